"""The parameters of feed-forward layers, dense or with experts, as all families have them."""

from collections.abc import Iterator
from typing import Any, Protocol

from expertmesh.config.moe import MoEConfig
from expertmesh.layout.spec import Parameter, parameter

GATED_ACTIVATIONS = frozenset({"swiglu", "geglu", "reglu", "clamped_swiglu"})


class HasFeedForwards(Protocol):
    """What the feed-forward layers of a model depend on; the configurations of transformers have it."""

    @property
    def dim(self) -> int:
        """D."""

    @property
    def ffn_hidden_dim(self) -> int:
        """F of dense layers."""

    @property
    def activation(self) -> str:
        """Of experts and dense layers."""

    @property
    def moe(self) -> MoEConfig:
        """The mixture-of-experts layers."""


def num_branches(activation: str) -> int:
    """G: the matrices that a feed-forward network begins with, two of a gated one."""
    return 2 if activation in GATED_ACTIVATIONS else 1


def mlp_parameters(*, dim: int, hidden_dim: int, activation: str, bias: bool) -> int:
    """Parameters of one feed-forward network or expert: w_in (G, F, D), w_out (D, F), and their biases."""
    branches = num_branches(activation)
    matrices = (branches + 1) * dim * hidden_dim
    return matrices + (branches * hidden_dim + dim if bias else 0)


def feed_forward(config: HasFeedForwards, num_experts: int) -> Iterator[Parameter]:
    """Every parameter of one layer's feed-forward, `ffn` or `moe`, in the order of the model.

    Args:
        config: the model.
        num_experts: of the layer; 0: dense.
    """
    if not num_experts:
        yield from mlp("ffn", "dense_ffn", config, config.ffn_hidden_dim, bias=False)
    else:
        yield from moe(config, num_experts)


def moe(config: HasFeedForwards, num_experts: int) -> Iterator[Parameter]:
    """Every parameter of a `MoELayer`.

    Args:
        config: the model.
        num_experts: of the layer.
    """
    D, options, E = config.dim, config.moe, num_experts
    if options.router == "cosine":
        C = options.cosine_dim
        yield parameter("moe.router.expert_embeddings", "embedding", "router", expert=E, cosine=C)
        yield parameter("moe.router.log_scale", "scale", "router", one=1)
        yield parameter("moe.router.proj.weight", "router", "router", cosine=C, model=D)
    elif options.router != "hash":
        yield parameter(
            "moe.router.proj.weight", "router", "router", expert=E, model=D, hub="mlp.gate.weight"
        )
        if options.router_bias:
            name = "moe.router.proj.bias"
            yield parameter(name, "bias", "router", expert=E, hub="mlp.gate.bias")
    F = options.hidden_dim
    yield from mlp("moe.experts", "experts", config, F, bias=options.bias, num_experts=E)
    if options.num_shared_experts or options.shared_hidden_dim:
        shared = options.shared_hidden_dim or options.num_shared_experts * F
        yield from mlp("moe.shared_experts", "shared", config, shared, bias=options.bias)
        if options.shared_gate:
            hub = "mlp.shared_expert_gate.weight"
            yield parameter("moe.shared_gate.weight", "gate", "shared", one=1, model=D, hub=hub)
    if options.residual:
        hidden = config.ffn_hidden_dim
        yield from mlp("moe.residual_mlp", "residual", config, hidden, bias=options.bias)
        yield parameter("moe.residual_coefficient.weight", "gate", "residual", choice=2, model=D)
        yield parameter("moe.residual_coefficient.bias", "bias", "residual", choice=2)


_IN_HUB = {
    "dense_ffn": "mlp.",
    "experts": "mlp.experts.{expert}.",
    "shared": "mlp.shared_experts.",
}


def mlp(
    name: str,
    part: str,
    config: HasFeedForwards,
    hidden_dim: int,
    *,
    bias: bool,
    num_experts: int = 0,
) -> Iterator[Parameter]:
    """The parameters of a `DenseMLP`, or of the stacked experts of a layer.

    Args:
        name: of the module.
        part: see `Parameter`.
        config: the model, of which width and activation count.
        hidden_dim: F.
        bias: whether there are biases.
        num_experts: E; 0: it is one network.
    """
    D, F, G = config.dim, hidden_dim, num_branches(config.activation)
    lead: dict[str, Any] = {"expert": num_experts} if num_experts else {}
    cut = None if num_experts else "hidden"
    hub = _IN_HUB.get(part)
    branches = ("gate_proj.weight", "up_proj.weight") if G == 2 else ("up_proj.weight",)
    into: tuple[str, ...] = () if hub is None else tuple(hub + branch for branch in branches)
    out: tuple[str, ...] = () if hub is None else (f"{hub}down_proj.weight",)
    yield parameter(
        f"{name}.w_in", "matrix", part, **lead, branch=G, hidden=F, model=D, cut=cut, hub=into
    )
    yield parameter(
        f"{name}.w_out",
        "matrix",
        part,
        **lead,
        model=D,
        hidden=F,
        cut=cut,
        is_output=True,
        hub=out,
    )
    if bias:
        into, out = (
            tuple(own.replace(".weight", ".bias") for own in names) for names in (into, out)
        )
        yield parameter(f"{name}.b_in", "bias", part, **lead, branch=G, hidden=F, cut=cut, hub=into)
        yield parameter(f"{name}.b_out", "bias", part, **lead, model=D, hub=out)
