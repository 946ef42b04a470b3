"""`expertmesh train` and `expertmesh report`, called as the command line calls them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli import report
from expertmesh.cli.main import main
from expertmesh.models.family import Baseline
from expertmesh.models.gpt.task import GPTTask

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


def test_report_compares_with_the_trigram_and_the_exit_code_says_who_wins(
    tmp_path, corpus_folder, cache_folder, capsys, monkeypatch
):
    argv = words(tmp_path, corpus_folder, cache_folder, "--train.steps", "3")
    main(["train", "gpt-moe-test", *argv])
    capsys.readouterr()
    arguments = ["report", "--run", str(tmp_path / "run"), "--samples", "2", "--tokens", "20"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    for text in ("before training", "after step 3", "byte trigram", "sample 2", "tokenise as"):
        assert text in out
    assert "NOT better" in out
    poor = Baseline("byte trigram", "trigram model", 99.0)
    monkeypatch.setattr(GPTTask, "baseline", lambda task, data: poor)
    assert main([*arguments, "--temperature", "0"]) == 0
    assert "better than the trigram model" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--run", "nowhere"], "does not exist"),
        (["--run", "x", "--tokens", "0"], "--tokens 0"),
        ([], "--run"),
    ],
)
def test_report_of_nothing_is_one_line(arguments, text, capsys):
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_report_needs_the_data_it_was_trained_on(tmp_path, make_corpus, cache_folder, capsys):
    folder = make_corpus(tmp_path / "texts")
    argv = words(tmp_path, folder, cache_folder, "--train.steps", "2")
    main(["train", "gpt-moe-test", *argv])
    (folder / "file000.txt").write_text("another text\n")
    assert main(["report", "--run", str(tmp_path / "run")]) == 2
    assert "not what the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, good",
    [
        ("import os", True),
        ("return self.value[3]", True),
        ("if x:", True),
        ("foo(a, b", False),
        ("print('unfinished)", False),
        ("a $ b", False),
        ("x = 'text'  # comment", True),
    ],
)
def test_the_rule_of_lines_that_tokenise(line, good):
    assert report.tokenises(line) == good


def test_countable_lines_leave_out_the_prompt_and_the_cut_line():
    cut = report.Sample("import os\nimport sys\n", "x = 1\n\n  y = 2\nz = (", True)
    assert report.countable_lines(cut) == ["x = 1", "y = 2"]
    ended = report.Sample("def f", "(a):\n    return a", False)
    assert report.countable_lines(ended) == ["def f(a):", "return a"]


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
    rows = report.curve_table(metrics).splitlines()[1:]
    assert len(rows) <= 14 and rows[0].split()[0] == "1" and rows[-1].split()[0] == "500"
    assert report.curve_table([]) == "no metrics"


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_process_cleanly(tmp_path, corpus_folder, cache_folder, number, code):
    argv = words(tmp_path, corpus_folder, cache_folder, "--train.steps", "100000")
    command = [sys.executable, "-m", "expertmesh", "train", "gpt-moe-test", *argv]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, error
    assert "Traceback" not in error and "continue with --train.resume auto" in out
    assert main(["train", "gpt-moe-test", *argv, "--train.resume", "auto", "--dry-run"]) == 0
    checkpoints = list((tmp_path / "run" / "checkpoints").glob("step_*"))
    last_step = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert f"step_{last_step:08d}" in {p.name for p in checkpoints}
