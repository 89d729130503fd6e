"""`longctx plan` as a user types it: numbers, pure JSON, one-line errors, and what it costs to ask."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longctx import cli
from longctx.cli import app as app_module
from longctx.cli.app import main
from longctx.cli.plan import parse_geometry, parse_tiers
from longctx.errors import LongctxError
from longctx.kv.budget import TierSpec

TEXTBOOK = ["plan", "--geometry", "layers=80,kv_heads=8,head_dim=128"]

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*TEXTBOOK, *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_textbook_device(capsys: pytest.CaptureFixture[str]) -> None:
    got = ask(
        capsys,
        *("--tokens", "128000", "--device-memory", "180GB", "--memory-fraction", "0.8", "--weight-bytes", "100GB"),
    )
    assert got["kv_limit_bytes"] == 64 * 10**9
    assert got["kv_bytes"] == 41_943_040_000
    assert got["tokens_that_fit"] == 195_312
    assert got["weight_bytes"] == 100 * 10**9
    assert got["verdict"] == "fits"
    assert got["seconds"] is None


def test_textbook_eight_bits(capsys: pytest.CaptureFixture[str]) -> None:
    got = ask(capsys, "--tokens", "128000", "--kv-memory", "64GB", "--kv-format", "int8")
    assert (got["bytes_per_token"], got["kv_bytes"], got["tokens_that_fit"]) == (163_840, 20_971_520_000, 390_625)


def test_textbook_crowd_is_refused_and_that_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    got = ask(capsys, "--tokens", "128000", "--concurrency", "64", "--weight-bytes", "140GB", "--kv-memory", "64GB")
    assert got["kv_bytes"] == 2_684_354_560_000
    assert got["verdict"] == "refused"
    assert got["remedy"]


def test_textbook_chunks_and_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [part for pair in ("g1=4000GB/s", "g2=100GB/s", "g3=7.5GB/s", "g4=2GB/s") for part in ("--tier", pair)]
    got = ask(capsys, "--tokens", "100000", "--chunk-tokens", "8192", "--kv-memory", "64GB", *tiers)
    assert (got["num_chunks"], got["last_chunk_tokens"]) == (13, 1_696)
    for name, speed in (("g1", 4000e9), ("g2", 100e9), ("g3", 7.5e9), ("g4", 2e9)):
        assert got["tiers"][name]["load_ms"] == pytest.approx(got["kv_bytes"] / speed * 1e3)


def test_several_lengths_give_several_plans(capsys: pytest.CaptureFixture[str]) -> None:
    got = ask(capsys, "--tokens", "128K,1M", "--kv-memory", "64GB")
    assert list(got) == ["plans"]
    assert [each["tokens"] for each in got["plans"]] == [131_072, 1_048_576]


def test_without_memory_options_it_plans_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    small = ask(capsys, "--tokens", "100", "--chunk-tokens", "100")
    assert small["verdict"] == "fits"
    assert small["pool_bytes"] == small["needed_bytes"], "no more than this length needs"
    assert small["kv_limit_bytes"] > small["pool_bytes"]
    assert ask(capsys, "--tokens", "1M", "--concurrency", "64")["verdict"] == "refused"


def test_the_table_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TEXTBOOK, "--tokens", "128000,250000", "--kv-memory", "64GB", "--tier", "g2=100GB/s"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in (
        "fits",
        "spills",
        "41.9 GB",
        "195,312",
        "419 ms",
        "305,176 tokens/s",
        "328 kB",
        "250,000 tokens: needs",
    ):
        assert text in out


def test_windows_in_a_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["plan", "--geometry", "layers=18,kv_heads=1,head_dim=256,window=512,window_layers=15", "--tokens", "32K"]
    assert main([*shape, "--kv-format", "fp32", "--kv-memory", "1GiB", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["bytes_per_token"] == 3 * 2048
    assert got["kv_bytes"] == 3 * 2048 * 32_768 + 15 * 2048 * 512


BAD = [
    ([*TEXTBOOK, "--tokens", "abc"], "--tokens 'abc'"),
    ([*TEXTBOOK, "--tokens", ""], "--tokens ''"),
    ([*TEXTBOOK, "--tokens", "1K,-5"], "--tokens '-5'"),
    ([*TEXTBOOK], "--tokens"),
    ([*TEXTBOOK, "--tokens", "1K", "--kv-memory", "8XB"], "--kv-memory '8XB'"),
    ([*TEXTBOOK, "--tokens", "1K", "--memory-fraction", "1.5"], "--memory-fraction 1.5"),
    ([*TEXTBOOK, "--tokens", "1K", "--memory-fraction", "nan"], "--memory-fraction nan"),
    ([*TEXTBOOK, "--tokens", "1K", "--concurrency", "0"], "--concurrency 0"),
    ([*TEXTBOOK, "--tokens", "1K", "--chunk-tokens", "0"], "--chunk-tokens '0'"),
    ([*TEXTBOOK, "--tokens", "1K", "--kv-format", "int3"], "KV format 'int3' is unknown: use auto, fp32"),
    ([*TEXTBOOK, "--tokens", "1K", "--tier", "g2=fast"], "--tier g2 'fast'"),
    ([*TEXTBOOK, "--tokens", "1K", "--tier", "disk=1GB/s"], "--tier 'disk=1GB/s'"),
    ([*TEXTBOOK, "--tokens", "1K", "--nope"], "--nope"),
    ([*TEXTBOOK, "some-model", "--tokens", "1K"], "either a MODEL or --geometry"),
    (["plan", "--tokens", "1K"], "either a MODEL or --geometry"),
    (["plan", "m", "--tokens", "1K", "--weight-bytes", "1GB"], "--weight-bytes 1GB goes with --geometry"),
    (
        ["plan", "--geometry", "layers=3,kv_heads=1,head_dim=3", "--tokens", "9", "--kv-format", "int4"],
        "head dim 3 is no whole",
    ),
    (["frobnicate"], "frobnicate"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=lambda value: " ".join(value[-2:])[:40])
def test_an_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("longctx: ") and err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a=1",
        "layers:80",
        "layers=80",
        "layers=80,kv_heads=8",
        "layers=80,layers=80",
        "layers=80,kv_heads=8,head_dim=x",
        "layers=0,kv_heads=8,head_dim=128",
        "layers=99999999,kv_heads=8,head_dim=128",
        "layers=2,kv_heads=1,head_dim=8,window_layers=1",
        "layers=2,kv_heads=1,head_dim=8,window=4,window_layers=3",
    ],
)
def test_a_geometry_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LongctxError, match="--geometry"):
        parse_geometry(text)


def test_tiers_have_a_speed_and_maybe_a_size() -> None:
    assert parse_tiers(["g3=7.5GB/s", "g2 = 25GB/s, 64GiB"]) == [
        TierSpec("g2", 25e9, 64 * 2**30),
        TierSpec("g3", 7.5e9),
    ]
    for bad in (["g2=1GB/s", "g2=2GB/s"], ["g2=1GB/s,"], ["g5=1GB/s"], ["g2"], ["=1GB/s"], ["g2=1GB"]):
        with pytest.raises(LongctxError, match="--tier"):
            parse_tiers(bad)


def test_an_interrupt_leaves_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_module, "app", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_exit_code_of_a_command_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "app", lambda **_: 130)
    assert cli.main(["run"]) == 130


def test_a_bug_is_not_hidden_as_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app_module, "app", broken)
    with pytest.raises(RuntimeError):
        main(["plan"])


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = "import sys; from longctx.cli import main; main([sys.argv[1]]); print('torch' in sys.modules)"
    for option in ("--help", "--version"):
        out = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True).stdout
        assert out.splitlines()[-1] == "False"


def test_the_name_alone_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "plan" in out + err and "longctx: \n" not in err


PROBE = """
import sys
from longctx.cli import main
from longctx.cli.report import peak_rss_bytes
code = main(sys.argv[1:])
print(peak_rss_bytes(), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


def test_a_70b_is_planned_from_its_config_alone_in_1_2_gb(llama_70b: Path, tmp_path: Path) -> None:
    environment = os.environ | {"LONGCTX_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    arguments = ["plan", str(llama_70b), "--tokens", "128000,262144", "--dtype", "bfloat16", "--kv-memory", "64GB"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    fits, long = json.loads(done.stdout)["plans"]
    assert int(done.stderr.split()[-1]) < 1.2e9
    assert fits["bytes_per_token"] == 327_680
    assert fits["kv_bytes"] == 41_943_040_000
    assert fits["tokens_that_fit"] == 195_312
    assert fits["weight_bytes"] == 2 * 70_553_706_496
    assert fits["seconds"]["high"] > fits["seconds"]["low"] > 0
    assert fits["peak_bytes"] == sum(fits[f"{part}_bytes"] for part in ("weight", "workspace", "process", "pool"))
    assert long["verdict"] == "refused" and "131,072 positions" in long["remedy"]
