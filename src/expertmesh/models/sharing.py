"""Sharding of a model over the ranks of an engine."""

from typing import Any

from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.config.values import type_of
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import spread_gpt_for_engine
from expertmesh.parallel.experts.coordinated import ServingGroups, StepSizes
from expertmesh.parallel.serving import ServingDegrees


def spread_for_engine(
    model: Any, config: ParallelConfig, world: World
) -> tuple[ServingDegrees, ServingGroups, StepSizes]:
    """Shard a model over ranks, in place; see `spread_gpt_for_engine`. Every rank must call."""
    if not isinstance(model, GPT):
        raise ConfigError(
            f"parallel: {type_of(model)} is served by one process; leave it out, or open the model as our GPT"
        )
    return spread_gpt_for_engine(model, config, world)
