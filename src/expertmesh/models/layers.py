"""Parts of all transformer families here: initial weights, feed-forward layers, RMSNorm.

Attention is in `expertmesh.models.attention`; the dense feed-forward layer is `expertmesh.moe.experts.DenseMLP`, the
same module as a shared expert.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.moe import MoEConfig
from expertmesh.config.values import check_type
from expertmesh.moe.check_arguments import check_dtype
from expertmesh.moe.experts import DenseMLP
from expertmesh.moe.init import init_normal_
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.module_adapters import reset_adapters
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.op_set import DEFAULT_OPS, OpSet
from expertmesh.spec.model_spec import ModelSpec


def check_model_arguments(config: Any, kind: type, dtype: Any) -> None:
    """Raise ConfigError unless a model's configuration is of its kind, and its dtype None or a floating-point type."""
    check_type("config", config, kind, f"a {kind.__name__}", "give recipe(...).model")
    check_dtype(dtype)


def draw_weights(model: Any, *, device: torch.device | str | None, seed: int | None) -> None:
    """Allocate the parameters of a model built on "meta", and draw its initial weights; do nothing if `device` is
    "meta"."""
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type != "meta":
        model.to_empty(device=target)
        model.init_weights(seed)


def init_by_spec(
    model: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    std: float,
    out_std: Callable[[str], float] | None = None,
) -> None:
    """Initialise every parameter by the spec: N(0, std^2), norms 1, biases 0. MoE layers follow
    `MoELayer.reset_parameters`.

    The numbers depend on the seed and the parameter's name only, not on the device or the number of ranks.

    Args:
        model: the model; its MoE layers are called `moe`.
        spec: specification of the model.
        seed: seed of the whole model.
        std: standard deviation of all matrices except outputs.
        out_std: returns, from a name, the standard deviation of an output matrix (its product is added to the residual
            stream) or of the output matrices of a MoE layer; None: std, and in MoE layers their default.
    """
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            of_outputs = None if out_std is None else out_std(name)
            module.reset_parameters(seed, std=std, out_std=of_outputs)
    for name, parameter in model.named_parameters():
        if ".moe." in name or ".adapters." in name:
            continue
        said = spec.by_name[name]
        if said.first_value is not None:
            nn.init.constant_(parameter, said.first_value)
        else:
            of_outputs = out_std(name) if said.is_output and out_std is not None else std
            init_normal_(parameter, std=of_outputs, seed=seed, name=name, per_expert=False)
    reset_adapters(model, seed)


class FeedForward(nn.Module):
    """A block of a transformer whose feed-forward layer has experts, as `moe`, or is dense, as `ffn`."""

    moe: MoELayer | None
    ffn: DenseMLP | None

    def make_feed_forward(
        self,
        moe: MoEConfig,  # options of a layer with experts
        num_experts: int,  # experts of the layer; 0: it is dense
        *,
        dim: int,  # model width
        hidden_dim: int,  # hidden size of a dense layer, and of the residual MLP beside experts
        activation: str,  # activation of experts or of a dense layer
        layer_index: int,  # index of the layer in the model
        bias: bool = False,  # whether a dense layer has biases
        arithmetic: OpSet = DEFAULT_OPS,  # op set of a dense layer in evaluation
        **place: Any,  # device and dtype of the parameters
    ) -> None:
        """Create the feed-forward layer."""
        self.moe = self.ffn = None
        if num_experts:
            self.moe = MoELayer.from_config(
                moe,
                dim=dim,
                num_experts=num_experts,
                activation=activation,
                residual_hidden_dim=hidden_dim,
                layer_index=layer_index,
                **place,
            )
        else:
            self.ffn = DenseMLP(
                dim=dim,
                hidden_dim=hidden_dim,
                activation=activation,
                bias=bias,
                arithmetic=arithmetic,
                **place,
            )

    def feed_forward(self, x_TD: Tensor, **call: Any) -> tuple[Tensor, RoutingStats | None]:
        """Output (T, D) for (T, D), and the routing statistics of a layer with experts; `call` is passed to
        `MoELayer`."""
        if self.moe is not None:
            y_TD, stats = self.moe(x_TD, **call)
            return y_TD, stats
        assert self.ffn is not None
        return self.ffn(x_TD), None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    Computed in FP32 (FP64 for FP64 input) and returned in the dtype of the input.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        arithmetic: op set of the norm in evaluation.
        device: the device of the weight.
        dtype: the type of the weight.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        arithmetic: OpSet = DEFAULT_OPS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.arithmetic = eps, arithmetic
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised x, (..., dim), in the dtype of x."""
        return self.arithmetic.in_mode(self.training).rms_norm(x, self.weight, eps=self.eps)
