"""What ranks read of a checkpoint that they open together: their own part, and a share of the checksums."""

import pytest
import torch
from tests.support.calls import calls_of
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.checkpoints import dcp_files, dcp_index, manifest
from expertmesh.comm.world import World
from expertmesh.models.gpt.model import GPT
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.init_from import save_as_run

BLOCK = 4096


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read") / "run"
    tokenizer = folder.parent / "tokenizer.json"
    config = em.recipe(
        "gpt-moe-test",
        {"train.run_dir": str(folder), "train.device": "cpu", "train.dtype": "float32"},
    )
    train_tokenizer(["some words"], vocab_size=config.model.vocab_size).save(str(tokenizer))
    model = GPT(config.model, dtype=torch.float32, seed=0)
    save_as_run(model, config, recipe="test", files={"tokenizer.json": tokenizer})
    checkpoint = next((folder / "checkpoints").iterdir())
    files = [path for path in checkpoint.iterdir() if path.name != manifest.NAME]
    sums = {path.name: manifest.described(path, block_bytes=BLOCK) for path in files}
    manifest.write_manifest(checkpoint, sums, version=1)
    return folder


def opened(folder):
    """Bytes compared, bytes copied, bytes of this rank's tensors, times that the index was read."""
    world = World() if torch.distributed.is_initialized() else None
    calls = []
    try:
        for function in (manifest._sha256, dcp_files.copy_piece, dcp_index.read_index):
            with calls_of(function) as found:
                loaded = open_model(folder, device="cpu", ranks=Ranks(world))
            calls.append([told for told, _ in found])
    finally:
        if world is not None:
            world.close()
    sums, copies, indices = calls
    state = loaded.model.state_dict().values()
    return (
        sum(told["num_bytes"] for told in sums),
        sum(told["target"].numel() * told["dtype"].itemsize for told in copies),
        sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in state),
        len(indices),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_reads_its_part_and_its_share_of_the_files(run_dir, num_ranks, request):
    checkpoint = next((run_dir / "checkpoints").iterdir())
    files = sum(p.stat().st_size for p in checkpoint.iterdir() if p.name != "manifest.json")
    if num_ranks == 1:
        found = [opened(run_dir)]
    else:
        ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[num_ranks])
        found = ranks.run(opened, run_dir)
    assert sum(compared for compared, *_ in found) == files
    for compared, copied, own, reads in found:
        assert copied == own, "its part, once"
        assert compared <= files / num_ranks + BLOCK
        assert reads == 1
    if num_ranks > 1:
        assert max(own for _, _, own, _ in found) < opened(run_dir)[2]
