"""`longctx run` around a fake engine: what is read, refused, shown, printed, and how an interrupt ends it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from longctx.cli.app import main
from longctx.cli.progress import JobProgress, Meter
from longctx.cli.prompt import read_prompt
from longctx.cli.report import peak_rss_bytes
from longctx.cli.run import run
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import FinishEvent, ProgressEvent, Timings, TokenEvent, TokenLogprobs, Usage
from longctx.params import SamplingParams
from longctx.variant import VariantConfig

USAGE_KEYS = {"prompt_tokens", "completion_tokens", "prompt_tokens_details"}
TIMING_KEYS = {"queue_ms", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_rss_bytes"}
ANSWER_KEYS = {"text", "usage", "timings", "computed_tokens", "finish_reason", "seed"}
POSITIONS = 1000


class FakeLLM:
    """Stands for a loaded model: a token per character, every answer is `reply`, the last prompt's prefix is cached."""

    reply = "forty-two"
    chat_template: str | None = None
    tokenizer = None
    fail = False
    hang = False
    made: FakeLLM

    def __init__(self, model: str, *, progress: Any = None, **options: Any):
        if model == "missing":
            raise LongctxError("no model 'missing'")
        self.options, self.prompts = options, []
        self.last: list[int] = []
        progress("converting", 5, 10)
        self.engine = SimpleNamespace(
            loaded=SimpleNamespace(chat_template=self.chat_template, spec=SimpleNamespace(weight_bytes=100)),
            partition=SimpleNamespace(pool_bytes=200, longest_request=POSITIONS),
            make_request=self.check,
            config=SimpleNamespace(variant=VariantConfig()),
        )
        FakeLLM.made = self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def encode(self, prompt: Any) -> list[int]:
        text = prompt if isinstance(prompt, str) else f"<user>{prompt[0]['content']}<model>"
        self.prompts.append(text)
        return [ord(c) for c in text]

    def check(self, ids: list[int], params: SamplingParams) -> None:
        if len(ids) + params.max_tokens > POSITIONS:
            raise RequestError(f"prompt of {len(ids)} tokens, {POSITIONS} positions")

    def plan(self, tokens: int, *, max_tokens: int) -> Any:
        return SimpleNamespace(
            verdict="fits", kv_bytes=7_000_000, scale_bytes=0, pool_bytes=9_000_000, peak_bytes=2_000_000_000,
            seconds={"low": 1.0, "high": 2.0},
        )  # fmt: skip

    def start(self, ids: list[int], params: SamplingParams) -> Any:
        self.params = params
        cached = next((i for i, pair in enumerate(zip(ids, self.last, strict=False)) if pair[0] != pair[1]), 0)
        self.last = ids
        request = SimpleNamespace(seed=params.seed if params.seed is not None else 7, cancelled=False)
        return Events(request, self.events(request, len(ids), cached, params))

    def events(self, request: Any, total: int, cached: int, params: SamplingParams) -> Iterator[Any]:
        yield ProgressEvent("r", "queued", total, 0, 0, 0.0, None, 1)
        yield ProgressEvent("r", "prefill", total, cached, cached, 10.0, 500.0)
        yield ProgressEvent("r", "prefill", total, cached, total, 1010.0, 0.0)
        text, reason = "", "stop"
        for index, piece in enumerate(self.reply[: params.max_tokens]):
            text += piece
            logprobs = None if params.logprobs is None else TokenLogprobs(-0.5, (7,), (-0.25,))
            yield TokenEvent("r", ord(piece), piece, index, logprobs)
            if self.hang:
                os.kill(os.getpid(), signal.SIGINT)
                deadline = time.monotonic() + 5
                while not request.cancelled and time.monotonic() < deadline:
                    time.sleep(0.01)
                reason = "cancelled"
                break
        if self.fail:
            reason = "error"
        usage = Usage(total, len(text), cached, {"g1": cached})
        timings = Timings(1.0, 20.0, 300.0, 40.0, 60.0)
        yield FinishEvent("r", reason, text, (), usage, timings, total - cached, "it broke" if self.fail else None)


class Events:
    def __init__(self, request: Any, events: Iterator[Any]):
        self.request, self._events = request, events

    def __iter__(self) -> Iterator[Any]:
        return self._events


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = SimpleNamespace(LLM=FakeLLM)
    monkeypatch.setitem(sys.modules, "longctx.llm", module)  # type: ignore[arg-type]
    for name in ("chat_template", "fail", "hang"):
        monkeypatch.setattr(FakeLLM, name, getattr(FakeLLM, name))
    return FakeLLM


def invoke(*args: str, stdin: bytes | None = None) -> Any:
    app = typer.Typer()
    app.command()(run)
    return CliRunner().invoke(app, list(args), input=stdin)


