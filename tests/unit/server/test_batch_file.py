"""A batch's files: what counts as a request, what a results file may be, and what a crash leaves of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.server import batch_file
from longctx.server.batch_file import RequestFile, ResultFile


def request(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **fields}


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def opened(tmp_path: Path, *lines: Any, model: str = "m") -> RequestFile:
    return RequestFile(str(write(tmp_path / "in.jsonl", *lines)), model)


def result(line: batch_file.Line, **fields: Any) -> dict[str, Any]:
    return {"id": line.id, "custom_id": line.custom_id, "response": {"status_code": 200}, "error": None, **fields}


def test_requests_are_read_where_they_lie(tmp_path: Path) -> None:
    """A byte order mark, blank lines, Windows line ends and a last line without an end are no trouble."""
    chat = request("b", url="/v1/chat/completions", body={"messages": ["é"]})
    raw = (
        b"\xef\xbb\xbf" + json.dumps(request()).encode() + b"\r\n\n  \n" + json.dumps(chat, ensure_ascii=False).encode()
    )
    (tmp_path / "in.jsonl").write_bytes(raw)
    requests = RequestFile(str(tmp_path / "in.jsonl"), "m")
    assert [(line.custom_id, line.number) for line in requests.lines] == [("a", 1), ("b", 4)]
    assert requests.body(requests.lines[1]) == ("chat", '{"messages":["é"]}'.encode())
    assert requests.body(requests.lines[0]) == ("completions", b'{"prompt":"x"}')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{broken", "not valid JSON"),
        (b'"text"', "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"custom_id": "a", "body": NaN}', "not valid JSON"),
        (b'{"custom_id": "\\ud800"}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (request(None), "custom_id must be text"),
        (request(5), "custom_id must be text"),
        (request(""), "custom_id must be text"),
        (request("x" * 513), "custom_id must be text"),
        (request(method="GET"), "method must be POST"),
        (request(url="/v1/embeddings"), "url must be one of /v1/completions"),
        (request(url=["/v1/completions"]), "url must be one of"),
        (request(body="text"), "body must be a JSON object"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "body must be a JSON object"),
        (request(boddy={}), "unknown field 'boddy'"),
    ],
)
def test_a_line_that_is_no_request_says_why_and_takes_no_other_along(tmp_path: Path, line: Any, said: str) -> None:
    bad, good = opened(tmp_path, line, request("good")).lines
    assert bad.custom_id is None and said in str(bad.error) and str(bad.error).startswith("line 1: ")
    assert len(str(bad.error)) < 400 and "\n" not in str(bad.error)
    assert good.custom_id == "good" and good.error is None


def test_a_custom_id_that_comes_twice_counts_once(tmp_path: Path) -> None:
    first, second = opened(tmp_path, request("a"), request("a", body={"prompt": "y"})).lines
    assert first.error is None and "line 1 has its custom_id 'a' already" in str(second.error)


def test_a_line_without_end_is_refused_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 200)
    fits = json.dumps(request("fits")).encode().ljust(200)
    lines = opened(tmp_path, request("x", body={"prompt": "y" * 1000}), fits, fits + b" ", request("good")).lines
    assert [line.error is not None and "larger than 200" in line.error for line in lines] == [True, False, True, False]
    assert [(line.number, line.custom_id) for line in lines] == [(1, None), (2, "fits"), (3, None), (4, "good")]


def test_ids_name_all_that_is_asked(tmp_path: Path) -> None:
    """Another prompt, endpoint or model is another request; spaces and the order of fields are not."""
    [line] = opened(tmp_path, request()).lines
    for other, model in ((request(body={"prompt": "z"}), "m"), (request(url="/v1/responses"), "m"), (request(), "n")):
        [changed] = opened(tmp_path, other, model=model).lines
        assert changed.id != line.id
    shuffled = b'{ "body":{"prompt" : "x"}, "url":"/v1/completions","method":"POST", "custom_id":"a"}'
    assert opened(tmp_path, shuffled).lines[0].id == line.id


def test_standard_input_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(request()).encode())))
    requests = RequestFile("-", "m")
    assert requests.body(requests.lines[0])[0] == "completions"


def test_files_that_cannot_be_read_or_are_empty(tmp_path: Path) -> None:
    for name, content in (("missing", None), ("empty", b""), ("blank", b"\n \n")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(LongctxError, match=r"--batch .*(cannot be read|has no requests)"):
            RequestFile(str(tmp_path / name), "m")
    with pytest.raises(LongctxError, match="cannot be read"):
        RequestFile(str(tmp_path), "m")


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    requests = opened(tmp_path, request(), request("b"))
    write(tmp_path / "in.jsonl", request(body={"prompt": "y"}), request("b"))
    with pytest.raises(LongctxError, match=r"line 1 .* has changed"):
        requests.body(requests.lines[0])


def test_results_are_appended_and_found_again(tmp_path: Path) -> None:
    requests, out = opened(tmp_path, request(), request("b"), b"{broken"), str(tmp_path / "out.jsonl")
    results = ResultFile(out, requests)
    for line in requests.lines[1:]:
        results.append(result(line))
        assert Path(out).read_bytes().endswith(b"\n"), "each is there when it is done"
    results.close()
    again = ResultFile(out, requests)
    assert again.done == {line.id for line in requests.lines[1:]}
    again.append(result(requests.lines[0]))
    again.close()
    assert [json.loads(line)["custom_id"] for line in Path(out).read_text().splitlines()] == ["b", None, "a"]


@pytest.mark.parametrize("cut", [1, 5, 14, 40, 100])
def test_a_torn_last_line_is_healed(tmp_path: Path, cut: int) -> None:
    """Killed in the middle of a write, wherever that was: what was complete stays, the rest runs again."""
    requests, out = opened(tmp_path, request(), request("b")), tmp_path / "out.jsonl"
    results = ResultFile(str(out), requests)
    results.append(result(requests.lines[0]))
    whole = out.read_bytes()
    results.append(result(requests.lines[1], response={"status_code": 200, "body": {"text": "x" * 200}}))
    results.close()
    out.write_bytes(out.read_bytes()[: len(whole) + cut])
    healed = ResultFile(str(out), requests)
    assert healed.done == {requests.lines[0].id} and out.read_bytes() == whole
    healed.append(result(requests.lines[1]))
    healed.close()
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 2


def test_a_whole_line_without_its_end_runs_again(tmp_path: Path) -> None:
    requests, out = opened(tmp_path, request()), tmp_path / "out.jsonl"
    results = ResultFile(str(out), requests)
    results.append(result(requests.lines[0]))
    results.close()
    out.write_bytes(out.read_bytes()[:-1])
    again = ResultFile(str(out), requests)
    assert again.done == set() and out.read_bytes() == b""
    again.close()


@pytest.mark.parametrize(
    "content",
    [
        b"notes\n",
        b"notes",
        b"{}\n",
        b'{"id":"batch_req_1"}\n',
        b'{"id":"other","custom_id":"a","response":null,"error":null}\n',
        b'{"custom_id":"a"',
        b"\n",
        b"\x00\x01",
        json.dumps(request()).encode() + b"\n",
    ],
)
def test_a_foreign_file_is_refused_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    requests, out = opened(tmp_path, request()), tmp_path / "precious.txt"
    out.write_bytes(content)
    with pytest.raises(LongctxError, match="no file of results"):
        ResultFile(str(out), requests)
    assert out.read_bytes() == content


def test_a_foreign_tail_behind_good_results_is_refused_too(tmp_path: Path) -> None:
    requests, out = opened(tmp_path, request(), request("b")), tmp_path / "out.jsonl"
    results = ResultFile(str(out), requests)
    results.append(result(requests.lines[0]))
    results.close()
    content = out.read_bytes() + b"my own note"
    out.write_bytes(content)
    with pytest.raises(LongctxError, match="line 2"):
        ResultFile(str(out), requests)
    assert out.read_bytes() == content


def test_results_of_other_requests_are_not_taken_for_these(tmp_path: Path) -> None:
    """Another file with the same custom_ids, another model, or custom_ids that are not in the file."""
    requests, out = opened(tmp_path, request()), tmp_path / "out.jsonl"
    results = ResultFile(str(out), requests)
    results.append(result(requests.lines[0]))
    results.close()
    content = out.read_bytes()
    for other, model, said in (
        (request(body={"prompt": "other"}), "m", "asks something else"),
        (request(), "n", "another model"),
        (request("z"), "m", "'a' is not in"),
    ):
        with pytest.raises(LongctxError, match=said):
            ResultFile(str(out), opened(tmp_path, other, model=model))
    assert out.read_bytes() == content


def test_a_corrected_line_runs_though_its_error_was_reported(tmp_path: Path) -> None:
    requests, out = opened(tmp_path, b"{broken", request("b")), tmp_path / "out.jsonl"
    results = ResultFile(str(out), requests)
    for line in requests.lines:
        results.append(result(line))
    results.close()
    corrected = opened(tmp_path, request("a"), request("b"))
    results = ResultFile(str(out), corrected)
    assert [line.id in results.done for line in corrected.lines] == [False, True]
    results.close()


def test_out_must_be_a_file_of_its_own(tmp_path: Path) -> None:
    requests = opened(tmp_path, request())
    with pytest.raises(LongctxError, match="is the file of the requests"):
        ResultFile(str(tmp_path / "in.jsonl"), requests)
    (tmp_path / "link").symlink_to(tmp_path / "in.jsonl")
    with pytest.raises(LongctxError, match="is the file of the requests"):
        ResultFile(str(tmp_path / "link"), requests)
    for name in (str(tmp_path), str(tmp_path / "no" / "folder" / "out")):
        with pytest.raises(LongctxError, match=r"--out .* cannot be written"):
            ResultFile(name, requests)
    with pytest.raises(LongctxError, match="no regular file"):
        ResultFile("/dev/null", requests)
    assert json.loads((tmp_path / "in.jsonl").read_text()) == request()


def test_two_runs_cannot_write_into_one_file(tmp_path: Path) -> None:
    requests, out = opened(tmp_path, request()), tmp_path / "out.jsonl"
    program = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", program, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(LongctxError, match="another run writes"):
            ResultFile(str(out), requests)
    finally:
        holder.communicate()
    ResultFile(str(out), requests).close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    requests = opened(tmp_path, request())
    results = ResultFile(str(tmp_path / "out.jsonl"), requests)
    results._file.close()
    with (
        Path("/dev/full").open("r+b", buffering=0) as results._file,
        pytest.raises(LongctxError, match="No space left"),
    ):
        results.append(result(requests.lines[0]))
