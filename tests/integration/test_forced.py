"""Looking inside: tokens that are given and still decoded, layers that are watched, engines side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longctx import LLM, SamplingParams
from longctx.errors import LongctxError, RequestError
from longctx.request import ScoreSheet
from tests.helpers.engine import make_engine, run_all
from tests.helpers.server import save_tiny
from tests.helpers.tiny import VOCAB, hf_logits, make_tiny, random_ids

OPTIONS: dict[str, Any] = {"kv_memory": "16MiB", "block_tokens": 16, "max_running": 1}
IDS = random_ids(90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "gemma3_text", template=None, peaky=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kv_tokens", [2048, 64])
def test_forced_tokens_are_decoded_one_by_one(kv_tokens: int) -> None:
    """Each is a step of its own through the decode backend, and computes what Hugging Face does; also when preempted
    by an older request's growth."""
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, kv_tokens=kv_tokens + 96)
    rows: list[list[tuple[int, int, bool]]] = []
    run = engine.runner.run

    def watched(step: Any, on_layer: Any = None) -> Any:
        rows.append([(r.start, r.n, r.start >= r.num_prompt_tokens) for r in step.rows if r.targets is not None])
        return run(step, on_layer)

    engine.runner.run = watched  # type: ignore[method-assign]
    if kv_tokens == 64:
        engine.add(random_ids(40, seed=1), SamplingParams(max_tokens=60, ignore_eos=True))
    got = np.full((len(IDS), VOCAB), np.nan, np.float32)
    sheet = ScoreSheet(True, 30, lambda start, logits: got.__setitem__(slice(start, start + len(logits)), logits))
    request = engine.make_request(IDS, SamplingParams(max_tokens=1), score=sheet)
    engine.submit(request)
    finished = run_all(engine)
    assert finished[request.id].reason == "scored"
    assert request.preemptions > 0 or kv_tokens != 64
    seen = [row for step in rows for row in step]
    assert all(n == 1 for start, n, _ in seen if start >= 60) and all(start + n <= 60 for start, n, _ in seen if n > 1)
    assert {start for start, _, decoded in seen if decoded} == set(range(60, 90))
    assert not sheet.logits and sheet.num_scored == 90
    want = hf_logits(model, IDS).numpy()
    np.testing.assert_allclose(got, want, atol=2e-4)
    logprobs = torch.log_softmax(torch.as_tensor(want), -1)[torch.arange(89), IDS[1:]]
    np.testing.assert_allclose(np.concatenate(sheet.logprobs)[:-1], logprobs, atol=1e-4)


def test_scoring_through_the_api(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        plain = llm.score(IDS, logits=True)
        parts: dict[int, np.ndarray] = {}
        forced = llm.score(IDS, decode=20, on_logits=lambda start, rows: parts.__setitem__(start, rows.copy()))
        assert plain.logits is not None and forced.logits is None
        together = np.concatenate([parts[start] for start in sorted(parts)])
        assert [len(parts[start]) for start in sorted(parts)][-20:] == [1] * 20
        np.testing.assert_allclose(together, plain.logits, atol=2e-4)
        np.testing.assert_allclose(forced.logprobs[1:], plain.logprobs[1:], atol=2e-4)
        with pytest.raises(RequestError, match="decode=90"):
            llm.score(IDS, decode=90)

        def wrong(start: int, rows: np.ndarray) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            llm.score(IDS, on_logits=wrong)
        assert llm.score(IDS).logprobs == plain.logprobs, "the engine lives on"


def test_a_probe_sees_each_layer_once_per_position(folder: Path) -> None:
    seen: dict[tuple[int, int], np.ndarray] = {}

    def keep(layer: int, positions: np.ndarray, out: torch.Tensor) -> None:
        for position, row in zip(positions.tolist(), out.numpy().copy(), strict=True):
            assert (layer, position) not in seen
            seen[layer, position] = row

    with LLM(str(folder), **OPTIONS) as llm:
        spec = llm.engine.loaded.spec
        with llm.probe(keep):
            llm.score(IDS, decode=10)
        llm.score(IDS)
        assert set(seen) == {(layer, p) for layer in range(spec.num_layers) for p in range(len(IDS))}
        assert seen[0, 5].shape == (spec.layers[0].num_heads, spec.layers[0].v_dim) and seen[0, 5].any()


def test_engines_side_by_side_share_weights_and_nothing_else(tmp_path: Path) -> None:
    """They take turns on one model, whatever both are asked at once: here one needs its long rope, the other not."""
    folder = save_tiny(tmp_path / "tiny", "phi3_longrope", template=None, peaky=True)
    prompts = [random_ids(60, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **OPTIONS) as llm, llm.beside(kv_format="int8", max_running=2) as other:
        assert other.engine.loaded.model is llm.engine.loaded.model and other.engine.config.cache.block_tokens == 16
        assert other.engine.groups[0].key.k_format == "int8" and llm.engine.groups[0].key.k_format == "fp32"
        alone = [llm.score(ids).logprobs for ids in prompts]
        others = [list(other.start(ids, params)) for ids in prompts]
        streams = [other.start(ids, params) for ids in prompts]
        assert [llm.score(ids).logprobs for ids in prompts] == alone
        assert [list(stream)[-1].token_ids for stream in streams] == [events[-1].token_ids for events in others]
        assert other.score(prompts[0]).logprobs != alone[0]
        with pytest.raises(LongctxError, match="dtype decides what is loaded"):
            llm.beside(dtype="bfloat16")
