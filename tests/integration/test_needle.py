"""The constructed needle model through the engine: always right, and wrong exactly where the cache was damaged."""

from __future__ import annotations

import pytest
import torch

from longctx.evals.needle_model import NeedleModel
from longctx.evals.needle_prompt import NONE
from longctx.params import SamplingParams
from tests.helpers.engine import make_engine, run_all

LENGTH, BLOCK = 4096, 256
KEYS = range(32)
NEEDLE = NeedleModel(num_keys=len(KEYS), head_dim=16, num_heads=4, num_kv_heads=2)
IDS = NEEDLE.make_prompt(LENGTH, {key: key / (len(KEYS) - 1) for key in KEYS}, seed=3)
PLACES = {
    key: next(i for i, t in enumerate(IDS) if t in range(NEEDLE.vocab.pair(key, 0), NEEDLE.vocab.pair(key + 1, 0)))
    for key in KEYS
}


def ask_all(engine) -> dict[int, int]:
    """The answer to every key's question, each a request of its own on the same haystack."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = {key: engine.add([*IDS, *NEEDLE.query_ids(key)], params) for key in KEYS}
    run_all(engine)
    assert all(r.cached_tokens >= LENGTH - BLOCK for r in list(requests.values())[1:])
    return {key: r.token_ids[-1] for key, r in requests.items()}


def right(key: int) -> int:
    return NEEDLE.answer([*IDS, *NEEDLE.query_ids(key)])


def test_every_needle_is_found_at_every_depth() -> None:
    for chunk in (512, 300):
        engine = make_engine(NEEDLE.build(), kv_tokens=2 * LENGTH, block_tokens=BLOCK, chunk_tokens=chunk)
        assert ask_all(engine) == {key: right(key) for key in KEYS}


@pytest.mark.parametrize("block", [0, 7, 15])
@pytest.mark.parametrize("damage", ["zeroed", "key halved"])
def test_a_damaged_block_loses_exactly_its_needles(block: int, damage: str) -> None:
    """The block lies in the prefix cache when its bytes change; every later question reads them."""
    engine = make_engine(NEEDLE.build(), kv_tokens=2 * LENGTH, block_tokens=BLOCK, chunk_tokens=512)
    request = engine.add([*IDS, *NEEDLE.query_ids(0)], SamplingParams(max_tokens=1, ignore_eos=True))
    while request.num_computed < LENGTH:
        engine.step()
    assert request.table is not None
    _, layer = engine.runner.storage.layer(0)
    slot = request.table.columns[0][block]
    run_all(engine)
    if damage == "zeroed":
        layer.k[slot], layer.v[slot] = 0.0, 0.0
    else:
        layer.k[slot] *= 0.5
    lost = {key for key in KEYS if PLACES[key] // BLOCK == block}
    assert lost
    assert ask_all(engine) == {key: NONE if key in lost else right(key) for key in KEYS}
    assert torch.isfinite(layer.k[slot]).all()
