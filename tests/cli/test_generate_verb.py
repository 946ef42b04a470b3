"""`expertmesh generate` on a run directory with a random model."""

import gzip
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from tests.support.agent import Agent, hasty_main
from tests.support.full_screen import full_log
from tests.support.patience import PATIENCE_S
from tests.support.ranks import RankPool

import expertmesh as em
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.cli.main import main
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.texts import prompt_ids, stream_text
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.ops.backend import cpu_kernels
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.format import text_format
from expertmesh.text.tokenizer import load_tokenizer, train_tokenizer

TEXTS = ["def main():\n    return 'é'\n", "import os\n"] * 30
BF16_ROUNDING = 2.0**-5
PROMPT = "def main("
COMPUTING = f"computing in float32 on cpu, kernels {cpu_kernels()} (as it was trained)"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training leaves behind that `generate` reads."""
    folder = tmp_path_factory.mktemp("run")
    config = RECIPES["gpt-moe-test"]().updated({"train.dtype": "float32", "model.init_std": 0.3})
    tokenizer = folder / "trained.json"
    train_tokenizer(TEXTS, vocab_size=config.model.vocab_size).save(str(tokenizer))
    files = {"tokenizer.json": tokenizer}
    RunDir(folder).write_description(config, recipe="gpt-moe-test", files=files)
    model = GPT(config.model, dtype=torch.float32, seed=1)
    store = CheckpointStore(RunDir(folder).checkpoints, keep_last=1)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    store.save(5, tensors, {}, eval_loss=None)
    store.wait()
    store.close()
    return folder


def printed(run_dir: Path, *words: str, capsys: pytest.CaptureFixture[str], prompt: str = PROMPT) -> str:
    assert main(["generate", "--run", str(run_dir), *words, prompt]) == 0
    return capsys.readouterr().out


def test_prints_what_the_engine_generates(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = RunDir(run_dir).read_config()
    tokenizer = load_tokenizer(run_dir / "tokenizer.json")
    text = text_format(tokenizer)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=3, max_tokens=12)
    model = GPT(config.model, dtype=torch.float32, seed=1)
    pieces = stream_text(model, prompt_ids(text, PROMPT), params, text=text)
    words = ("--max-tokens", "12", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.9")
    assert printed(run_dir, *words, "--seed", "3", capsys=capsys) == PROMPT + "".join(pieces) + "\n"


def test_seed_and_greedy(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [printed(run_dir, "--seed", seed, capsys=capsys) for seed in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]
    greedy = [printed(run_dir, "--greedy", "--seed", seed, capsys=capsys) for seed in ("0", "1")]
    assert greedy[0] == greedy[1] != texts[0]


def test_prompt_from_standard_input(
    run_dir: Path, capsys: pytest.CaptureFixture[str], typed: Callable[[str], None]
) -> None:
    expected = printed(run_dir, "--max-tokens", "5", capsys=capsys)
    typed(PROMPT)
    assert printed(run_dir, "--max-tokens", "5", capsys=capsys, prompt="-") == expected


def test_a_text_that_quotes_the_end_of_text_is_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "x = '<|endoftext|>'"
    assert printed(run_dir, "--max-tokens", "2", capsys=capsys, prompt=prompt).startswith(prompt)


def refused(run_dir: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["generate", "--run", str(run_dir), *words]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("error: ") and "unexpected" not in line and said.out == ""
    return line


def test_temperature_0_is_greedy_and_the_smallest_one_works(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = printed(run_dir, "--greedy", "--max-tokens", "8", capsys=capsys)
    for temperature in ("0", "1e-320", "1e-30"):
        words = ("--temperature", temperature, "--max-tokens", "8")
        assert printed(run_dir, *words, capsys=capsys) == greedy


def test_a_note_that_cannot_be_written_ends_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--chat", "--greedy", "--max-tokens", "2")  # with a note: it learned no conversations
    expected = printed(run_dir, *words, capsys=capsys)
    with full_log():
        assert printed(run_dir, *words, capsys=capsys) == expected


@pytest.mark.parametrize("prompt", ["-x", "--debug", "--x"])
def test_a_prompt_that_begins_like_an_option(run_dir: Path, capsys: pytest.CaptureFixture[str], prompt: str) -> None:
    if prompt != "--debug":  # that is an option before --
        line = refused(run_dir, prompt, capsys=capsys)
        assert "write it last, and -- before one that begins with -" in line
    assert main(["generate", "--run", str(run_dir), "--max-tokens", "2", "--", prompt]) == 0
    assert capsys.readouterr().out.startswith(prompt)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-draft-tokens", "65"), "--num-draft-tokens 65: must be at most 64; for example 64"),
        (("--expert-slots", "0"), "--expert-slots 0: must be greater than 0"),
        (("--adapter", "no"), "--adapter no: has no readable adapter_config.json; give a folder"),
    ],
)
def test_fixes_of_options_are_possible(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refused(run_dir, *words, PROMPT, capsys=capsys)


@pytest.mark.parametrize("device", ["mps", "cuda:99", "gpu"])
def test_errors_of_the_device_name_the_option_of_this_verb(
    run_dir: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    line = refused(run_dir, "--device", device, PROMPT, capsys=capsys)
    assert line.startswith(f"error: --device {device}: ") and "train" not in line


@pytest.mark.parametrize(
    ("setup", "prompt", "said"),
    [
        ("", b"'\xff'", "is not UTF-8 text; convert it"),
        ("printf '\\377' |", b"'-'", "is not UTF-8 text, but perhaps latin-1; convert it"),
        ("", b"'-' <&-", "is empty; give some text"),
        ("", b"'def' >&-", "standard output is closed"),
    ],
    ids=["words", "input", "closed input", "closed output"],
)
def test_streams_of_any_kind(run_dir: Path, setup: str, prompt: bytes, said: str) -> None:
    words = f"{setup} {sys.executable} -m expertmesh generate --run {run_dir} --max-tokens 2 "
    command = ["/bin/sh", "-c", words.encode() + prompt]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.decode() and b"unexpected" not in done.stderr


def test_an_output_that_lacks_a_letter(run_dir: Path) -> None:
    """As with PYTHONIOENCODING=ascii."""
    raw = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(raw, encoding="ascii")):
        assert main(["generate", "--run", str(run_dir), "--max-tokens", "2", "h\u00e9"]) == 0
        sys.stdout.flush()
        assert raw.getvalue().startswith(b"h\\xe9")


def test_several_prompts_and_a_file_of_them(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each gets what it would get alone, in the order in which they are given."""
    prompts = ["import os", "def main("]
    alone = [printed(run_dir, "--greedy", "--max-tokens", "4", capsys=capsys, prompt=p) for p in prompts]
    expected = "".join(f"--- {i}\n{text}" for i, text in enumerate(alone, 1))
    words = ["generate", "--run", str(run_dir), "--greedy", "--max-tokens", "4"]
    assert main([*words, *prompts]) == 0
    assert capsys.readouterr().out == expected
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts), encoding="utf-8-sig")
    assert main([*words, "--prompt-file", str(tmp_path / "prompts.txt"), "--batch-size", "1"]) == 0
    assert capsys.readouterr().out == expected


