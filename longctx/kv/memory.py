"""The memory words: what --kv-memory, --device-memory and --memory-fraction make of a device, and what a step needs."""

# Legend: T tokens of a step's chunk, S tokens of a tile, R rows that sample, H query heads, K kv heads, D head dim.
from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

from longctx.attention.span import TILE_TOKENS
from longctx.errors import LongctxError
from longctx.models.spec import DTYPE_BYTES, INT8_WEIGHTS, LayerSpec, ModelSpec
from longctx.units import format_bytes, parse_bytes

DEFAULT_FRACTION = 0.9
PROCESS_BYTES = 510_000_000
"""Resident size of the interpreter with torch, transformers and numba before any weight (450 MB with a CPU build), and
some 60 MB more where kernels are compiled for the first time."""

TRITON_BYTES = 100_000_000
"""What triton adds to it: transformers imports it, by way of torch's compiler, wherever it is installed."""

TOKENIZER_BYTES_PER_ENTRY = 1300
"""Resident bytes of a tokenizer per entry of the vocabulary (334 MiB measured for 262,144 entries)."""

SCORE_LOGIT_BYTES = 40 * 2**20
"""Logits that a step scores stay under this together, whatever the vocabulary."""


@dataclass(frozen=True)
class MemoryWords:
    """What the user said about memory; None is not said.

    `kv_memory` is the pool itself. `device_memory` is everything on the device: weights, workspace, pool and, where the
    device is the CPU, the process. `memory_fraction` is the pool's share of what is free after all but the pool.
    """

    kv_memory: int | None = None
    device_memory: int | None = None
    memory_fraction: float | None = None

    @classmethod
    def parse(
        cls,
        kv_memory: str | int | None = None,
        device_memory: str | int | None = None,
        memory_fraction: float | None = None,
    ) -> MemoryWords:
        """From the options' text; raises `LongctxError` naming the option."""
        if memory_fraction is not None and not 0.0 < memory_fraction <= 1.0:
            raise LongctxError(f"--memory-fraction {memory_fraction} must be above 0 and at most 1, such as 0.8")
        return cls(
            None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
            None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
            memory_fraction,
        )


