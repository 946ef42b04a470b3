"""How a GPT is spread over ranks: layer by layer, experts by their own storage."""

from expertmesh.comm.mesh import dense_degrees
from expertmesh.comm.world import World
from expertmesh.config.model import ModelConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.parallel.apply import expert_plan, parallelize


def parallelize_gpt(model: GPT, config: ParallelConfig, *, world: World | None = None) -> World:
    """Spread a GPT over all ranks, in place; see `expertmesh.parallel.apply.parallelize`."""
    return parallelize(model, config, world=world, blocks=model.layers)


def check_degrees(model: ModelConfig, config: ParallelConfig, *, num_ranks: int) -> None:
    """Whether a GPT can be spread so, before anything is built.

    Raises:
        ConfigError: degrees do not fit the ranks, or the experts of a layer.
    """
    degrees = dense_degrees(
        num_ranks, dp_replicate=config.dp_replicate_degree, dp_shard=config.dp_shard_degree
    )
    for num_experts in sorted({n for n in model.experts_per_layer() if n}):
        expert_plan(
            config,
            num_ranks=degrees.num_storage_ranks,
            num_experts=num_experts,
            hidden_dim=model.moe.hidden_dim,
        )
