"""The page before a real server with a tiny model: what it shows is what happens."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.helpers.chromium import Watch, chromium
from tests.helpers.server import LiveServer, save_tiny

pytestmark = pytest.mark.slow

WAIT_MS = 120_000
"""Machines that test are small and busy."""

WORDS = "the quick brown fox jumps over the lazy dog. "
LONG = WORDS * 500
"""Read for longer than the page waits between two looks at the server."""

RECORD = """(id) => {
    window.seen ??= {};
    const seen = window.seen[id] = [];
    const look = () => {
        const bar = document.querySelector(`#${id} [role=progressbar]`);
        const now = Number(bar?.getAttribute('aria-valuenow') ?? 0);
        if (seen.at(-1) !== now) seen.push(now);
    };
    const everything = { subtree: true, childList: true, attributes: true };
    new MutationObserver(look).observe(document.getElementById(id), everything);
}"""
"""Writes down every state of the bar inside an element."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("page")
    size = {"max_position_embeddings": 32_768, "hidden_size": 256, "num_hidden_layers": 6}
    model = save_tiny(root / "model", **size)
    with LiveServer(model, "--kv-memory", "512MiB", "--chunk-tokens", "128", cache=root / "cache") as server:
        yield server


@pytest.fixture
def page(server: LiveServer) -> Iterator[Page]:
    watch = Watch()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        watch.page(page)
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_contain_text(server.name)
        yield page
        watch.check(server.url)


def test_a_prompt_from_its_plan_to_its_cache_report(page: Page, server: LiveServer) -> None:
    page.locator("label", has_text="A prompt").click()
    page.locator("#plan-prompt").fill(LONG)
    page.locator("#plan-send").click()
    expect(page.locator("#plan-verdict")).to_have_text("fits")

    for bar in ("try-progress", "runs"):
        page.evaluate(RECORD, bar)
    page.locator("#try-prompt").fill(LONG)
    page.locator("#try-max").fill("20")
    page.locator("#try-send").click()
    report = page.locator("#try-report")
    expect(report).to_contain_text("0 of ")
    seen = page.evaluate("window.seen")
    assert seen["try-progress"] == sorted(seen["try-progress"])
    assert len([percent for percent in seen["try-progress"] if 0 < percent < 100]) >= 3
    assert any(0 < percent < 100 for percent in seen["runs"])
    row = page.locator("#last-rows > tr").first
    expect(row).to_contain_text("nothing from cache")

    page.locator("#try-send").click()
    expect(report).to_contain_text("from g1)")
    expect(page.locator("#last-rows > tr")).to_have_count(2)
    expect(row).to_contain_text("from g1")
    body = {"model": server.name, "messages": [{"role": "user", "content": LONG}], "max_tokens": 20}
    with server.client(timeout=WAIT_MS / 1e3) as client:
        (last, *_) = client.get("/v1/requests").json()["data"]
        answer = client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
    shown = page.locator("#try-answer").text_content()
    assert shown == answer["choices"][0]["message"]["content"]
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * last["total"]
    expect(row).to_contain_text(f"{cached:,} of {last['total']:,} cached")
    expect(page.locator("#tiers")).to_contain_text("G1 device")
    expect(page.locator("#total-cached")).to_have_text(re.compile(r"[1-9]"))


def test_a_cancelled_prompt_is_cancelled_in_the_engine(page: Page, server: LiveServer) -> None:
    page.locator("#try-prompt").fill("another text: " + WORDS * 400)
    page.locator("#try-send").click()
    expect(page.locator("#try-progress")).to_contain_text("reading")
    page.locator("#try-cancel").click()
    row = page.locator("#last-rows > tr").first
    expect(row.locator(".pill")).to_have_text("cancelled")
    with server.client() as client:
        (last, *_) = client.get("/v1/requests").json()["data"]
    assert last["finish_reason"] == "cancelled"
    assert last["processed"] < last["total"]
    expect(page.locator("#runs-empty")).to_be_visible()