def test_objects_in_and_out(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of a JSON Lines file gets an answer in another, in its order, and nothing is printed."""
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    turns = [{"role": "user", "content": "def"}]
    asked.write_text(json.dumps({"prompt": PROMPT}) + "\n\n" + json.dumps({"messages": turns}))
    words = ["generate", "--run", str(run_dir), "--greedy", "--max-tokens", "4"]
    assert main([*words, "--input", str(asked), "--output", str(answered)]) == 0
    assert capsys.readouterr().out == ""
    first, second = map(json.loads, answered.read_text().splitlines())
    alone = printed(run_dir, "--greedy", "--max-tokens", "4", capsys=capsys)
    assert PROMPT + first["text"] + "\n" == alone and first["finish_reason"] == "length"
    assert second["messages"] == turns and second["text"]
    assert main([*words, "--chat", "def"]) == 0
    assert capsys.readouterr().out == second["text"] + "\n"


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.jsonl.gz", "array.json", "array.jsonl"]
)
def test_objects_of_all_endings_and_forms(run_dir: Path, tmp_path: Path, name: str) -> None:
    asked, answered = tmp_path / name, tmp_path / "answered.jsonl"
    values = [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": "def"}]}]
    text = "\n".join(map(json.dumps, values))
    if name.startswith("array"):
        text = json.dumps(values, indent=1)
    data = text.encode("utf-8-sig")
    asked.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    words = ["generate", "--run", str(run_dir), "--greedy", "--max-tokens", "2"]
    assert main([*words, "--input", str(asked), "--output", str(answered)]) == 0
    found = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [one.get("prompt", one.get("messages")) for one in found] == [
        PROMPT,
        values[1]["messages"],
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '[{"prompt": "a"}, {"prompt": 3}]', "entry 2: must be"),
        ("a.json", '{"prompt": 3}', "entry 1: must be"),
        ("a.json", '[{"prompt": "a"},', "is no JSON (line 1)"),
        ("a.csv", "prompt\na\n", "prompts are not read from .csv; give a text"),
        ("a.txt.gz", "a\n", "cannot be read (damaged: "),
    ],
)
def test_what_holds_no_prompts_is_named(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    said: str,
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert f"--input {path}: {said}" in refused(run_dir, "--input", str(path), capsys=capsys)


def test_a_developer_is_the_system(run_dir: Path, tmp_path: Path) -> None:
    """As in OpenAI's newer conversations, in a file of prompts as on the server."""
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    said = [
        [{"role": role, "content": "short"}, {"role": "user", "content": "def"}] for role in ("system", "developer")
    ]
    asked.write_text("\n".join(json.dumps({"messages": one}) for one in said))
    words = ["generate", "--run", str(run_dir), "--greedy", "--max-tokens", "4"]
    assert main([*words, "--input", str(asked), "--output", str(answered)]) == 0
    first, second = map(json.loads, answered.read_text().splitlines())
    assert (first["messages"], second["messages"]) == tuple(said)
    assert first["text"] == second["text"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2: must be"),
        ('{"prompt": 3}', "line 2: must be"),
        ('{"prompt": "a", "n": 2}', "line 2: must be"),
        ('{"messages": []}', "line 2: must be"),
        ('{"messages": [{"role": "user"}]}', "line 2: must be"),
        ('{"prompt": ""}', "line 2: prompt='': is empty"),
        ('{"prompt": "\\ud800"}', "line 2: has half a character"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 2: has half a character"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "foo", "content": "a"}]}',
            "line 2: message 2 has role foo, which is none of system, user, assistant, tool",
        ),
        (json.dumps({"prompt": "x " * 200}), "line 2: prompt of"),
        (json.dumps({"messages": [{"role": "user", "content": "x " * 200}]}), "line 2: prompt of"),
    ],
)
def test_a_line_that_asks_nothing_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n' + line)
    path = tmp_path / "asked.jsonl"
    assert f"--input {path}: {said}" in refused(run_dir, "--input", str(path), capsys=capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([PROMPT, "x " * 200], "prompt 2: prompt of"),
        ([PROMPT, PROMPT, ""], "prompt 3: prompt='': is empty"),
        (["--max-tokens", "999", PROMPT, PROMPT], "prompt 1: --max-tokens 999: with a prompt of"),
        (["x " * 200], "prompt of"),
        ([""], "prompt='': is empty"),
    ],
)
def test_an_error_of_one_prompt_names_it_and_nothing_is_generated(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    assert refused(run_dir, *words, capsys=capsys).startswith(f"error: {said}")
    if len(words) == 2:
        (tmp_path / "mix.txt").write_text("\n\n".join(words))
        place = f"error: --input {tmp_path / 'mix.txt'}: line 3: prompt of"
        line = refused(run_dir, "--input", str(tmp_path / "mix.txt"), capsys=capsys)
        assert line.startswith(place)


def test_answers_go_into_no_file_that_is_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.txt"
    asked.write_text("def\n")
    for words, said in (
        (("--input", str(asked), "--output", str(asked)), "which is read"),
        (("--input", str(asked), "--output", str(tmp_path / "no" / "x")), "there is no folder"),
        (("--interactive", "--output", str(tmp_path / "x")), "no effect with --interactive"),
    ):
        assert said in refused(run_dir, *words, capsys=capsys)
    assert asked.read_text() == "def\n"


def test_interactive(run_dir: Path, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """A line is a prompt, until there are no more; one that is too long is said and the next is answered."""
    alone = printed(run_dir, "--greedy", "--max-tokens", "4", capsys=capsys)
    lines = f"{'x ' * 200}\n\n{PROMPT}\n{PROMPT}"
    typed(lines)
    words = ["generate", "--run", str(run_dir), "--greedy", "--interactive", "--max-tokens"]
    assert main([*words, "4"]) == 0
    said = capsys.readouterr()
    assert said.out == 2 * alone.removeprefix(PROMPT)
    assert said.err.count("error: ") == 1 and "max_seq_len" in said.err
    typed(lines)
    assert main([*words, "999"]) == 0
    assert capsys.readouterr().err.count("error: --max-tokens 999: ") == 2


def test_a_typed_line_in_another_encoding_is_said_and_the_next_is_answered(
    run_dir: Path, typed: Callable[[str | bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed(b"caf\xe9\n\xc3\xa9\r\n")
    words = ["generate", "--run", str(run_dir), "--greedy", "--max-tokens", "2", "--interactive"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("error: ") == 1 and "latin-1; convert it" in said.err
    assert said.out.endswith("\n") and len(said.out) > 1


def test_experts_are_cast_once_and_not_for_every_token(run_dir: Path, tmp_path: Path) -> None:
    """A run in BF16 has FP32 weights, and autocast would cast those of all experts in each call."""
    shutil.copytree(run_dir, tmp_path / "run")
    config, _ = RunDir(run_dir).read_config()
    config = config.updated({"train.dtype": "bfloat16"})
    RunDir(tmp_path / "run").write_description(config, recipe="gpt-moe-test", files={})
    ids = torch.arange(1, 9)[None]
    opened = open_model(tmp_path / "run", for_autocast=True)
    model, precision = opened.decoder, opened.precision
    plain = open_model(tmp_path / "run").model
    with torch.no_grad(), precision.autocast():
        # native kernels serve weights that are BF16 already, with another order of sums
        pair = model(ids).logits_BSV.double(), plain(ids).logits_BSV.double()
        assert (pair[0] - pair[1]).norm() <= BF16_ROUNDING * pair[1].norm()
    kept = {n: p.dtype for n, p in model.named_parameters() if p.dtype != torch.float32}
    assert kept and set(kept.values()) == {torch.bfloat16}
    assert all(".experts." in name for name in kept)


def test_several_processes_answer_once(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--greedy", "--max-tokens", "12"
    expected = f"{COMPUTING}\n{printed(run_dir, *words, capsys=capsys)}"
    # with whole experts and two choices, sums are the same to the bit
    words = "generate", str(run_dir), *words, "--es-degree", "1", PROMPT
    agent = Agent(2, tmp_path)
    codes = agent.run(main, words, restarts=0, timeout_s=PATIENCE_S)
    assert (codes, agent.printed(0), agent.printed(1)) == ([0, 0], expected, "")
    for mistake, reason in (
        ((*words[:-1], ""), "prompt=''"),
        (["100" if word == "12" else word for word in words], "--max-tokens 100"),
    ):
        codes = agent.run(main, mistake, restarts=0, timeout_s=PATIENCE_S)
        said = [agent.printed(rank) for rank in range(2)]
        # by rank 0; by rank 1, too, where that was left waiting for so long that it could not be heard
        assert any(codes) and any(reason in each for each in said), (codes, said)
        assert all(each.count("error:") == (reason in each) for each in said), said
    assert main([*words]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_ranks_that_share_a_model_say_the_same(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_dir), "--greedy", "--max-tokens", "8", PROMPT, "other"]
    assert main(words) == 0
    expected = f"{COMPUTING}\n{capsys.readouterr().out}"
    agent, slots = Agent(2, tmp_path), ("--expert-slots", "2")  # which ranks have in an engine only
    codes = agent.run(main, [*words, *slots], restarts=0, timeout_s=PATIENCE_S)
    assert (codes, agent.printed(0), agent.printed(1)) == ([0, 0], expected, "")
    assert main([*words, "--parallel.tp-degree", "2"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("shares", [["--parallel.tp-degree", "2"], []], ids=["shared", "spread"])
def test_a_killed_rank_ends_the_other_with_one_line(run_dir: Path, tmp_path: Path, shares: list[str], odd: int) -> None:
    """One that leads, one that follows, and one of two that do the same."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def\n" * 600)
    agent = Agent(2, tmp_path)
    words = ["generate", str(run_dir), "--input", str(prompts), "--max-tokens", "40"]
    agent.start(hasty_main, [*words, "--batch-size", "2", *shares])
    try:
        end = time.monotonic() + PATIENCE_S
        while "--- 3" not in agent.printed(0):
            assert time.monotonic() < end and None in agent.wait(timeout_s=0.1), agent.printed(0)
        agent.kill(odd)
        codes = agent.wait(timeout_s=PATIENCE_S)
        said = agent.printed(1 - odd)
    finally:
        agent.stop()
    assert codes[1 - odd] == 1, (codes, said[-500:])
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"rank {1 - odd}: " in lines[0], said[-500:]
    assert "Traceback" not in said and "--- 600" not in said


def loaded(run_dir: Path) -> str | list[str]:
    """What a model generates whose experts are spread."""
    with pytest.raises(em.ConfigError, match="spread=True"):
        em.load(run_dir, es_degree=1)
    model, tokenizer = em.load(run_dir, spread=True, es_degree=1)
    return em.generate(model, tokenizer, PROMPT, max_tokens=12, temperature=0)


def test_python_loads_it_on_several_ranks(run_dir: Path, two_ranks: RankPool) -> None:
    model, tokenizer = em.load(run_dir)
    expected = em.generate(model, tokenizer, PROMPT, max_tokens=12, temperature=0)
    assert two_ranks.run(loaded, run_dir) == [expected, expected]
