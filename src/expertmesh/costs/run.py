"""What a training run costs: parameters, operations and memory, from its configuration alone."""

from dataclasses import dataclass

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.costs.flops import forward_flops
from expertmesh.costs.memory import MemoryEstimate, RankMemory, estimate_memory, rank_memory
from expertmesh.costs.parameters import count_parameters


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run.

    Attributes:
        parameters: in all.
        active: parameters that one item (a token, an image) uses.
        num_items: items of all steps.
        flops_per_item: the operations of training on one item.
        alone: memory of one process that does it alone.
        each: memory of each of several ranks, activations left out; None for one.
    """

    parameters: int
    active: int
    num_items: int
    flops_per_item: int
    alone: MemoryEstimate
    each: RankMemory | None


def gpt_costs(config: GPTRunConfig, *, num_ranks: int, dtype: str) -> RunCosts:
    """The costs of training a GPT.

    Args:
        config: the run; its degrees fit the ranks.
        num_ranks: the number of ranks of the world.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
    """
    train, seq_len = config.train, config.data.seq_len
    parameters = count_parameters(config.model)
    flops = forward_flops(config.model, seq_len=seq_len)
    return RunCosts(
        parameters=parameters.total,
        active=parameters.active,
        num_items=train.steps * train.batch_size * seq_len,
        flops_per_item=flops.training_flops(
            activation_checkpointing=train.activation_checkpointing
        ),
        alone=estimate_memory(
            config.model,
            micro_batch_size=train.samples_per_pass,
            seq_len=seq_len,
            dtype=dtype,
            activation_checkpointing=train.activation_checkpointing,
            optimizer=config.optim.name,
        ),
        each=None
        if num_ranks == 1
        else rank_memory(
            config.model,
            config.parallel,
            num_ranks=num_ranks,
            dtype=dtype,
            optimizer=config.optim.name,
        ),
    )
