"""Parts of a model that learn and parts that rest, in words."""

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from expertmesh.costs.memory_text import memory_text
from expertmesh.models.family import Family
from expertmesh.models.task import Task
from expertmesh.moe.layer import grouped_layers
from expertmesh.runs.precision import Precision
from expertmesh.training.state import TrainState

_PARTS = (
    (r"^token_rows\.", "new tokens"),
    (r"(^|\.)router\b", "routers"),
    (r"(^|\.)experts\.(adapters\.)?w_in\b", "experts w_in"),
    (r"(^|\.)experts\.(adapters\.)?w_out\b", "experts w_out"),
    (r"(^|\.)experts\.", "experts' biases"),
    (r"(^|\.)(shared_experts|shared_gate)\b", "shared experts"),
    (r"(^|\.)attention\.", "attention"),
    (r"(^|\.)(ffn|residual_mlp|residual_coefficient)\.", "dense layers"),
    (r"(^|\.)embedding\.", "embedding"),
    (r"^output\.", "head"),
    (r"norm", "norms"),
)
"""Patterns of parameter names, of which the first that fits counts, and the part that they are of."""


def part_of(name: str) -> str:
    """Part of the model that a parameter belongs to."""
    return next((part for pattern, part in _PARTS if re.search(pattern, name)), "the rest")


def counts_of_parts(model: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """Numbers of parameters that learn, and of those that rest, by part of the model; packed experts by their
    format."""
    learning, resting = Counter[str](), Counter[str]()
    for _, _, experts in grouped_layers(model):
        if experts.format != "dense":
            w = experts.weights().slices()[0]
            E, G, F, D = w.shape
            biases = (b.numel() for b in (w.b_in_EGF, w.b_out_ED) if b is not None)
            resting[f"experts in {experts.format}"] += E * (G + 1) * F * D + sum(biases)
    for name, parameter in model.named_parameters():
        (learning if parameter.requires_grad else resting)[part_of(name)] += parameter.numel()
    return learning, resting


def what_learns(model: nn.Module) -> str:
    """Line with the parts that learn, their numbers of parameters and dtypes, and the parts that rest."""
    learning, resting = counts_of_parts(model)
    total = sum(learning.values())
    whole = max(total + sum(resting.values()), 1)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    parts = ", ".join(f"{part} {count:,}" for part, count in learning.most_common())
    rest = ", ".join(f"{part} {count:,}" for part, count in resting.most_common())
    return (
        f"trainable: {total:,} of {whole:,} parameters ({total / whole:.1%}) in {' and '.join(sorted(dtypes))}: "
        f"{parts}; frozen: {rest or 'nothing'}"
    )


def learning_lines(family: Family, task: Task, state: TrainState, precision: Precision) -> Iterator[str]:
    """Lines about what learns, and about the memory that this takes, where the family can tell it."""
    yield what_learns(state.model)
    on_gpu, num_ranks = precision.device.type != "cpu", state.ranks.size
    dtype = str(precision.compute_dtype).removeprefix("torch.")
    costs = family.costs_of(task.config, num_ranks=num_ranks, dtype=dtype, on_gpu=on_gpu)
    if costs is not None:
        if costs.adapters:
            yield f"adapters: {costs.adapters}"
        yield f"memory: {memory_text(costs.memory, num_ranks, on_gpu=on_gpu)}"
