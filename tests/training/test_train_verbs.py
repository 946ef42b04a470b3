"""`expertmesh train` and `expertmesh report`, called as the command line calls them."""

import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.support.calls import calls_of
from tests.support.mistakes import reseal
from torch import nn

from expertmesh.checkpoints.store import newest_good
from expertmesh.cli import report, report_samples
from expertmesh.cli.main import main
from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus
from expertmesh.errors import TrainingDivergedError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.registry import DEFAULT
from expertmesh.models.task import Baseline
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.format import text_format
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.loop import train

TINY = [
    "--model.vocab-size",
    "300",
    "--model.dim",
    "32",
    "--model.moe.hidden-dim",
    "16",
    "--model.max-seq-len",
    "64",
    "--data.seq-len",
    "64",
    "--train.batch-size",
    "4",
    "--train.eval-batches",
    "1",
    "--train.dtype",
    "float32",
    "--train.device",
    "cpu",
    "--train.no-tensorboard",
]


def words(tmp_path, corpus_folder, cache_folder, *more):
    data = ["--data.path", str(corpus_folder), "--data.cache-dir", str(cache_folder)]
    return [*TINY, *data, "--train.run-dir", str(tmp_path / "run"), *more]


def test_train_prints_progress_and_a_summary(tmp_path, corpus_folder, cache_folder, capsys):
    argv = words(tmp_path, corpus_folder, cache_folder, "--train.steps", "4")
    assert main(["train", "gpt-moe-test", *argv]) == 0
    out = capsys.readouterr().out
    for text in ("step 1/4: loss", "tokens/s", "grad norm", "expert load", "ETA", "dead experts"):
        assert text in out
    assert "4 steps, 1,024 tokens" in out and "bits per byte" in out
    assert main(["train", "gpt-moe-test", *argv]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "gpt-moe-test", *argv, "--train.resume", "auto"]) == 0
    assert "nothing was left to do" in capsys.readouterr().out


