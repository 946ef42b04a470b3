"""`expertmesh generate` on a run directory with a random model."""

import io
from pathlib import Path

import pytest
import torch

from expertmesh.cli.main import main
from expertmesh.data.tokenizer import END_OF_TEXT_ID, load_tokenizer, train_tokenizer
from expertmesh.infer.engine import generate_text
from expertmesh.infer.sampling import Sampling
from expertmesh.models.gpt.model import GPT
from expertmesh.recipes import RECIPES
from expertmesh.training.checkpoint import CheckpointStore
from expertmesh.training.run_dir import RunDir

TEXTS = ["def main():\n    return 'é'\n", "import os\n"] * 30
PROMPT = "def main("


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


def printed(
    run_dir: Path, *words: str, capsys: pytest.CaptureFixture[str], prompt: str = PROMPT
) -> str:
    assert main(["generate", "--run", str(run_dir), *words, prompt]) == 0
    return capsys.readouterr().out


def test_prints_what_the_engine_generates(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = RunDir(run_dir).read_config()
    tokenizer = load_tokenizer(run_dir / "tokenizer.json")
    pieces = generate_text(
        GPT(config.model, dtype=torch.float32, seed=1),
        tokenizer,
        PROMPT,
        max_new_tokens=12,
        sampling=Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3),
        eos_id=END_OF_TEXT_ID,
        start_id=END_OF_TEXT_ID,
    )
    words = ("--max-tokens", "12", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.9")
    assert printed(run_dir, *words, "--seed", "3", capsys=capsys) == PROMPT + "".join(pieces) + "\n"


def test_seed_and_greedy(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [printed(run_dir, "--seed", seed, capsys=capsys) for seed in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]
    greedy = [printed(run_dir, "--greedy", "--seed", seed, capsys=capsys) for seed in ("0", "1")]
    assert greedy[0] == greedy[1] != texts[0]


def test_prompt_from_standard_input(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(run_dir, "--max-tokens", "5", capsys=capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert printed(run_dir, "--max-tokens", "5", capsys=capsys, prompt="-") == expected


def test_a_text_that_quotes_the_end_of_text_is_text(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "x = '<|endoftext|>'"
    assert printed(run_dir, "--max-tokens", "2", capsys=capsys, prompt=prompt).startswith(prompt)
