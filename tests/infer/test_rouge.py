"""ROUGE of headings: what can be counted by hand, in any script, and whether a difference is real."""

import pytest

from expertmesh.errors import ConfigError
from expertmesh.infer.translation_scores import rouge


def values(found):
    return [round(ours.value, 4) for ours, _ in found]


def test_it_is_counted_by_hand():
    """Of "a b c d" and "a c b e": three of four words, one of three pairs is "b e", a common sequence of two."""
    assert values(rouge(["a c b e"], ["a b c d"], language="en")) == [75.0, 0.0, 50.0]
    assert values(rouge(["A b, C"], ["a b c"], language="en")) == [100.0] * 3
    assert values(rouge(["x", "a b"], ["y", "a b"], language="en")) == [50.0] * 3
    assert values(rouge(["Über größe"], ["über die größe"], language="de"))[0] == 80.0
    assert values(rouge(["дом большой"], ["большой дом"], language="ru")) == [100.0, 0.0, 50.0]
    assert values(rouge(["长城"], ["长江"], language="zh")) == [50.0, 0.0, 50.0]


def test_a_difference_has_its_p_value():
    references = [f"the heading of page {i}" for i in range(40)]
    better = [line if i % 4 else "nothing of it" for i, line in enumerate(references)]
    worse = [line if i % 4 > 1 else "nothing of it" for i, line in enumerate(references)]
    for mine, other in rouge(better, references, language="en", others=worse):
        assert mine.value > other.value and mine.p_value < 0.05 and other.p_value is None
        assert mine.interval > 0 and other.interval > 0
        assert mine.signature == other.signature and "tok:word" in mine.signature
    for mine, other in rouge(better, references, language="en", others=better):
        assert mine.value == other.value and mine.p_value == 1.0


def test_unequal_lines_are_refused():
    with pytest.raises(ConfigError, match="2 lines and 1 references"):
        rouge(["a", "b"], ["a"], language="en")
