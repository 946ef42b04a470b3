"""Moments in few bytes on ranks: a rank's bytes by the formula, and runs that go from one layout to another."""

import pytest
from tests.parallel.test_checkpoint_ranks import STEPS, run_training
from tests.parallel.test_fake_world import large, rank_of, spread
from tests.support.rank_memory import memory_of_rank
from tests.support.runs import RELATIVE, assert_same_lines, lines_of

from expertmesh.config.run import OptimConfig, ParallelConfig
from expertmesh.parallel.matrices import own_part
from expertmesh.training.low_bit_adamw import new_state
from expertmesh.training.moment_types import code_of
from expertmesh.training.optim import build_optimizer

TYPES = ("bfloat16", "int8", "fp16-scaled")
LAYOUTS = {
    "E": {},
    "sliced": {"es_degree": 8, "expert_order": "experts_inner"},
    "E+D+M": {"tp_degree": 2, "dp_replicate_degree": 2},
    "E+Z-Offload+M": {"zero_stage": 2, "offload": True, "tp_degree": 2},
}
TWO_PERCENT = 0.02


def kept_bytes(optimizer):
    return sum(
        own_part(tensor).nbytes for state in optimizer.state.values() for key, tensor in state.items() if key != "step"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", TYPES)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_rank_holds_what_the_formula_says(layout, state_dtype, name):
    """Of 64 ranks, on the meta device: moments as the optimizer lays them out."""
    parallel, config = ParallelConfig(**LAYOUTS[layout]), large(64)
    expected = memory_of_rank(config, parallel, 64, name=name, state_dtype=state_dtype)
    plain = memory_of_rank(config, parallel, 64, name=name)
    with rank_of(64, 33) as (world, _):
        model = spread(config, parallel, world, device="meta")
        optimizer = build_optimizer(model, OptimConfig(name=name, state_dtype=state_dtype))
        lay_out(optimizer)
        assert kept_bytes(optimizer) == pytest.approx(expected.optimizer_bytes, rel=TWO_PERCENT)
    share = 0.31 if state_dtype == "int8" else 0.51  # what a cut inside blocks leaves in FP32 is there
    assert expected.optimizer_bytes < share * plain.optimizer_bytes


def lay_out(optimizer):
    """Moments as the first step makes them, without the step."""
    for group in optimizer.param_groups:
        keys = ("momentum_buffer",) if group.get("is_matrix") else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            code = code_of(parameter, group["state_dtype"])
            optimizer.state[parameter] = new_state(parameter, code, *keys)


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [
        ("adamw", "int8"),
        ("muon", "fp16-scaled"),
        ("adamw", "bfloat16"),
        pytest.param("muon", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_one_rank_to_two_and_four_and_back(tmp_path, two_ranks, four_ranks, name, state_dtype):
    """In FP64, where layouts differ by 1e-16: codes and scales move as they are, and words go by place."""
    of = {"optim.name": name, "optim.state_dtype": state_dtype, "model.dim": 32}
    assert run_training(tmp_path, "straight", STEPS, of) is None
    oracle = lines_of(tmp_path / "straight")
    assert run_training(tmp_path, "run", 2, of) is None
    layout = {"parallel.tp_degree": 2, "parallel.es_degree": 2}
    assert two_ranks.run(run_training, tmp_path, "run", 4, of | layout) == [None] * 2
    layout = {"parallel.dp_replicate_degree": 2, "parallel.zero_stage": 2, "parallel.offload": True}
    assert four_ranks.run(run_training, tmp_path, "run", 5, of | layout) == [None] * 4
    assert run_training(tmp_path, "run", STEPS, of) is None
    assert_same_lines(lines_of(tmp_path / "run"), oracle, "loss", "grad_norm")


def test_another_type_on_another_layout(tmp_path, two_ranks, four_ranks):
    """From four ranks with FP32 to two with 8 bits that share sequences, to one with fairseq's scheme."""
    assert four_ranks.run(run_training, tmp_path, "run", 2, {}) == [None] * 4
    changes = {"parallel.tp_degree": 2, "optim.state_dtype": "int8"}
    assert two_ranks.run(run_training, tmp_path, "run", 4, changes) == [None] * 2
    changes = {"parallel.es_degree": 2, "optim.state_dtype": "fp16-scaled"}
    assert two_ranks.run(run_training, tmp_path, "run", 5, changes) == [None] * 2
    assert run_training(tmp_path, "run", STEPS, {}) is None
    assert run_training(tmp_path, "straight", STEPS, {}) is None
    losses, oracle = ([line["loss"] for line in lines_of(tmp_path / name)] for name in ("run", "straight"))
    assert losses[:3] == pytest.approx(oracle[:3], rel=RELATIVE)  # those of steps with FP32's moments
    assert losses[3:] == pytest.approx(oracle[3:], rel=TWO_PERCENT)
    assert losses[3:] != pytest.approx(oracle[3:], rel=RELATIVE)
