"""What `longctx eval drift` measured of a model's formats: a note in the cache folder, and the one line made of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.kv.factors import KeyFactors
from longctx.kv.groups import formats_text
from longctx.models.spec import PLAIN_WEIGHTS
from longctx.quant.formats import FORMATS
from longctx.units import format_tokens

if TYPE_CHECKING:
    from longctx.engine import Engine

_VERSION = 1


@dataclass(frozen=True)
class NoteKey:
    """What a note is of: the weights' digest (None: not known yet), what the cache stores, how weights are held, the
    attention variant, the digest of key factors.

    `model` is only what a user calls it.
    """

    digest: str | None
    model: str
    stored: str
    weights: str
    variant: str = "exact"
    factors: str | None = None

    @classmethod
    def of(cls, engine: Engine) -> NoteKey:
        loaded, keys = engine.loaded, engine.runner.keys
        stored, variant = formats_text(engine.groups), engine.config.variant.key
        factors = keys.digest if isinstance(keys, KeyFactors) else None
        return cls(loaded.digest, loaded.spec.name, stored, loaded.spec.weights, variant, factors)

    @property
    def is_lossy(self) -> bool:
        """Whether anything is kept relative to scales, by the user's choice."""
        names = set(re.split("[:,]", self.stored))
        return self.weights != PLAIN_WEIGHTS or any(FORMATS[name].lossy for name in names & FORMATS.keys())

    @property
    def path(self) -> Path:
        root = Path(os.environ.get("LONGCTX_CACHE") or "~/.cache/longctx").expanduser()
        identity = json.dumps([_VERSION, self.digest, self.stored, self.weights, self.variant, self.factors])
        return root / "drift" / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


@dataclass(frozen=True)
class Measured:
    """One text of `tokens` tokens: mean KL in nats, share of positions with the same likeliest token, and the day."""

    tokens: int
    kl: float
    top1: float
    date: str

    def __str__(self) -> str:
        tokens = f"{self.tokens // 1024}K" if self.tokens % 1024 == 0 else format_tokens(self.tokens)
        return f"KL {self.kl:.2g} at {tokens}, top-1 {self.top1:.1%}, measured {self.date}"


def save_note(key: NoteKey, measured: Measured) -> None:
    """Put one measurement beside those of other lengths, in the place of an older one of its own."""
    assert key.digest is not None
    others = [each for each in load_notes(key) if each.tokens != measured.tokens]
    texts = [asdict(each) for each in sorted([*others, measured], key=lambda m: m.tokens)]
    note = {"model": key.model, "stored": key.stored, "weights": key.weights, "measured": texts}
    with suppress(OSError):  # the report itself is the result; this only spares its reader a look
        key.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = key.path.with_name(f"{key.path.name}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(note) + "\n")
        temporary.replace(key.path)


def load_notes(key: NoteKey) -> list[Measured]:
    """What was measured, by rising length; nothing where there is no note or none that can be read."""
    if key.digest is None:
        return []
    try:
        data = json.loads(key.path.read_text())
        return [Measured(int(m["tokens"]), float(m["kl"]), float(m["top1"]), str(m["date"])) for m in data["measured"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def drift_line(key: NoteKey) -> str | None:
    """What is known, as "int8: KL 0.0003 at 8K, top-1 99.6%, measured 2026-11-29", or how to measure it.

    None for settings whose loss nobody chose.
    """
    if not key.is_lossy:
        return None
    plain = key.weights == PLAIN_WEIGHTS
    if notes := load_notes(key):
        return f"{key.stored}{'' if plain else f', weights {key.weights}'}: {notes[-1]}"
    option = "" if plain else f" --weights {key.weights}"
    return f"not measured: longctx eval drift {key.model} --kv-format {key.stored}{option}"
