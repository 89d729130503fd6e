"""One object for prefill cost and tier speeds: plan, chunking, fetching, ETA and routing all ask it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from longctx.fit import OnlineFit
from longctx.machine import MachineSpeed, fingerprint, measured
from longctx.models.spec import DTYPE_BYTES, INT8_WEIGHTS, LayerSpec, ModelSpec

log = logging.getLogger(__name__)

Row = tuple[int, int]
"""(start, n): n tokens of one request from position `start`; one token alone is a decode."""

STEP_CAP_S = 2.0
LAYER_OVERHEAD_S = 2e-4
ATTENTION_SHARE = 0.5
"""First guess of the speed of attention beside the measured product and stream."""
CHUNK_MULTIPLE = 16
FILE_VERSION = 2
OVERRUN_UP, OVERRUN_DOWN, MOST_OVERRUN = 0.3, 0.03, 2.0
"""Quick to believe that steps take long, slow to forget it, and one that took ages counts no more than twice."""


@dataclass
class Rates:
    """Predicts seconds of steps from what was measured, and learns from every step.

    Owns two cost models, both linear with non-negative coefficients:
    - a step with prefill rows: a + b n + c Q + h S, n all their tokens, Q = sum of n (start + n/2) their causal pairs,
      S = sum of start the history that a step reads once, however few its tokens. Window layers cost the same for
      every token past their window, so their share is part of b;
    - a step of decodes alone: a' + d rows + e context. In a mixed step the decodes add d rows + e context.
    `reach` is the furthest position a measured prefill got to. `tiers` are bytes per second by tier name. `overrun` is
    how many times longer than predicted steps with prefills and decodes take when they take long: whoever waits for its
    next token is promised a time that is kept, not one that is right on average. Not safe for concurrent writers; the
    engine's loop is the only one.
    """

    prefill: OnlineFit
    decode: OnlineFit
    reach: int = 0
    tiers: dict[str, float] = field(default_factory=dict)
    overrun: float = 1.0

    @classmethod
    def initial(cls, spec: ModelSpec, speed: MachineSpeed) -> Rates:
        """The first guess: the model's arithmetic and bytes at the measured speeds."""
        size, overhead = DTYPE_BYTES[spec.dtype], LAYER_OVERHEAD_S * spec.num_layers
        attention_flops, kv_speed = speed.flops * ATTENTION_SHARE, speed.read_bytes_per_s * ATTENTION_SHARE
        full = [layer for layer in spec.layers if layer.reach.most is None]
        windowed = [(layer, layer.reach.most) for layer in spec.layers if layer.reach.most is not None]
        pair = sum(_pair_flops(layer) for layer in full)
        window_flops = sum(_pair_flops(layer) * window for layer, window in windowed)
        # Integer products are two to four times as fast as those in floats.
        linear = (1 if spec.weights == INT8_WEIGHTS else 2) * spec.active_linear_params / speed.flops
        read = spec.step_weight_bytes / speed.read_bytes_per_s
        kv_bytes = size * sum(_kv_elements(layer) for layer in full)
        window_bytes = size * sum(_kv_elements(layer) * window for layer, window in windowed)
        tiny = 1e-15  # a coefficient's guess must be positive to be scaled
        history = kv_bytes / kv_speed
        return cls(
            OnlineFit(
                (
                    overhead + tiny,
                    linear + window_flops / attention_flops + tiny,
                    pair / attention_flops + tiny,
                    history + tiny,
                )
            ),
            OnlineFit((overhead + read + tiny, linear + window_bytes / kv_speed + tiny, history + tiny)),
        )

    def observe(self, rows: Sequence[Row], seconds: float) -> None:
        """Learn from one step that took `seconds`."""
        prefills, decodes = _split(rows)
        if not prefills:
            self.decode.observe(_decode_features(decodes), seconds)
            return
        if decodes and (predicted := self.step_seconds(rows)) > 0:
            ratio = min(seconds / predicted, MOST_OVERRUN)
            weight = OVERRUN_UP if ratio > self.overrun else OVERRUN_DOWN
            self.overrun = max(1.0, self.overrun + weight * (ratio - self.overrun))
        own = max(seconds - self._decode_addition(decodes), 0.1 * seconds)
        self.prefill.observe(_prefill_features(prefills), own)
        self.reach = max([self.reach, *(start + n for start, n in prefills)])

    def step_seconds(self, rows: Sequence[Row]) -> float:
        """Predicted seconds of a step of these rows."""
        prefills, decodes = _split(rows)
        if not prefills:
            return self.decode.predict(_decode_features(decodes)) if decodes else 0.0
        return self.prefill.predict(_prefill_features(prefills)) + self._decode_addition(decodes)

    def largest_chunk(self, start: int, seconds_cap: float, *, maximum: int, decodes: Sequence[int] = ()) -> int:
        """Most prompt tokens from `start` that keep a step within `seconds_cap`.

        `decodes` are the positions of the tokens decoded in the same step; where there are any, `overrun` counts. At
        least 1, at most `maximum`; above 16 a multiple of 16 unless it is `maximum` itself.
        """
        assert maximum >= 1
        rows = [(position, 1) for position in decodes]
        seconds_cap = seconds_cap / self.overrun if rows else seconds_cap
        low, high = 1, maximum
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_seconds([*rows, (start, middle)]) <= seconds_cap
            low, high = (middle, high) if fits else (low, middle - 1)
        return low if low == maximum or low < CHUNK_MULTIPLE else low // CHUNK_MULTIPLE * CHUNK_MULTIPLE

    def chunks(self, tokens: int, max_chunk: int, seconds_cap: float = STEP_CAP_S) -> tuple[int, int]:
        """A cold prefill of `tokens` alone in its steps: (number of chunks, tokens of the last).

        Chunks never grow along a prompt, so each size is counted at once.
        """
        start, count = 0, 0
        while True:
            n = self.largest_chunk(start, seconds_cap, maximum=max_chunk)
            if n >= tokens - start:
                return count + 1, tokens - start
            low, high = 1, (tokens - start - 1) // n
            while low < high:
                middle = (low + high + 1) // 2
                same = self.largest_chunk(start + (middle - 1) * n, seconds_cap, maximum=max_chunk) == n
                low, high = (middle, high) if same else (low, middle - 1)
            start, count = start + low * n, count + low

    def _decode_addition(self, decodes: Sequence[Row]) -> float:
        """What decode rows add to a step that has prefill rows."""
        _, count, context = _decode_features(decodes)
        return self.decode.predict((0.0, count, context))

    def prefill_eta(self, start: int, n: int, chunk_tokens: int | None = None) -> float:
        """Most likely seconds to compute tokens [start, start + n) in steps of `chunk_tokens` (one step, if None)."""
        if n < 1:
            return 0.0
        steps = 1 if chunk_tokens is None else -(-n // chunk_tokens)
        history = steps * start + n * (steps - 1) / 2
        return self.prefill.predict((steps, n, n * (start + n / 2), history))

    def remaining_seconds(self, own: Row, rows: Sequence[Row], start: int, n: int) -> float:
        """Most likely seconds until a prompt's tokens [start, start + n) are computed, in steps of `rows` as now, of
        which its own part is `own`: what else is in them takes its time in every one."""
        if n < 1:
            return 0.0
        steps = -(-n // own[1])
        others = max(0.0, self.step_seconds(rows) - self.prefill.predict(_prefill_features([own])))
        return self.prefill_eta(start, n, own[1]) + steps * others

    def prefill_seconds(self, n: int, start: int = 0, chunk_tokens: int | None = None) -> tuple[float, float]:
        """(low, high) around `prefill_eta`: twice the typical error, more far beyond what was ever measured."""
        middle = self.prefill_eta(start, n, chunk_tokens)
        beyond = 0.25 if start + n > 4 * self.reach else 0.0
        factor = 1 + 2 * self.prefill.relative_error + beyond
        return middle / factor, middle * factor

    def decode_seconds(self, context: int) -> float:
        """Predicted seconds of one decode step of one request with `context` tokens."""
        return self.step_seconds([(context, 1)])

    def load_seconds(self, tier: str, num_bytes: int) -> float:
        """Seconds to read `num_bytes` from a tier; infinite while its speed is unknown."""
        return num_bytes / self.tiers[tier] if tier in self.tiers else math.inf

    def observe_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Learn a tier's speed from one read: an average of seconds per byte in which the latest counts a quarter."""
        if num_bytes <= 0 or seconds <= 0:
            return
        measured = seconds / num_bytes
        old = 1 / self.tiers[tier] if tier in self.tiers else measured
        self.tiers[tier] = 1 / (old + 0.25 * (measured - old))

    def break_even_start(self, tier: str, bytes_per_token: int, n: int) -> int | None:
        """The least position from which fetching `n` tokens is faster than computing them; None if it never is.

        A token costs the same bytes anywhere but more arithmetic the later it stands.
        """
        load_s = self.load_seconds(tier, bytes_per_token * n)
        if choose(load_s, self.prefill_eta(0, n)) == "load":
            return 0
        _, _, pair_s, history_s = self.prefill.coefficients
        per_start = float(pair_s * n + history_s)
        if per_start <= 0 or math.isinf(load_s):
            return None
        return math.floor((load_s - self.prefill_eta(0, n)) / per_start) + 1

    def save(self, path: Path) -> None:
        """Write atomically: another process sees the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "version": FILE_VERSION,
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "reach": self.reach,
            "tiers": self.tiers,
        }
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Rates | None:
        """What `save` wrote, or None: a missing file silently, a corrupt one with a warning."""
        try:
            data: Any = json.loads(path.read_text())
            if data["version"] != FILE_VERSION:
                return None
            prefill, decode = OnlineFit.from_json(data["prefill"]), OnlineFit.from_json(data["decode"])
            tiers = {str(name): float(speed) for name, speed in data["tiers"].items()}
            if len(prefill.guess) != 4 or len(decode.guess) != 3 or not all(x > 0 for x in tiers.values()):
                raise ValueError("wrong sizes")
            return cls(prefill, decode, int(data["reach"]), tiers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("ignoring measured rates in %s: %s", path, error)
            return None


def rates_path(spec: ModelSpec, variant: str = "", root: Path | None = None) -> Path:
    """Where the rates of an architecture on this machine lie: in LONGCTX_CACHE or ~/.cache/longctx.

    The name covers everything of `spec` but the model's name (other weights are as fast), the dtype and rope limits
    included, `variant` (such as the formats in use), the machine's fingerprint and the number of threads.
    """
    if root is None:
        root = Path(os.environ.get("LONGCTX_CACHE") or "~/.cache/longctx").expanduser()
    parts = (replace(spec, name=""), variant, fingerprint(), torch.get_num_threads())
    return root / "rates" / f"{spec.model_type}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


def rates_for(spec: ModelSpec, variant: str = "", root: Path | None = None) -> Rates:
    """The rates learned for this architecture on this machine, or a first guess after a measurement of 0.3 s."""
    return Rates.load(rates_path(spec, variant, root)) or Rates.initial(spec, measured())


def choose(load_s: float, recompute_s: float) -> str:
    """Fetch or compute again: "load" only if it is faster."""
    return "load" if load_s < recompute_s else "recompute"


def effective_ttft(cold: float, warm: float, hit_rate: float) -> float:
    """Mean time to first token when a share `hit_rate` of requests is warm; the unit is that of its arguments."""
    assert 0.0 <= hit_rate <= 1.0
    return hit_rate * warm + (1 - hit_rate) * cold


def break_even_speed(num_tokens: int, load_s: float) -> float:
    """The prefill speed in tokens per second at which computing takes as long as loading."""
    return num_tokens / load_s


def _pair_flops(layer: LayerSpec) -> int:
    """Operations of one (query, key) pair in all heads: 2 for each element of K and of V."""
    return 2 * layer.num_heads * (layer.k_dim + layer.v_dim)


def _kv_elements(layer: LayerSpec) -> int:
    return layer.num_kv_heads * (layer.k_dim + layer.v_dim)


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(prefill rows, decode rows)."""
    return [row for row in rows if row[1] > 1], [row for row in rows if row[1] == 1]


def _prefill_features(rows: Sequence[Row]) -> tuple[float, float, float, float]:
    pairs = sum(n * (start + n / 2) for start, n in rows)
    return 1.0, float(sum(n for _, n in rows)), float(pairs), float(sum(start for start, _ in rows))


def _decode_features(rows: Sequence[Row]) -> tuple[float, float, float]:
    return 1.0, float(len(rows)), float(sum(start + 1 for start, _ in rows))
