"""Builders of a family's models: construction, placement on ranks, weights of earlier runs, and interfaces for
inference."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from expertmesh.comm.world import World
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.classifier import Classifier
from expertmesh.models.decoder import CausalLM, Translation
from expertmesh.models.run_adapters import adapt
from expertmesh.parallel.apply import degrees_of, parallelize
from expertmesh.parallel.construct import give_memory
from expertmesh.parallel.ranks import Ranks


class ModelBuilder(ABC):
    """Builder of the model of one run.

    Args:
        config: the run's configuration.
    """

    config: Any
    is_built_empty = False
    """Whether `build` makes a model without memory on "meta", whose `init_weights(seed)` then draws the weights."""
    bytes_beside: float = 0.0
    """Bytes per rank that a teacher's weights will take beside the model; set before `place`."""
    plans: Path | None = None
    """File of the run for plans of adaptive dispatch; set before `place`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The whole model with its initial weights, which depend only on the run's seed: torch's default generator is
        seeded.

        Args:
            device: the device of the parameters.
            dtype: the type of the parameters.
        """

    def check(self, num_ranks: int) -> None:
        """Check that the run fits a number of ranks, before anything is built.

        Raises:
            ConfigError: the run does not fit, or has an option that this family does not support.
        """
        degrees_of(self.config.parallel, num_ranks=num_ranks)
        for name, value in (
            ("parallel.tp_degree", self.config.parallel.tp_degree),
            ("train.activation_checkpointing", self.config.train.activation_checkpointing),
        ):
            if value > 1 or value is True:
                raise ConfigError(name, value, f"family {self.config.family} has no such thing", "leave it out")

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Modules that FSDP gathers one at a time, in order. Default: none, so the whole model is one unit."""
        return ()

    def place(self, *, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> nn.Module:
        """The model with its initial weights, spread over the ranks if there are several."""
        offload, world = self.config.parallel.offload, ranks.world
        if world is None:
            return self._adapted(device="cpu" if offload else device, dtype=dtype)

        def spread(model: nn.Module) -> None:
            self.spread(model, world)

        return self.build_spread(spread, device=device, dtype=dtype, offload=offload)

    def _adapted(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The whole model with the run's adapters."""
        model = self.build(device=device, dtype=dtype)
        adapt(model, self.config, dtype=dtype)
        return model

    def build_spread(
        self,
        spread: Callable[[nn.Module], None],
        *,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool = False,
        is_read_next: bool = False,
        in_huge_pages: bool = True,
    ) -> nn.Module:
        """The model with its initial weights, spread over ranks.

        With `is_built_empty`, no rank ever holds the whole model; otherwise every rank builds it first.

        Args:
            spread: spreads a model over the ranks, in place.
            device: device that computes.
            dtype: dtype of the parameters.
            offload: whether parameters are kept in host memory.
            is_read_next: whether all weights are read next, for inference: none are drawn where none need be, and large
                ones get huge pages.
            in_huge_pages: whether they may.
        """
        home, is_empty = "cpu" if offload else device, self.is_built_empty
        model = self._adapted(device="meta" if is_empty else home, dtype=dtype)
        spread(model)
        if is_empty:
            give_memory(model, device=device, offload=offload, in_huge_pages=is_read_next and in_huge_pages)
            if not is_read_next:
                cast(Any, model).init_weights(self.config.train.seed)
        return model

    def spread(self, model: nn.Module, world: World) -> None:
        """Spread a model over ranks, in place."""
        parallelize(
            model,
            self.config.parallel,
            world=world,
            blocks=self.blocks(model),
            bytes_beside=self.bytes_beside,
            plans=self.plans,
        )

    def inherited(self, model: nn.Module, begin: RunConfig, data: Any) -> Mapping[str, Tensor]:
        """Tensors of the model to load from the run in train.init_from, by name. Default: all.

        Args:
            model: the model as `place` returned it.
            begin: configuration of the run in train.init_from.
            data: the `Data` of this run.
        """
        return model.state_dict()

    def decoder(self, model: nn.Module) -> CausalLM:
        """The model as a `CausalLM` for decoding.

        Raises:
            ConfigError: models of this family do not generate text (the default).
        """
        raise ConfigError(f"family {self.config.family}: its models generate no text; use gpt, or seq2seq to translate")

    def translation(self, tokenizer: Any, *, to: str) -> Translation:
        """Special tokens for translation by the `decoder`, which is an encoder-decoder.

        Args:
            tokenizer: the run's tokenizer.
            to: target language.

        Raises:
            ConfigError: models of this family do not translate (the default), or not into this language.
        """
        raise ConfigError(
            f"family {self.config.family}: its models translate nothing; use one that does, for example seq2seq"
        )

    def classifier(self, model: nn.Module) -> Classifier:
        """The model as a `Classifier` of images.

        Raises:
            ConfigError: models of this family do not classify images (the default).
        """
        raise ConfigError(
            f"family {self.config.family}: its models classify no images; use one that does, for example swin"
        )
