"""The plan: the textbook numbers to the byte, honest verdicts, and remedies that work."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import LongctxError
from longctx.kv.budget import Demand, Plan, TierSpec, plan
from longctx.kv.groups import LayerGroup
from longctx.kv.memory import Fixed
from longctx.kv.partition import admit, partition
from longctx.kv.sizes import geometry_groups, request_bytes, tokens_that_fit, with_format
from longctx.machine import MachineSpeed
from longctx.quant.formats import FORMATS
from longctx.rates import Rates
from tests.helpers.spec import make_spec

GB = 10**9
FIXED_KEYS = """tokens bytes_per_token kv_bytes scale_bytes weight_bytes workspace_bytes process_bytes peak_bytes
    min_kv_bytes verdict tokens_that_fit requests_that_fit pool_bytes num_chunks last_chunk_tokens tiers seconds"""


def textbook(fmt: str = "bf16") -> tuple[LayerGroup, ...]:
    """80 layers, 8 KV heads, head dim 128."""
    return geometry_groups(80, 8, 128, FORMATS[fmt], 256)


def gemma(block: int = 256) -> tuple[LayerGroup, ...]:
    """The geometry of gemma3-270m: 18 layers of one head of 256, three of them full, window 512, fp32."""
    return geometry_groups(18, 1, 256, FORMATS["fp32"], block, 512, 15)


def test_textbook_bytes_per_token() -> None:
    assert plan(Demand(128_000), textbook(), 64 * GB).bytes_per_token == 327_680
    for fmt in ("int8", "fp8_e4m3", "fp8_e5m2"):
        eight = plan(Demand(128_000), textbook(fmt), 64 * GB)
        assert eight.bytes_per_token == 163_840
        assert eight.scale_bytes_per_token == 80 * 8 * 2 * 4
        assert eight.scale_bytes == 128_000 * 5_120


def test_textbook_bytes_of_128_000_tokens() -> None:
    assert plan(Demand(128_000), textbook(), 64 * GB).kv_bytes == 41_943_040_000
    assert plan(Demand(128_000), textbook("int8"), 64 * GB).kv_bytes == 20_971_520_000


def test_textbook_tokens_that_64_gb_hold() -> None:
    assert plan(Demand(128_000), textbook(), 64 * GB).tokens_that_fit == 195_312
    assert plan(Demand(128_000), textbook("int8"), 64 * GB).tokens_that_fit == 390_625


def test_textbook_concurrency_64() -> None:
    crowd = plan(Demand(128_000, 64), textbook(), 64 * GB, fixed=Fixed(140 * GB))
    assert crowd.kv_bytes == 2_684_354_560_000
    assert crowd.kv_bytes > 19 * crowd.weight_bytes
    assert crowd.verdict == "refused"
    assert crowd.fits_with["concurrency"] == 1


def test_textbook_tiers() -> None:
    """4 GB at 4000, 100, 7.5 and 2 GB/s; 1,000,000,000 tokens of 4 bytes."""
    groups = geometry_groups(1, 1, 1, FORMATS["bf16"], 256)
    speeds = {"g1": 4000, "g2": 100, "g3": 7.5, "g4": 2}
    tiers = [TierSpec(name, speed * GB) for name, speed in speeds.items()]
    rows = plan(Demand(10**9), groups, 5 * GB, tiers=tiers).tiers
    assert [round(float(row["load_ms"] or 0)) for row in rows.values()] == [1, 40, 533, 2000]
    assert [row["bytes"] for row in rows.values()] == [4 * GB] * 4
    assert rows["g2"]["break_even_tokens_per_s"] == pytest.approx(100 * GB / 4)
    two = plan(Demand(10**9 // 2, 2), groups, 5 * GB, tiers=tiers).tiers
    assert two["g2"] == rows["g2"], "all requests' tokens are loaded, or computed again"


def test_textbook_chunks() -> None:
    chunked = plan(Demand(100_000), textbook(), 64 * GB, chunk_tokens=8192)
    assert (chunked.num_chunks, chunked.last_chunk_tokens) == (13, 1_696)
    whole = plan(Demand(2 * 8192), textbook(), 64 * GB, chunk_tokens=8192)
    assert (whole.num_chunks, whole.last_chunk_tokens) == (2, 8192)


def test_the_json_has_the_fixed_keys_and_is_json() -> None:
    data = json.loads(json.dumps(plan(Demand(1000), gemma(), GB).to_json()))
    assert set(FIXED_KEYS.split()) <= set(data)
    assert data["seconds"] is None
    assert data["tiers"]["g1"]["load_ms"] == 0


def test_windows_count_up_to_their_width() -> None:
    layer = 2 * 256 * 4
    at_32k = plan(Demand(32_768), gemma(), 10 * GB)
    assert at_32k.bytes_per_token == 3 * layer
    assert at_32k.kv_bytes == 3 * layer * 32_768 + 15 * layer * 512
    assert plan(Demand(300, 2), gemma(), 10 * GB).kv_bytes == 2 * 18 * layer * 300


def test_peak_is_the_sum_of_its_parts() -> None:
    whole = plan(Demand(1000), gemma(), GB, fixed=Fixed(7, 11, 13))
    assert (whole.weight_bytes, whole.workspace_bytes, whole.process_bytes) == (7, 11, 13)
    assert whole.peak_bytes == 31 + whole.pool_bytes
    refused = plan(Demand(10**6), gemma(), GB, fixed=Fixed(7, 11, 13))
    assert refused.peak_bytes == 31 + refused.needed_bytes > GB


def test_the_pool_is_what_the_partition_allocates() -> None:
    made = partition(gemma(), GB, 3, 512, 32_768)
    engine = plan(Demand(32_768, 3), gemma(), GB, engine_pool=made)
    assert engine.pool_bytes == made.pool_bytes
    alone = plan(Demand(5000, 2), gemma(), GB, chunk_tokens=512)
    assert alone.pool_bytes == partition(gemma(), GB, 2, 512, 5000).pool_bytes
    assert plan(Demand(5000), gemma(), GB, kv_memory=alone.needed_bytes // 2, chunk_tokens=64).pool_bytes < GB // 2


def outcome(prompt: int, max_tokens: int, **pool: int) -> tuple[str, bool]:
    made = partition(gemma(16), pool["memory"], pool["running"], 64, pool["length"], 1024)
    verdict = plan(
        Demand(prompt + max_tokens), gemma(16), made.pool_bytes, max_positions=pool["length"], engine_pool=made
    )
    return verdict.verdict, admit(made, prompt, max_tokens) is None


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.integers(1, 3000),
    max_tokens=st.integers(1, 300),
    memory=st.integers(12_000_000, 25_000_000),
    running=st.integers(1, 2),
    length=st.integers(64, 3000),
)
def test_plan_and_admission_never_disagree(
    prompt: int, max_tokens: int, memory: int, running: int, length: int
) -> None:
    try:
        verdict, admitted = outcome(prompt, max_tokens, memory=memory, running=running, length=length)
    except LongctxError:
        return  # below the minimum pool: there is no engine
    assert (verdict == "fits") == admitted


def test_verdicts_in_their_order() -> None:
    small, tiers = 20 * GB, [TierSpec("g2", 25.0 * GB)]
    assert plan(Demand(50_000), textbook(), small).verdict == "fits"
    assert plan(Demand(100_000), textbook(), small).verdict == "needs_quantization"
    assert plan(Demand(100_000), textbook(), small, tiers=tiers).verdict == "spills"
    assert plan(Demand(10**6), textbook(), small).verdict == "refused"
    assert plan(Demand(10**6), textbook(), small, tiers=tiers).verdict == "spills"
    assert plan(Demand(10**6), textbook(), GB // 2, tiers=tiers).verdict == "refused", "below the minimum pool"


def test_a_tier_holds_no_more_than_its_capacity() -> None:
    over = plan(Demand(100_000), textbook(), 20 * GB).needed_bytes - 20 * GB
    for capacity, verdict in ((over, "spills"), (over - 1, "needs_quantization")):
        half = TierSpec("g3", 1e9, capacity - capacity // 2)
        tiers = [TierSpec("g1", 1e12), TierSpec("g2", 1e9, capacity // 2), half]
        assert plan(Demand(100_000), textbook(), 20 * GB, tiers=tiers).verdict == verdict
    spilled = plan(Demand(100_000), textbook(), 20 * GB, tiers=[TierSpec("g2", 1e9)])
    assert spilled.tiers["g1"]["bytes"] == spilled.pool_bytes
    assert "computes only from g1" in str(spilled.remedy), "the engine cannot do it yet and says so"


def test_the_models_length_refuses_with_the_way_out() -> None:
    long = plan(Demand(40_000), gemma(), 10 * GB, max_positions=32_768)
    assert long.verdict == "refused"
    assert long.fits_with == {"tokens": 32_768}
    assert long.requests_that_fit == 0
    assert "32,768 positions" in str(long.remedy) and "--max-model-len 40000 --rope-scaling yarn" in str(long.remedy)
    assert plan(Demand(32_768), gemma(), 10 * GB, max_positions=32_768).verdict == "fits"
    hopeless = plan(Demand(40_000), gemma(), 0, max_positions=32_768, fixed=Fixed(300 * GB))
    assert hopeless.fits_with == {}
    assert "it also needs" in str(hopeless.remedy) and "weights 300 GB" in str(hopeless.remedy)


def test_a_device_too_small_for_the_weights_says_what_all_of_it_takes() -> None:
    none = plan(Demand(1000), gemma(), 0, fixed=Fixed(300 * GB))
    assert (none.verdict, none.pool_bytes, none.tokens_that_fit, none.requests_that_fit) == ("refused", 0, 0, 0)
    assert f"{300 + none.needed_bytes / GB:.0f} GB in all" in str(none.remedy)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(100, 400_000), concurrency=st.integers(1, 8), memory=st.integers(GB // 2, 30 * GB))
def test_every_change_the_plan_offers_works_and_is_the_least(tokens: int, concurrency: int, memory: int) -> None:
    groups = geometry_groups(80, 8, 128, FORMATS["bf16"], 256, 1024, 40)

    def again(**changed: int) -> Plan:
        demand = Demand(changed.get("tokens", tokens), changed.get("concurrency", concurrency))
        return plan(demand, groups, changed.get("memory", memory), chunk_tokens=512)

    first = again()
    if first.verdict == "fits":
        assert first.remedy is None and first.fits_with == {}
        return
    needed = int(first.fits_with["kv_memory_bytes"])
    assert again(memory=needed).verdict == "fits"
    assert again(memory=needed - 1).verdict != "fits"
    for key, most in (("tokens", tokens), ("concurrency", concurrency)):
        if key in first.fits_with:
            value = int(first.fits_with[key])
            assert value < most
            assert again(**{key: value}).verdict == "fits"
            assert again(**{key: value + 1}).verdict != "fits"
    if "kv_format" in first.fits_with:
        assert first.verdict == "needs_quantization"
        smaller = with_format(groups, FORMATS[str(first.fits_with["kv_format"])])
        assert plan(Demand(tokens, concurrency), smaller, memory, chunk_tokens=512).verdict == "fits"


def test_the_smallest_change_comes_first() -> None:
    def order(text: str | None, *parts: str) -> bool:
        places = [str(text).index(part) for part in parts]
        return places == sorted(places)

    slightly_long = plan(Demand(195_400), textbook(), 64 * GB).remedy
    assert order(slightly_long, "--kv-memory 64.2 GB", "at most 194,817 tokens", "--kv-format int8")
    far = plan(Demand(128_000), textbook(), 12 * GB).remedy
    assert order(far, "--kv-format int4", "at most 36,", "--kv-memory")


def test_what_fits_by_bytes_and_in_blocks() -> None:
    fits = plan(Demand(128_000, 3), textbook("int8"), 64 * GB)
    assert fits.tokens_that_fit == 390_625 // 3
    assert fits.pool_tokens < 390_625 // 3
    assert plan(Demand(fits.pool_tokens, 3), textbook("int8"), 64 * GB).verdict == "fits"
    assert plan(Demand(fits.pool_tokens + 1, 3), textbook("int8"), 64 * GB).verdict != "fits"
    count = plan(Demand(10_000), textbook(), 64 * GB).requests_that_fit
    assert plan(Demand(10_000, count), textbook(), 64 * GB).verdict == "fits"
    assert plan(Demand(10_000, count + 1), textbook(), 64 * GB).verdict != "fits"


def test_an_engines_pool_counts_its_running_requests() -> None:
    made = partition(gemma(), 10 * GB, 3, 512, 32_768)
    assert plan(Demand(1000, 3), gemma(), made.pool_bytes, engine_pool=made).verdict == "fits"
    four = plan(Demand(1000, 4), gemma(), made.pool_bytes, engine_pool=made)
    assert four.verdict != "fits" and four.fits_with["concurrency"] == 3 == four.requests_that_fit


@settings(max_examples=60, deadline=None)
@given(memory=st.integers(0, 10**8), concurrency=st.integers(1, 5), window=st.integers(1, 900))
def test_tokens_that_fit_is_the_largest(memory: int, concurrency: int, window: int) -> None:
    groups = geometry_groups(6, 1, 256, FORMATS["fp32"], 256, window, 5)
    longest = tokens_that_fit(groups, memory, concurrency)
    assert longest is not None
    assert (
        concurrency * request_bytes(groups, longest)[0] <= memory < concurrency * request_bytes(groups, longest + 1)[0]
    )


def test_a_model_of_windows_alone_has_no_longest_context() -> None:
    groups = geometry_groups(4, 1, 16, FORMATS["fp32"], 16, 64)
    endless = plan(Demand(10**6), groups, GB)
    assert endless.tokens_that_fit is None
    assert endless.verdict == "fits" and endless.bytes_per_token == 0
    assert tokens_that_fit(groups, 64 * 4 * 128 - 1, 1) == 63


def test_seconds_come_from_the_rates() -> None:
    rates = Rates.initial(make_spec(), MachineSpeed(1e11, 1e10))
    timed = plan(Demand(4000, 2), gemma(), GB, rates=rates, tiers=[TierSpec("g2", 1e15), TierSpec("g4", 1.0)])
    assert timed.seconds == dict(zip(("low", "high"), rates.prefill_seconds(4000, chunk_tokens=2048), strict=True))
    assert (timed.tiers["g2"]["choice"], timed.tiers["g4"]["choice"]) == ("load", "recompute")
    slow = Rates.initial(make_spec(), MachineSpeed(1e6, 1e10))
    assert plan(Demand(4000), gemma(), GB, rates=slow).num_chunks > 2, "steps are cut at two seconds"
    fixed_chunk = plan(Demand(4000), gemma(), GB, rates=slow, chunk_tokens=2048)
    assert (fixed_chunk.num_chunks, fixed_chunk.last_chunk_tokens) == (2, 1952)


@pytest.mark.parametrize("demand", [(0, 1), (1, 0), (-5, 1)])
def test_an_empty_demand_is_refused(demand: tuple[int, int]) -> None:
    with pytest.raises(LongctxError, match="at least 1"):
        Demand(*demand)


def test_geometries_of_every_format_have_whole_layouts() -> None:
    for fmt in FORMATS.values():
        for group in with_format(gemma(), fmt):
            assert group.key.k_format == group.layout.k_format.name == fmt.name
            assert replace(group).layout.block_bytes % 64 == 0
