"""The engine: schedule, run, commit. Stepped by hand, by a thread (loop.py) or by another process."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedConfig

from longctx.attention.registry import Backends, pick_backends
from longctx.config import EngineConfig
from longctx.detokenize import IncrementalDetokenizer
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import Event
from longctx.kv.budget import Demand, Plan, plan
from longctx.kv.cache import CacheStats, KVCache
from longctx.kv.factors import KeyFactors
from longctx.kv.groups import LayerGroup, formats_text
from longctx.kv.memory import Fixed
from longctx.kv.partition import Partition, admit, admit_score
from longctx.kv.table import KeyChain
from longctx.models.load import LoadedModel
from longctx.offload.key import KeySpace, digest_of, root_key
from longctx.params import SamplingParams
from longctx.rates import Rates
from longctx.request import Request, ScoreSheet, Status, token_buffer
from longctx.runner import Runner
from longctx.scheduler import Scheduler
from longctx.step import RowResult, StepSpec

log = logging.getLogger(__name__)


class StepAbandonedError(Exception):
    """Raised inside a forward pass when most of the step belongs to cancelled requests."""


def backends_for(config: EngineConfig, device: torch.device | str) -> Backends:
    """The attention backends that `config` asks for; raises `LongctxError` where `device` has none of that name."""
    try:
        backends = pick_backends(device, config.compute.attention)
    except ValueError as error:
        raise LongctxError(str(error)) from None
    return replace(backends, decode=None) if config.scheduler.deterministic else backends


class Engine:
    """One model, one cache, many requests.

    `step` computes one step and answers its events. `on_progress`, if set, also hears of progress inside a step, once
    per layer, from the stepping thread. `cancel` may be called from any thread; everything else belongs to one thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        groups: Sequence[LayerGroup],
        partition: Partition,
        fixed: Fixed,
        rates: Rates,
        factors: KeyFactors | None = None,
    ):
        spec, block_tokens = loaded.spec, config.cache.block_tokens
        self.config = config
        self.loaded = loaded
        self.groups = groups
        self.partition = partition
        self.fixed = fixed
        self.rates = rates
        self.cache = KVCache(
            groups,
            partition.num_slots,
            block_tokens,
            config.scheduler.largest_chunk,
            tail_every=config.cache.tail_every,
        )
        self.scheduler = Scheduler(config.scheduler, self.cache, rates, spec.vocab_size, block_tokens)
        backends = backends_for(config, loaded.model.device)
        self.runner = Runner(
            loaded.model, spec, groups, partition.num_slots, backends, loaded.vocab_limit, turn=loaded.turn
        )
        self.runner.keys = factors
        self.on_progress: Callable[[Event], None] | None = None
        self.last_step: StepSpec | None = None
        self._key_space = KeySpace(
            weights_digest=loaded.digest,
            config_digest=_config_digest(loaded.model.config),
            dtype=spec.dtype,
            weight_mode=spec.weights,
            formats=(formats_text(groups), *(() if factors is None else (factors.digest,))),
            block_tokens=block_tokens,
            attention_variant=config.variant.key,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def make_request(
        self,
        token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        score: ScoreSheet | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Check a request against the model and the memory and build it; touches no engine state.

        Raises `RequestError` or `DoesNotFitError` before any work is done.
        """
        spec = self.loaded.spec
        if not isinstance(cache_salt, str | None):
            raise RequestError(f"cache_salt must be text, got {cache_salt!r}")
        ids = token_buffer(token_ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        bad = _first_outside(np.frombuffer(ids, dtype=np.int64), spec.vocab_size)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the model's vocabulary of {spec.vocab_size}")
        if params.logit_bias and (bad := params.logit_bias[-1][0]) >= self.loaded.vocab_limit:
            raise RequestError(f"logit_bias names token id {bad}: the vocabulary has {self.loaded.vocab_limit} tokens")
        max_tokens = params.max_tokens
        if score is not None:
            refusal, total = admit_score(self.partition, len(ids)), len(ids)
        else:
            refusal = admit(self.partition, len(ids), max_tokens)
            total = self.partition.longest_request if max_tokens is None else len(ids) + max_tokens
        if refusal is not None:
            raise refusal
        endless = score is None and max_tokens is None
        regime = spec.rope.regime(spec.max_positions if endless else total)
        chain = KeyChain(root_key(self._key_space, regime=regime, salt=cache_salt), self.config.cache.block_tokens, ids)
        chain.prepare()
        tokenizer = self.loaded.tokenizer
        return Request(
            id=request_id if request_id is not None else uuid.uuid4().hex[:16],
            token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_total_tokens=total,
            regime=regime,
            chain=chain,
            eos_token_ids=self.loaded.eos_token_ids,
            detokenizer=IncrementalDetokenizer(tokenizer) if tokenizer is not None else None,
            cacheable=self.config.cache.prefix_cache,
            score=score,
        )

    def submit(self, request: Request, *, bounded: bool = True) -> None:
        """Queue a request made by `make_request`; `QueueFullError` when the queue is full, unless not `bounded`."""
        if bounded:
            self.scheduler.check_queue()
        self.scheduler.add(request)

    def add(self, token_ids: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None) -> Request:
        """`make_request` and `submit` in one, for callers that step by hand."""
        request = self.make_request(token_ids, params, cache_salt=cache_salt)
        self.submit(request)
        return request

    def cancel(self, request_id: str) -> bool:
        """Ask for a request to end; honoured between layers. False if no such request is alive."""
        request = self.scheduler.live.get(request_id)
        if request is not None:
            request.cancelled = True
        return request is not None

    def plan(self, tokens: int, *, concurrency: int = 1) -> Plan:
        """What `concurrency` requests of `tokens` tokens (prompt + generated) need of this engine's pool, and how long
        prefill takes."""
        return plan(
            Demand(tokens, concurrency),
            self.groups,
            self.partition.pool_bytes,
            fixed=self.fixed,
            chunk_tokens=self.config.scheduler.chunk_tokens,
            max_positions=self.loaded.spec.max_positions,
            engine_pool=self.partition,
            rates=self.rates,
            attention_variant=self.config.variant.key,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Schedule, run, commit; answers what happened."""
        events = self.scheduler.drop_cancelled()
        step = self.last_step = self.scheduler.schedule()
        try:
            return events + self.scheduler.commit(step, self._run(step))
        except StepAbandonedError:
            return events
        except EngineError as error:
            return events + self._give_up(step, error)

    def _give_up(self, step: StepSpec, error: EngineError) -> list[Event]:
        if step.copies:
            # Nobody knows which of them ran: rows that were never copied must not be found again.
            self.cache.clear()
        return self.scheduler.fail(step, str(error))

    def _run(self, step: StepSpec) -> list[RowResult]:
        before_s = time.perf_counter()
        try:
            results = self.runner.run(step, lambda fraction: self._on_layer(step, fraction))
        except StepAbandonedError:
            raise
        except Exception as error:
            log.exception("a step failed")
            raise EngineError(f"the step failed: {type(error).__name__}: {error}") from error
        # A scored token costs the head as well: its time says nothing of prompts that are only read.
        if step.rows and all(row.targets is None for row in step.rows):
            self.rates.observe([(row.start, row.n) for row in step.rows], time.perf_counter() - before_s)
        return results

    def _on_layer(self, step: StepSpec, fraction: float) -> None:
        """Between two layers: give up if most of the step is no longer wanted, and say how far it is."""
        live = self.scheduler.live
        unwanted = sum(row.n for row in step.rows if live[row.request_id].cancelled)
        if 2 * unwanted > step.num_tokens:
            raise StepAbandonedError
        if self.on_progress is not None:
            for row in step.rows:
                if live[row.request_id].in_prefill:
                    self.on_progress(self.scheduler.progress(live[row.request_id], int(row.n * fraction)))

    # -- looking inside ------------------------------------------------------------------------------------------

    def cache_stats(self) -> list[CacheStats]:
        """Free, held and cached slots of every layer group."""
        return self.cache.stats()

    def check_integrity(self) -> None:
        """Recompute every invariant of the cache from scratch; raises `AssertionError` naming what is wrong."""
        running = self.scheduler.running
        assert all(r.status is Status.RUNNING and r.table is not None for r in running)
        self.cache.check_integrity([r.table for r in running if r.table is not None])


_NOT_MATH = ("architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version")
"""Config entries that no logit depends on, or that the key names by itself."""


def _first_outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """The first of `ids` [n] that is no token, or None."""
    if ids.min() >= 0 and ids.max() < vocab_size:
        return None
    return int(ids[(ids < 0) | (ids >= vocab_size)][0])


def _config_digest(config: PreTrainedConfig) -> str:
    values = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in _NOT_MATH}
    return digest_of(values)