@dataclass(frozen=True)
class Fixed:
    """Bytes on the device besides the pool; all 0 for a bare geometry."""

    weight_bytes: int = 0
    workspace_bytes: int = 0
    process_bytes: int = 0
    load_bytes: int = 0
    """Taken only while loading, before a pool is touched: the largest matrix is there twice while it is packed."""

    @property
    def load_peak(self) -> int:
        return self.weight_bytes + self.process_bytes + self.load_bytes

    @property
    def total(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.process_bytes

    def split(self, kv_bytes: int) -> str:
        """One phrase with every part, for messages."""
        return (
            f"weights {format_bytes(self.weight_bytes)}, KV {format_bytes(kv_bytes)}, activations "
            f"{format_bytes(self.workspace_bytes)}, process {format_bytes(self.process_bytes)}"
        )


def kv_limit(words: MemoryWords, fixed: Fixed, available_bytes: int) -> int:
    """The most bytes the pool may take; 0 if nothing is left.

    `kv_memory` as given, else the fraction of what `fixed` leaves of `device_memory`, else the fraction of what it
    leaves of `available_bytes` (counted as if nothing of `fixed` were loaded yet).
    """
    if words.kv_memory is not None:
        return words.kv_memory
    device = available_bytes if words.device_memory is None else words.device_memory
    # Exact in decimals: 0.8 of 80 GB is 64 GB and not a byte less.
    fraction = Fraction(repr(words.memory_fraction or DEFAULT_FRACTION))
    return max(0, math.floor((device - fixed.total) * fraction))


def fixed_for(spec: ModelSpec, chunk_tokens: int, sampling_rows: int) -> Fixed:
    """What a CPU process holds besides the pool for steps of at most `chunk_tokens` tokens and `sampling_rows`."""
    return Fixed(
        spec.weight_bytes,
        workspace_bytes(spec, min(chunk_tokens, spec.max_positions), sampling_rows),
        PROCESS_BYTES + (TRITON_BYTES if find_spec("triton") else 0) + TOKENIZER_BYTES_PER_ENTRY * spec.vocab_size,
        # Int8 weights are made of a few rows at a time.
        0 if spec.weights == INT8_WEIGHTS else spec.head_params * DTYPE_BYTES[spec.dtype],
    )


def kv_memory_for(words: MemoryWords, fixed: Fixed, available_bytes: int, need_bytes: int) -> int:
    """The pool's bytes: `kv_limit` if the user said anything about memory, else no more of it than `need_bytes`.

    `need_bytes` is what the most running requests of full length need; a laptop's pool need not be larger.
    """
    limit = kv_limit(words, fixed, available_bytes)
    return min(limit, need_bytes) if words == MemoryWords() else limit


def check_machine(words: MemoryWords, fixed: Fixed, pool_bytes: int, physical_bytes: int) -> None:
    """Raise `LongctxError` at start when pool and all else exceed the machine, or the device memory the user named."""
    limits = [(physical_bytes, "this machine has")]
    if words.device_memory is not None:
        limits.append((words.device_memory, "--device-memory is"))
    limit, name = min(limits)
    if pool_bytes + fixed.total <= limit:
        return
    room = limit - fixed.total
    if room > 0:
        remedy = f"set --kv-memory to at most {room} bytes ({format_bytes(room)})"
    else:
        remedy = f"even without KV it needs {format_bytes(fixed.total)}: use a smaller model or more memory"
    raise LongctxError(
        f"{fixed.split(pool_bytes)} add up to {format_bytes(pool_bytes + fixed.total)}, {name} "
        f"{format_bytes(limit)}: {remedy}"
    )


def mlp_width(spec: ModelSpec) -> int:
    """Intermediate features per token of one layer's gated MLP (of all experts a token visits), from the counts."""
    attention = sum(
        spec.hidden_size * (x.num_heads * x.k_dim + x.num_kv_heads * (x.k_dim + x.v_dim) + x.num_heads * x.v_dim)
        for x in spec.layers
    )
    return max(0, spec.active_linear_params - attention) // (3 * spec.hidden_size * spec.num_layers)


def max_scored(vocab_size: int) -> int:
    """Tokens whose logits one step may score."""
    return max(1, SCORE_LOGIT_BYTES // (4 * vocab_size))


def workspace_bytes(spec: ModelSpec, chunk_tokens: int, sampling_rows: int = 1) -> int:
    """Peak of a CPU step's activations: T = `chunk_tokens` flat tokens of which R = `sampling_rows` sample.

    The residual and the normed input (2 T hidden) live all along; on top of them the largest of
    - attention: q, k, v and the rotated q and k; the running fp32 state, the tile's and the merged one; a tile of
      S = 2,048 gathered keys and values and its [T, S] mask;
    - MLP: gate, up and their product, and the output;
    - head: R rows of logits, and those of tokens that are scored, each with its sorted or exponentiated copy, fp32.
    """
    size = DTYPE_BYTES[spec.dtype]
    live = 2 * chunk_tokens * spec.hidden_size * size
    attention = max(_attention_bytes(layer, chunk_tokens, size) for layer in spec.layers)
    mlp = chunk_tokens * (3 * mlp_width(spec) + spec.hidden_size) * size
    scored = min(chunk_tokens, max_scored(spec.vocab_size))
    head = (sampling_rows + scored) * (spec.hidden_size * size + 2 * spec.vocab_size * 4)
    return live + max(attention, mlp, head)


def _attention_bytes(layer: LayerSpec, chunk_tokens: int, size: int) -> int:
    queries, keys = layer.num_heads * layer.k_dim, layer.num_kv_heads * layer.k_dim
    values = layer.num_kv_heads * layer.v_dim
    projections = chunk_tokens * (2 * queries + 2 * keys + values) * size
    states = 3 * chunk_tokens * layer.num_heads * (layer.v_dim + 1) * 4
    tile = TILE_TOKENS * (keys + values) * size + chunk_tokens * TILE_TOKENS * 4
    return projections + states + tile
