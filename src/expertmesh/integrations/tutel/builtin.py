"""Tutel's gates and experts as modules, with the weights that Tutel draws, and the making of one's own."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import net


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
        self.top_k, self.fp32_gate = min(int(k), num_global_experts), fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the tokens."""
        weight = self.wg.weight
        if self.fp32_gate:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return F.linear(x.to(weight.dtype), weight)


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
        self.log_most = torch.log(torch.tensor(100.0)).item()
        self.temperature = nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)
        self.top_k = min(int(k), num_global_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the tokens."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias, vectors, temperature = (
            p.to(wide)
            for p in (
                self.cosine_projector.weight,
                self.cosine_projector.bias,
                self.sim_matrix,
                self.temperature,
            )
        )
        projected = F.normalize(F.linear(x.to(wide), weight, bias), dim=1)
        return projected @ F.normalize(vectors, dim=0) * temperature.clamp(max=self.log_most).exp()


class Ffn(nn.Module):
    """Two linear maps per expert with any activation between; (n, C, D) to (n, C, output_dim).

    Where ranks share an expert, each has a slice of the hidden size, and of the output's bias.
    """

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
        if hidden_size_per_expert % sharded_count:
            raise ConfigError(
                f"hidden_size_per_expert={hidden_size_per_expert}: {sharded_count} devices share an expert, which must "
                "divide it; choose a multiple"
            )
        self.activation_fn = activation_fn or F.relu
        self.activation_fn_with_self = activation_fn_with_self
        self.model_dim, self.output_dim = model_dim, output_dim or model_dim
        hidden, count = hidden_size_per_expert // sharded_count, num_experts_per_device
        bias_dim = -(-self.output_dim // sharded_count)
        self.batched_fc1_w = nn.Parameter(torch.empty(count, hidden, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(count, hidden, self.output_dim))
        for name, has, size in (("fc1", has_fc1_bias, hidden), ("fc2", has_fc2_bias, bias_dim)):
            bias = nn.Parameter(torch.zeros(count, size)) if has else None
            self.register_parameter(f"batched_{name}_bias", bias)
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Uniform numbers within 1 / sqrt(inputs), FP32, the two maps of an expert in turn."""
        for maps in zip(self.batched_fc1_w, self.batched_fc2_w, strict=True):
            for w, inputs in zip(maps, (self.model_dim, maps[0].shape[0]), strict=True):
                most = inputs**-0.5
                w.copy_(torch.rand(w.shape, dtype=torch.float32) * (most + most) - most)

    def forward(self, x: Tensor, layer: Any) -> Tensor:
        """Results of the rows."""
        own, r = dict(self.named_parameters()), layer.adaptive_degree
        sharing = layer.sharded_count

        def whole(name: str, *shape: int, ranks: int = sharing // max(r, 1)) -> Tensor:
            values: Tensor = own[name]
            if r == 0:
                values = net.zero_gather(values, group=layer.group)
            elif ranks > 1:
                values = net.zero_gather(values, group=neighbours(ranks, layer.group))
            return values.view(len(x), *shape)

        h = x @ whole("batched_fc1_w", -1, self.model_dim).mT
        if "batched_fc1_bias" in own:
            h = h + whole("batched_fc1_bias", 1, -1)
        with_self = self.activation_fn_with_self
        h = self.activation_fn(h) if with_self is None else with_self(h, self)
        y = h @ whole("batched_fc2_w", -1, self.output_dim)
        if "batched_fc2_bias" not in own:
            return y
        bias = whole("batched_fc2_bias", 1, -1, ranks=sharing)[..., : self.output_dim]
        return y + (bias / r if r > 1 else bias)


class LlamaFfn(nn.Module):
    """Gated experts, act(x W_fc1) * (x W_fc2) W_fc3; each parameter is flat, this rank's part of an equal cut."""

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.activation_fn = activation_fn or F.silu
        sizes = (num_experts_per_device, model_dim, hidden_size_per_expert)
        self.shapes = [torch.Size(s) for s in (sizes, sizes, (sizes[0], sizes[2], sizes[1]))]
        for n, shape in enumerate(self.shapes, 1):
            values = torch.empty(-(-shape.numel() // sharded_count)).normal_(0, 0.01)
            self.register_parameter(f"W_fc{n}", nn.Parameter(values))

    def forward(self, x: Tensor, layer: Any) -> Tensor:
        """Results of the rows."""
        if layer.world_size > 1 and layer.adaptive_degree != 1:
            raise ConfigError(
                f"adaptive_r={layer.adaptive_degree}: experts of type llama_ffn beside a gate of your own have 1 "
                "only; leave it out"
            )
        group = neighbours(layer.sharded_count, layer.group)
        gate, up, out = (
            net.zero_gather(p, shape, group) for p, shape in zip(self.parameters(), self.shapes, strict=True)
        )
        return (self.activation_fn(x @ gate) * (x @ up)) @ out


def neighbours(size: int, parent: net.Group) -> net.Group:
    """The group of so many neighbouring ranks that this rank is in; every rank must call. parent: None or all ranks."""
    return net.create_groups_from_world(group_count=-size, parent_group=parent).model_group


GATES: dict[str, Callable[..., nn.Module]] = {"top": LinearGate, "cosine_top": CosineGate}
EXPERTS: dict[str, Callable[..., nn.Module]] = {"ffn": Ffn, "llama_ffn": LlamaFfn}


def make_gate(gate: Mapping[str, Any], model_dim: int, num_global_experts: int, *, seed: int | None) -> nn.Module:
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
    """The module of Tutel's `experts` dictionary; classes of one's own may take the number of experts by its former
    name."""
    make = experts["module"] if experts["type"] == "custom" else EXPERTS[experts["type"]]
    accepted = inspect.signature(make).parameters
    former = "local_experts" in accepted and "num_experts_per_device" not in accepted
    count = "local_experts" if former else "num_experts_per_device"
    sizes = {"model_dim": model_dim, "sharded_count": sharded_count, count: num_local_experts}
    return _drawn(make, _arguments(experts) | sizes, seed)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in given.items() if n not in ("type", "module")}


def _drawn(make: Callable[..., nn.Module], arguments: dict[str, Any], seed: int | None) -> nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
    return make(**arguments)
