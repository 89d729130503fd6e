"""`longctx serve` before it serves: keys, origins, times, names, and every start that cannot be, in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.cli.app import main
from longctx.cli.serve import check_origin, parse_seconds, read_keys, served_name
from longctx.errors import LongctxError
from longctx.server.address import listen, url_of

GOOD = "sk-0123456789"


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{GOOD}\n\n  sk-second-key-x  \n#sk-old-key-xxxx\n{GOOD}\n")
    assert read_keys(file, "sk-third-key-xx, sk-fourth-key-x") == (
        "sk-third-key-xx",
        "sk-fourth-key-x",
        GOOD,
        "sk-second-key-x",
    )
    assert read_keys(None, None) == read_keys(None, "  ") == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# only a comment\n",
        b"short\n",
        b"with space 123\n",
        "sk-ünïcödé-123\n".encode(),
        b"\xff\xfe\x00",
        b"x" * 600,
    ],
)
def test_a_file_without_usable_keys_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    """An empty list would let everybody in."""
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(LongctxError) as caught:
        read_keys(file, None)
    text = content.decode("latin-1").strip()
    assert "\n" not in str(caught.value) and (not text or text not in str(caught.value))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("250ms", 0.25), ("10m", 600), ("12h", 43200), ("7d", 604800)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1", "1y", "inf", "nan", "1e3", "10 m m", "9" * 30])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(LongctxError, match="--x"):
        parse_seconds(text, "--x")


def test_origins_are_checked() -> None:
    assert check_origin("https://A.example:8443") == "https://a.example:8443" and check_origin("*") == "*"
    for bad in ("a.example", "https://a.example/", "https://a.example/path", "ftp://a", "", "null"):
        with pytest.raises(LongctxError, match="--cors-origin"):
            check_origin(bad)


def test_a_model_is_called_by_its_name_and_not_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "small.Q4.gguf").touch()
    assert served_name(str(tmp_path / "my-model")) == served_name(f"{tmp_path}/my-model/") == "my-model"
    assert served_name(str(tmp_path / "small.Q4.gguf")) == "small.Q4"
    assert served_name("owner/name") == "owner/name" and served_name("smollm2-135m") == "smollm2-135m"


def test_listening_on_a_free_port() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(LongctxError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")
def test_an_ipv6_address_has_brackets_in_its_url() -> None:
    try:
        sock = listen("::1", 0)
    except LongctxError:
        pytest.skip("this machine has no IPv6 loopback")
    with sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which `longctx serve` refuses to start."""
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("longctx: ") and err.count("\n") == 1
    return err


def test_every_start_that_cannot_be_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    model = str(folder)
    assert "no model" in fails(capsys, "no-such-model")
    assert "is not a model" in fails(capsys, str(tmp_path))
    assert "MODEL" in fails(capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f":{port}" in fails(capsys, model, "--port", port)
    assert "--host" in fails(capsys, model, "--host", "no.such.host.invalid")
    assert "--host" in fails(capsys, model, "--host", "203.0.113.7", "--port", "0")
    assert "--host" in fails(capsys, model, "--host", "a" * 300)
    assert "--port" in fails(capsys, model, "--port", "70000")
    assert "--api-key-file" in fails(capsys, model, "--api-key-file", str(tmp_path / "none"))
    assert "--api-key-file" in fails(capsys, model, "--api-key-file", str(tmp_path))
    assert "--chat-template" in fails(capsys, model, "--chat-template", str(tmp_path / "none"))
    assert "--max-body" in fails(capsys, model, "--max-body", "huge")
    assert "max_body_bytes" in fails(capsys, model, "--max-body", "0")
    assert "--request-timeout" in fails(capsys, model, "--request-timeout", "soon")
    assert "--job-ttl" in fails(capsys, model, "--job-ttl", "0")
    assert "drain_s" in fails(capsys, model, "--drain-seconds", "-1")
    assert "ping_s" in fails(capsys, model, "--ping-seconds", "nan")
    assert "itl_target_s" in fails(capsys, model, "--itl-target-ms", "0")
    assert "max_queue" in fails(capsys, model, "--max-queue", "0")
    assert "log_format" in fails(capsys, model, "--log-format", "xml")
    assert "--kv-memory" in fails(capsys, model, "--kv-memory", "much")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server_with_code_2(tmp_path: Path) -> None:
    """Seen only in the engine's process, while the server already listens."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{ no json")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from longctx.cli import main; sys.exit(main())",
            "serve",
            str(folder),
            "--port",
            "0",
        ],
        env={**os.environ, "LONGCTX_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2 and run.stdout == ""
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("longctx: ") and "config" in last and "Traceback" not in run.stderr
