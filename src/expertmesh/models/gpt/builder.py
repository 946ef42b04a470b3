"""Builder of GPTs: construction, placement on ranks, interface for generation."""

import torch
from torch import nn

from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.models.builder import ModelBuilder
from expertmesh.models.decoder import CausalLM
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import check_degrees, parallelize_gpt
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.adapter_targets import check_targets


class GPTBuilder(ModelBuilder):
    """Builder of a run's GPT."""

    config: GPTRunConfig
    is_built_empty = True

    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> GPT:
        """The whole model on one device, with weights drawn from the run's seed."""
        model = GPT(self.config.model, device=device, dtype=dtype, seed=self.config.train.seed)
        model.set_activation_checkpointing(self.config.train.activation_checkpointing)
        return model

    def check(self, num_ranks: int) -> None:
        """Check degrees, heads, experts and sequence length; see `check_degrees`."""
        config = self.config
        check_degrees(
            config.model, config.parallel, num_ranks=num_ranks, seq_len=config.data.seq_len
        )
        adapted, tp = (
            check_targets(config.adapter, gpt_spec(config.model)),
            config.parallel.tp_degree,
        )
        if tp > 1 and "output.weight" in adapted:
            rule = "ranks that share sequences gather the head, without its adapter"
            raise ConfigError("parallel.tp_degree", tp, rule, "leave head out of the targets")

    def spread(self, model: nn.Module, world: World) -> None:
        """Spread a model over ranks, in place; a tp_degree also splits sequences and dense layers."""
        assert isinstance(model, GPT)
        parallelize_gpt(
            model,
            self.config.parallel,
            world=world,
            bytes_beside=self.bytes_beside,
            plans=self.plans,
        )

    def decoder(self, model: nn.Module) -> CausalLM:
        """The model itself."""
        assert isinstance(model, GPT)
        return model
