"""Tutel's files of the ranks: parted, loaded on two ranks to the outputs of one process, written back and joined."""

import pytest
import torch
import torch.distributed as dist
from tests.oracle.numerics import assert_close_fp64

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import checkpoint, moe
from expertmesh.integrations.tutel.checkpoint import gather, scatter

D, H = 8, 6
RANKS = 2
KINDS = {
    "ffn": {"type": "ffn", "hidden_size_per_expert": H},
    "without biases": {
        "type": "ffn",
        "hidden_size_per_expert": H,
        "has_fc1_bias": False,
        "has_fc2_bias": False,
    },
    "llama_ffn": {"type": "llama_ffn", "hidden_size_per_expert": H},
}
GATES = {
    "grouped": {"type": "top", "k": 2, "capacity_factor": 0},
    "cosine": {"type": "cosine_top", "k": 2, "capacity_factor": 0, "proj_dim": 5},
    "padded": [{"type": "top", "k": 2, "capacity_factor": 0}] * 2,
}  # fmt: skip
CASES = [(kind, gate, count) for kind in KINDS for gate in GATES for count in (4, 1)]


def layer_of(kind, gate, count):
    """A layer of `count` experts over all ranks; with fewer experts than ranks these share one."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    each = count // ranks if count >= ranks else -(ranks // count)
    experts = KINDS[kind] | {"num_experts_per_device": each}
    torch.manual_seed(3)
    layer = moe.moe_layer(GATES[gate], D, experts).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return layer


def tokens():
    return torch.randn(10, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def from_files(cases, folder):
    """Outputs of every case for each way of parallelism, and its file written back."""
    found, rank = {}, dist.get_rank()
    for number, case in enumerate(cases):
        layer = torch.nn.Sequential(layer_of(*case))
        layer.load_state_dict(torch.load(f"{folder}/{number}/{rank}-of-2.pt"))
        ways = [1] if case[:2] == ("llama_ffn", "padded") else layer[0].valid_rs
        with torch.no_grad():
            found[case] = [layer[0](tokens(), adaptive_r=r) for r in ways]
        torch.save({"model": layer.state_dict()}, f"{folder}/{number}/back-{rank}.pt")
    return found


def test_files_of_ranks_in_both_directions(two_ranks, tmp_path, capsys):
    whole = {case: torch.nn.Sequential(layer_of(*case)) for case in CASES}
    for number, layer in enumerate(whole.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save(layer.state_dict(), folder / "all.pt")
        scatter.main(
            ["--input", f"{folder}/all.pt", "--output_size", "2", "--outputs", f"{folder}/{{rank}}-of-{{size}}.pt"]
        )
    results = two_ranks.run(from_files, CASES, str(tmp_path))
    for number, (case, layer) in enumerate(whole.items()):
        expected = layer(tokens()).detach()
        for outputs in results:
            for y in outputs[case]:
                assert_close_fp64(y, expected, what=str(case))
        folder = tmp_path / str(number)
        gather.main(
            [
                "--inputs",
                f"{folder}/back-{{rank}}.pt",
                "--input_size",
                "2",
                "--output",
                f"{folder}/again.pt",
                "--namespace",
                "model",
            ]
        )
        again, state = torch.load(folder / "again.pt")["model"], layer.state_dict()
        assert again.keys() == state.keys(), case
        for name, values in state.items():
            assert torch.equal(again[name].reshape(-1), values.reshape(-1)), (case, name)
        layer_of(*case).load_state_dict({n.removeprefix("0."): v for n, v in again.items()})


@pytest.mark.parametrize(
    ("state", "size", "words"),
    [
        ({"w": torch.zeros(2)}, 2, "no _num_global_experts"),
        ({"a._num_global_experts": torch.tensor(3)}, 2, "3 experts and 2 ranks"),
        ({"a._num_global_experts": torch.tensor(2), "a.experts.w": torch.zeros(2, 3, 4)}, 4, "2 ranks share"),
        ({"a._num_global_experts": torch.tensor(2), "a.experts.w": torch.zeros(3, 4)}, 4, "cannot be parted"),
    ],
)  # fmt: skip
def test_states_that_cannot_be_parted(state, size, words):
    with pytest.raises(ConfigError, match=words):
        checkpoint.part(state, size)


def test_files_that_are_none(tmp_path):
    torch.save({"optimizer": {}}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="is no file"):
        checkpoint.read(str(tmp_path / "y.pt"))
    with pytest.raises(ConfigError, match="has no 'model'"):
        checkpoint.read(str(tmp_path / "x.pt"), "model")
    with pytest.raises(ConfigError, match="--default_num_global_experts"):
        checkpoint.join([{"a.experts.w": torch.zeros(1, 2)}] * 2)
    joined = checkpoint.join([{"a.experts.w": torch.zeros(1, 2)}] * 2, 2)
    assert joined["a.experts.w"].shape == (2, 2) and joined["a._num_global_experts"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--input", "a", "--size", "2"], "--size 2: the words are"),
        (["--input", "a", "--output_size"], "--output_size : the words are"),
        (["--input", "a", "--output_size=two", "--outputs", "b"], "--output_size two: must be a whole number"),
        (["--input", "a", "--output_size=2"], "--outputs is missing"),
    ],
)  # fmt: skip
def test_wrong_words(words, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        scatter.main(words)