def test_text_alone_is_on_stdout_and_everything_else_on_stderr(fake: type[FakeLLM]) -> None:
    result = invoke("m", "--prompt", "abc", "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout == "forty\n"
    for part in ("loading m", "converting: 50 %", "plan: fits", "3 prompt + 5 answer tokens", "1.0 s to 2.0 s"):
        assert part in result.stderr
    assert "3 prompt tokens, 0 of them cached" in result.stderr
    assert "first token after 20 ms" in result.stderr


def test_json_is_one_object_with_the_promised_keys(fake: type[FakeLLM]) -> None:
    result = invoke("m", "--prompt", "abc", "--json", "--seed", "9")
    report = json.loads(result.stdout)
    assert set(report) == ANSWER_KEYS | {"ranks"}
    assert set(report["usage"]) == USAGE_KEYS and set(report["timings"]) == TIMING_KEYS
    assert report["usage"]["prompt_tokens_details"]["by_tier"] == {"g1": 0, "g2": 0, "g3": 0, "g4": 0}
    assert report["ranks"] == [{"weight_bytes": 100, "kv_bytes": 200}]
    assert (report["text"], report["seed"], report["finish_reason"]) == ("forty-two", 9, "stop")
    assert report["timings"]["peak_rss_bytes"] > 1_000_000
    assert "reading: 100 %" in result.stderr


def test_every_sampling_flag_reaches_the_engine(fake: type[FakeLLM]) -> None:
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
    invoke(
        "m", "--prompt", "abc", *flags.split(), "--frequency-penalty=-0.3", "--seed", "4", "--logprobs", "2", "--json"
    )
    assert fake.made.params == SamplingParams(
        *(256, 0.5, 3, 0.9, 4),
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logprobs=2,
    )


def test_logprobs_are_in_the_json_as_chat_answers_have_them(fake: type[FakeLLM]) -> None:
    report = json.loads(invoke("m", "--prompt", "abc", "--logprobs", "1", "--json").stdout)
    assert len(report["logprobs"]) == len("forty-two")
    best = {"token": "token_id:7", "bytes": [*b"token_id:7"], "logprob": -0.25}
    assert report["logprobs"][0] == {
        "token": "token_id:102",
        "bytes": [*b"token_id:102"],
        "logprob": -0.5,
        "top_logprobs": [best],
    }
    assert "logprobs" not in json.loads(invoke("m", "--prompt", "abc", "--json").stdout)


def test_questions_share_the_document_and_are_reported_in_order(fake: type[FakeLLM]) -> None:
    result = invoke("m", "--prompt", "document", "--ask", " one?", "--ask", " two?", "--json")
    report = json.loads(result.stdout)
    assert fake.made.prompts == ["document one?", "document two?"]
    assert [a["question"] for a in report["answers"]] == [" one?", " two?"]
    assert set(report["answers"][0]) == ANSWER_KEYS | {"question"}
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in report["answers"]]
    assert cached == [0, len("document ")]
    assert report["usage"] == report["answers"][0]["usage"]
    assert "9 cached" in result.stderr


def test_a_last_question_that_is_too_long_is_refused_before_the_first_is_run(fake: type[FakeLLM]) -> None:
    result = invoke("m", "--prompt", "d", "--ask", "?", "--ask", "x" * POSITIONS)
    assert isinstance(result.exception, RequestError) and result.stdout == ""
    assert not fake.made.last


@pytest.mark.parametrize(
    ("template", "flags", "prompt"),
    [
        (None, [], "abc"),
        ("t", [], "<user>abc<model>"),
        ("t", ["--raw"], "abc"),
        ("t", ["--chat"], "<user>abc<model>"),
        ("t", ["--ask", "q"], "<user>abc\n\nq<model>"),
        ("t", ["--raw", "--ask", "q"], "abcq"),
    ],
)
def test_a_chat_model_gets_its_template_unless_raw(
    fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, template: str | None, flags: list[str], prompt: str
) -> None:
    monkeypatch.setattr(fake, "chat_template", template)
    assert invoke("m", "--prompt", "abc", *flags).exit_code == 0
    assert fake.made.prompts == [prompt]


def test_chat_without_a_template_is_refused(fake: type[FakeLLM]) -> None:
    assert "no chat template" in str(invoke("m", "--prompt", "abc", "--chat").exception)


def test_the_default_length_gives_way_to_the_prompt_but_a_given_one_does_not(fake: type[FakeLLM]) -> None:
    long = "x" * (POSITIONS - 3)
    assert invoke("m", "--prompt", long).stdout == "for\n"
    assert isinstance(invoke("m", "--prompt", long, "--max-tokens", "4").exception, RequestError)