def test_dry_run_writes_nothing(tmp_path, corpus_folder, cache_folder, capsys):
    argv = words(tmp_path, corpus_folder, cache_folder)
    assert main(["train", "gpt-moe-test", *argv, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "parameters" in out and "active" in out and "MiB" in out
    config = json.loads(out[out.index("{") :])
    assert config["model"]["dim"] == 32 and config["data"]["path"] == str(corpus_folder)
    assert not (tmp_path / "run").exists()


def report_words(tmp_path, *more):
    return ["report", str(tmp_path / "run"), "--samples", "2", "--tokens", "20", *more]


def test_report_compares_with_the_trigram_and_the_exit_code_says_who_wins_if_asked(
    tmp_path, corpus_folder, cache_folder, capsys, monkeypatch
):
    argv = words(tmp_path, corpus_folder, cache_folder, "--train.steps", "3")
    main(["train", "gpt-moe-test", *argv])
    capsys.readouterr()
    with calls_of(open_model) as opened:
        assert main(report_words(tmp_path)) == 0
    out = capsys.readouterr().out
    for text in ("before training", "after step 3", "byte trigram", "sample 2", "words that the"):
        assert text in out
    assert "NOT better" in out and "import os" not in out
    assert len(opened) == 1, "page and summary share the model"
    with calls_of(newest_good) as looked_for:
        assert main(report_words(tmp_path, "--check")) == 1
    assert len(looked_for) == 1
    poor = Baseline("byte trigram", "trigram model", 99.0)
    monkeypatch.setattr(GPTTask, "baseline", lambda task, data: poor)
    capsys.readouterr()
    again = report_words(tmp_path, "--check", "--temperature", "0", "--prompt", "alpha beta")
    assert main(again) == 0
    out = capsys.readouterr().out
    assert "better than the trigram model" in out and "prompt 'alpha beta'" in out


def test_report_says_of_which_step_and_which_data_its_numbers_are(tmp_path, corpus_folder, cache_folder, capsys):
    argv = words(tmp_path, corpus_folder, cache_folder, "--train.steps", "3")
    main(["train", "gpt-moe-test", *argv, "--train.eval-every", "1"])
    trained = capsys.readouterr().out
    metrics = tmp_path / "run" / "metrics.jsonl"
    # Steps that are in no checkpoint, as a diverging run leaves them.
    line = json.loads(metrics.read_text().splitlines()[-1])
    for step in (4, 5):
        lost = line | {"step": step, "loss": None, "eval_bits_per_byte": None, "skipped_steps": 1}
        with metrics.open("a") as file:
            file.write(json.dumps(lost) + "\n")
    assert main(report_words(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "on the trainer's sample, after step 3" in out and "after step 5" not in out
    assert "on all validation data, after step 3" in out
    value = re.search(r"step 3: validation loss .*?, ([0-9.]+) bits per byte", trained)[1]
    assert re.search(rf"trainer's sample, after step 3 +{value}\n", out)
    assert "not finite" in out and "1 steps were skipped" in out


def test_report_of_a_language_without_blanks_has_prompts_that_fit(tmp_path, cache_folder, capsys):
    """Four of its words may be more than the model reads."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(chr(0x3042 + i % 80) * 90 for i in range(400)), encoding="utf-8")
    main(["train", "gpt-moe-test", *words(tmp_path, text, cache_folder, "--train.steps", "1")])
    assert main(report_words(tmp_path)) == 0
    assert re.search(r"sample 2, prompt '\S", capsys.readouterr().out)


@pytest.mark.parametrize("change", ["moved", "changed", "of elsewhere"])
def test_report_without_its_data_says_so_and_samples(tmp_path, make_corpus, cache_folder, capsys, change):
    folder = make_corpus(tmp_path / "texts")
    argv = words(tmp_path, folder, cache_folder, "--train.steps", "2")
    main(["train", "gpt-moe-test", *argv])
    reason = "not what the run"
    if change == "moved":
        folder.rename(tmp_path / "elsewhere")
        reason = "does not exist"
    elif change == "of elsewhere":  # as a converted run is; nothing is prepared in vain
        (state,) = (tmp_path / "run").glob("checkpoints/*/state.json")
        state.write_text(json.dumps(json.loads(state.read_text()) | {"data_key": ""}))
        reseal(state.parent)
        reason = "came from elsewhere"
    else:
        (folder / "file000.txt").write_text("another text\n")
    capsys.readouterr()
    with calls_of(GPTTask.prepare) as prepared:
        assert main(report_words(tmp_path)) == 0
    assert bool(prepared) == (change != "of elsewhere")
    out = capsys.readouterr().out
    for text in ("not judged beside a baseline", reason, "sample 2", "before training"):
        assert text in out
    assert main(report_words(tmp_path, "--check")) == 1


def test_report_of_a_run_that_diverged_at_once_shows_the_curve(tmp_path, capsys, tiny):
    config = tiny(**{"model.init_std": 1e38})
    with pytest.raises(TrainingDivergedError):
        train(config, recipe="gpt-moe-test", console=Console(quiet=True))
    assert main(["report", config.train.run_dir]) == 0
    out, error = capsys.readouterr()
    assert "not finite" in out and "not judged, and no samples" in out and not error
    assert "has no checkpoint yet" in out
    assert main(["report", config.train.run_dir, "--check"]) == 1
    RunDir(config.train.run_dir).metrics.unlink()
    assert main(["report", config.train.run_dir]) == 1, "there is nothing to report"


def test_report_of_python_source_begins_like_python(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n" * 9)
    (tmp_path / "b.py").write_text("y = 1\n" * 9)
    corpus = load_corpus(TextConfig(path=str(tmp_path)))
    assert report_samples.prompts_of(corpus, 9)[:8] == list(report_samples.PYTHON_PROMPTS)
    found = [report_samples.Sample("x", " = 2", True)]
    shown = "sampled words that the training text has: 1 of 1 (100%)"
    assert report_samples.measure(found, corpus) == shown
    (tmp_path / "c.txt").write_text("Speak, speak again.\n\nAll resolved to die.\n" * 20)
    corpus = load_corpus(TextConfig(path=str(tmp_path)))
    assert "import os\nimport sys\n" not in report_samples.prompts_of(corpus, 9)
    assert "words that the training text has" in report_samples.measure(found, corpus)


def test_a_sample_that_ends_is_not_cut(tmp_path):
    """Also where it is the last one to end."""
    tokenizer = train_tokenizer(["some words"], vocab_size=300)
    model = GPT(ModelConfig(vocab_size=300, dim=16, num_layers=1), seed=0)
    nn.init.zeros_(model.embedding.weight)  # the first token is the most likely: the end of text
    text = text_format(tokenizer, tmp_path / "tokenizer.json", model=model)
    opened = SimpleNamespace(decoder=model, text=text)
    options = {"prompts": ["x"], "num_tokens": 3, "temperature": 0.0, "seed": 0}
    assert report_samples.sample(opened, **options) == [report_samples.Sample("x", "", False)]


def test_words_that_a_sample_has_only_a_part_of_do_not_count():
    assert report_samples.countable_words(report_samples.Sample("hel", "lo big wor", True)) == ["big"]
    assert report_samples.countable_words(report_samples.Sample("hi", " big world", False)) == [
        "big",
        "world",
    ]
    assert report_samples.countable_words(report_samples.Sample("", "big world ", True)) == [
        "big",
        "world",
    ]


def test_the_curve_has_few_rows_and_ends_with_the_last():
    metrics = [
        {
            "step": i,
            "tokens": 10 * i,
            "loss": 5.0,
            "tokens_per_second": 1.0,
            "load_imbalance": 1.0,
            **({"eval_loss": 1.0, "eval_bits_per_byte": 2.5} if i % 10 == 0 else {}),
        }
        for i in range(1, 501)
    ]
    rows = report.curve_table(metrics, DEFAULT).splitlines()[1:]
    assert len(rows) <= 14 and rows[0].split()[0] == "1" and rows[-1].split()[0] == "500"
    assert report.curve_table([], DEFAULT) == "no metrics"
