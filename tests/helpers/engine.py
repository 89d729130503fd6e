"""Engines over tiny in-memory models, stepped by hand, with every pool poisoned."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from longctx.build import assemble
from longctx.config import EngineConfig
from longctx.engine import Engine
from longctx.events import FinishEvent
from longctx.machine import MachineSpeed
from longctx.models.inspect import spec_from_config
from longctx.models.load import LoadedModel
from longctx.params import SamplingParams
from longctx.rates import Rates
from longctx.request import Request, ScoreSheet

POISONS = {"nan": float("nan"), "huge": 1e4, "-huge": -1e4}


def digest_of(model: PreTrainedModel) -> str:
    """A digest of weights and config, as a loader would give it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    digest.update(model.config.to_json_string(use_diff=False).encode())
    return digest.hexdigest()


def make_engine(
    model: PreTrainedModel,
    *,
    kv_tokens: int = 2048,
    poison: str | None = "nan",
    tokenizer: Any = None,
    eos: Sequence[int] = (),
    vocab_limit: int | None = None,
    **options: Any,
) -> Engine:
    """An engine on a copy of `model` whose full-attention pool holds `kv_tokens` tokens; blocks of 16 unless given."""
    config = EngineConfig.from_options("tiny", **{"block_tokens": 16, "max_chunk_tokens": 512, **options})
    spec = spec_from_config(
        model.config, "tiny", dtype=str(model.dtype).removeprefix("torch."), weights=config.load.weights
    )
    spec = config.variant.applied_to(spec)
    loaded = LoadedModel(
        model=copy.deepcopy(model),
        tokenizer=tokenizer,
        spec=spec,
        digest=digest_of(model),
        eos_token_ids=frozenset(eos),
        vocab_limit=vocab_limit or spec.vocab_size,
        chat_template=None,
    )
    engine = assemble(config, loaded, Rates.initial(spec, MachineSpeed(1e11, 1e10)), kv_tokens=kv_tokens)
    if poison is not None:
        poison_pools(engine, POISONS[poison])
    return engine


def poison_pools(engine: Engine, value: float) -> None:
    """Fill every slot of every layer, the null block included, with `value`."""
    for pool in engine.runner.storage.pools:
        pool.view(torch.float32).fill_(value)


def run_all(engine: Engine, max_steps: int = 10_000) -> dict[str, FinishEvent]:
    """Step until nothing is left; every step's invariants are checked, and the pool must be whole at the end."""
    finished: dict[str, FinishEvent] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for event in engine.step():
            if isinstance(event, FinishEvent):
                finished[event.request_id] = event
        engine.check_integrity()
    assert not engine.has_work, f"still busy after {max_steps} steps"
    for stats in engine.cache_stats():
        assert stats.held == 0, f"slots leaked: {stats}"
    return finished


def score_all(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits [n, V] of every position of every prompt, computed side by side."""
    sheets = []
    for ids in prompts:
        sheet = ScoreSheet(want_logits=True)
        engine.submit(engine.make_request(ids, SamplingParams(max_tokens=1), score=sheet))
        sheets.append(sheet)
    run_all(engine)
    return [np.concatenate(sheet.logits) for sheet in sheets]


def generate(engine: Engine, ids: Sequence[int], max_tokens: int = 8, **params: Any) -> FinishEvent:
    """Run one prompt alone to its end."""
    request = engine.add(ids, SamplingParams(max_tokens=max_tokens, **params))
    return run_all(engine)[request.id]


class LogitTap:
    """Records the logits row of every token an engine samples, by request id."""

    def __init__(self, engine: Engine):
        self.rows: dict[str, list[torch.Tensor]] = {}
        runner = engine.runner
        forward = runner._forward

        def tapped(rows: Any, plan: Any, kept: Any) -> torch.Tensor:
            logits = forward(rows, plan, kept)
            sampled = [row for row in rows if row.sample]
            if len(sampled) == len(logits):
                for row, row_logits in zip(sampled, logits, strict=True):
                    self.rows.setdefault(row.request_id, []).append(row_logits.clone())
            return logits

        runner._forward = tapped  # type: ignore[method-assign]

    def of(self, request: Request) -> torch.Tensor:
        return torch.stack(self.rows[request.id])
