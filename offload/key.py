"""The one place where a block's identity is computed, for every tier: a chained cryptographic hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

BlockKey = bytes
"""A 32-byte BLAKE2b digest of everything that a block's content depends on: its own tokens and all before them."""

KEY_BYTES = 32

_Part = None | int | str | bytes | tuple["_Part", ...]


@dataclass(frozen=True)
class KeySpace:
    """What the stored bytes depend on besides the tokens; two engines share blocks only if all of it is equal.

    `weights_digest` identifies the weights by content, never by a served name; `config_digest` (see `digest_of`) what
    the forward pass takes from the configuration: rope theta and scaling, windows, soft-caps, attention scales.
    `formats` say how every layer's K and V are stored, and with which key factors.
    """

    weights_digest: str
    config_digest: str
    dtype: str
    weight_mode: str
    formats: tuple[str, ...]
    block_tokens: int
    attention_variant: str


def root_key(space: KeySpace, *, regime: int, salt: str | None, extras: tuple[bytes | None, ...] = ()) -> BlockKey:
    """The parent of a request's first block.

    `regime` is the rope regime (cached keys are stored rotated); `salt` a tenant's namespace; `extras` digests of
    whatever else stands behind the tokens (images, prompt embeddings). Absent and empty are different values.
    """
    parts: tuple[_Part, ...] = (astuple(space), regime, salt, extras)
    return hashlib.blake2b(_frame(parts), digest_size=KEY_BYTES, person=b"longctx-root").digest()


def chain_key(parent: BlockKey, token_ids: np.ndarray | Sequence[int]) -> BlockKey:
    """The key of the full block that holds `token_ids` and follows the block called `parent`."""
    assert len(parent) == KEY_BYTES
    tokens = np.asarray(token_ids, dtype="<i8").tobytes()
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, person=b"longctx-chain").digest()


def storage_name(key: BlockKey, group: int, shard: int, num_shards: int, layout_version: int) -> str:
    """The name under which every tier stores one group's block: the content's key, then how the bytes are laid out.

    `shard` of `num_shards` is a rank's share of the heads; `layout_version` the block layout's. Safe as a file name.
    """
    assert len(key) == KEY_BYTES and 0 <= shard < num_shards and group >= 0
    return f"{key.hex()}-g{group}-s{shard}of{num_shards}-v{layout_version}"


def digest_of(values: Mapping[str, object]) -> str:
    """A hex digest of a flat or nested configuration, independent of the order of its names."""
    text = json.dumps(values, sort_keys=True, allow_nan=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=b"longctx-config").hexdigest()


def _frame(part: _Part) -> bytes:
    """Encode with a type and a length before every part, so that no two different values share an encoding."""
    if part is None:
        return b"n"
    if isinstance(part, tuple):
        return b"t" + len(part).to_bytes(8, "little") + b"".join(map(_frame, part))
    if isinstance(part, int):
        body, tag = str(int(part)).encode(), b"i"
    elif isinstance(part, str):
        body, tag = part.encode("utf-8", "surrogatepass"), b"s"
    else:
        body, tag = part, b"b"
    return tag + len(body).to_bytes(8, "little") + body