def test_options_reach_the_engine_as_numbers(fake: type[FakeLLM]) -> None:
    flags = "--kv-memory 2GiB --device-memory 4GB --memory-fraction 0.5 --chunk-tokens 1K --max-model-len 64K"
    more = "--rope-scaling yarn --kv-format fp32 --dtype float32 --load-format dummy --unverified-model --deterministic"
    lossy = "--kv-factors f.safetensors --weights int8 --variant streaming --window 1K --sinks 8 --attention torch"
    assert invoke("m", "--prompt", "abc", *flags.split(), *more.split(), *lossy.split()).exit_code == 0
    assert fake.made.options == {
        "kv_memory": 2 * 2**30,
        "device_memory": 4 * 10**9,
        "memory_fraction": 0.5,
        "chunk_tokens": 1024,
        "max_model_len": 65536,
        "rope_scaling": "yarn",
        "kv_format": "fp32",
        "dtype": "float32",
        "load_format": "dummy",
        "unverified_model": True,
        "deterministic": True,
        "kv_factors": "f.safetensors",
        "weights": "int8",
        "attention_variant": "streaming",
        "window": 1024,
        "sinks": 8,
        "local_chunk": None,
        "attention": "torch",
        "max_running": 1,
    }


def test_sampling_options_reach_the_request(fake: type[FakeLLM]) -> None:
    flags = "--temperature 0.7 --top-k 5 --top-p 0.9 --seed 3 --stop END --stop ## --max-tokens 1K"
    invoke("m", "--prompt", "abc", *flags.split())
    assert isinstance(invoke("m", "--prompt", "abc", *flags.split()).exception, RequestError)  # 1K > POSITIONS
    assert invoke("m", "--prompt", "abc", *flags.split()[:-1], "9").exit_code == 0
    assert fake.made.params == SamplingParams(9, 0.7, 5, 0.9, 3, ("END", "##"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-tokens 0", "--max-tokens '0'"),
        ("--max-tokens many", "--max-tokens 'many'"),
        ("--max-tokens -5", "--max-tokens '-5'"),
        ("--temperature nan", "temperature must be between 0 and 100, got nan"),
        ("--temperature -1", "got -1.0"),
        ("--top-p 0", "top_p must be above 0"),
        ("--top-k -1", "top_k must be 0 (off) or more"),
        ("--seed -1", "seed must be between 0"),
        ("--min-p 1.1", "min_p must be between 0 (off) and 1"),
        ("--repetition-penalty 0", "repetition_penalty must be between 0.01 and 100"),
        ("--presence-penalty 3", "presence_penalty must be between -2 and 2"),
        ("--frequency-penalty nan", "frequency_penalty must be between -2 and 2, got nan"),
        ("--logprobs 21 --json", "logprobs must be between 0 and 20"),
        ("--logprobs 5", "--logprobs 5 needs --json"),
        ("--stop=", "each stop string must have 1"),
        ("--ask=", "--ask number 1 is empty"),
        ("--kv-memory lots", "--kv-memory 'lots'"),
        ("--chunk-tokens 0", "--chunk-tokens '0'"),
        ("--max-model-len 1e30", "--max-model-len '1e30'"),
        ("--prompt-file f", "got both"),
        ("--memory-fraction 7", "memory_fraction must be above 0 and at most 1, got 7.0"),
        ("--memory-fraction nan", "got nan"),
    ],
)
def test_absurd_values_are_refused_in_one_line_before_the_model_is_loaded(
    fake: type[FakeLLM], flags: str, said: str
) -> None:
    result = invoke("missing", "--prompt", "abc", *flags.split(" "))
    assert isinstance(result.exception, LongctxError)
    assert said in str(result.exception) and "\n" not in str(result.exception)


def test_a_failed_step_is_an_engine_error(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "fail", True)
    result = invoke("m", "--prompt", "abc")
    assert isinstance(result.exception, EngineError) and "it broke" in str(result.exception)


