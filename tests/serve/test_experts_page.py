"""The page in headless Chromium: tokens arrive with their experts, at any width, in both schemes, by keyboard alone."""

import re
import shutil

import pytest
from tests.support.serving import served

PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, server):
    """The page, which asks nobody but its server; what the console says is a failure."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    one = context.new_page()
    one.set_default_timeout(PATIENCE_MS)
    said, asked = [], []
    one.on("console", lambda message: said.append(message.text))
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on("request", lambda request: asked.append(request.url))
    one.goto(server.address)
    yield one
    assert said == []
    assert all(url.startswith((server.address, "data:")) for url in asked)
    context.close()


def write(page, *, prompt="import os", kind="text", tokens=12):
    page.locator("#prompt").fill(prompt)
    page.locator("#kind").select_option(kind)
    page.locator("#tokens").fill(str(tokens))
    page.locator("#seed").fill("1")
    page.keyboard.press("Control+Enter")
    page.wait_for_function("document.querySelector('#said').textContent.includes('ended by')")


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_tokens_have_colours_experts_and_alternatives(page, kind):
    write(page, kind=kind)
    told = page.locator("#said").inner_text()
    tokens = page.locator(".token")
    count = int(re.match(r"(\d+) tokens", told).group(1))
    assert page.locator(".token:not(.prompt)").count() == count > 0
    assert page.locator(".token.prompt").count() == (3 if kind == "text" else 0)
    colours = [tokens.nth(i).evaluate("one => one.style.background") for i in range(count)]
    assert all(colours[: count - 1]) and len({*colours}) > 1  # the last one is never read
    tokens.nth(count - 2).focus()
    tip = page.locator("#tip").inner_text()
    assert len(re.findall(r"^ *[\d.]+ %  ", tip, re.MULTILINE)) == 5 and "layer 1: experts" in tip


def test_the_layer_that_is_chosen_colours_the_text_and_the_load_is_all_of_it(page):
    write(page)
    tokens = page.locator(".token")
    before = [tokens.nth(i).evaluate("one => one.style.background") for i in range(10)]
    page.locator(".layer input").nth(1).check()
    after = [tokens.nth(i).evaluate("one => one.style.background") for i in range(10)]
    assert before != after
    for layer in range(2):
        label = page.locator(".bars").nth(layer).get_attribute("aria-label")
        counted = sum(int(number) for number in re.findall(r"expert \d+: (\d+)", label))
        assert counted == 2 * (tokens.count() - 1)  # K = 2; all tokens but the last are read


def test_the_keyboard_is_enough(page):
    page.locator("#prompt").focus()
    write(page)
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"kind", "tokens", "temperature", "seed", "go"} <= reached
    assert any(name.startswith("token") for name in reached)
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    last = page.locator(".token").last
    assert last.evaluate("one => one === document.activeElement")
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_stop_ends_an_answer(page):
    page.locator("#tokens").fill("500")
    page.locator("#go").click()
    page.wait_for_selector(".token:not(.prompt)")
    page.locator("#stop").click()
    page.wait_for_function("document.querySelector('#said').textContent.startsWith('stopped')")
    assert page.locator("#go").is_enabled()


def test_nothing_is_wider_than_the_window_in_both_schemes(page):
    write(page, prompt="a" * 300, tokens=40)
    backgrounds = set()
    for width in (320, 390, 820, 1440):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.locator(".token").last.focus()
            right = page.locator("#tip").bounding_box()
            assert right["x"] >= 0 and right["x"] + right["width"] <= width
    assert len(backgrounds) == 2


def test_errors_and_keys(browser, folder, tmp_path):
    (tmp_path / "keys").write_text("key\n")
    with served(folder, "--api-key-file", str(tmp_path / "keys")) as server:
        one = browser.new_page()
        one.set_default_timeout(PATIENCE_MS)
        one.goto(server.address)
        one.wait_for_selector("#keybox:not([hidden])")
        one.locator("#key").fill("wrong")
        one.locator("#go").click()
        one.wait_for_function("document.querySelector('#said').textContent.includes('Bearer')")
        one.locator("#key").fill("key")
        write(one)
        one.locator("#prompt").fill("word " * 3000)
        one.locator("#go").click()
        one.wait_for_function("document.querySelector('#said').className === 'bad'")
        assert "shorten it" in one.locator("#said").inner_text()
        one.close()
