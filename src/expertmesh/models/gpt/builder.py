"""Builder of GPTs: construction, placement on ranks, interface for generation."""

from pathlib import Path

import torch
from torch import nn

from expertmesh.comm.world import World
from expertmesh.config.frozen_base import QUANTIZED
from expertmesh.errors import ConfigError, named
from expertmesh.models.builder import ModelBuilder
from expertmesh.models.decoder import CausalLM
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import check_degrees, parallelize_gpt
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.spec.adapter_targets import check_targets
from expertmesh.text.new_tokens import grown_vocabulary


class GPTBuilder(ModelBuilder):
    """Builder of a run's GPT."""

    config: GPTRunConfig
    is_built_empty = True

    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> GPT:
        """The whole model on one device, with weights drawn from the run's seed."""
        model = GPT(self.config.model, device=device, dtype=dtype, seed=self.config.train.seed)
        model.set_activation_checkpointing(self.config.train.activation_checkpointing)
        return model

    def _adapted(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The whole model with the run's adapters, and the rows of added tokens that learn beside them."""
        model, tokens = super()._adapted(device=device, dtype=dtype), self.config.tokens
        if self.config.adapter.rests and tokens.add:
            assert isinstance(model, GPT)
            path = Path(str(self.config.data.encode_with))
            grown = grown_vocabulary(path, tokens, vocab_size=model.vocab_size)
            model.learn_rows(grown.ids, dtype=torch.promote_types(dtype, torch.float32))
        return model

    def check(self, num_ranks: int) -> None:
        """Check degrees, heads, experts and sequence length; see `check_degrees`."""
        config = self.config
        splits = check_degrees(config.model, config.parallel, num_ranks=num_ranks, seq_len=config.data.seq_len)
        es = max((one.storage.f // one.gather_f for one in splits), default=1)
        if config.objective.name == "grpo" and config.rl.exact and es > 1:
            rule = (
                "adds parts of products over ranks, in another order than rollouts do, and "
                f"{named('rl.exact', True)} compares the bits"
            )
            fix = f"use {named('parallel.route_degree', 1)}, or {named('rl.exact', False)}"
            raise ConfigError("parallel.es_degree", es, rule, fix)
        _check_storage(config, num_ranks)
        check_targets(config.adapter, gpt_spec(config.model))

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


def _check_storage(config: GPTRunConfig, num_ranks: int) -> None:
    """Refuse a storage of resting weights that does not fit the model or the ranks."""
    storage, model = config.base.storage, config.model
    if num_ranks > 1 and storage == "bfloat16":
        rule = "frozen weights that are not quantized are FP32 on several ranks"
        raise ConfigError("base.storage", storage, rule, "use one process, or leave it out")
    if storage not in QUANTIZED:
        return
    if not model.num_moe_layers:
        rule = "is of routed experts, and the model has none"
        raise ConfigError("base.storage", storage, rule, "use bfloat16, or leave it out")
    unit, D, F = FORMATS[storage].columns(config.base.group_size), model.dim, model.moe.hidden_dim
    if D % unit or F % unit:
        rule = f"needs groups of {unit} numbers, which must divide {D} and {F}"
        raise ConfigError("base.storage", storage, rule, "use int8")
