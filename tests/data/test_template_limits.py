"""A chat template is a program that may loop for ever or grow without end; it is ended, and the next text is
written."""

import os
import re
import subprocess
import sys
import threading

import pytest
from tests.support.byte_tokenizer import byte_tokenizer

from expertmesh.errors import ConfigError
from expertmesh.text import template_process
from expertmesh.text.chat import TemplateFormat
from expertmesh.text.format import text_format
from expertmesh.text.limits import TextLimitError
from expertmesh.text.template_process import render

GROWING = "{{% set ns = namespace(x={}) %}}{{% for i in range(99) %}}{{% set ns.x = {} %}}{{% endfor %}}{}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ (messages|length + 6) ** 30000000 }}",
    "a folded power": "{{ 7 ** 30000000 }}",
    "a power of powers": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "a folded filter": "{{ 'a'|center(10 ** 11) }}",
    "a folded method": "{{ 'a'.center(10 ** 11) }}",
    "a folded tag": "{% autoescape 'a'|center(10 ** 11) %}{% endautoescape %}",
    "a repeated text": "{{ messages[0].content * 10 ** 11 }}",
    "a repeated list": "{{ [1] * 10 ** 11 }}",
    "a width": "{{ '%100000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (2147483647, 1) }}",
    "a width of format": "{{ '{:100000000000}'.format(1) }}",
    "a filter of format": "{{ '%100000000000d'|format(1) }}",
    "an indent": "{{ messages|tojson(indent=10 ** 11) }}",
    "zeros": "{{ '1'.zfill(10 ** 11) }}",
    "bytes": "{{ (1).to_bytes(10 ** 11, 'big') }}",
    "slices": "{{ 'a'|slice(10 ** 11)|list }}",
    "a text twice": GROWING.format("'a'", "ns.x ~ ns.x", "{{ ns.x }}"),
    "a sum": GROWING.format("'a'", "ns.x + ns.x", "{{ ns.x }}"),
    "a joined text": GROWING.format("'a'", "[ns.x, ns.x]|join", "{{ ns.x }}"),
    "a replaced text": GROWING.format("'a'", "ns.x|replace('a', 'aaaa')", "{{ ns.x }}"),
    "a list of lists": GROWING.format("'a'", "[ns.x, ns.x]", "{{ ns.x }}"),
    "lists that are compared": GROWING.format("[['a'], ['a']]", "[[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]]", "{{ ns.x[0] == ns.x[1] }}"),  # noqa: E501
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ "
                                   "f(99) }}",
    "pieces": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.3)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_ended_and_the_next_text_is_written(name, tokenizer):
    form = TemplateFormat(tokenizer, HOSTILE[name], {})
    with pytest.raises(ConfigError, match="the model's chat template") as caught:
        form.prompt([{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)
    is_refused = "refuses it" in str(caught.value)  # Python itself knows the limit
    assert is_refused or caught.value.code == "chat_template_limit"
    assert render("{{ a }}", {"a": "b"}) == "b"


def test_an_answer_without_an_end_is_found_at_once_when_a_model_is_opened(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(HOSTILE["a folded power"])
    with pytest.raises(TextLimitError, match=r"^the model's chat template takes more than 0\.3 s"):
        text_format(tokenizer, tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content * 2 }}", "writes more than 30 characters, for which the model"),
        ("{% for i in range(99) %}abc{% endfor %}", "writes more than 30 characters"),
    ],
)
def test_a_text_is_ended_while_it_is_written(template, said):
    given = {"messages": [{"content": "a" * 20}]}
    with pytest.raises(TextLimitError, match=said) as caught:
        render(template, given, most_characters=30)
    assert caught.value.code == "context_length_exceeded"
    assert render(template, given, most_characters=297)


def test_threads_get_their_own_texts():
    found = {}

    def ask(number):
        for again in range(20):
            text = render("{{ a }} {{ b }}", {"a": number, "b": "x" * 9 * again})
            found.setdefault(number, []).append(text == f"{number} {'x' * 9 * again}")

    several = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert found == {i: [True] * 20 for i in range(4)}


FORKED = """
import os
from expertmesh.text import template_process
from expertmesh.text.template_process import render
assert render("{{ a }}", {"a": 1}) == "1"
before = template_process._process._process.pid
if (child := os.fork()) == 0:
    assert render("{{ a }}", {"a": 2}) == "2"
    assert template_process._process._process.pid != before
    template_process._process.end()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert render("{{ a }}", {"a": 3}) == "3"
assert template_process._process._process.pid == before
print(before)
"""


def test_a_forked_process_has_one_of_its_own_and_none_outlives_its_owner():
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_process_that_was_ended_is_started_again():
    assert render("{{ a }}", {"a": 1}) == "1"
    template_process._process._process.kill()
    template_process._process._process.wait()
    assert render("{{ a }}", {"a": 1}) == "1"


def test_half_a_character_is_no_text():
    with pytest.raises(ConfigError, match="the model's chat template writes half a character"):
        render(r"{{ '\ud800' }}", {})
    with pytest.raises(ConfigError, match=r"refuses it \(a\?b\)"):
        render(r"{{ raise_exception('a\ud800b') }}", {})


def test_a_template_gets_plain_values_alone():
    class Rich(str):
        def write(self):
            raise AssertionError

    given = {"a": Rich("x"), "b": object(), "c": {"d": (1, True, None, 1.5)}}
    assert render("{{ a }} {{ b }} {{ c.d[1] }} {{ c.d }}", given) == ("x <object> True (1, True, None, 1.5)")
    with pytest.raises(ConfigError, match=re.escape("refuses it ('str object' has no attribute 'write'")):
        render("{{ a.write() }}", given)
    deep = []
    for _ in range(9999):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested deeper"):
        render("{{ a }}", {"a": deep})
