"""Runs one step: copies, one flat forward through the model, sampling. Knows no requests beyond the step's rows."""

# Shape legend: T tokens of the flat batch, V vocabulary.
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from longctx.attention.registry import Backends
from longctx.forward import ForwardPlan, OnAttention
from longctx.kv.factors import KeyTransform
from longctx.kv.groups import LayerGroup
from longctx.kv.storage import KVStorage
from longctx.logprobs import logprob_rows, token_logprobs
from longctx.models.hook import attach
from longctx.models.rotary import RegimeRotary
from longctx.models.spec import ModelSpec
from longctx.parallel.group import Group, SoloGroup
from longctx.params import SamplingParams
from longctx.resident import trim_heap
from longctx.sampler import SamplingError, sample_rows
from longctx.step import RowResult, StepRow, StepSpec


class Runner:
    """Owns the model and the pools' memory. `run` may be repeated: a step writes the same bytes every time.

    `vocab_limit`: token ids from it on are padding of the weights and are never sampled. `backends` may be replaced
    between steps, as a probe does that times them. `on_attention`, if set, sees every layer's attention output;
    `keys` changes keys before they are stored. Runners of one model take `turn` about: its modules know one step at a
    time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        groups: Sequence[LayerGroup],
        num_slots: Sequence[int],
        backends: Backends,
        vocab_limit: int,
        group: Group | None = None,
        turn: threading.Lock | None = None,
    ):
        attach(model)
        self._model = model
        self._rotaries = [module for module in model.modules() if isinstance(module, RegimeRotary)]
        assert spec.rope.kind == "static" or self._rotaries, "a model with rope regimes needs RegimeRotary"
        self._spec = spec
        self._block_tokens = groups[0].layout.block_tokens
        self.backends = backends
        self._vocab_limit = vocab_limit
        self._group = group or SoloGroup()
        self._turn = turn or threading.Lock()
        self.on_attention: OnAttention | None = None
        self.keys: KeyTransform | None = None
        self.storage = KVStorage(groups, num_slots, model.device)

    @torch.inference_mode()
    def run(self, step: StepSpec, on_layer: Callable[[float], None] | None = None) -> list[RowResult]:
        """Compute every row of `step`; one result per row, in order."""
        for copy in step.copies:
            self.storage.copy_rows(copy)
        if not step.rows:
            return []
        plan = ForwardPlan(
            step.rows,
            self._spec.layers,
            self.storage,
            self._block_tokens,
            self.backends,
            self._group,
            on_layer,
            self.on_attention,
            self.keys,
        )
        kept, where = _logit_rows(step.rows)
        with self._turn:
            logits = self._forward(step.rows, plan, kept)
        scored = {i: self._score(row, logits[where[i]]) for i, row in enumerate(step.rows) if row.targets is not None}
        sampled = self._sample(step.rows, logits, where)
        if scored:
            del logits
            trim_heap()
        return [_result(row, scored.get(i), sampled.get(i)) for i, row in enumerate(step.rows)]

    def _score(self, row: StepRow, logits_nV: torch.Tensor) -> RowResult:
        assert row.targets is not None
        scores = logprob_rows(logits_nV, row.targets, row.params.prompt_logprobs or 0, self._vocab_limit)
        if np.isnan(scores.logprobs).any():
            bad = row.start + int(np.isnan(scores.logprobs).argmax())
            return RowResult(
                row.request_id, error=f"the logits at position {bad} are not numbers: nothing can be scored"
            )
        logits = logits_nV.float().cpu().numpy() if row.want_logits else None
        return RowResult(row.request_id, scores=scores, logits=logits)

    def _sample(self, rows: Sequence[StepRow], logits: torch.Tensor, where: Sequence[slice]) -> dict[int, RowResult]:
        """Results of the rows that sample, by their place among `rows`."""
        sampling = [i for i, row in enumerate(rows) if row.sample]
        if not sampling:
            return {}
        # The last of a row's logits; where nothing is scored there are no others, and nothing is copied.
        last = [where[i].stop - 1 for i in sampling]
        logits_RV = logits if len(last) == len(logits) else logits[last]
        tokens = sample_rows(logits_RV, [rows[i] for i in sampling], self._vocab_limit)
        return {
            i: self._sampled(rows[i], token, logits_V)
            for i, token, logits_V in zip(sampling, tokens, logits_RV, strict=True)
        }

    def _sampled(self, row: StepRow, token: int | SamplingError, logits_V: torch.Tensor) -> RowResult:
        if isinstance(token, SamplingError):
            return RowResult(row.request_id, error=str(token))
        if row.params.logprobs is None:
            return RowResult(row.request_id, token)
        return RowResult(row.request_id, token, token_logprobs(logits_V, token, row.params.logprobs, self._vocab_limit))

    def warm_up(self) -> None:
        """Compute one prompt token and one decoded token in slots that nobody uses yet.

        Whatever is compiled on first use is compiled here, and no request's first token waits for it.
        """
        tables = tuple(np.array([1, 2], dtype=np.int64) for _ in self.storage.pools)
        for start in (0, 1):
            row = StepRow("warm-up", start, np.zeros(1, np.int64), tables, 1, 0, SamplingParams(), 0, sample=True)
            self.run(StepSpec((row,)))

    def _forward(self, rows: Sequence[StepRow], plan: ForwardPlan, kept: np.ndarray) -> torch.Tensor:
        device = self._model.device
        regimes = torch.as_tensor(np.repeat([row.regime for row in rows], [row.n for row in rows]))
        for rotary in self._rotaries:
            rotary.regimes = regimes.to(device)
        output = self._model(
            input_ids=torch.as_tensor(np.concatenate([row.token_ids for row in rows]), device=device)[None],
            position_ids=torch.as_tensor(plan.positions_T, device=device)[None],
            use_cache=False,
            # An empty index tensor keeps no row; the integer 0 would mean all of them.
            logits_to_keep=torch.as_tensor(kept, device=device),
            longctx_plan=plan,
        )
        return output.logits[0]


def _result(row: StepRow, scored: RowResult | None, sampled: RowResult | None) -> RowResult:
    """What a row got of scores and a token, either, both or none."""
    if scored is None or sampled is None:
        return scored or sampled or RowResult(row.request_id)
    if scored.error is not None or sampled.error is not None:
        return scored if scored.error is not None else sampled
    return replace(sampled, scores=scored.scores, logits=scored.logits)


def _logit_rows(rows: Sequence[StepRow]) -> tuple[np.ndarray, list[slice]]:
    """Flat indices of the tokens whose logits are needed, and each row's slice among them."""
    kept: list[int] = []
    where = []
    offset = 0
    for row in rows:
        first = len(kept)
        if row.targets is not None:
            kept.extend(range(offset, offset + row.n))
        elif row.sample:
            kept.append(offset + row.n - 1)
        where.append(slice(first, len(kept)))
        offset += row.n
    return np.array(kept, dtype=np.int64), where
