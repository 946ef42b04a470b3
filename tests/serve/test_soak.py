"""The short form of `make soak`, and the client that puts the load on."""

import pytest
from tests.support.serving import served
from tests.support.soak import soak

from expertmesh.cli.main import main


def test_streams_side_by_side_are_whole_or_refused_and_leave_nothing(folder):
    with served(folder, "--max-sequences", "8", "--max-waiting", "8") as server:
        for seed in range(2):
            found = soak(server, clients=24, seconds=1.5, seed=seed)
            assert found.strays == [] and found.held == 0
            assert any(one.is_whole for one in found.outcomes)
            assert any(one.is_cut for one in found.outcomes)
            assert any(one.status == 429 for one in found.outcomes)


def test_bench_serve_prints_times_and_throughput(server, capsys, tmp_path):
    (tmp_path / "load.yaml").write_text("num_requests: 9\nprompt_tokens: [4, 8]\n")
    words = ["--config", str(tmp_path / "load.yaml"), "--answer-tokens", "4", "6"]
    words += [
        "--rate",
        "100",
        "--prefix-tokens",
        "32",
        "--num-prefixes",
        "2",
        "--num-requests",
        "12",
    ]
    assert main(["bench", "serve", server.address, *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("12 answered, 0 refused (429), 0 failed")
    assert "time to first token" in said and "p99" in said and "nan" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["127.0.0.1:1"], "must be http://HOST:PORT"),
        (["http://127.0.0.1:1"], "gives no /tokenizer_info"),
        (["http://127.0.0.1:1", "--rate", "0"], "--rate 0"),
        (["http://127.0.0.1:1", "--prompt-tokens", "9", "3"], "--prompt-tokens 9 3"),
        (["http://127.0.0.1:1", "--config", "gone.yaml"], "does not exist"),
    ],
)
def test_wrong_words_of_bench_serve_are_one_line(words, said, capsys):
    assert main(["bench", "serve", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_requests_that_no_model_has_room_for_are_refused_before_they_are_sent(server, capsys):
    assert main(["bench", "serve", server.address, "--prefix-tokens", "500"]) == 2
    assert "has room for 512" in capsys.readouterr().err
