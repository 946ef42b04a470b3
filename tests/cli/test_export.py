"""`expertmesh export`: one file with the weights of a checkpoint, of one rank or of several."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.support.runs import train_quietly

from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.main import main
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.training.export import export

TINY = {
    "model.dim": 16,
    "model.moe.bias_update_rate": 0.01,
    "train.steps": 2,
    "train.checkpoint_every": 1,
    "train.eval_every": 100,
    "train.eval_batches": 1,
    "train.device": "cpu",
    "train.dtype": "float32",
    "train.tensorboard": False,
    "optim.warmup_steps": 1,
    "data.max_bytes": 60_000,
}


def train_tiny(folder, name):
    places = {"train.run_dir": str(folder / name), "data.cache_dir": str(folder / "cache")}
    train_quietly(RECIPES["gpt-moe-test"]().updated(TINY | places), recipe="gpt-moe-test")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, two_ranks):
    """A run of one process and one of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    train_tiny(folder, "one")
    two_ranks.run(train_tiny, folder, "two")
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_file_gives_the_model_of_the_checkpoint(runs, tmp_path, capsys, name):
    output = tmp_path / "model.safetensors"
    assert main(["export", str(runs / name), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "of step 2" in said and f"{output.stat().st_size:,} bytes" in said
    with safe_open(output, "pt") as file:
        texts = file.metadata()
    assert (texts["step"], texts["recipe"]) == ("2", "gpt-moe-test")
    config = GPTRunConfig.model_validate_json(texts["config"])
    model, expected = GPT(config.model, seed=1), GPT(config.model, seed=2)
    model.load_state_dict(load_file(output), strict=True)
    last = list_checkpoints(runs / name / "checkpoints")[-1]
    read_into(Checkpoint(last, prefix="model."), expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_older_checkpoint_and_an_existing_file(runs, tmp_path, capsys):
    output = tmp_path / "model.safetensors"
    older = list_checkpoints(runs / "two" / "checkpoints")[0]
    assert main(["export", str(older), "--output", str(output)]) == 0
    before = output.read_bytes()
    assert main(["export", str(runs / "two"), "--output", str(output)]) == 2
    assert "exists already" in capsys.readouterr().err and output.read_bytes() == before
    assert main(["export", str(runs / "two"), "--output", str(output), "--overwrite"]) == 0
    assert output.read_bytes() != before


def test_all_dtypes_survive(tmp_path):
    from expertmesh.checkpoints.store import CheckpointStore

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    tensors = {f"model.{str(d)[6:]}": torch.tensor([[0, 1], [1, 1]]).to(d) for d in dtypes}
    tensors |= {"model.scalar": torch.tensor(2.5), "model.empty": torch.zeros(0, 3)}
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, tensors, {"config": {}}, eval_loss=None)
    store.wait()
    store.close()
    found = export(tmp_path / "step_00000001", tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert found.num_tensors == len(loaded) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name.removeprefix("model.")], tensor), name


def test_a_link_to_a_file_stays_a_link(runs, tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    export(runs / "one", tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert load_file(tmp_path / "file")


def test_the_header_is_what_the_format_says(runs, tmp_path):
    export(runs / "one", tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert (8 + length) % 8 == 0
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length
