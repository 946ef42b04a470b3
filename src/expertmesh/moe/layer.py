"""The mixture-of-experts layer: route -> assign -> dispatch -> experts -> combine (+ shared)."""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.model import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.experts import DenseMLP, GroupedExperts
from expertmesh.moe.init import draw_seed, init_normal_
from expertmesh.moe.losses import switch_loss, z_loss
from expertmesh.moe.router import TopKRouter
from expertmesh.moe.types import RoutingStats


class MoELayer(nn.Module):
    """A drop-in mixture-of-experts layer."""

    def __init__(self, *, dim: int, hidden_dim: int, num_experts: int, top_k: int, activation: str = "swiglu", bias: bool = False,
                 num_shared_experts: int = 0, shared_hidden_dim: int | None = None, residual: bool = False, residual_hidden_dim: int | None = None,
                 aux_loss_weight: float = 0.01, z_loss_weight: float = 0.0, dispatcher: Any = None, seed: int | None = None, layer_index: int = 0,
                 device=None, dtype=None, **later: Any) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k={top_k}: must be from 1 to num_experts={num_experts}; lower top_k or add experts")
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.aux_loss_weight, self.z_loss_weight = aux_loss_weight, z_loss_weight
        self.layer_index = layer_index
        kw = {"device": device, "dtype": dtype}
        self.router = TopKRouter(dim=dim, num_experts=num_experts, **kw)
        self.experts = GroupedExperts(num_experts=num_experts, dim=dim, hidden_dim=hidden_dim, activation=activation, bias=bias, **kw)
        shared = shared_hidden_dim or num_shared_experts * hidden_dim
        self.shared_experts = DenseMLP(dim=dim, hidden_dim=shared, activation=activation, bias=bias, **kw) if shared else None
        self.residual_mlp = self.residual_coefficient = None
        if residual:
            self.residual_mlp = DenseMLP(dim=dim, hidden_dim=residual_hidden_dim or hidden_dim, activation=activation, bias=bias, **kw)
            self.residual_coefficient = nn.Linear(dim, 2, **kw)
        self.dispatcher = dispatcher or LocalDispatcher()
        self.reset_parameters(seed)

    @classmethod
    def from_config(cls, moe: MoEConfig, *, dim: int, num_experts: int, activation: str, residual_hidden_dim: int | None = None,
                    layer_index: int = 0, device=None, dtype=None) -> "MoELayer":
        """Build from the configuration."""
        options = moe.model_dump(exclude={"num_experts"})
        return cls(dim=dim, num_experts=num_experts, activation=activation, residual_hidden_dim=residual_hidden_dim,
                   layer_index=layer_index, device=device, dtype=dtype, **options)

    def reset_parameters(self, seed: int | None = None, *, std: float | None = None, out_std: float | None = None) -> None:
        """Initialise every parameter; std None: 1/sqrt(fan_in)."""
        seed = draw_seed() if seed is None else seed
        for name, p in self.named_parameters():
            if name.split(".")[-1] in ("b_in", "b_out", "bias"):
                nn.init.zeros_(p)
                continue
            given = out_std if name.endswith("w_out") else std
            init_normal_(p, std=p.shape[-1] ** -0.5 if given is None else given, seed=seed,
                         name=f"layers.{self.layer_index}.moe.{name}", per_expert=name.startswith("experts."))

    def update_expert_bias(self, num_tokens_per_expert_E: Tensor) -> None:
        """Aux-loss-free balancing step."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None, token_index: Tensor | None = None,
                routing: Any = None, top_k: int | None = None, capacity_factor: float | None = None) -> tuple[Tensor, RoutingStats]:
        """x (..., D) -> y like x, and the routing statistics."""
        x_TD = x.reshape(-1, self.dim)
        r = self.router(x_TD, top_k or self.top_k)
        counts = torch.bincount(r.topk_expert_ids_TK.flatten(), minlength=self.num_experts)
        sent = self.dispatcher.dispatch(x_TD, r.topk_expert_ids_TK, r.topk_weights_TK)
        y = self.dispatcher.combine(self.experts(sent.x_TD, sent.expert_ids_TK, sent.weights_TK), sent)
        if self.residual_mlp is not None:
            a, b = self.residual_coefficient(x_TD).softmax(-1).unbind(-1)
            y = a[:, None] * y + b[:, None] * self.residual_mlp(x_TD)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_TD)
        stats = RoutingStats(
            aux_loss=self.aux_loss_weight * switch_loss(r.scores_TE, counts),
            z_loss=self.z_loss_weight * z_loss(r.logits_TE),
            num_tokens_per_expert_E=counts,
            num_dropped=torch.zeros((), dtype=torch.int64, device=x.device),
            topk_expert_ids_TK=r.topk_expert_ids_TK.detach(),
            topk_weights_TK=r.topk_weights_TK.detach(),
        )
        return y.reshape(x.shape), stats
