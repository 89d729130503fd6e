"""API keys on a live server: who has none is kept out, and no key sees another one's requests, jobs or cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.live_jobs import post, wait
from tests.helpers.server import LiveServer, words

pytestmark = pytest.mark.slow  # a server takes its seconds to start

KEYS = ("sk-file-key-0001", "sk-env-key-0002")
OK = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One key comes from a file, the other from the environment."""
    root = tmp_path_factory.mktemp("keys")
    (root / "keys").write_text(f"{KEYS[0]}\n")
    flags = ("--api-key-file", str(root / "keys"))
    with LiveServer(folder, *flags, cache=root / "cache", env={"LONGCTX_API_KEYS": KEYS[1]}) as live:
        yield live


def with_key(server: LiveServer, number: int) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {KEYS[number]}"})


def test_keys_keep_the_others_out_and_their_requests_apart(server: LiveServer) -> None:
    prompt = {"prompt": words(300), "max_tokens": 1}
    with server.client() as nobody:
        for path in ("/v1/models", "/metrics", "/v1/requests"):
            assert nobody.get(path).status_code == 401
        for path in ("/v1/completions", "/tokenize", "/v1/jobs"):
            assert nobody.post(path, json=prompt).status_code == 401
        assert nobody.get("/ready").status_code == 200
    with with_key(server, 0) as one, with_key(server, 1) as two:

        def cached(client: httpx.Client, **salt: str) -> tuple[str, int]:
            answer = client.post("/v1/completions", json={**prompt, **salt}).json()
            return answer["id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        id, cold = cached(one)
        assert cold == 0 and cached(one)[1] > 0
        assert cached(two)[1] == 0, "a tenant must not see by the time it takes what another one asked"
        assert cached(one, cache_salt="x")[1] == 0
        assert one.get(f"/v1/requests/{id}").status_code == 200
        assert two.get(f"/v1/requests/{id}").status_code == two.delete(f"/v1/requests/{id}").status_code == 404
        assert "sk-" not in server.stderr


def test_other_keys_see_no_job_of_mine(server: LiveServer) -> None:
    with with_key(server, 0) as one, with_key(server, 1) as two, server.client() as nobody:
        id = post(one, **OK)["id"]
        wait(one, id, "completed")
        for path in (f"/v1/jobs/{id}", f"/v1/jobs/{id}/result", f"/v1/jobs/{id}/stream"):
            assert (two.get(path).status_code, nobody.get(path).status_code) == (404, 401)
        assert two.delete(f"/v1/jobs/{id}").status_code == 404
        assert two.get("/v1/jobs").json()["data"] == []
        assert two.get("/v1/jobs", params={"after": id}).status_code == 404
        assert one.get(f"/v1/jobs/{id}/result").status_code == 200
        key = {"idempotency-key": "shared"}
        ids = [c.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": OK}, headers=key) for c in (one, two)]
        assert [answer.status_code for answer in ids] == [202, 202] and ids[0].json()["id"] != ids[1].json()["id"]
