"""What ranks read of a checkpoint that they open together: their own part, and a share of the checksums."""

from unittest import mock

import pytest
import torch

import expertmesh as em
from expertmesh.checkpoints import dcp, manifest
from expertmesh.comm.world import World
from expertmesh.models.gpt.model import GPT
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.begin import save_as_run

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
    with mock.patch.object(manifest, "BLOCK_BYTES", BLOCK):
        save_as_run(model, config, recipe="test", files={"tokenizer.json": tokenizer})
    return folder


def opened(folder):
    """Bytes compared, bytes copied, bytes of this rank's tensors, times that the index was read."""
    compared, copied = [], []
    plain_sum, plain_copy = manifest._sha256, dcp.copy_piece

    def counted_sum(path, start, num_bytes):
        compared.append(num_bytes)
        return plain_sum(path, start, num_bytes)

    def counted_copy(target, *args, **kwargs):
        copied.append(target.numel() * kwargs["dtype"].itemsize)
        plain_copy(target, *args, **kwargs)

    world = World() if torch.distributed.is_initialized() else None
    try:
        with (
            mock.patch.object(manifest, "_sha256", counted_sum),
            mock.patch.object(dcp, "copy_piece", counted_copy),
            mock.patch.object(dcp, "read_index", wraps=dcp.read_index) as index,
        ):
            loaded = open_model(folder, device="cpu", ranks=Ranks(world))
        own = 0
        for tensor in loaded.model.state_dict().values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            own += local.nbytes
        return sum(compared), sum(copied), own, index.call_count
    finally:
        if world is not None:
            world.close()


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
