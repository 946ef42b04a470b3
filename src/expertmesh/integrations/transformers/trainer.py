"""Callback for transformers' Trainer that updates balancing biases of MoE layers."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from expertmesh.errors import ConfigError, command
from expertmesh.moe.layer import MoELayer
from expertmesh.training.optim import balance_experts
from expertmesh.training.routing_losses import LoadCounter


class BalanceExperts(TrainerCallback):
    """Updates the balancing biases of a model with `bias_update_rate` after every step, as our own trainer does.

    Example:
        >>> Trainer(model=model, args=args, train_dataset=data, callbacks=[BalanceExperts()])
    """

    def __init__(self) -> None:
        self._counters: dict[MoELayer, LoadCounter] = {}
        self._handles: list[RemovableHandle] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start to count choices per expert."""
        if args.world_size > 1:
            raise ConfigError(
                f"BalanceExperts: {args.world_size} ranks would each count for themselves; use {command('train')}, or "
                "aux_loss_weight"
            )
        model: nn.Module = kwargs["model"]
        layers = [m for m in model.modules() if isinstance(m, MoELayer)]
        if not any(layer.expert_bias_E is not None for layer in layers):
            raise ConfigError("BalanceExperts: no layer has a balancing bias; set bias_update_rate, or leave it out")
        self._counters = {layer: LoadCounter() for layer in layers}
        self._handles = [layer.register_forward_hook(self._count) for layer in layers]

    def _count(self, layer: nn.Module, _: Any, found: Any) -> None:
        if layer.training:
            assert isinstance(layer, MoELayer)
            self._counters[layer].add([found[1]])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the biases from the counts of this step."""
        with torch.no_grad():
            for layer, counter in self._counters.items():
                balance_experts(layer, counter.counts)
                self._counters[layer] = LoadCounter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._counters = [], {}
