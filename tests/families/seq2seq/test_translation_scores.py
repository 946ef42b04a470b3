"""ROUGE of headings: what can be counted by hand, in any script, and whether a difference is real."""

import pytest
from benchmarks.claims.translation_scores import compare, main, rouge

from expertmesh.errors import ConfigError
from expertmesh_families.seq2seq.scores import score


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


def test_words_of_any_script_are_whole():
    """Vowel signs belong to their words, two ways to write one letter are one, and marks of format are not seen."""
    assert values(rouge(["कि"], ["के"], language="hi")) == [0.0] * 3
    assert values(rouge(["हिन्दी भाषा"], ["हिन्दी"], language="hi"))[0] == 66.6667
    assert values(rouge(["cafe\u0301"], ["caf\u00e9"], language="fr"))[0] == 100.0
    assert values(rouge(["می\u200cخواهم"], ["می خواهم"], language="fa"))[0] == 0.0
    assert values(rouge(["ក\u200bខ"], ["ក ខ"], language="xx"))[0] == 100.0


@pytest.mark.parametrize("language", ["zh_CN", "zh-TW", "zho_Hans", "JA", "th", "lao_Laoo", "km", "my"])
def test_without_blanks_characters_are_compared(language):
    (one, _), *_ = rouge(["长城高大"], ["长江高大"], language=language)
    assert one.value == 75.0 and "tok:char" in one.signature
    assert values(rouge(["กิน"], ["กาน"], language="th"))[0] == 40.0, "a sign above is no character"


def test_a_region_does_not_change_bleu():
    one, other = (score(["长城 高"], ["长城 高"], language=code) for code in ("zh", "zh_CN"))
    assert one == other and "tok:zh" in one[0].signature
    for code in ("zho_Hant", "jpn_Jpan", "kor_Hang"):
        assert "tok:13a" not in score(["长城 高"], ["长城 高"], language=code)[0].signature


def test_nothing_has_no_score():
    for measure in (rouge, score):
        with pytest.raises(ConfigError, match="^0 "):
            measure([], [], language="en")


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


def test_files_are_scored_and_compared(tmp_path, capsys):
    references = [f"the heading of page {i}" for i in range(40)]
    lines = {
        "right": [*references, ""],
        "best": [*references, "never scored"],
        "worse": [line if i % 4 > 1 else "nothing of it" for i, line in enumerate(references)] + [""],
    }
    for name, texts in lines.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in texts))
    words = [str(tmp_path / "best"), "--reference", str(tmp_path / "right"), "--language", "en"]
    assert main([*words, "--rouge"]) == 0
    out, error = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [[f"rouge{n}", "100.00"] for n in "12L"]
    assert error == "note: 1 lines have no reference and are not scored\n"
    assert main([*words, "--compare", str(tmp_path / "worse")]) == 0
    out = capsys.readouterr().out
    assert out.count("BLEU") == 2 and "+-" in out and "p = " in out and "p = 1.0000" not in out
    assert main([*words, "--compare", str(tmp_path / "best")]) == 0
    assert capsys.readouterr().out.count("p = 1.0000") == 2, "a system is no better than itself"
    assert main([*words, "--compare", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(ConfigError, match="^0 "):
        compare([], [], [], language="en")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((["a"], [["a"]]), "references: one is a list"),
        (([["a"]], ["a"]), "translations: one is a list"),
        ((["a", None], ["a", "b"]), "translations: one is a NoneType"),
        ((["a"], [b"a"]), "references: one is a bytes"),
    ],
)
def test_a_score_is_of_texts(given, words):
    with pytest.raises(ConfigError, match=words):
        score(*given, language="en")
