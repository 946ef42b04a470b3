"""An encoder-decoder in miniature: trained, killed, resumed, spread over two ranks, evaluated, translating."""

import json
import re
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from tests.support.runs import (
    assert_resumed_to_the_bit,
    assert_same_lines,
    lines_of,
    mortal,
    train_quietly,
)

from expertmesh.cli.main import main
from expertmesh.data import files
from expertmesh.models.family import Family
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run
from expertmesh.training.expert_use import read_use
from expertmesh_families.seq2seq.family import SEQ2SEQ
from expertmesh_families.seq2seq.recipes import translate_test
from expertmesh_families.seq2seq.task import Seq2SeqTask
from expertmesh_families.seq2seq.translate import one_line, split_text, translate

WORDS = ("dog", "cat", "bird", "fish"), ("red", "blue", "green")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two "languages": xx says what de says in another order, in other letters."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "data").mkdir()
    animals, colours = WORDS
    for split, lines in (("train", 48), ("val", 12)):
        pairs = [(animals[i % 4], colours[(i // 4) % 3]) for i in range(lines)]
        de = "".join(f"a {colour} {animal}.\n" for animal, colour in pairs)
        xx = "".join(f"{animal.upper()} {colour.upper()} IS HERE!\n" for animal, colour in pairs)
        (folder / "data" / f"{split}.de").write_text(de)
        (folder / "data" / f"{split}.xx").write_text(xx)
    return folder


def run_of(corpus, folder, **changes):
    values = {
        "data.path": (str(corpus / "data"),),
        "data.cache_dir": str(corpus / "cache"),
        "data.denoising": 0.25,
        "data.temperature": 2.0,
        "model.dim": 16,
        "model.moe.router_noise": "gumbel",
        "train.dtype": "float64",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.run_dir": str(folder),
        "train.resume": "auto",
    }
    return translate_test().updated(values | changes)


@pytest.fixture(scope="module")
def straight(corpus):
    folder = corpus / "straight"
    result = train_quietly(run_of(corpus, folder))
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    assert {"loss_de-xx", "loss_xx-de"} < set(result.evaluation)
    used = [line["counts_by_label"] for line in read_use(folder / "experts.jsonl")]
    assert set(used[0]) == {"de-xx", "xx-de", "de", "xx"}
    for line, by_label in zip(read_use(folder / "experts.jsonl"), used, strict=True):
        for layer, counts in enumerate(line["counts"]):
            assert counts == [sum(n) for n in zip(*(of[layer] for of in by_label.values()), strict=True)]
    return folder


def test_stopped_and_resumed_to_the_bit(corpus, straight, tmp_path):
    assert_resumed_to_the_bit(partial(run_of, corpus), straight, tmp_path)


def mortal_main(corpus, folder):
    family = Family(SEQ2SEQ.name, task=mortal(Seq2SeqTask, step=12), config=SEQ2SEQ.config, items="tokens")
    train_quietly(run_of(corpus, folder), family=family)


def test_killed_and_resumed_on_two_ranks(corpus, straight, tmp_path):
    agent = Agent(2, tmp_path)
    codes = agent.run(mortal_main, corpus, tmp_path / "run", restarts=1, timeout_s=PATIENCE_S)
    assert codes == [0, 0], [agent.printed(rank)[-2000:] for rank in range(2)]
    assert agent.num_lives == 2
    names = "loss", "grad_norm", "aux_loss", "eval_loss"
    assert_same_lines(lines_of(tmp_path / "run"), lines_of(straight), *names)


@pytest.fixture(scope="module")
def learned(corpus):
    """Trained until it translates its few sentences."""
    folder = corpus / "learned"
    changes = {"train.steps": 150, "model.dim": 32, "data.pairs": ("de-xx",), "data.denoising": 0.0}
    changes |= {"train.eval_every": 150, "train.checkpoint_every": 150, "optim.lr": 1e-2}
    changes |= {"model.init_std": 0.15, "model.dropout": 0.0, "model.label_smoothing": 0.0}
    changes |= {"train.batch_size": 16}
    train_quietly(run_of(corpus, folder, **changes, **{"train.dtype": "float32"}))
    return str(folder)


def test_lines_of_standard_input(learned, capsys, typed):
    for words in (["-"], ["--input", "-"]):
        typed("\ufeff\r\na red dog.\r\n\n")  # an editor's mark, and nothing behind it
        assert main(["translate", "--run", learned, "--to", "xx", *words]) == 0
        assert capsys.readouterr().out == "\nDOG RED IS HERE!\n\n"


def test_it_translates(learned, corpus, capsys, tmp_path):
    assert main(["translate", "--run", learned, "--to", "xx", "a red dog.", "", "a green bird."]) == 0
    assert capsys.readouterr().out == "DOG RED IS HERE!\n\nBIRD GREEN IS HERE!\n"
    data = corpus / "data"
    words = ["translate", "--run", learned, "--to", "xx", "--input", str(data / "val.de")]
    output = tmp_path / "out.xx"
    assert main([*words, "--reference", str(data / "val.xx"), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "BLEU 100.00  nrefs:1|" in out.replace("#:1|", "nrefs:1|") and "chrF2 100.00" in out, out
    assert output.read_text() == (data / "val.xx").read_text()


def test_translations_before_a_full_disk_are_kept(learned, corpus, capsys, tmp_path):
    source, output = corpus / "data" / "val.de", tmp_path / "out.xx"
    words = ["translate", learned, "--to", "xx", "--input", str(source), "--output", str(output)]
    right = (corpus / "data" / "val.xx").read_text().splitlines(keepends=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len("".join(right[:5])) + 1, before[1]))
    try:
        assert main([*words, "--batch-size", "2"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    part = tmp_path / "out.xx.part"
    said = capsys.readouterr().err
    assert f"note: the first 5 of 12 texts are in {part}\n" in said and "File too large" in said
    assert part.read_text() == "".join(right[:5]) and list(tmp_path.iterdir()) == [part]


def test_lines_that_are_not_translated_are_not_scored(learned, capsys, tmp_path):
    for name, lines in (
        ("de", ("a red dog.", "", "a green bird.", "a blue cat.")),
        ("xx", ("DOG RED IS HERE!", "CAT RED IS HERE!", " ", "CAT BLUE IS HERE!")),
    ):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    words = [
        "translate",
        "--run",
        learned,
        "--to",
        "xx",
        "--input",
        str(tmp_path / "de"),
    ]
    reference = str(tmp_path / "xx")
    assert main([*words, "--reference", reference]) == 0
    out, error = capsys.readouterr()
    assert out.count(" 100.00") == 2, out
    assert error.count("note: 2 of 4 lines are not scored") == 1
    (tmp_path / "xx").write_text("\nDOG\n\n\n")
    assert main([*words, "--reference", reference]) == 2
    assert "has no line for a text that is not blank" in capsys.readouterr().err


def test_a_translation_does_not_depend_on_the_texts_beside_it(learned):
    """Of a text without an end, too: its length is bounded by its own."""
    found = load_run(learned)
    opened = open_model(found)
    task, model = opened.task, opened.model
    tokenizer = found.load_tokenizer()
    translation = task.builder.translation(tokenizer, to="xx")._replace(end_id=1)
    texts = ["a red dog.", "a blue cat. " * 4]
    together = translate(model, tokenizer, translation, texts)
    alone = [translate(model, tokenizer, translation, [text])[0] for text in texts]
    assert together == alone and len(set(map(len, alone))) == 2
    assert translate(model, tokenizer, translation, [" " * 999]) == [""], "blanks are not too long"


def test_a_long_text_is_translated_in_pieces_where_that_is_asked_for(learned, capsys):
    dogs = ["a red dog.", "a blue cat.", "a green bird."] * 12
    words = ["translate", "--run", learned, "--to", "xx", "--split-long"]
    assert main([*words, "a red dog.", " ".join(dogs), ""]) == 0
    short, long, blank = capsys.readouterr().out.split("\n")[:3]
    assert short == "DOG RED IS HERE!" and long.count(" IS HERE!") > 1 and not blank


def test_pieces_end_with_sentences_or_words_and_lose_nothing():
    def fits(text):
        return len(text) <= 12

    assert split_text("No. It is so! He said.", fits) == ["No.", "It is so!", "He said."]
    assert split_text("它是一只红色的狗。他说：“是。”再见。", fits) == [
        "它是一只红色的狗。",
        "他说：“是。”再见。",
    ]
    assert split_text("about 3.5 of them", fits) == ["about 3.5", "of them"]
    assert split_text("x" * 30, fits) == ["x" * 7, "x" * 8] * 2
    assert split_text("ab", lambda text: False) == ["a", "b"], "what never fits is refused later"


def test_a_translation_without_an_end_is_named(learned, caplog):
    found = load_run(learned)
    opened = open_model(found)
    task, model = opened.task, opened.model
    tokenizer = found.load_tokenizer()
    translation = task.builder.translation(tokenizer, to="xx")
    texts = ["a red dog.", "", "a blue cat."]
    assert translate(model, tokenizer, translation, texts)[0] == "DOG RED IS HERE!"
    assert not caplog.messages
    translate(model, tokenizer, translation, texts, num_beams=1, max_tokens=1)
    assert caplog.messages == [
        "2 of 3 translations have no end and were cut off at their greatest length: of texts 1, 3"
    ]


def test_a_line_is_what_ends_with_a_newline():
    """Not what Python's splitlines takes for one, as U+2028 and the form feed; and a translation is one line."""
    assert files.lines_of("a red dog.\u2028\r\n\x0c\n\na bird.") == [
        "a red dog.\u2028",
        "\x0c",
        "",
        "a bird.",
    ]
    assert files.lines_of("") == files.lines_of("\n")[1:] == []
    assert one_line(" A\nB\r\nC\n") == "A B  C"


@pytest.mark.parametrize(
    "words, text",
    [
        (["--to", "fr", "a dog"], "language fr: unknown; known here: de, xx"),
        (["--to", "xx"], "no text, or text and --input"),
        (["--to", "xx", "a dog", "--reference", "nowhere"], "--reference nowhere: is not a file"),
        (["--to", "xx", "a dog", "--reference", __file__], "lines for 1 texts"),
        (["--to", "xx", "--beams", "0", "a dog"], "--beams 0: must be at least 1"),
        (
            ["--to", "xx", "--beams", "9" * 9, "a dog"],
            "--beams 999999999: must be a whole number from 1 to",
        ),
        (["--to", "xx", "--length-penalty", "1e308", "a dog"], "--length-penalty 1e+308: must"),
        (["--to", "xx", "dog " * 100], "text 1: has"),
        (["--to", "xx", "dog " * 100], "translated in pieces by --split-long"),
        (["--to", "xx", "dog " * 100, "a dog", "dog " * 99], "texts 1, 3: have up to"),
        (["--to", "xx", *["dog " * 99] * 25], "19, 20 and 5 more: have up to"),
    ],
)
def test_mistakes_are_one_line(learned, words, text, capsys):
    assert main(["translate", "--run", learned, *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer.json", r"tokenizer.json: has the SHA-256 \w+..., and \S+ was trained with"),
        ("config.json", r"config.json: has model.moe.top_k=\d+, and \S+ was trained with"),
    ],
)
def test_files_of_another_run_are_refused(learned, tmp_path, capsys, name, words):
    run = shutil.copytree(learned, tmp_path / "run")
    values = json.loads((run / name).read_text())
    if name == "config.json":
        values["model"]["moe"]["top_k"] = 3 - values["model"]["moe"]["top_k"]
    (run / name).write_text(json.dumps(values, indent=3))
    assert main(["translate", str(run), "--to", "xx", "a dog"]) == 1
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1, error


def test_other_verbs_answer(learned, capsys):
    assert main(["report", "--run", learned]) == 0
    assert "nats per target token" in capsys.readouterr().out
    assert main(["generate", "--run", learned, "a dog"]) == 2
    error = capsys.readouterr().err
    assert "expertmesh translate" in error and error.count("\n") == 1
    assert Path(learned, "tokenizer.json").is_file()
