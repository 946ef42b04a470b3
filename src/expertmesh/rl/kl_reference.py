"""The reference of a policy: the model as the run begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.moe.module_adapters import without_adapters
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import find_model


class Reference:
    """The weights that a run begins with: the model's own without its adapters, or a second copy, placed as the model
    is."""

    def __init__(self, config: GPTRunConfig, model: nn.Module, ranks: Ranks) -> None:
        begin, self._copy = config.train.init_from, None
        if config.adapter.rests:
            return
        assert begin is not None
        run = ranks.on_all(lambda: find_model(begin)).with_weights(ranks)
        same = {"parallel": config.parallel, "model": config.model}
        first = next(model.parameters())
        self._copy = open_model(
            replace(run, config=run.config.model_copy(update=same)),
            device=first.device,
            dtype=first.dtype,
            ranks=ranks,
            is_placed=True,
        ).model

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[nn.Module]:
        """The reference of the model, which has no adapters meanwhile."""
        if self._copy is not None:
            yield self._copy
            return
        with without_adapters(model):
            yield model
