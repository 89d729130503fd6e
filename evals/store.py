"""A folder of results: one configuration, one line per finished piece of work, gone on with after an interruption."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from longctx.errors import LongctxError

CONFIG, RECORDS = "config.json", "records.jsonl"
_NEW_CONFIG = "config.json.new"


class Store:
    """Owns a folder while it is open. What was written is never overwritten: not by another configuration, not twice.

    A record is on disk before the next one is begun; a line that a kill left half written is dropped. One process
    writes at a time.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """Begin a folder, or go on with one of the same `config`. Raises `LongctxError` for anything else."""
        self.folder = folder
        plain: dict[str, Any] = json.loads(json.dumps(config))
        others = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        if others and not {CONFIG, _NEW_CONFIG} & set(others):
            raise LongctxError(f"--out {folder} has other files in it ({', '.join(others[:3])}): give a new name")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / CONFIG).exists():
                (folder / _NEW_CONFIG).touch()
            self._file: IO[str] = (folder / RECORDS).open("a+")
        except OSError as error:
            raise LongctxError(f"--out {folder} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LongctxError(f"--out {folder} is being written by another run: wait, or give another name") from error
        try:
            self._check_config(plain)
            self.records = self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record and see it through to the disk's queue."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.records.append(dict(record))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_config(self, config: dict[str, Any]) -> None:
        path = self.folder / CONFIG
        if not path.exists():
            new = self.folder / _NEW_CONFIG
            new.write_text(json.dumps(config, indent=1) + "\n")
            new.rename(path)
            return
        try:
            there = json.loads(path.read_text())
        except ValueError as error:
            raise LongctxError(f"{path} is not readable JSON: give another --out") from error
        if there != config:
            names = sorted(key for key in {*there, *config} if there.get(key) != config.get(key))
            first = names[0]
            raise LongctxError(
                f"--out {self.folder} holds results of another configuration ({first}: {there.get(first)!r} there, "
                f"{config.get(first)!r} now), and results are not overwritten: give another name"
            )

    def _read(self) -> list[dict[str, Any]]:
        """The records so far; the file is cut behind the last whole line."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._file.truncate(len(whole.encode()))
        records = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise LongctxError(
                    f"{self.folder / RECORDS} is corrupt in line {number}: give another --out"
                ) from error
        return records


class Memory:
    """A store that is forgotten at the end: what runs without `--out`."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        pass
