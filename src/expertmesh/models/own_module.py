"""User-defined modules as a family: `expertmesh.train(module, data=..., loss=...)` without a `Task`."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.run import RunConfig
from expertmesh.config.values import type_of
from expertmesh.data.samples import data_of
from expertmesh.errors import ConfigError
from expertmesh.models.builder import ModelBuilder
from expertmesh.models.family import Family, Metric
from expertmesh.models.task import Batch, Data, Loss, Part, Task, num_samples
from expertmesh.models.upcycle import collect_stats
from expertmesh.moe.routing_noise import count_tokens_from
from expertmesh.moe.types import RoutingStats
from expertmesh.parallel.ranks import Ranks

Module = nn.Module | Callable[[], nn.Module]
"""A module, or a class or function that returns one."""

FAMILY_NAME = "module"
_RETURN = "return a scalar, the mean over the samples, then RoutingStats and a dictionary of measures"

_TAKEN = {"loss": "the loss itself", "items": "the number of samples"}


class OwnBuilder(ModelBuilder):
    """Builder for a user-defined module. `module`: the module, or a class or function that returns it."""

    def __init__(self, config: RunConfig, module: Module) -> None:
        super().__init__(config)
        self._module = module

    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The module on a device: the given one, moved, or a new one."""
        module = self._module if isinstance(self._module, nn.Module) else self._module()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"module: made {type_of(module)}; give an nn.Module, its class, or a function that returns one"
            )
        return module.to(device, dtype)

    def place(self, *, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> nn.Module:
        """The module, placed by `ModelBuilder.place`; a module given as an instance must have equal weights on all
        ranks."""
        if ranks.world is not None and isinstance(self._module, nn.Module):
            digest = hashlib.sha256()
            for tensor in self._module.state_dict().values():
                # flattened, because a scalar (BatchNorm's counter) cannot be viewed as bytes
                digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
            ranks.check_equal(digest.hexdigest(), what="the module's weights (give its class, not one)")
        module = super().place(device=device, dtype=dtype, ranks=ranks)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"module: {type(module).__name__} has no parameter that requires a gradient; there is nothing to "
                "train, give one that has"
            )
        return module


class OwnModule(Task):
    """Task of a user-defined module, with samples and a loss.

    Args:
        loss: called as loss(model, *batch); returns a scalar mean over the batch's samples, and then, in any order,
            RoutingStats and a dictionary of other means by name; "loss" and "items" are taken.
    """

    def __init__(
        self,
        config: RunConfig,  # the run's configuration
        *,
        module: Module,  # the module, or a class or function that returns it
        data: Any = None,  # see `expertmesh.data.samples.data_of`
        validation: Any = None,  # see `expertmesh.data.samples.data_of`
        loss: Callable[..., Any] | None = None,
        metric: str = "loss",  # name of the mean that evaluations are compared by
    ) -> None:
        self.config, self.builder = config, OwnBuilder(config, module)
        self._samples, self._validation = data, validation
        self._loss, self._metric = loss, metric

    def prepare(self) -> Data:
        """The samples."""
        data: Data = data_of(self._samples, self._validation, seed=self.config.train.seed)
        return data

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """The user's loss times the number of samples, with the routing statistics of upcycled blocks."""
        rows = part.rows
        count_tokens_from(model, first=rows.start, count=rows.stop - rows.start)
        value, stats, _ = self._call(model, batch)
        if not any(one.requires_grad for one in (value, *(s.aux_loss + s.z_loss for s in stats))):
            raise ConfigError(
                "loss: depends on no parameter of the module; compute it from what the model returns, without "
                "detach(), item() or no_grad()"
            )
        return Loss(value * num_samples(batch), stats)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """The user's loss and measures, times the number of samples."""
        count = num_samples(batch)
        value, _, measures = self._call(model, batch)
        found: dict[str, Tensor | float] = {**measures, "loss": value}
        if self._metric not in found:
            raise ConfigError(
                f"metric={self._metric}: loss returned {', '.join(found)}; name one of these, or return it in the "
                "dictionary"
            )
        return {name: mean * count for name, mean in found.items()} | {"items": count}

    def _call(self, model: nn.Module, batch: Batch) -> tuple[Tensor, list[RoutingStats], dict[str, Any]]:
        """The user's loss, the routing statistics, and the other measures."""
        assert self._loss is not None, "a run is trained with a loss"
        with collect_stats() as collected:
            if isinstance(batch, Mapping):
                found = self._loss(model, **batch)
            else:
                found = self._loss(model, *(batch if isinstance(batch, tuple | list) else (batch,)))
        value, *others = found if isinstance(found, tuple | list) else (found,)
        if not isinstance(value, Tensor) or value.ndim:
            is_tensor = isinstance(value, Tensor)
            what = f"shape {tuple(value.shape)}" if is_tensor else f"{type_of(value)}"
            raise ConfigError(f"loss: returned {what}; {_RETURN}")
        stats: list[RoutingStats] = []
        measures: dict[str, Any] = {}
        for other in others:
            if isinstance(other, Mapping):
                measures |= other
            else:
                stats += other if isinstance(other, tuple | list) else [other]
        for one in stats:
            if not isinstance(one, RoutingStats):
                raise ConfigError(f"loss: returned {type_of(one)} after it; {_RETURN}")
        for name, owner in _TAKEN.items():
            if name in measures:
                raise ConfigError(
                    f"loss: returned a measure {name!r}; the name is taken by {owner}; give it another name"
                )
        for name, mean in measures.items():
            if isinstance(mean, Tensor) and mean.ndim:
                what = f"tensor of shape {tuple(mean.shape)}"
            elif isinstance(mean, Tensor | Real):
                continue
            else:
                what = type(mean).__name__
            raise ConfigError(f"loss: {name} is a {what}; a measure must be a number; {_RETURN}")
        return value, [*stats, *collected.layers], measures


def own_family(module: Module, *, metric: str = "loss", **parts: Any) -> Family:
    """The family of a user-defined module."""
    task = partial(OwnModule, module=module, metric=metric, **parts)
    return Family(FAMILY_NAME, task=task, metric=Metric(metric, metric, metric[:10]))
