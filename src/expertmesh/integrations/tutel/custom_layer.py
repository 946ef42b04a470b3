"""A layer in Tutel's padded form, for gates and experts that are modules of their own: route -> rows -> experts ->
tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import net
from expertmesh.integrations.tutel.builtin import make_experts, make_gate
from expertmesh.integrations.tutel.padded import (
    extract_critical,
    fast_decode,
    fast_encode,
    gshard_loss,
    load_importance_loss,
)
from expertmesh.parallel.experts.owned import OwnedParameter


class CustomLayer(nn.Module):
    """Gates and experts in Tutel's protocol: `gate(x)` gives logits, `experts(rows, layer)` maps (n, C, *token)
    rows."""

    def __init__(
        self,
        gates: Sequence[Mapping[str, Any]],  # Tutel's `gate_type` dictionaries
        experts: Mapping[str, Any],  # Tutel's `experts` dictionary, without the number of experts
        *,
        model_dim: int,  # D
        num_global_experts: int,  # E
        num_local_experts: int,  # experts of this rank
        sharded_count: int,  # ranks that share an expert
        group: Any,  # the ranks; None: all
        seeds: tuple[int | None, ...],  # as in `MOELayer`
        options: Mapping[str, bool],  # is_postscore, batch_prioritized_routing, normalize_gate, is_gshard_loss
    ) -> None:
        super().__init__()
        self.model_dim, self.num_global_experts = model_dim, num_global_experts
        self.num_local_experts, self.sharded_count = num_local_experts, sharded_count
        self.group, self.options = group, options
        self.world_size = net.get_world_size(group)
        self.adaptive_degree, self.megablocks_size = 1, 0
        self.experts = make_experts(experts, model_dim, num_local_experts, sharded_count, seed=seeds[1])
        if self.world_size > 1:
            owners = World(group).all_ranks()
            for parameter in self.experts.parameters():
                OwnedParameter.adopt(parameter, owners)
        made = []
        for index, gate in enumerate(gates):
            seed = None if seeds[0] is None else seeds[0] + index
            module = make_gate(gate, model_dim, num_global_experts, seed=seed)
            for name, default in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
                if not hasattr(module, name):
                    setattr(module, name, gate.get(name, default))
            if not hasattr(module, "top_k"):
                raise ConfigError(
                    f"gate_type: {type(module).__name__} has no top_k; set self.top_k, experts per token, in its "
                    "__init__"
                )
            made.append(module)
        self.gates = nn.ModuleList(made)

    def forward(
        self,
        input: Tensor,
        *,
        gate_index: int,
        top_k: int | None,
        capacity_factor: float | None,
        reserve_dims: int,
        inequivalent_tokens: bool,
        adaptive_r: int,
        alignment: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Output, balance loss, and (E,) choices per expert."""
        self.adaptive_degree = adaptive_r
        token = input.shape[-reserve_dims:]
        gate = self.gates[gate_index]
        weight = next(self.experts.parameters(), input)
        x = input.reshape(-1, token.numel()).to(weight.dtype).contiguous()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            routed, loss = self._routed(
                gate, x.to(weight.dtype), top_k, capacity_factor, inequivalent_tokens, alignment
            )
        after = self.options["is_postscore"]
        rows = fast_encode(x, routed, after)
        rows = self._through_experts(rows, token, adaptive_r)
        token_out = rows.shape[2:]
        rows = rows.flatten(2)
        y = fast_decode(rows, routed, after)
        y = y.view(*input.shape[:-reserve_dims], *token_out[-reserve_dims:])
        return y.to(input.dtype), loss, routed.dispatch_count.long()

    def _through_experts(self, rows: Tensor, token: torch.Size, r: int) -> Tensor:
        """Results of (E, C, *token) rows: of all experts here (r = 0), or where they are, in r slices of an expert."""
        if r == 0:
            return self.experts(rows.unflatten(-1, token), self)
        if self.sharded_count > 1:
            rows = rows.repeat(1, r, 1).view(self.world_size, -1, rows.shape[2])
        rows = net.all_to_all(rows, 1, 0, group=self.group)
        rows = self.experts(rows.unflatten(-1, token), self)
        token_out = rows.shape[2:]
        rows = net.all_to_all(rows.flatten(2), 0, 1, group=self.group)
        if self.sharded_count > 1:
            rows = rows.view(self.num_global_experts, r, -1, rows.shape[2]).sum(1)
        return rows.unflatten(-1, token_out)

    def _routed(
        self,
        gate: Any,
        x: Tensor,
        top_k: int | None,
        capacity_factor: float | None,
        inequivalent_tokens: bool,
        alignment: int,
    ) -> Any:
        logits = gate(x)
        if logits.shape != (len(x), self.num_global_experts):
            raise ConfigError(
                f"{type(gate).__name__} gave logits of shape {tuple(logits.shape)}: must be "
                f"{(len(x), self.num_global_experts)}, one per token and expert of all ranks; change its forward"
            )
        std = gate.gate_noise / self.num_global_experts if self.training else 0.0
        noisy = logits + std * torch.randn_like(logits) if std else logits

        def loss_fn(scores: Tensor, ids: Tensor) -> Tensor:
            if self.options["is_gshard_loss"]:
                return gshard_loss(scores, ids)
            return load_importance_loss(logits, noisy, ids, std)

        return extract_critical(
            F.softmax(noisy, dim=1),
            top_k=top_k or gate.top_k,
            loss_fn=loss_fn,
            capacity_factor=gate.capacity_factor if capacity_factor is None else capacity_factor,
            batch_prioritized_routing=self.options["batch_prioritized_routing"],
            normalize_gate=self.options["normalize_gate"],
            alignment=alignment,
            group=self.group,
            inequivalent_tokens=inequivalent_tokens,
        )
