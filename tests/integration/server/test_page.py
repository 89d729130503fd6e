"""The page in a real browser, against a server that moves when the test says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.helpers.chromium import Watch, chromium
from tests.helpers.page_server import REFUSED, PageServer, Tried, delta, progress, usage

pytestmark = pytest.mark.slow

WAIT_MS = 20_000
expect.set_options(timeout=WAIT_MS)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def open_page(browser: Browser, server: PageServer) -> Iterator[Open]:
    """Opens the page; in the end no page may have complained, broken its policy or called another host."""
    watch, contexts = Watch(), []

    def open_one(*, width: int = 1280, height: int = 900, ready: bool = True, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        watch.page(page)
        page.goto(server.url)
        if ready:
            expect(page.locator("#state")).to_have_text("ready")
            expect(page.locator("#model")).to_contain_text("some-model")
        return page

    yield open_one
    for context in contexts:
        context.close()
    watch.check(server.url)


def share(page: Page, selector: str) -> float:
    """The width of a bar's part by that of its bar, once it has come to rest."""
    return page.locator(selector).evaluate(
        """async (e) => {
            await Promise.all(e.getAnimations().map((animation) => animation.finished));
            return e.offsetWidth / e.parentElement.clientWidth;
        }"""
    )


def send(page: Page, server: PageServer, text: str = "a question") -> Tried:
    page.locator("#try-prompt").fill(text)
    page.locator("#try-send").click()
    return server.tried.get(timeout=20)


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_an_idle_server(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#runs-empty")).to_have_text("Nothing is running.")
    expect(page.locator("#model")).to_have_text("some-model 32,768 tokens at most, KV fp32")
    expect(page.locator("#uptime")).to_contain_text("up ")
    expect(page.locator("#last-empty")).to_be_visible()
    expect(page.locator("#notice")).to_be_hidden()
    assert page.title() == "longctx"


def test_a_bar_moves_while_a_prompt_is_read(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record = server.add("chat", 32_000)
    server.read(record, 9600, cached=6400, eta_s=75)
    bar = page.locator("#runs [role=progressbar]")
    expect(bar).to_have_attribute("aria-valuenow", "30")
    row = page.locator("#runs > li")
    expect(row).to_contain_text("9,600 of 32,000 tokens")
    expect(row).to_contain_text("6,400 from cache")
    expect(row).to_contain_text("1 min 15 s left")
    assert share(page, "#runs .cached") == pytest.approx(0.2, abs=0.01)
    assert share(page, "#runs .computed") == pytest.approx(0.1, abs=0.01)
    for processed in (16_000, 24_000):
        server.read(record, processed, cached=6400, eta_s=20)
        expect(bar).to_have_attribute("aria-valuenow", str(processed * 100 // 32_000))
    expect(row).to_contain_text("tokens/s")
    expect(page).to_have_title("75 % · longctx")
    assert share(page, "#runs .computed") == pytest.approx(0.55, abs=0.01)


def test_progress_never_says_done_before_it_is(open_page: Open, server: PageServer) -> None:
    page = open_page()
    server.read(server.add("chat", 32_000), 31_999)
    expect(page.locator("#runs .figure")).to_have_text("99 %")


def test_an_answer_being_written(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record = server.add("completions", 100)
    server.read(record, 100)
    for index in range(12):
        server.write(record, index)
    row = page.locator("#runs > li")
    expect(row.locator(".figure")).to_have_text("12")
    expect(row).to_contain_text("writing")
    expect(row).to_contain_text("100 tokens read")


def test_the_queue_is_in_order_and_moves_up(open_page: Open, server: PageServer) -> None:
    page = open_page()
    first, second = server.add("chat", 120_000), server.add("responses", 900)
    rows = page.locator("#queue > li")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("120,000 tokens")
    expect(rows.nth(0)).to_contain_text("1.")
    expect(rows.nth(1)).to_contain_text("response")
    server.read(first, 10)
    expect(rows).to_have_count(1)
    expect(page.locator("#runs > li")).to_have_count(1)
    server.finish(second)
    server.finish(first)
    expect(page.locator("#queue-box")).to_be_hidden()
    expect(page.locator("#last-rows > tr")).to_have_count(2)


def test_a_request_is_cancelled_from_its_row(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record, other = server.add(), server.add()
    server.read(record, 100)
    server.read(other, 200)
    page.get_by_role("button", name=f"Cancel chat {record.id[:8]}").click()
    expect(page.locator("#last-rows > tr")).to_have_count(1)
    expect(page.locator("#last-rows .pill")).to_have_text("cancelled")
    assert server.cancelled == [record.id]
    expect(page.locator("#runs > li")).to_have_count(1)


def test_the_focus_stays_with_a_request_that_leaves_the_queue(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record = server.add()
    page.locator("#queue button").focus()
    server.read(record, 100)
    expect(page.locator("#runs button")).to_be_focused()
    server.finish(record)
    expect(page.locator("#running")).to_be_focused()


def test_cache_reports_of_the_last_requests(open_page: Open, server: PageServer) -> None:
    page = open_page()
    warm, cold = server.add("chat", 32_000), server.add("completions", 500)
    server.read(warm, 32_000, cached=29_696)
    server.finish(warm, cached=29_696)
    server.read(cold, 500)
    server.finish(cold, "length", answer=7)
    server.registry.close(server.registry.open("refused0", "chat", None), "refused", "too long: 40,000 of 32,768")
    refused, second, first = (page.locator("#last-rows > tr").nth(i) for i in range(3))
    expect(first).to_contain_text("29,696 of 32,000 cached")
    expect(first).to_contain_text("93 %: 14,848 from g1, 14,848 from g2")
    for label, text in (("Computed", "2,304"), ("First token", "4.3 s"), ("Reading", "1,235 /s"), ("Answer", "40")):
        expect(first.locator(f'[data-label="{label}"]')).to_have_text(text)
    expect(first.locator(".pill")).to_have_text("done")
    expect(second).to_contain_text("nothing from cache")
    expect(second.locator(".pill")).to_have_text("length")
    expect(refused).to_contain_text("too long: 40,000 of 32,768")
    expect(refused.locator(".pill")).to_have_text("refused")


def test_memory_by_tier_and_the_totals(open_page: Open) -> None:
    page = open_page()
    tiers = page.locator("#tiers > li")
    expect(tiers).to_have_count(2)
    expect(tiers.nth(0)).to_contain_text("G1 device")
    expect(tiers.nth(0)).to_contain_text("800 MB held")
    expect(tiers.nth(0)).to_contain_text("700 MB free")
    assert share(page, "#tiers > li:first-child .computed") == pytest.approx(0.4, abs=0.01)
    expect(page.locator("#total-prompt")).to_have_text("160,000")
    expect(page.locator("#total-cached")).to_have_text("75 %")
    expect(page.locator("#total-preempted")).to_have_text("2")
    expect(page.locator("#total-jobs")).to_have_text("8, 1 queued, 2 running")


def test_a_screen_reader_hears_of_ends(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record = server.add("chat", 1000)
    expect(page.locator("#queue > li")).to_have_count(1)
    server.finish(record, cached=400)
    expected = f"chat {record.id[:8]} done, 400 of 1,000 tokens from cache"
    expect(page.locator("#announcer[aria-live=polite]")).to_have_text(expected)


# -- the server's life -------------------------------------------------------------------------------------------------


def test_loading_then_ready(open_page: Open, server: PageServer) -> None:
    server.state |= {"engine": "starting", "loading": {"stage": "reading weights", "done": 30e6, "total": 120e6}}
    page = open_page(ready=False)
    expect(page.locator("#state")).to_have_text("loading")
    expect(page.locator("#loading")).to_contain_text("reading weights")
    expect(page.locator("#loading-bar")).to_have_attribute("aria-valuenow", "25")
    server.state |= {"engine": "ready"}
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#model")).to_contain_text("some-model")


def test_an_engine_that_died_says_why(open_page: Open, server: PageServer) -> None:
    page = open_page()
    server.state |= {"engine": "restarting", "last_failure": "killed by signal 9"}
    expect(page.locator("#state")).to_have_text("restarting")
    expect(page.locator("#runs-empty")).to_have_text("The engine ended: killed by signal 9")


def test_the_page_survives_a_restart(open_page: Open, server: PageServer) -> None:
    page = open_page()
    server.read(server.add("chat", 1000), 500)
    expect(page.locator("#runs > li")).to_have_count(1)
    server.stop()
    expect(page.locator("#state")).to_have_text("disconnected")
    expect(page.locator("#notice")).to_contain_text("reconnects by itself")
    expect(page.locator("#runs > li")).to_have_count(1)
    server.start_again()
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#notice")).to_be_hidden()
    server.read(server.add("chat", 2000), 500)
    expect(page.locator("#runs > li")).to_have_count(2)


def test_an_api_key_is_asked_for_and_kept_in_the_tab(open_page: Open, server: PageServer) -> None:
    server.key = "correct horse"
    page = open_page(ready=False)
    expect(page.locator("#notice")).to_contain_text("asks for an API key")
    page.get_by_role("button", name="Enter a key").click()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("does not know this API key")
    page.locator("#notice-action").click()
    page.keyboard.type("correct horse")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#model")).to_contain_text("some-model")
    assert page.evaluate("Object.values(sessionStorage)") == ["correct horse"]
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("document.cookie") == ""
    tried = send(page, server)
    tried.to_send.put(delta("hello"))
    expect(page.locator("#try-answer")).to_have_text("hello")
    page.locator("#key-open").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#notice")).to_contain_text("asks for an API key")
    assert page.evaluate("sessionStorage.length") == 0


# -- a prompt ----------------------------------------------------------------------------------------------------------


def test_a_prompt_streams_with_progress(open_page: Open, server: PageServer) -> None:
    page = open_page()
    page.locator("#try-max").fill("77")
    tried = send(page, server, "What is in there?")
    assert tried.path == "/v1/chat/completions"
    assert tried.body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "What is in there?"}],
        "max_tokens": 77,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    box, answer = page.locator("#try-progress"), page.locator("#try-answer")
    expect(page.locator("#try-cancel")).to_be_visible()
    tried.to_send.put(progress("queued", 0, 8000))
    expect(box).to_contain_text("queued")
    tried.to_send.put(progress("prefill", 6000, 8000, cache=4000, eta_ms=9000))
    expect(box.locator("[role=progressbar]")).to_have_attribute("aria-valuenow", "75")
    expect(box).to_contain_text("9 s left")
    expect(box).to_contain_text("4,000 from cache")
    expect(answer).to_have_attribute("aria-busy", "true")
    tried.to_send.put(delta("The harbour "))
    expect(answer).to_have_text("The harbour")
    tried.to_send.put(delta("froze."))
    expect(answer).to_have_text("The harbour froze.")
    tried.to_send.put(delta("", finish_reason="length"))
    tried.to_send.put(usage(8000, 4000, 77))
    tried.to_send.put(None)
    report = page.locator("#try-report")
    expect(report).to_contain_text("4,000 of 8,000 prompt tokens from cache (4,000 from g1)")
    expect(report).to_contain_text("first token after 1.2 s")
    expect(report).to_contain_text("77 written at 21.0 tokens/s")
    expect(report).to_contain_text("ended by the limit of answer tokens")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.locator("#try-send")).to_be_visible()


def test_cancelling_a_prompt_reaches_the_server(open_page: Open, server: PageServer) -> None:
    page = open_page()
    tried = send(page, server)
    tried.to_send.put(progress("prefill", 10, 8000))
    expect(page.locator("#try-progress")).to_contain_text("10 of 8,000 tokens")
    page.locator("#try-cancel").click()
    assert tried.left.wait(20)
    expect(page.locator("#try-report")).to_contain_text("Cancelled")
    expect(page.locator("#try-progress")).to_contain_text("cancelled")
    again = send(page, server, "another")
    again.to_send.put(delta("fine"))
    expect(page.locator("#try-answer")).to_have_text("fine")


def test_an_error_in_a_stream_is_shown(open_page: Open, server: PageServer) -> None:
    page = open_page()
    tried = send(page, server)
    tried.to_send.put(delta("half an "))
    tried.to_send.put(
        {"error": {"message": "the engine died while this answer was being sent", "code": "engine_error"}}
    )
    expect(page.locator("#try-error")).to_have_text("the engine died while this answer was being sent")
    expect(page.locator("#try-answer")).to_have_text("half an")
    expect(page.locator("#try-send")).to_be_visible()


def test_a_server_that_goes_away_inside_an_answer(open_page: Open, server: PageServer) -> None:
    page = open_page()
    tried = send(page, server)
    tried.to_send.put(delta("half"))
    expect(page.locator("#try-answer")).to_have_text("half")
    server.stop()
    expect(page.locator("#try-error")).to_contain_text("The connection was lost")
    server.start_again()


def test_a_base_model_gets_completions(open_page: Open, server: PageServer) -> None:
    server.chat_template = False
    page = open_page()
    expect(page.get_by_role("radio", name="Completion")).to_be_checked()
    tried = send(page, server, "Once upon")
    assert (tried.path, tried.body["prompt"]) == ("/v1/completions", "Once upon")
    tried.to_send.put(delta(" a time", chat=False))
    expect(page.locator("#try-answer")).to_have_text("a time")


def test_a_document_goes_before_the_question(open_page: Open, server: PageServer, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("chapter one é\n" * 1000)
    page = open_page()
    page.locator("#try-file").set_input_files(book)
    expect(page.locator("#document")).to_contain_text("book.txt")
    expect(page.locator("#document")).to_contain_text("15.0 kB")
    tried = send(page, server, "Who?")
    assert tried.body["messages"][0]["content"] == book.read_text() + "\n\nWho?"
    page.locator("#try-cancel").click()
    page.get_by_role("button", name="Remove the document").click()
    tried = send(page, server, "Who?")
    assert tried.body["messages"][0]["content"] == "Who?"


def test_what_a_model_or_client_writes_stays_text(open_page: Open, server: PageServer) -> None:
    """Prompt, answer, error and names come from strangers; none of them may become part of the page."""
    page = open_page()
    server.registry.close(server.registry.open(HOSTILE, HOSTILE, None), "refused", HOSTILE)
    server.plan = {**REFUSED, "remedy": HOSTILE, "verdict": HOSTILE}
    page.locator("#plan-send").click()
    tried = send(page, server, HOSTILE)
    tried.to_send.put(delta(HOSTILE))
    expect(page.locator("#try-answer")).to_have_text(HOSTILE)
    expect(page.locator("#last-rows")).to_contain_text(HOSTILE)
    expect(page.locator("#plan-remedy")).to_have_text(HOSTILE)
    tried.to_send.put({"error": {"message": HOSTILE}})
    expect(page.locator("#try-error")).to_have_text(HOSTILE)
    assert page.locator("img, script:not(:last-of-type)").count() == 0
    assert page.title() != "owned"


# -- a plan ------------------------------------------------------------------------------------------------------------


def test_the_first_plan_fits_the_model(open_page: Open, server: PageServer) -> None:
    expect(open_page().locator("#plan-tokens")).to_have_value("8K")
    for server.longest_request, length in ((8192, "4K"), (1000, "512")):
        expect(open_page().locator("#plan-tokens")).to_have_value(length)


def test_a_length_is_planned(open_page: Open, server: PageServer) -> None:
    page = open_page()
    page.locator("#plan-tokens").fill("131,072")
    page.locator("#plan-max").fill("100")
    page.locator("#plan-concurrency").fill("4")
    page.locator("#plan-send").click()
    expect(page.locator("#plan-verdict")).to_have_text("fits")
    assert server.plan_asked == [{"tokens": 131_172, "concurrency": 4}]
    result = page.locator("#plan-result")
    expect(result).to_contain_text("230 MB of 2.00 GB")
    expect(result).to_contain_text("3.70 GB")
    expect(result).to_contain_text("9.1 s to 12.4 s")
    expect(page.locator("#plan-remedy")).to_be_hidden()
    server.plan = REFUSED
    page.locator("#plan-send").click()
    expect(page.locator("#plan-verdict")).to_have_text("does not fit")
    expect(page.locator("#plan-remedy")).to_contain_text("ask for at most 32,768")
    assert share(page, "#plan-bar .over") == pytest.approx(1.3 / 3.3, abs=0.05)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("128K", 131_072), ("1m", 1_048_576), ("0.5 K", 512), (" 4_096 ", 4096), ("many", "many"), ("-1", "-1")],
)
def test_lengths_are_read_as_the_command_line_reads_them(
    open_page: Open, server: PageServer, text: str, tokens: int | str
) -> None:
    page = open_page()
    page.locator("#plan-tokens").fill(text)
    page.locator("#plan-max").fill("1")
    page.locator("#plan-send").click()
    expect(page.locator("#plan-error" if isinstance(tokens, str) else "#plan-result")).to_be_visible()
    expected = tokens if isinstance(tokens, str) else tokens + 1
    assert server.plan_asked == [{"tokens": expected, "concurrency": 1}]


def test_a_prompt_is_planned(open_page: Open, server: PageServer) -> None:
    page = open_page()
    page.locator("label", has_text="A prompt").click()
    expect(page.locator("#plan-tokens")).to_be_hidden()
    page.locator("#plan-prompt").fill("some text")
    page.locator("#plan-send").click()
    expect(page.locator("#plan-verdict")).to_have_text("fits")
    assert server.plan_asked == [{"prompt": "some text", "max_tokens": 256, "concurrency": 1}]


# -- everyone ----------------------------------------------------------------------------------------------------------


def test_everything_can_be_done_with_the_keyboard(open_page: Open, server: PageServer) -> None:
    page = open_page()
    record = server.add("chat", 5000)
    server.read(record, 100)
    expect(page.locator("#runs > li")).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#running")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#runs button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#last-rows > tr")).to_have_count(1)
    assert server.cancelled == [record.id]

    page.keyboard.press("Tab")
    expect(page.get_by_role("radio", name="Chat")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Completion")).to_be_checked()
    page.keyboard.press("Tab")
    page.keyboard.type("typed")
    page.keyboard.press("Control+Enter")
    tried = server.tried.get(timeout=20)
    assert tried.body["prompt"] == "typed"
    page.keyboard.press("Escape")
    assert tried.left.wait(20)
    expect(page.locator("#try-send")).to_be_visible()

    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "plan-tokens":
            break
    page.keyboard.press("Control+a")
    page.keyboard.type("4K")
    page.keyboard.press("Enter")
    expect(page.locator("#plan-verdict")).to_have_text("fits")
    assert server.plan_asked[0]["tokens"] == 4096 + 256


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_focus_is_always_seen(open_page: Open, server: PageServer, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    server.read(server.add(), 100)
    expect(page.locator("#runs > li")).to_have_count(1)
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        place = page.evaluate("document.activeElement === document.body ? '' : document.activeElement.outerHTML")
        if not place:
            break
        seen.append((place, page.evaluate(OUTLINED)))
    assert len(seen) >= 12
    assert [place for place, outlined in seen if not outlined] == []


def test_every_control_has_a_name(open_page: Open, server: PageServer) -> None:
    page = open_page()
    server.read(server.add(), 100)
    server.add()
    expect(page.locator("#queue > li")).to_have_count(1)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, a, [role=progressbar], [role=img], dialog')]
            .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length
                || e.getAttribute('aria-labelledby') || e.placeholder))
            .filter((e) => e.id !== 'notice-action' && e.id !== 'plan-bar').map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(open_page: Open, server: PageServer, scheme: str) -> None:
    """WCAG's contrast of 4.5 for every text on the page, in both themes."""
    page = open_page(color_scheme=scheme)
    fill(server)
    server.plan = REFUSED
    page.locator("#plan-send").click()
    expect(page.locator("#plan-remedy")).to_be_visible()
    expect(page.locator("#last-rows > tr")).to_have_count(4)
    tried = send(page, server)
    tried.to_send.put({"error": {"message": "an error"}})
    expect(page.locator("#try-error")).to_be_visible()
    assert page.evaluate(CONTRAST) == []


def test_the_themes_differ(open_page: Open) -> None:
    grounds = {
        scheme: open_page(color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    }
    light, dark = (sum(map(int, re.findall(r"\d+", grounds[scheme])[:3])) for scheme in ("light", "dark"))
    assert light > 600 > 150 > dark


@pytest.mark.parametrize("width", [360, 768, 1024])
def test_nothing_is_wider_than_the_screen(open_page: Open, server: PageServer, width: int) -> None:
    page = open_page(width=width, height=740)
    fill(server)
    server.plan = {**REFUSED, "remedy": "x" * 300}
    page.locator("#plan-send").click()
    expect(page.locator("#last-rows > tr")).to_have_count(4)
    expect(page.locator("#queue > li")).to_have_count(1)
    tried = send(page, server, "y" * 500)
    tried.to_send.put(progress("prefill", 1_000_000, 1_048_576, cache=500_000, eta_ms=7_200_000))
    tried.to_send.put(delta("z" * 500))
    expect(page.locator("#try-answer")).to_contain_text("zzz")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    spilled = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((e) => {
            const box = e.getBoundingClientRect();
            return box.width && box.right > innerWidth + 1 && !e.closest('.hidden, thead, .answer');
        }).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert spilled == []


def test_motion_is_spared_those_who_ask(open_page: Open, server: PageServer) -> None:
    page = open_page(reduced_motion="reduce")
    server.read(server.add(), 100)
    expect(page.locator("#runs > li")).to_have_count(1)
    assert page.locator("#runs .computed").evaluate("(e) => getComputedStyle(e).transitionDuration") in ("0s", "0s, 0s")


def test_a_long_evening_leaves_no_more_than_the_last_requests(open_page: Open, server: PageServer) -> None:
    page = open_page()
    for _ in range(60):
        server.finish(server.add())
    expect(page.locator("#last-rows > tr")).to_have_count(20)


def fill(server: PageServer) -> None:
    """Something of everything: running, writing, waiting, and four that ended in four ways."""
    server.read(server.add("chat", 1_048_576), 700_000, cached=300_000, eta_s=5000)
    writing = server.add("completions", 8000)
    server.read(writing, 8000)
    server.write(writing, 0)
    server.add("responses", 900_000)
    for reason in ("stop", "length", "cancelled"):
        record = server.add("completions", 1_000_000)
        server.read(record, 900_000, cached=700_000)
        server.finish(record, reason, cached=700_000, answer=100_000)
    server.registry.close(server.registry.open("refused0", "chat", None), "refused", "w" * 200)


OUTLINED = """() => {
    // Radios and the file input are transparent: what they lie on is outlined for them.
    const { activeElement: e } = document;
    return [e, e.nextElementSibling, e.parentElement].some((x) => {
        const { outlineWidth, outlineStyle } = x ? getComputedStyle(x) : {};
        return x && outlineWidth !== '0px' && outlineStyle !== 'none';
    });
}"""
"""Whether what has the focus shows it."""

CONTRAST = """() => {
    const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
            if (a > 0.99) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const poor = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || !element.getClientRects().length || element.closest('.hidden, noscript, script, style')) continue;
        const [a, b] = [luminance(parse(getComputedStyle(element).color).slice(0, 3)), luminance(behind(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.textContent.slice(0, 40)}`);
    }
    return poor;
}"""
"""Every visible text whose contrast with its background is below 4.5."""


def test_the_contrast_check_sees_poor_contrast(open_page: Open) -> None:
    page = open_page()
    page.evaluate("document.querySelector('h1').style.color = 'rgb(200, 200, 200)'")
    assert len(page.evaluate(CONTRAST)) == 1
