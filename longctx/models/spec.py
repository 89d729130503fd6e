"""What the engine must know of a model before any weight is read: layers, attention shapes, sizes, limits."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.attention.reach import Reach
from longctx.errors import LongctxError


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one decoder layer, as its module will call the hook.

    `window` counts the query's own position (Hugging Face's convention): query i sees keys i-window+1 .. i, and the
    first `sinks`. With `local_chunk` it sees its own multiple of it. None of the three is full attention. `by_variant`:
    the model itself has full attention here, and its user chose otherwise. `temperature` (floor, scale): the query at
    position p is multiplied by 1 + scale * log(1 + (p + 1) // floor) (Llama 4).
    """

    index: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    softcap: float | None = None
    has_sink: bool = False
    sinks: int = 0
    local_chunk: int | None = None
    by_variant: bool = False
    temperature: tuple[int, float] | None = None

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.sinks, self.local_chunk)


@dataclass(frozen=True)
class RopeSpec:
    """Which rope regimes a model has.

    kind `static`: one regime for every length. `longrope`: short or long factors, chosen by whether a request's last
    position exceeds `original_positions`. `dynamic`: the base grows with the request's length beyond
    `original_positions`.
    """

    kind: str = "static"
    original_positions: int = 0

    def regime(self, total_tokens: int) -> int:
        """The regime of a request that will have at most `total_tokens` positions; 0 is the short, unscaled one.

        `longrope` answers 0 or 1; `dynamic` answers 0 or the length itself (each length has its own base).
        """
        if self.kind == "static" or total_tokens <= self.original_positions:
            return 0
        return 1 if self.kind == "longrope" else total_tokens


PLAIN_WEIGHTS, INT8_WEIGHTS = "plain", "int8"
"""How linears' weights are held; the word for it in block keys."""


def check_weights(weights: str) -> None:
    """Raise `LongctxError` unless a user may ask for these weights: "auto", which are plain, or "int8"."""
    if weights not in ("auto", INT8_WEIGHTS):
        raise LongctxError(f"weights {weights!r} are not known; choose auto or {INT8_WEIGHTS}")


@dataclass(frozen=True)
class ModelSpec:
    """A model's geometry from its config alone; `plan` and the cache are built from it.

    `num_params` counts every parameter once (a tied head is counted with the embedding); `embedding_params` are the
    input embedding's; `head_params` are the LM head's (equal to the embedding's when tied, where `tied` is true);
    `linear_params` are all parameters that a token multiplies in the layers (for MoE: `active_linear_params` are those
    one token touches). `max_positions` is the model's own limit, after any rope scaling asked for by the user.
    `weights` says how linears are held: "plain" in `dtype`, or "int8", which holds `int8_params` of the parameters, the
    LM head's among them, in `int8_bytes`, scales included.
    """

    name: str
    model_type: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    num_params: int
    embedding_params: int
    head_params: int
    linear_params: int
    active_linear_params: int
    tied: bool
    weights: str = PLAIN_WEIGHTS
    int8_params: int = 0
    int8_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as resident, a tied embedding counted once."""
        return self._stored_bytes(self.num_params)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that one token's step reads: every linear it touches, and the LM head."""
        return self._stored_bytes(self.active_linear_params + self.head_params)

    def _stored_bytes(self, num_params: int) -> int:
        """Bytes of `num_params` parameters, all those among them that int8 weights are made of."""
        if self.weights == INT8_WEIGHTS:
            return (num_params - self.int8_params) * DTYPE_BYTES[self.dtype] + self.int8_bytes
        return num_params * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
