"""The page of a plan: whole, and of one file."""

import re
from html.parser import HTMLParser

import pytest
from tests.support.full_screen import full_screen

import expertmesh as em
from expertmesh.cli import main as front
from expertmesh.planner.scaling import SIZES, crossovers, scaling
from expertmesh.planner.svg import Axis, Dot, bars, plot

VOID = {"meta", "link", "line", "rect", "circle", "polyline", "br"}


class Balanced(HTMLParser):
    """Elements that are open, and all that were."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def parsed(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    words = ["plan", "gpt-350m-moe128", "--cluster", "h100x32", "--page", str(path)]
    assert front.main(words) == 0
    return path.read_text()


def test_the_page_is_whole(page):
    seen = parsed(page)
    assert seen.count("svg") == 4 and seen.count("section") == 5
    for part in ("Memory against time", "By part", "4,096 devices", "How sure this is", "guessed:"):
        assert part in page


def test_the_page_needs_no_other_file(page):
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "<script" not in page


def test_the_page_is_written_before_the_screen(tmp_path):
    path = tmp_path / "plan.html"
    words = ["plan", "gpt-moe-1b", "--cluster", "h100x8", "--page", str(path)]
    with full_screen():
        assert front.main(words) == 1
    assert path.is_file()


def test_names_are_no_markup():
    text = plot(Axis("<b>", 1, 10, True), Axis("y", 0, 1), [Dot(2, 0.5, "<i>&")], label='"a" < b') + bars(
        [("<u>", [("<s>", 1.0)])], unit="<q>", label="l"
    )
    assert parsed(text).count("svg") == 2
    assert not re.search(r"<(b|i|u|s|q)\b", text)


@pytest.mark.parametrize(("low", "high", "is_log"), [(1, 1e6, True), (3, 3, False), (0, 7, False), (2, 9, True)])
def test_axes_have_ticks_inside(low, high, is_log):
    axis = Axis.of("x", [low, high], is_log=is_log)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())
    assert 1 <= len(axis.ticks()) <= 12
    assert 0 < axis.place(low) <= axis.place(high) < 1


def test_scaling_keeps_the_tokens_of_a_device():
    problem = em.plan("gpt-350m-moe128", cluster="h100x32").problem
    found = scaling(problem)
    assert tuple(s.num_gpus for s in found) == SIZES
    each = problem.batch // 32
    for s in found:
        assert s.best is None or s.best.problem.batch == each * s.num_gpus
    for crossover in crossovers(found):
        assert crossover.num_gpus is None or crossover.num_gpus in SIZES


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    words = ["plan", "gpt-moe-1b", "--cluster", "h100x8", "--page", str(tmp_path)]
    assert front.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
