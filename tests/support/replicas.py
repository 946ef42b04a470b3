"""The same in every process: weights, some steps of the trainer on a GPT."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.task import GPTTask
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.optim import build_optimizer
from expertmesh.training.step import training_step


def dense_or_moe(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration with changes; without options of experts where the changes leave none."""
    is_dense = changes.get("model.moe.num_experts") == ()
    return {k: v for k, v in values.items() if not (is_dense and "model.moe." in k)} | changes


def messages_of(*calls: Callable[[], object]) -> list[str]:
    """What the ConfigErrors of some calls say, one after the other."""
    return [str(pytest.raises(ConfigError, call).value) for call in calls]


def assert_said(found: list[str], *expected: str) -> None:
    """One line each, in which a pattern is found."""
    for message, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, message) and "\n" not in message, message


def fill_biases(module: nn.Module, *, scale: float = 1.0) -> None:
    """Draw biases that are not zero, in FP64 and then rounded, so that all precisions begin with the same numbers."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if "b_" in name:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(scale * drawn)


def build_gpt(config: GPTRunConfig) -> GPT:
    """The model of a run, the same in every process, with biases that are not zero."""
    model = GPT(config.model, dtype=resolve_precision(config.train).master_dtype, seed=1)
    model.set_activation_checkpointing(config.train.activation_checkpointing)
    fill_biases(model, scale=0.1)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batches(config: GPTRunConfig, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random ids and the next ones, (B, S) each, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shape = (config.train.batch_size, config.data.seq_len + 1)
    for _ in range(count):
        ids = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def trainer_steps(
    config: GPTRunConfig,
    ranks: Ranks,
    count: int,
    *,
    before: Callable[[int, GPT, Any], None] = lambda step, model, scaler: None,
) -> Iterator[tuple[GPT, Any, Any]]:
    """Take the trainer's steps; yields the model, the loss scaler and the step's result after each.

    Args:
        config: of the run.
        ranks: the ranks; the model is spread over them as the configuration says.
        count: number of steps.
        before: called before each step with its number, the model and the scaler.
    """
    model, precision = build_gpt(config), resolve_precision(config.train)
    if ranks.world is not None:
        parallelize_gpt(model, config.parallel, world=ranks.world)
    optimizer = build_optimizer(model, config.optim)
    follow_optimizer(model, optimizer)
    scaler = precision.scaler(ranks)
    for step, batch in enumerate(batches(config, count)):
        before(step, model, scaler)
        settings = {"step": step, "precision": precision, "ranks": ranks}
        result = training_step(GPTTask(config), model, optimizer, scaler, batch, **settings)
        yield model, scaler, result
