"""Every KV format at every head dim: bounded errors, defined edges, counted bytes (B48, B50)."""

# Shape legend: V vectors, D head dim, T tokens, K kv heads.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longctx.quant.codec import LEAST_SCALE
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import gather_tokens, store_tokens
from tests.helpers.engine import make_engine
from tests.helpers.tiny import make_tiny

DIMS = [16, 64, 80, 96, 128, 256]
LOSSY = [name for name, fmt in FORMATS.items() if fmt.lossy]
GROUP = 64
# The arithmetic around a code (one over the scale, two products, a sum) is fp32: 2^-21 of the largest value involved.
FP32_NOISE = 2.0**-21

every_format = pytest.mark.parametrize("name", list(FORMATS))
lossy_format = pytest.mark.parametrize("name", LOSSY)
every_dim = pytest.mark.parametrize("dim", DIMS)


def groups_of(x_VD: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
    """The parts of vectors that share a scale."""
    return x_VD.split(GROUP, -1) if name == "int4" else (x_VD,)


def error_bound(name: str, x_VD: torch.Tensor) -> torch.Tensor:
    """The largest error [V, D] in float64 that the format's definition allows for each element of finite vectors."""
    x_VD = x_VD.double()
    bounds = []
    for part in groups_of(x_VD, name):
        most = part.abs().amax(-1, keepdim=True)
        if name == "fp32":
            bound = torch.zeros_like(part)
        elif name == "bf16":
            bound = torch.maximum(part.abs() * 2.0**-8, torch.tensor(2.0**-134))
        elif name == "fp16":
            bound = torch.maximum(part.abs() * 2.0**-11, torch.tensor(2.0**-25))
        elif name == "int8":
            bound = (most / 127 / 2 + most * FP32_NOISE).expand_as(part)
        elif name == "int4":
            bottom, top = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
            # The low end moves down and the step up, each by at most one unit of bf16's last place.
            step = (top - bottom + bottom.abs() * 2.0**-7) / 15 * (1 + 2.0**-7)
            bound = (step / 2 + most * FP32_NOISE).expand_as(part)
        else:
            relative, subnormal, largest = {
                "fp8_e4m3": (1 / 17, 2.0**-10, 448.0),
                "fp8_e5m2": (1 / 9, 2.0**-17, 57344.0),
            }[name]
            bound = torch.maximum(part.abs() * relative, most / largest * subnormal) + most * FP32_NOISE
        bounds.append(bound)
    return torch.cat(bounds, -1)


def round_trip(name: str, x_VD: torch.Tensor) -> torch.Tensor:
    codec = FORMATS[name].codec
    data, scales = codec.encode(x_VD)
    out = torch.full(x_VD.shape, math.nan)
    codec.decode(data, scales, out)
    return out


def samples(dim: int) -> dict[str, torch.Tensor]:
    """Vectors [V, D] of every kind that keys and values come in."""
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(64, dim, generator=generator)
    spread = normal * torch.logspace(-12, 12, 64)[:, None]
    outlier = normal.clone()
    outlier[torch.arange(64), torch.arange(64) % dim] = 3e4 * torch.randn(64, generator=generator)
    channels = normal * torch.logspace(-3, 3, dim)
    shifted = normal * 0.01 + torch.linspace(-7.7, 7.7, 64)[:, None]
    constant = torch.linspace(-1.1, 1.3, 64)[:, None].expand(64, dim)
    sparse = normal * (torch.rand(64, dim, generator=generator) < 0.1)
    return {
        "normal": normal,
        "spread": spread,
        "outlier": outlier,
        "channels": channels,
        "shifted": shifted,
        "constant": constant,
        "sparse": sparse,
    }


@every_format
@every_dim
def test_errors_are_what_the_format_says(name: str, dim: int) -> None:
    for kind, x_VD in samples(dim).items():
        if name == "fp16":
            x_VD = x_VD.clamp(-65504, 65504)
        excess = (round_trip(name, x_VD).double() - x_VD.double()).abs() - error_bound(name, x_VD)
        assert excess.max() <= 0, f"{kind}: {excess.max():.3e} beyond the bound"


@lossy_format
def test_the_bound_is_reached(name: str) -> None:
    """The bound is no looser than the format: some element of many has nine tenths of it."""
    x_VD = samples(256)["normal"]
    share = (round_trip(name, x_VD).double() - x_VD.double()).abs() / error_bound(name, x_VD)
    assert share.max() > 0.9


@every_format
@every_dim
def test_zeros_stay_zeros_and_change_nothing_beside_them(name: str, dim: int) -> None:
    """B50: a zero row, channel or block was NaN after quantization: 0 / 0 (huggingface/kernels-community#680, #681;
    ROCm/aiter#4289; openvinotoolkit/openvino#28326)."""
    codec, plain_VD = FORMATS[name].codec, samples(dim)["normal"]
    data, scales = codec.encode(plain_VD)
    mixed_VD = plain_VD.clone()
    mixed_VD[::3] = 0.0
    mixed_VD[1::6] = -0.0
    back_VD = round_trip(name, mixed_VD)
    zero_V = (mixed_VD == 0).all(-1)
    assert torch.equal(back_VD[zero_V], torch.zeros_like(back_VD[zero_V]))
    mixed_data, mixed_scales = codec.encode(mixed_VD)
    assert torch.equal(mixed_data[~zero_V], data[~zero_V])
    assert scales is None or (mixed_scales is not None and torch.equal(mixed_scales[~zero_V], scales[~zero_V]))

    channel_VD = plain_VD.clone()
    channel_VD[:, dim // 2] = 0.0
    back_VD = round_trip(name, channel_VD)
    assert back_VD.isfinite().all()
    if name != "int4":  # its codes are relative to the lowest value: a zero is as exact as any other element
        assert (back_VD[:, dim // 2] == 0).all()
    assert torch.equal(round_trip(name, torch.zeros(5, 3, dim)), torch.zeros(5, 3, dim))
    if name == "int4" and dim > GROUP:
        half_VD = plain_VD.clone()
        half_VD[:, :GROUP] = 0.0
        back_VD, whole_VD = round_trip(name, half_VD), round_trip(name, plain_VD)
        assert (back_VD[:, :GROUP] == 0).all() and torch.equal(back_VD[:, GROUP:], whole_VD[:, GROUP:])


@lossy_format
@every_dim
def test_what_is_not_finite_is_nan_under_its_scale_alone(name: str, dim: int) -> None:
    """Nothing wraps or saturates: all that shares its scale reads back as NaN, everything else as before."""
    plain_VD = samples(dim)["normal"]
    want_VD = round_trip(name, plain_VD)
    for bad in (math.inf, -math.inf, math.nan):
        for at in (0, dim // 2, dim - 1):
            x_VD = plain_VD.clone()
            x_VD[7, at] = bad
            got_VD = round_trip(name, x_VD)
            group = slice(at // GROUP * GROUP, (at // GROUP + 1) * GROUP) if name == "int4" else slice(None)
            assert got_VD[7, group].isnan().all()
            got_VD[7, group] = want_VD[7, group]
            assert torch.equal(got_VD, want_VD)


@lossy_format
def test_the_largest_and_the_smallest_numbers(name: str) -> None:
    """Up to fp32's largest value half a step is half a step; what is next to nothing is close to nothing, never NaN."""
    largest = torch.finfo(torch.float32).max
    x_VD = torch.randn(32, 128).clamp(-3, 3) / 3
    huge_VD = torch.cat([x_VD * largest * 0.45, x_VD.abs() * 1e38])
    assert ((round_trip(name, huge_VD).double() - huge_VD.double()).abs() <= error_bound(name, huge_VD)).all()
    for size in (1e-30, 1e-36, 1e-38, 1e-40, 1.4e-45):
        tiny_VD = x_VD * size
        error = (round_trip(name, tiny_VD).double() - tiny_VD.double()).abs()
        assert (error <= error_bound(name, tiny_VD) + LEAST_SCALE * 57344).all()
        # int4 may store the lowest value alone, in bf16.
        assert (error <= 2 * tiny_VD.double().abs().amax(-1, keepdim=True) + 2.0**-133).all()


def test_int4_codes_reach_both_ends() -> None:
    """The lowest value is rounded down and the step up: no element lies beyond code 0 or code 15."""
    for x_VD in samples(GROUP).values():
        _, scales = FORMATS["int4"].codec.encode(x_VD)
        assert scales is not None
        step_V, low_V = scales.double().unbind(-1)
        assert (low_V <= x_VD.double().amin(-1)).all()
        assert (low_V + 15 * step_V >= x_VD.double().amax(-1) - x_VD.double().abs().amax(-1) * FP32_NOISE).all()


def test_a_range_that_fp32_cannot_hold_is_nan_and_not_clipped() -> None:
    """int4 needs the distance between both ends: one that overflows is no number, as if an end were infinite."""
    x_D = torch.zeros(128)
    x_D[3], x_D[5] = 3e38, -3e38
    back_D = round_trip("int4", x_D)
    assert back_D[:GROUP].isnan().all() and (back_D[GROUP:] == 0).all()


@every_format
@every_dim
def test_codes_depend_on_nothing_but_their_vector(name: str, dim: int) -> None:
    """Alone, beside outliers, in another order, strided or from another dtype with the same values: the same bytes."""
    codec, x_VD = FORMATS[name].codec, samples(dim)["normal"].bfloat16().float()
    data, scales = codec.encode(x_VD)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    outliers_VD = samples(dim)["outlier"]
    strided = torch.stack([x_VD, outliers_VD], -1)[..., 0]
    for inputs, pick in (
        (x_VD[order], order),
        (torch.cat([outliers_VD, x_VD])[64:], slice(None)),
        (x_VD.view(8, 8, dim).transpose(0, 1), torch.arange(64).view(8, 8).T),
        (strided, slice(None)),
        (x_VD.bfloat16(), slice(None)),
        (x_VD[5], 5),
        (x_VD[60:63], slice(60, 63)),
    ):
        got_data, got_scales = codec.encode(inputs)
        assert torch.equal(got_data.contiguous().view(torch.uint8), data.view(torch.uint8)[pick])
        assert scales is None or (got_scales is not None and torch.equal(got_scales, scales[pick]))


def poisoned(layout: BlockLayout, num_slots: int, layer: int = 0) -> LayerKV:
    """A layer of a pool whose every byte is 0xFF: NaN to fp32 and bf16, data and scales alike."""
    return layout.layer_view(torch.full((layout.block_bytes * num_slots,), 255, dtype=torch.uint8), layer)


@pytest.mark.parametrize("k_name, v_name", [(name, name) for name in FORMATS] + [("int8", "int4"), ("int4", "bf16")])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_a_pool_gives_back_what_the_codec_makes_of_it(k_name: str, v_name: str, dim: int) -> None:
    """Chunks, scattered slots and single rows; the rest of the pool keeps its poison, and none of it is read."""
    layout = BlockLayout(2, 2, 16, dim, 2 * dim, FORMATS[k_name], FORMATS[v_name])
    layer = poisoned(layout, 9, 1)
    length, table = 75, np.array([7, 2, 3, 4, 8], np.int64)
    k_KTD, v_KTD = torch.randn(2, length, dim), torch.randn(2, length, 2 * dim)
    for start, end in ((0, 40), (40, 41), (41, length)):
        at = np.arange(start, end)
        store_tokens(layer, table[at // 16], at % 16, k_KTD[:, start:end], v_KTD[:, start:end])
    want = round_trip(k_name, k_KTD), round_trip(v_name, v_KTD)
    for start, end, padded in ((0, length, 80), (17, 50, 33), (70, 71, 2), (30, 30, 4)):
        got = gather_tokens(layer, table, start, end - start, padded)
        for got_KSD, want_KTD in zip(got, want, strict=True):
            assert torch.equal(got_KSD[:, : end - start], want_KTD[:, start:end])
            assert not got_KSD[:, end - start :].any()
    for stored in layer.tensors:
        bytes_NKBS = stored.contiguous().view(torch.uint8)
        assert (bytes_NKBS[[0, 1, 5, 6]] == 255).all() and (bytes_NKBS[8, :, 11:] == 255).all()


@lossy_format
def test_many_tokens_of_many_sequences_take_their_scales_along(name: str) -> None:
    """Decode steps: one row each in forty slots, data and scales by an indexed write."""
    layer = poisoned(BlockLayout(1, 2, 16, 80, 80, FORMATS[name], FORMATS[name]), 42)
    slots, rows = np.random.default_rng(0).permutation(40) + 1, np.random.default_rng(1).integers(0, 16, 40)
    x_KTD = torch.randn(2, 40, 80)
    store_tokens(layer, slots, rows, x_KTD, -x_KTD)
    want_KTD = round_trip(name, x_KTD)
    for t in range(40):
        got_KSD, _ = gather_tokens(layer, np.array([slots[t]]), int(rows[t]), 1)
        assert torch.equal(got_KSD[:, 0], want_KTD[:, t])


@every_format
def test_offsets_beyond_31_bits(name: str) -> None:
    """B48: slot times stride passed 2^31 and keys went to another address (vllm-project/vllm#1486).

    The pool has more than 2^31 elements of the format, of which only the pages written become resident.
    """
    fmt = FORMATS[name]
    layout = BlockLayout(1, 1, 256, 256, 256, fmt, fmt)
    num_slots = (1 << 31) // (256 * fmt.stored_dim(256)) + 3
    pool = torch.from_numpy(np.zeros(num_slots * layout.block_bytes, np.uint8))
    layer = layout.layer_view(pool, 0)
    assert num_slots * layer.k[0].numel() > 1 << 31 and layer.k.stride(0) * (num_slots - 1) > 1 << 31
    k_KTD, v_KTD = torch.randn(1, 300, 256), torch.randn(1, 300, 256)
    table, at = np.array([num_slots - 1, 1], np.int64), np.arange(300)
    store_tokens(layer, table[at // 256], at % 256, k_KTD, v_KTD)
    k_KSD, v_KSD = gather_tokens(layer, table, 0, 300)
    assert torch.equal(k_KSD, round_trip(name, k_KTD)) and torch.equal(v_KSD, round_trip(name, v_KTD))
    for stored in layer.tensors:
        assert not any(stored[slot].view(torch.uint8).any() for slot in (0, 2, num_slots - 2))
        assert not stored[1, :, 44:].contiguous().view(torch.uint8).any()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.53), ("fp8_e4m3", 0.53), ("fp8_e5m2", 0.53), ("int4", 0.30)])
def test_a_pool_takes_its_share_of_bf16_scales_included(name: str, most: float) -> None:
    """Of the pools that an engine decodes from, at head dim 128 and blocks of 256 tokens."""
    model = make_tiny("llama", head_dim=128, num_hidden_layers=2)

    def pool_bytes(kv_format: str) -> int:
        engine = make_engine(model, kv_format=kv_format, block_tokens=256, kv_tokens=4096, poison=None)
        return sum(pool.untyped_storage().nbytes() for pool in engine.runner.storage.pools)

    assert pool_bytes(name) <= most * pool_bytes("bf16")
