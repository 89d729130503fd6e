"""Model specs made by hand, for tests of pure arithmetic."""

from __future__ import annotations

from longctx.models.spec import LayerSpec, ModelSpec, RopeSpec


def make_spec(hidden: int = 64, layers: int = 2, intermediate: int = 256, vocab: int = 1000) -> ModelSpec:
    """A tied fp32 model of full layers: 4 query and 2 KV heads of dim 16, a gated MLP."""
    linear = layers * (hidden * 4 * 16 + 2 * hidden * 2 * 16 + 4 * 16 * hidden + 3 * hidden * intermediate)
    return ModelSpec(
        name="tiny",
        model_type="llama",
        dtype="float32",
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=4096,
        layers=tuple(LayerSpec(i, None, 4, 2, 16, 16, 0.25) for i in range(layers)),
        rope=RopeSpec(),
        num_params=linear + vocab * hidden,
        embedding_params=vocab * hidden,
        head_params=vocab * hidden,
        linear_params=linear,
        active_linear_params=linear,
        tied=True,
    )
