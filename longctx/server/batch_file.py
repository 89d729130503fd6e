"""The files of a batch: requests as OpenAI's batch lines, and their results, appended and never overwritten."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from longctx.errors import LongctxError
from longctx.server.job_body import ENDPOINTS
from longctx.server.json_pieces import dumps, json_pieces
from longctx.server.text_side import clip
from longctx.units import format_bytes

MAX_LINE_BYTES = 64 * 2**20
MAX_ID_CHARS = 512
ID_PREFIX = "batch_req_"

_RESULT_START = f'{{"id":"{ID_PREFIX}'.encode()
_FIELDS = {"custom_id", "method", "url", "body"}
_LEVELS = 6  # a result's body lies two levels deeper than `json_pieces` expects one


class LineError(Exception):
    """A line that is no request of this batch; the message is one short line."""


@dataclass(frozen=True)
class Line:
    """Where a line is, and what names its result: `id` is a digest of all that the line asks for.

    `error` says why it is no request; it then has no `custom_id`.
    """

    number: int
    offset: int
    size: int
    id: str
    custom_id: str | None
    error: str | None = None


class RequestFile:
    """A batch's requests: scanned once, then read line by line, so that memory does not grow with their bodies.

    `model` is the name of the model that is asked, part of every id. `path` "-" is standard input. Raises
    `LongctxError` for a file that cannot be read or has no line.
    """

    def __init__(self, path: str, model: str):
        self.name = "standard input" if path == "-" else path
        self._model = model
        try:
            self._file = _spooled() if path == "-" else Path(path).expanduser().open("rb")
            self.lines = list(self._scan())
        except OSError as error:
            raise LongctxError(f"--batch {path} cannot be read: {error.strerror or error}") from error
        if not self.lines:
            raise LongctxError(f"--batch {path} has no requests: give one JSON object per line")

    def body(self, line: Line) -> tuple[str, bytes]:
        """The endpoint that a line asks ("completions", "chat", "responses") and the JSON of its body."""
        self._file.seek(line.offset)
        raw = self._file.read(line.size)
        try:
            request = _read(raw)
        except LineError:
            request = {}
        if not request or self._id(request) != line.id:
            raise LongctxError(f"line {line.number} of {self.name} has changed while the batch ran: run it again")
        return ENDPOINTS[request["url"]], dumps(request["body"]).encode()

    def is_same_file(self, file: IO[bytes]) -> bool:
        """Whether results in `file` would be written into this very one."""
        return os.path.samestat(os.fstat(self._file.fileno()), os.fstat(file.fileno()))

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> Iterator[Line]:
        seen: dict[str, int] = {}
        number = offset = 0
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            start, offset = offset, offset + len(raw)
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while rest := self._file.readline(MAX_LINE_BYTES):
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
                yield self._bad(number, start, raw, f"it is larger than {format_bytes(MAX_LINE_BYTES)}")
            elif raw.strip():
                yield self._line(number, start, raw, seen)

    def _line(self, number: int, start: int, raw: bytes, seen: dict[str, int]) -> Line:
        try:
            request = _read(raw)
        except LineError as error:
            return self._bad(number, start, raw, str(error))
        custom_id = request["custom_id"]
        first = seen.setdefault(custom_id, number)
        if first != number:
            return self._bad(number, start, raw, f"line {first} has its custom_id {clip(custom_id, 64)!r} already")
        return Line(number, start, len(raw), self._id(request), custom_id)

    def _bad(self, number: int, start: int, raw: bytes, error: str) -> Line:
        return Line(number, start, len(raw), _digest(str(number).encode() + raw), None, f"line {number}: {error}")

    def _id(self, request: Mapping[str, Any]) -> str:
        return _digest(json.dumps([self._model, request], sort_keys=True).encode())


class ResultFile:
    """A batch's results, one JSON object per line, each flushed when it is complete.

    A file that is there already is continued: it must hold nothing but results of the same requests by the same model.
    A last line that a crash cut off is removed, and its request runs again. The file is locked while it is open. Raises
    `LongctxError`, before anything is changed, for a file that is something else. Without a path results go to stdout.
    """

    def __init__(self, path: str | None, requests: RequestFile):
        self.path = None if path is None else Path(path).expanduser()
        self.done: Set[str] = frozenset()
        if self.path is None:
            self._file: IO[bytes] = sys.stdout.buffer
            return
        self._file = self._open(self.path)
        try:
            if requests.is_same_file(self._file):
                raise LongctxError(f"--out {path} is the file of the requests: give another name")
            self.done = self._check(requests)
        except BaseException:
            self._file.close()
            raise

    def append(self, result: Mapping[str, Any]) -> None:
        """Write a result as a line. Raises `LongctxError` where that is impossible."""
        try:
            for piece in json_pieces(result, _LEVELS):
                self._file.write(piece)
            self._file.write(b"\n")
            self._file.flush()
        except OSError as error:
            raise LongctxError(f"--out {self.path or 'stdout'} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        if self.path is not None:
            self._file.close()

    def _open(self, path: Path) -> IO[bytes]:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise LongctxError(f"--out {path} cannot be written: {error.strerror or error}") from error
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LongctxError(f"--out {path} is no regular file: give the name of a file, new or of this batch")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise LongctxError(f"another run writes to --out {path}: wait for it, or give another name") from error
        except LongctxError:
            file.close()
            raise
        return file

    def _check(self, requests: RequestFile) -> Set[str]:
        """The ids of the results that are there. Leaves the file behind its last complete line, cutting off a rest."""
        wanted = {line.custom_id: line.id for line in requests.lines if line.custom_id is not None}
        done: set[str] = set()
        end = 0
        for number, raw in enumerate(self._file, start=1):
            if not raw.endswith(b"\n"):
                if not (raw.startswith(_RESULT_START) or _RESULT_START.startswith(raw)):
                    raise self._foreign(number)
                self._file.truncate(end)
                break
            end += len(raw)
            done.add(self._known(number, raw, wanted, requests.name))
        self._file.seek(end)
        return done

    def _known(self, number: int, raw: bytes, wanted: Mapping[str, str], name: str) -> str:
        """The id of a result in the file. A line that was no request has no custom_id, and may have been corrected."""
        try:
            result = from_json(raw) if raw.startswith(_RESULT_START) else None
        except ValueError:
            result = None
        if not isinstance(result, dict) or not {"custom_id", "response", "error"} <= result.keys():
            raise self._foreign(number)
        custom_id, id = result["custom_id"], str(result["id"])
        if custom_id is not None and wanted.get(custom_id) != id:
            why = "asks something else now, or another model" if custom_id in wanted else f"is not in {name}"
            raise LongctxError(
                f"--out {self.path} has a result whose request {clip(str(custom_id), 64)!r} {why} (line {number}): "
                "give another --out, or remove that line"
            )
        return id

    def _foreign(self, number: int) -> LongctxError:
        return LongctxError(
            f"--out {self.path} is there and no file of results (line {number}): nothing is overwritten, give another "
            "name"
        )


def _spooled() -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.seek(0)
    return file


def _read(raw: bytes) -> dict[str, Any]:
    """A line as a checked request: {custom_id, method, url, body}. Raises `LineError`."""
    try:
        request = from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        raise LineError(f"it is not valid JSON: {clip(str(error), 200)}") from None
    if not isinstance(request, dict):
        raise LineError("it is no JSON object")
    if (unknown := next((name for name in request if name not in _FIELDS), None)) is not None:
        raise LineError(f"it has an unknown field {clip(unknown, 64)!r}: a request has custom_id, method, url and body")
    custom_id = request.get("custom_id")
    if not (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS):
        raise LineError(f"its custom_id must be text of 1 to {MAX_ID_CHARS} characters")
    if request.get("method") != "POST":
        raise LineError("its method must be POST")
    url = request.get("url")
    if not (isinstance(url, str) and url in ENDPOINTS):
        raise LineError(f"its url must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(request.get("body"), dict):
        raise LineError("its body must be a JSON object")
    return request


def _digest(data: bytes) -> str:
    return ID_PREFIX + hashlib.blake2b(data, digest_size=12).hexdigest()