def test_errors_leave_as_one_line_with_their_exit_code(
    fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "missing", "--prompt", "abc"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["longctx: no model 'missing'"]
    assert main(["run", "m", "--prompt", ""]) == 2
    assert capsys.readouterr().err.splitlines() == ["longctx: --prompt is empty: give at least one character"]
    assert main(["run", "m", "--prompt", "abc", "--top-k", "many"]) == 2
    assert "'--top-k'" in capsys.readouterr().err
    monkeypatch.setattr(fake, "fail", True)
    assert main(["run", "m", "--prompt", "abc"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "longctx: it broke" and "Traceback" not in captured.err


def test_interrupt_prints_what_there_is_and_exits_130(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "hang", True)
    before = signal.getsignal(signal.SIGINT)
    result = invoke("m", "--prompt", "abc", "--ask", "1", "--ask", "2", "--json")
    assert result.exit_code == 130
    report = json.loads(result.stdout)
    assert (report["text"], report["finish_reason"], len(report["answers"])) == ("f", "cancelled", 1)
    assert "interrupted" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


# -- the prompt ----------------------------------------------------------------------------------------------------


def test_a_prompt_file_is_read_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes("\ufeffa\r\nb é\n\n".encode())
    assert read_prompt(None, str(path)) == "a\r\nb é\n\n"


def test_a_dash_reads_standard_input(fake: type[FakeLLM]) -> None:
    assert invoke("m", "--prompt-file", "-", stdin="h\u00e9\n".encode()).exit_code == 0
    assert fake.made.prompts == ["h\u00e9\n"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"abc\xff", "is not UTF-8: byte 3 is 0xff"),
        ("abc".encode("utf-16-le"), "has a NUL at byte 1"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "p"
    path.write_bytes(data)
    with pytest.raises(LongctxError, match=said) as caught:
        read_prompt(None, str(path))
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LongctxError, match=r"nowhere cannot be read: No such file"):
        read_prompt(None, str(tmp_path / "nowhere"))
    with pytest.raises(LongctxError, match="directory"):
        read_prompt(None, str(tmp_path))
    with pytest.raises(LongctxError, match="got neither"):
        read_prompt(None, None)
    with pytest.raises(LongctxError, match="--prompt is empty"):
        read_prompt("", None)
    with pytest.raises(LongctxError, match="not valid UTF-8 at character 1"):
        read_prompt("a\udcff", None)
    monkeypatch.setattr("longctx.cli.prompt.MAX_PROMPT_BYTES", 3)
    (tmp_path / "huge").write_text("abcd")
    with pytest.raises(LongctxError, match="larger than"):
        read_prompt(None, str(tmp_path / "huge"))


# -- progress ------------------------------------------------------------------------------------------------------


def progress_event(processed: int, time_ms: float, eta_ms: float | None = None, cached: int = 0) -> ProgressEvent:
    return ProgressEvent("r", "prefill", 1000, cached, processed, time_ms, eta_ms)


def test_lines_are_few_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Meter(Console(file=out), interval_s=3600) as meter:
        job = JobProgress(meter)
        job.prefill(ProgressEvent("r", "queued", 1000, 0, 0, 0.0, None, 3))
        for i in range(1, 101):
            job.prefill(progress_event(10 * i, 100.0 * i, 100.0 * (100 - i)))
        job.prefill(progress_event(1000, 10_000.0, 0.0))
    lines = out.getvalue().splitlines()
    assert lines[0] == "waiting: 0 %  place 3 in the queue"
    assert lines[1] == "reading: 1 %  10 of 1,000 tokens, 9.9 s left"
    assert lines[2:] == ["reading: 100 %  1,000 of 1,000 tokens, 100 tokens/s"]


def test_a_line_comes_again_after_the_interval() -> None:
    out = io.StringIO()
    with Meter(Console(file=out), interval_s=0.0) as meter:
        for i in range(4):
            meter.show("reading", i, 10)
    assert out.getvalue().splitlines() == [f"reading: {10 * i} %" for i in range(4)]


def test_a_terminal_gets_a_bar_with_speed_rest_and_cached_part() -> None:
    out = io.StringIO()
    with Meter(Console(file=out, force_terminal=True, width=120, color_system=None)) as meter:
        job = JobProgress(meter)
        job.prefill(progress_event(500, 0.0, 5_000.0, cached=500))
        job.prefill(progress_event(750, 500.0, 2_500.0, cached=500))
    last = out.getvalue()
    for part in ("reading", "━", "75%", "750 of 1,000 tokens", "500 cached", "500 tokens/s", "2.5 s left"):
        assert part in last


def test_names_with_brackets_are_shown_as_they_are() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        with Meter(Console(file=out, force_terminal=terminal, width=120, color_system=None)) as meter:
            meter.show("[red]x[/nope]", 1, 2, "[b]y[/i]")
        assert "[red]x[/nope]" in out.getvalue() and "[b]y[/i]" in out.getvalue()


def test_peak_memory_is_this_process_s_own() -> None:
    """A child of a large process must not report the parent's size, as `ru_maxrss` does after fork and exec."""
    ballast = bytearray(os.urandom(1) * 300_000_000)
    code = "from longctx.cli.report import peak_rss_bytes; print(peak_rss_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(ballast) > 0
    assert int(child.stdout) < 200_000_000 < (peak_rss_bytes() or 0)


def test_running_outside_the_main_thread_leaves_signals_alone(fake: type[FakeLLM]) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(invoke("m", "--prompt", "abc")))
    thread.start()
    thread.join()
    assert results[0].exit_code == 0


@pytest.mark.parametrize("module", ["run", "pull", "progress", "prompt", "report"])
def test_commands_do_not_load_torch(module: str) -> None:
    code = (
        f"import sys, longctx.cli.{module}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
