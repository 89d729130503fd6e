"""A block's identity: everything its bytes depend on, framed without ambiguity, computed in one place."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from longctx.offload import key as key_module
from longctx.offload.key import KEY_BYTES, KeySpace, chain_key, digest_of, root_key, storage_name

SPACE = KeySpace("w", "c", "float32", "plain", ("fp32/fp32",), 16, "exact")
CHECKOUT = Path(key_module.__file__).resolve().parent.parent


def root(space: KeySpace = SPACE, regime: int = 0, salt: str | None = None, extras: tuple[bytes | None, ...] = ()):
    return root_key(space, regime=regime, salt=salt, extras=extras)


def test_keys_are_cryptographic_digests():
    """vllm-project/vllm#12621, #15297: a hash of 64 bits or less as the only identity. Ours has 256 and no seed."""
    assert KEY_BYTES * 8 >= 128
    assert len(root()) == len(chain_key(root(), [1, 2])) == KEY_BYTES
    # Keys outlive the process: a change of the framing makes every stored block unfindable.
    assert chain_key(root(), [1, 2]).hex() == "a1489021075d38fe670fad3a6f69f4fb35f56130831e34d24336269ef6f577cc"
    assert len({chain_key(root(), [i]) for i in range(2000)}) == 2000


def test_a_chain_key_depends_on_parent_order_and_count():
    a = root()
    assert chain_key(a, [1, 2]) == chain_key(a, np.array([1, 2], dtype=np.int32))
    others = [chain_key(a, t) for t in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [])]
    others += [chain_key(chain_key(a, [9]), [1, 2]), a]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("name", [f.name for f in fields(KeySpace)])
def test_every_part_of_the_space_changes_the_key(name):
    """sgl-project/sglang#24758, ai-dynamo/dynamo#1233: other weights, configuration or block size, and still a hit."""
    old = getattr(SPACE, name)
    new = {str: lambda: old + "x", int: lambda: old + 1, tuple: lambda: (*old, "fp32/fp32")}[type(old)]()
    assert root(replace(SPACE, **{name: new})) != root()


def test_moving_text_between_parts_changes_the_key():
    assert root(replace(SPACE, weights_digest="wc", config_digest="")) != root(
        replace(SPACE, weights_digest="w", config_digest="c")
    )


def test_the_rope_regime_and_the_salt_change_the_key():
    """vllm-project/vllm#16016, tinfoilsh/confidential-model-router#386: tenants in one namespace."""
    keys = [root(), root(regime=1), root(salt=""), root(salt="a"), root(salt="b"), root(salt="ab"), root(regime=70000)]
    assert len(set(keys)) == len(keys)
    assert root(salt="a") == root(salt="a")


def test_tenant_and_user_are_framed_apart():
    """tinfoilsh/confidential-model-router#386: ('org_1', '2345') must not be ('org_12345', ''), nor '' be None."""
    pairs = [(b"org_1", b"2345"), (b"org_12345", b""), (b"", b"x"), (None, b"x"), (b"x", None), (b"x",), (b"x", b"")]
    assert len({root(extras=pair) for pair in pairs}) == len(pairs)


def test_extras_count_in_full():
    """LMCache/LMCache#4086, #690: an image's digest cut to 16 bits, or not passed on at all."""
    a, b = b"ab" + bytes(28) + b"yz", b"ab" + bytes(27) + b"\x01yz"
    keys = [root(extras=e) for e in ((), (None,), (b"",), (a,), (b,), (a, b), (b, a))]
    assert len(set(keys)) == len(keys)


def test_a_stored_name_tells_shards_groups_and_layouts_apart():
    """LMCache/LMCache#2961: the second place that builds a key forgets a part."""
    key = chain_key(root(), [1])
    names = [
        storage_name(key, *rest)
        for rest in (
            (0, 0, 1, 1),
            (1, 0, 1, 1),
            (0, 0, 2, 1),
            (0, 1, 2, 1),
            (0, 0, 1, 2),
            (11, 0, 1, 1),
            (1, 10, 11, 1),
        )
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith(key.hex()) and "/" not in name for name in names)


def test_a_configuration_digest_ignores_order_only():
    """sgl-project/sglang#24794: rope theta, scaling, soft-cap, window or scale changed under the same weights."""
    config = {"rope": {"theta": 1e4, "factor": None}, "window": 512, "softcap": 50.0}
    assert digest_of(config) == digest_of(dict(reversed(config.items())))
    changed = [{**config, "window": 511}, {**config, "softcap": None}, {**config, "rope": {"theta": 1e6}}]
    assert len({digest_of(c) for c in (config, *changed)}) == 4


def test_keys_are_made_in_one_file_only():
    """vllm-project/vllm#44250: an external store with a key of its own."""
    makers = []
    for folder in ("longctx/kv", "offload"):
        for path in sorted((CHECKOUT / folder).glob("*.py")):
            names = {n.names[0].name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import)}
            if "hashlib" in names:
                makers.append(path.name)
    assert makers == ["key.py"]
