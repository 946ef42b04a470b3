"""Optimizer with its parameter groups, and the learning-rate schedule."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from expertmesh.config.run import Frozen, OptimConfig, StateDtype
from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer
from expertmesh.spec.moments import FEWEST_ELEMENTS
from expertmesh.training.fused import fused_halves
from expertmesh.training.low_bit_adamw import LowBitAdamW
from expertmesh.training.moment_types import CODES, kept_as
from expertmesh.training.muon import Muon
from expertmesh.training.param_groups import DECAYED, parameter_roles
from expertmesh.training.torchao_adamw import TorchaoAdamW, check_torchao


def freeze(model: nn.Module, parts: Sequence[Frozen]) -> None:
    """Freeze parts of all MoE layers.

    Args:
        model: a placed model, before `build_optimizer`.
        parts: "experts" (without shared experts and residual MLP), "router".
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if parts and not layers:
        raise ConfigError("train.freeze", ",".join(parts), "the model has no experts", "leave it out")
    for layer in layers:
        for part in parts:
            getattr(layer, part).requires_grad_(False)


def build_optimizer(
    model: nn.Module,  # parameters that require no gradient are left out
    config: OptimConfig,  # learning rate, betas, epsilon, momentum and decay
    *,
    compute_dtype: torch.dtype | None = None,
    num_ranks: int = 1,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), fused, or Muon for the matrices and AdamW for the rest.

    Parameters are grouped by weight decay, by Muon or AdamW, by type of the moments, and by mesh.

    Args:
        compute_dtype: dtype of the model's matmuls; Muon uses BF16 if it is BF16, and on a GPU.

    Returns:
        The optimizer; its learning rate is set before each step by the loop.
    """
    if config.state_dtype not in CODES:
        check_torchao(
            [p for p in model.parameters() if p.requires_grad],
            config.state_dtype,
            num_ranks=num_ranks,
        )
    roles, halves = parameter_roles(model), fused_halves(model)
    groups: dict[tuple[bool, bool, StateDtype, Any], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The fused update takes tensors of one mesh only.
            mesh = getattr(parameter, "device_mesh", None)
            is_matrix = config.name == "muon" and roles[name] == "matrix"
            kept = kept_as(parameter, config.state_dtype)
            group = roles[name] in DECAYED, is_matrix, kept, mesh
            groups.setdefault(group, []).append((name, parameter))
    is_compact = config.state_dtype != "float32"
    if is_compact and all(kept == "float32" for _, _, kept, _ in groups):
        raise ConfigError(
            "optim.state_dtype",
            config.state_dtype,
            f"has no effect on this model, of which no tensor of two axes has {FEWEST_ELEMENTS:,} elements",
            "leave it out",
        )
    params: list[dict[str, Any]] = [
        {
            # random words of stochastic rounding depend on the names
            "params": parameters if is_compact else [p for _, p in parameters],
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        | ({"is_matrix": True, "halves": [halves.get(id(p)) for _, p in parameters]} if is_matrix else {})
        | ({"state_dtype": kept} if is_compact else {})
        for (decayed, is_matrix, kept, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]
    betas = config.beta1, config.beta2
    if config.name == "muon":
        return Muon(
            params,
            lr=config.lr,
            momentum=config.momentum,
            betas=betas,
            eps=config.eps,
            dtype=torch.bfloat16 if compute_dtype == torch.bfloat16 else None,
        )
    if config.state_dtype not in CODES:
        return TorchaoAdamW(params, lr=config.lr, betas=betas, eps=config.eps)
    if is_compact:
        return LowBitAdamW(params, lr=config.lr, betas=betas, eps=config.eps)
    return torch.optim.AdamW(params, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(step: int, *, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up: lr (step + 1) / warmup_steps. Then, with p in [0, 1] the finished share of the remaining steps:

    * cosine (Loshchilov and Hutter 2017, eq. 5): lr (r + (1 - r) (1 + cos(pi p)) / 2), r = min_lr_ratio;
    * linear: lr (1 - (1 - r) p); constant: lr;
    * wsd (Hu et al. 2024, 4.3): lr, then from `decay_start` on a line down to lr r.

    The last step has p = 1, hence the rate lr r. If it is the only step or part of the warm-up, the rate never decays.

    Args:
        step: 0 ... total_steps - 1; larger steps have the last rate.
    """
    step = min(step, total_steps - 1)
    start = config.num_warmup_steps(total_steps)
    if step < start:
        return config.lr * (step + 1) / start
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        start = decay_start(total_steps=total_steps, config=config)
    steps = total_steps - 1 - start
    done = max((step - start) / steps, 0.0) if steps > 0 else float(0 < step >= start)
    ratio = config.min_lr_ratio
    if config.schedule == "cosine":
        return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))
    return config.lr * (1 - (1 - ratio) * done)


def decay_start(*, total_steps: int, config: OptimConfig) -> int:
    """Step at which a wsd schedule starts to decay: it decays for `decay_fraction` of the steps, at least one.

    A warm-up that reaches into the decay shortens it.
    """
    num_decay = max(round(total_steps * config.decay_fraction), 1)
    return max(config.num_warmup_steps(total_steps), total_steps - num_decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def balance_experts(model: nn.Module, num_tokens_per_expert: list[torch.Tensor]) -> None:
    """Update the aux-loss-free balancing bias of every MoE layer that has one."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if len(layers) != len(num_tokens_per_expert):
        raise ConfigError(
            f"Loss.stats: has {len(num_tokens_per_expert)} entries and the model has {len(layers)} MoE layers; return "
            "the RoutingStats of each, in their order"
        )
    for layer, counts_E in zip(layers, num_tokens_per_expert, strict=True):
        layer.update_expert_bias(counts_E)
