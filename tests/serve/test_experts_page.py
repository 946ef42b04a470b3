"""The page: what it says and asks, without a browser; and in headless Chromium, where there is one, what it does."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import httpx2
import numpy as np
import pytest
from tests.support.serving import events

from expertmesh.serve.experts_page import PAGE, PAGE_HEADERS
from expertmesh.serve.faults import RequestError

PATIENCE_MS = 60_000
POLICY = PAGE_HEADERS["content-security-policy"]
CODE = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL).group(1)
STYLE = re.search(r"<style>(.*)</style>", PAGE, re.DOTALL).group(1)


class _Parts(HTMLParser):
    """Visible text, ids and attributes of a page."""

    def __init__(self):
        super().__init__()
        self.words, self.ids, self.attributes, self._inside = [], [], [], ""
        self.feed(PAGE)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        if self._inside not in ("style", "script"):
            self.words.append(data)


@pytest.mark.parametrize(
    "said",
    [
        "mixture-of-experts model",
        "small networks side by side, its experts",
        "token (a word or a part of one)",
        "colour: the expert picked first",
        "underline: the expert picked second",
        "italic: your text",
        "What these settings do",
        "Maximum tokens",
        "Temperature",
        "Top-p",
        "Seed",
        "Generate",
        "Stop",
        "Repeat with the same seed",
        "Copy text",
        "Conversation",
        "this model only continues texts",
    ],
)
def test_the_page_says(said):
    assert said in _Parts().text


def test_the_page_is_whole_and_asks_nobody_else():
    parts = _Parts()
    assert "<!--" not in PAGE and not re.search(r"https?:|@import|url\(", PAGE)
    used = {
        *re.findall(r'\$\("(\w+)"\)', CODE),
        *re.findall(r'(?:for|labelledby|describedby)="(\w+)"', PAGE),
    }
    assert used <= set(parts.ids) and len(parts.ids) == len({*parts.ids})
    names = {name for name, _ in parts.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "title")]


def test_no_text_becomes_code():
    written = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|\.title = \w+\.text"
    assert not re.search(written, CODE)
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY
    for kind, part in (("script", CODE), ("style", STYLE)):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in POLICY


def _luminance(linear):
    return sum(w * min(1, max(0, x)) for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _of_hex(text):
    values = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return _luminance([((v + 0.055) / 1.055) ** 2.4 if v > 0.04 else v / 12.92 for v in values])


def _of_oklch(lightness, chroma, hue):
    """Relative luminance of an OKLCH color (Ottosson 2020), clipped to sRGB."""
    a, b = chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))
    lms = np.array(
        [
            [0.3963377774, 0.2158037573],
            [-0.1055613458, -0.0638541728],
            [-0.0894841775, -1.2914855480],
        ]
    )
    cubes = (lightness + lms @ [a, b]) ** 3
    to_rgb = [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
    return _luminance(np.array(to_rgb) @ cubes)


def _ratio(one, other):
    low, high = sorted((one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrasts_are_those_of_wcag_aa(scheme):
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[scheme]
    found = dict(re.findall(r"--([\w-]+): ([^;]+);", block))
    value = {name: _of_hex(text) for name, text in found.items() if text.startswith("#")}
    fill, tone = ([float(part) for part in found[name].split()] for name in ("fill", "tone"))
    for ground in ("page", "card", "mid"):
        for ink in ("text", "muted"):
            assert _ratio(value[ink], value[ground]) >= 4.5, (ink, ground)
    assert _ratio(value["bad"], value["card"]) >= 4.5
    assert _ratio(value["on-accent"], value["accent"]) >= 4.5
    assert min(_ratio(value["edge"], value[ground]) for ground in ("page", "card")) >= 3
    for hue in range(360):
        assert _ratio(value["text"], _of_oklch(*fill, hue)) >= 4.5, hue
        assert _ratio(value["card"], _of_oklch(*tone, hue)) >= 3, hue


def test_the_server_gives_what_the_page_reads(server):
    with httpx2.Client(base_url=server.address, timeout=PATIENCE_MS / 1000) as client:
        assert client.get("/").headers["content-security-policy"] == POLICY
        facts = client.get("/tokenizer_info").json()
        assert facts["chat_template"] and facts["model_max_length"] == 512
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        load = re.findall(r"^expertmesh:expert_tokens_total\{.*", client.get("/metrics").text, re.MULTILINE)
        assert [re.search(r'[{,]layer="(\d+)"', line).group(1) for line in load] == ["0"] * 4 + ["1"] * 4
        assert re.search(r'[{,]expert="(\d+)"', load[-1]).group(1) == "3"
        asked = {
            "stream": True,
            "max_tokens": 3,
            "return_routed_experts": True,
            "top_p": 1,
            "seed": 2**32 - 1,
        }
        text = client.post("/v1/completions", json=asked | {"prompt": "import os", "logprobs": 5, "echo": True})
        said = [event["choices"][0] for event in events(text.text.splitlines())[0]]
        scores = said[0]["logprobs"]
        assert scores["text_offset"][0] == 0 and scores["token_logprobs"][0] is None
        assert len(scores["tokens"]) == len(scores["top_logprobs"]) == len(scores["text_offset"])
        assert base64.b64decode(said[0]["routed_experts"])[:6] == b"\x93NUMPY"
        assert said[0]["routed_experts_start"] == 0 and said[-1]["finish_reason"] == "length"
        messages = [{"role": "user", "content": "import os"}]
        chat = client.post(
            "/v1/chat/completions",
            json=asked | {"messages": messages, "logprobs": True, "top_logprobs": 5},
        )
        said = [event["choices"][0] for event in events(chat.text.splitlines())[0]]
        (one, *_) = said[1]["logprobs"]["content"]
        assert {"token", "bytes", "logprob", "top_logprobs"} <= set(one) and said[1]["routed_experts"]


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


@pytest.fixture(scope="module")
def phone(browser):
    """What all pages of the tests share."""
    viewport = {"width": 390, "height": 844}
    context = browser.new_context(viewport=viewport, has_touch=True, is_mobile=True)
    yield context
    context.close()


@pytest.fixture
def page(phone, server):
    """The page on a phone, which asks nobody but its server; what the console says is a failure."""
    one = phone.new_page()
    one.set_default_timeout(PATIENCE_MS)
    said, asked = [], []
    one.on("console", lambda message: said.append(message.text))
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on("request", lambda request: asked.append(request.url))
    one.goto(server.address)
    one.locator("#model", has_text="context 512 tokens").wait_for()
    yield one
    assert [text for text in said if "the server responded with" not in text] == []
    assert all(url.startswith((server.address, "data:")) for url in asked)
    one.close()


def generate(page, *, prompt="import os", mode="text", tokens=8, seed="1"):
    page.locator(f"[value={mode}]").check()
    page.locator("#prompt").fill(prompt)
    page.locator("#tokens").fill(str(tokens))
    page.locator("#seed").fill(seed)
    page.keyboard.press("Control+Enter")
    ended(page)


def ended(page):
    page.locator("#said", has_text=re.compile("; seed \\d")).wait_for()


def styles(page, name):
    return page.evaluate(f"tokens.map(token => token.element.style.getPropertyValue('{name}'))")


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_tokens_have_colours_experts_and_alternatives(page, mode):
    generate(page, mode=mode)
    assert page.locator("#said").inner_text().startswith("8 tokens in ")
    assert "stopped at the token limit" in page.locator("#said").inner_text()
    tokens, num_given = page.locator("#text .token"), 3 if mode == "text" else 0
    assert page.locator("#text .token.prompt").count() == num_given
    assert tokens.count() == num_given + 8
    for name in ("--first", "--second"):
        assert all(styles(page, name)[:-1]) and len({*styles(page, name)}) > 2
        assert not styles(page, name)[-1]
    tokens.nth(num_given + 3).tap()
    about = page.locator("#about").inner_text()
    assert "Could have been" in about and "Experts" in about and "layer 1" in about
    assert len(re.findall(r"[\d.]+\s%", about)) >= 5 and about.count("\u2713") == 2
    tokens.last.tap()
    assert "No colour, no experts: this is the last token" in page.locator("#about").inner_text()
    assert page.locator("#first").is_visible() and page.locator("#second").is_visible()
    assert not page.locator("#keys").is_visible()


def test_bars_light_their_tokens_and_tokens_their_bars(page):
    generate(page)
    num_read = page.locator("#text .token").count() - 1
    before, slider, total = styles(page, "--first"), page.locator("#expert"), 0
    page.locator(".layer input").nth(1).check()
    assert styles(page, "--first") != before
    slider.focus()
    for expert in range(4):
        said = page.locator("#readout").inner_text()
        found = re.fullmatch(r"Expert (\d): (\d+) of (\d+) tokens \([\d.]+\s%\), the first pick for \d+\.", said)
        assert found and slider.get_attribute("aria-valuetext") == said
        assert (int(found[1]), int(found[3])) == (expert, num_read)
        assert page.locator("#text .token.lit").count() == int(found[2])
        assert page.locator("#bars i.lit").count() == 1
        total += int(found[2])
        page.keyboard.press("ArrowRight")
    assert total == 2 * num_read
    tokens = page.locator("#text .token")
    tokens.nth(1).tap()
    # Text that scrolls below a resting pointer is not pointed at.
    tokens.nth(5).evaluate("one => one.dispatchEvent(new MouseEvent('mousemove', {bubbles: true}))")
    assert page.locator(".token.chosen").get_attribute("data-index") == "1"
    tokens.nth(0).hover()
    tokens.nth(5).hover()
    assert page.locator(".token.chosen").get_attribute("data-index") == "5"
    tokens.nth(1).focus()
    assert page.locator("#bars i.lit").count() == 2 and page.locator("#text .token.lit").count() == 0
    page.locator("#numbers").check()
    shown = page.evaluate("getComputedStyle(tokens[1].element, '::after').content")
    assert shown == f'"{page.evaluate("tokens[1].experts[1][0]")}"'


def test_a_conversation_goes_on_and_its_last_answer_is_repeated(page):
    sent = []
    page.on("request", lambda request: sent.append(request.post_data))
    generate(page, mode="chat", prompt="import os", tokens=2)
    first = page.evaluate("turns[0].content")
    generate(page, mode="chat", prompt="main", tokens=4, seed="")
    text, said = page.locator("#text").inner_text(), page.locator("#said").inner_text()
    page.locator("#again").click()
    ended(page)
    assert page.locator("#text").inner_text() == text
    assert page.locator("#said").inner_text().partition("seed")[2] == said.partition("seed")[2]
    bodies = [json.loads(body) for body in sent if body]
    assert [one["content"] for one in bodies[0]["messages"]] == ["import os"]
    assert [one["content"] for one in bodies[1]["messages"]] == ["import os", first, "main"]
    assert len(bodies) == 3 and bodies[2] == bodies[1]
    page.locator("#copy").click()
    page.locator("#copy", has_text="Copied").wait_for()
    page.locator("#fresh").click()
    assert page.locator("#text").inner_text() == "" and page.locator("#hint").is_visible()


def test_the_keyboard_is_enough(page):
    generate(page)
    page.locator("#prompt").focus()
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {
        "tokens",
        "temperature",
        "topp",
        "seed",
        "go",
        "again",
        "copy",
        "numbers",
        "expert",
    } <= reached
    page.locator("#text .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    assert page.locator("#text .token").last.evaluate("one => one === document.activeElement")
    assert page.locator("#token.open").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#token.open").count() == 0
    page.locator("#tokens").fill("500")
    page.locator("#go").click()
    page.locator("#text .token:not(.prompt)").first.wait_for()
    page.locator("#stop").click()
    page.locator("#said", has_text="stopped by you").wait_for()
    assert page.locator("#go").is_enabled()


def test_nothing_is_wider_than_the_window_in_both_schemes(page):
    generate(page, prompt="a" * 300)
    page.locator("#text .token").last.tap()
    backgrounds = set()
    for width in (320, 390, 820, 1280):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


THOUGHT = "<img src=x onerror=document.title='hurt'>"


def test_thoughts_and_calls_stand_apart_and_are_text(page):
    call = {
        "index": 0,
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"a":'},
    }
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": THOUGHT},
        {"reasoning": "more"},
        {"content": "<b>so</b>"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "<i>"}'}}]},
    ]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    for choice, text in zip(choices[1:4], (THOUGHT, "more", "<b>so</b>"), strict=True):
        one = {"token": text, "bytes": list(text.encode()), "logprob": -0.1, "top_logprobs": []}
        choice["logprobs"] = {"content": [one]}
    choices[-1]["finish_reason"] = "tool_calls"
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    kind = {"content-type": "text/event-stream"}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body + "data: [DONE]\n\n", headers=kind),
    )
    generate(page, mode="chat")
    assert page.locator("#text details[open] .token").all_inner_texts() == [THOUGHT, "more"]
    assert page.locator("#text .token").nth(2).inner_text() == "<b>so</b>"
    assert page.locator(".call").inner_text() == 'Calls a tool: look({"a": "<i>"})'
    page.locator("#text .token").first.tap()
    assert THOUGHT.replace(" ", "\u2423") in page.locator("#about").inner_text()
    assert page.locator("#text img, #about img, #text b, #text i").count() == 0
    assert "hurt" not in page.title() and "calls a tool" in page.locator("#said").inner_text()


def test_a_model_that_converses_begins_so_ends_without_its_mark_and_says_when_it_is_full(page):
    assert page.locator("[value=chat]").is_checked()
    assert page.locator("#prompt").input_value() == "Hello, who are you?"
    scored = [
        {"token": text, "bytes": list(text.encode()), "logprob": -0.1, "top_logprobs": []}
        for text in ("Hi.", "<|end|>")
    ]
    choices = [
        {"index": 0, "delta": {"content": "Hi."}, "logprobs": {"content": scored[:1]}, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": {"content": scored[1:]}, "finish_reason": "stop"},
    ]  # fmt: skip
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    kind = {"content-type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, headers=kind))
    generate(page, mode="chat")
    assert page.locator("#text .token").all_inner_texts() == ["Hi.", "\u00b7"]
    page.locator("#text .token").last.tap()
    assert "<|end|>" in page.locator("#about").inner_text()
    full = RequestError(400, "prompt: has 600 tokens", code="context_length_exceeded")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=full.body))
    page.locator("#prompt").fill("and more")
    page.locator("#go").click()
    why = "no longer fits into the context of 512 tokens; begin a new one"
    page.locator("#said.bad", has_text=why).wait_for()
    assert page.locator("#fresh").is_visible()
    assert page.locator("#prompt").input_value() == "and more"


def test_a_model_that_cannot_converse_and_one_without_experts_say_so(page):
    facts = {"chat_template": None, "model_max_length": 64}
    page.route("**/tokenizer_info", lambda route: route.fulfill(json=facts))
    page.route("**/metrics", lambda route: route.fulfill(body=""))
    assert page.locator("[value=chat]").is_enabled() and not page.locator("#nochat").is_visible()
    page.reload()
    page.locator("#model", has_text="context 64 tokens").wait_for()
    assert page.locator("[value=chat]").is_disabled() and page.locator("#nochat").is_visible()
    assert page.locator("#tokens").input_value() == "64"
    assert "is a dense model" in page.locator("#lede").inner_text()
    assert not page.locator("#experts").is_visible()


def test_errors_keys_and_servers_with_fewer_alternatives(page):
    sent = []

    def answer(route, request):
        sent.append(json.loads(request.post_data)["logprobs"])
        if request.headers.get("authorization") != "Bearer key":
            fault = RequestError(401, "authorization: must be `Bearer KEY`")
        elif sent[-1] > 3:
            fault = RequestError(400, "logprobs: at most 3", param="logprobs")
        else:
            return route.continue_()
        return route.fulfill(status=fault.status, json=fault.body)

    page.route("**/v1/completions", answer)
    page.locator("[value=text]").check()
    page.locator("#go").click()
    page.locator("#said.bad", has_text="Bearer").wait_for()
    page.locator("#key").fill("key")
    generate(page)
    assert sent == [5, 5, 4, 3] and page.locator("#text .token").count() == 11
    page.locator("#prompt").fill("word " * 3000)
    page.locator("#go").click()
    page.locator("#said.bad", has_text="shorten it").wait_for()
