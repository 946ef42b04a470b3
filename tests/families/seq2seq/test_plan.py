"""Encoder-decoders are planned: sizes are those of the specification, and the command starts what was planned."""

import shlex

import pytest

import expertmesh as em
from expertmesh.cli.flags import parse_run_config
from expertmesh.errors import ConfigError
from expertmesh.models.registry import recipe, recipe_owners
from expertmesh.planner.serve import serve_plan

NAMES = [name for name, family in recipe_owners().items() if family.name == "seq2seq"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cluster", ["h100x1", "a100-80x64"])
def test_the_plan_is_of_the_run_that_its_command_starts(name, cluster):
    try:
        found = em.plan(name, cluster=cluster)
    except ConfigError as error:
        assert "fits nowhere" in str(error) and cluster == "h100x1"
        return
    family, config = recipe_owners()[name], recipe(name)
    costs = family.costs_of(config, num_ranks=1, dtype="bfloat16", on_gpu=True)
    assert found.problem.sizes.num_parameters == costs.parameters
    S, T = config.model.max_source_len, config.model.max_seq_len
    assert found.problem.work.seq_len == S + T
    per_target = found.problem.sizes.training_flops(S + T) * (S + T) / T
    assert per_target == pytest.approx(costs.flops_per_item, rel=0.1)
    words = shlex.split(found.command.partition(" train ")[2])
    run = parse_run_config(words).config
    layout = found.best.layout
    assert run.train.samples_per_pass == layout.dp_degree * layout.micro_batch
    assert run.parallel.zero_stage == layout.zero_stage
    said = family.costs_of(run, num_ranks=layout.num_ranks, dtype="bfloat16", on_gpu=True)
    assert said.memory == found.best.memory


def test_lengths_are_the_model_s_and_answers_are_not_planned():
    with pytest.raises(ConfigError, match="the model's own"):
        em.plan(NAMES[0], cluster="h100x8", max_context=64)
    with pytest.raises(ConfigError, match="decoders alone"):
        serve_plan(NAMES[0], cluster="h100x8", batch=1, context=64)
