"""A layer in Tutel's padded form, for gates and experts that are modules of their own: route -> rows -> experts -> tokens."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import net
from expertmesh.integrations.tutel.padded import (
    extract_critical,
    fast_decode,
    fast_encode,
    gshard_loss,
    load_importance_loss,
)
from expertmesh.parallel.experts.owned import OwnedParameter


class LinearGate(nn.Module):
    """Logits of a linear map without bias, (T, D) to (T, E)."""

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if fp32_gate else None
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k = min(int(k), num_global_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the tokens."""
        return self.wg(x.to(self.wg.weight.dtype))


class CosineGate(nn.Module):
    """Cosines of projected tokens with learned vectors, over a temperature, (T, D) to (T, E)."""

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        proj_dim: int = 256,
        init_t: float = 0.5,
        **_: Any,
    ) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)
        self.top_k = min(int(k), num_global_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the tokens."""
        projected = F.normalize(self.cosine_projector(x), dim=1)
        scale = self.temperature.clamp(max=torch.log(torch.tensor(100.0)).item()).exp()
        return projected @ F.normalize(self.sim_matrix, dim=0) * scale


class Ffn(nn.Module):
    """Two linear maps per expert with any activation between; (n, C, D) to (n, C, output_dim)."""

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        activation_fn_with_self: Callable[[Tensor, nn.Module], Tensor] | None = None,
        output_dim: int | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
    ) -> None:
        super().__init__()
        if sharded_count > 1:
            raise ConfigError(
                f"num_experts_per_device=-{sharded_count}: experts with an activation or output_dim of their own are whole "
                "on a device; use 1"
            )
        self.activation_fn = activation_fn or F.relu
        self.activation_fn_with_self = activation_fn_with_self
        self.output_dim = output_dim or model_dim
        pairs = [
            (
                nn.Linear(model_dim, hidden_size_per_expert, bias=has_fc1_bias),
                nn.Linear(hidden_size_per_expert, self.output_dim, bias=has_fc2_bias),
            )
            for _ in range(num_experts_per_device)
        ]
        stacked: dict[str, list[Any]] = {
            "batched_fc1_w": [fc1.weight for fc1, _ in pairs],
            "batched_fc2_w": [fc2.weight.T for _, fc2 in pairs],
            "batched_fc1_bias": [fc1.bias for fc1, _ in pairs],
            "batched_fc2_bias": [fc2.bias for _, fc2 in pairs],
        }
        for name, values in stacked.items():
            whole = None if values[0] is None else nn.Parameter(torch.stack(values).detach())
            self.register_parameter(name, whole)

    def forward(self, x: Tensor, _: nn.Module) -> Tensor:
        """Results of the rows."""
        own = dict(self.named_parameters())
        h = x @ own["batched_fc1_w"].mT
        if "batched_fc1_bias" in own:
            h = h + own["batched_fc1_bias"][:, None]
        with_self = self.activation_fn_with_self
        h = self.activation_fn(h) if with_self is None else with_self(h, self)
        y = h @ own["batched_fc2_w"]
        return y + own["batched_fc2_bias"][:, None] if "batched_fc2_bias" in own else y


GATES: dict[str, Callable[..., nn.Module]] = {"top": LinearGate, "cosine_top": CosineGate}


def make_gate(
    gate: Mapping[str, Any], model_dim: int, num_global_experts: int, *, seed: int | None
) -> nn.Module:
    """The module of one of Tutel's `gate_type` dictionaries; seed: of torch's generator, None: as it is."""
    make = gate["module"] if gate["type"] == "custom" else GATES[gate["type"]]
    own = _arguments(gate) | {"model_dim": model_dim, "num_global_experts": num_global_experts}
    return _drawn(make, own, seed)


def make_experts(
    experts: Mapping[str, Any],
    model_dim: int,
    num_local_experts: int,
    sharded_count: int,
    *,
    seed: int | None,
) -> nn.Module:
    """The module of Tutel's `experts` dictionary; classes of one's own may take the number of experts by its former name."""
    make = experts["module"] if experts["type"] == "custom" else Ffn
    accepted = inspect.signature(make).parameters
    former = "local_experts" in accepted and "num_experts_per_device" not in accepted
    count = "local_experts" if former else "num_experts_per_device"
    sizes = {"model_dim": model_dim, "sharded_count": sharded_count, count: num_local_experts}
    return _drawn(make, _arguments(experts) | sizes, seed)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in given.items() if n not in ("type", "module")}


def _drawn(
    make: Callable[..., nn.Module], arguments: dict[str, Any], seed: int | None
) -> nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
    return make(**arguments)


class CustomLayer(nn.Module):
    """Gates and experts in Tutel's protocol: `gate(x)` gives logits, `experts(rows, layer)` maps (n, C, *token) rows.

    Args:
        gates: Tutel's `gate_type` dictionaries.
        experts: Tutel's `experts` dictionary, without the number of experts.
        model_dim: D.
        num_global_experts: E.
        num_local_experts: experts of this rank.
        sharded_count: ranks that share an expert.
        group: the ranks; None: all.
        seeds: as in `MOELayer`.
        options: is_postscore, batch_prioritized_routing, normalize_gate, is_gshard_loss.
    """

    def __init__(
        self,
        gates: Sequence[Mapping[str, Any]],
        experts: Mapping[str, Any],
        *,
        model_dim: int,
        num_global_experts: int,
        num_local_experts: int,
        sharded_count: int,
        group: Any,
        seeds: tuple[int | None, ...],
        options: Mapping[str, bool],
    ) -> None:
        super().__init__()
        self.model_dim, self.num_global_experts = model_dim, num_global_experts
        self.num_local_experts, self.sharded_count = num_local_experts, sharded_count
        self.group, self.options = group, options
        self.world_size = net.get_world_size(group)
        self.adaptive_degree, self.megablocks_size = 1, 0
        self.experts = make_experts(
            experts, model_dim, num_local_experts, sharded_count, seed=seeds[1]
        )
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
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Output, balance loss, and (E,) choices per expert."""
        token = input.shape[-reserve_dims:]
        gate = self.gates[gate_index]
        weight = next(self.experts.parameters(), input)
        x = input.reshape(-1, token.numel()).to(weight.dtype).contiguous()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            routed, loss = self._routed(
                gate, x.to(weight.dtype), top_k, capacity_factor, inequivalent_tokens
            )
        after = self.options["is_postscore"]
        rows = fast_encode(x, routed, after)
        parts = self.sharded_count  # of an expert's rows, for its ranks
        rows = rows.view(rows.shape[0] * parts, rows.shape[1] // parts, rows.shape[2])
        rows = net.all_to_all(rows, 1, 0, group=self.group)
        rows = self.experts(rows.unflatten(-1, token), self)
        token_out = rows.shape[2:]
        rows = net.all_to_all(rows.flatten(2), 0, 1, group=self.group)
        y = fast_decode(rows, routed, after)
        y = y.view(*input.shape[:-reserve_dims], *token_out[-reserve_dims:])
        return y.to(input.dtype), loss, routed.dispatch_count.long()

    def _routed(
        self,
        gate: Any,
        x: Tensor,
        top_k: int | None,
        capacity_factor: float | None,
        inequivalent_tokens: bool,
    ) -> Any:
        logits = gate(x)
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
            alignment=self.sharded_count,
            group=self.group,
            inequivalent_tokens=inequivalent_tokens,
        )
