"""Parameters of feed-forward layers, dense or with experts, for all model families."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from expertmesh.config.moe import MoEConfig
from expertmesh.spec.model_spec import Parameter, parameter

GATED_ACTIVATIONS = frozenset({"swiglu", "geglu", "reglu", "clamped_swiglu"})


class HasFeedForwards(Protocol):
    """Configuration fields that the feed-forward layers of a model depend on."""

    @property
    def dim(self) -> int:
        """D."""

    @property
    def ffn_hidden_dim(self) -> int:
        """F of dense layers."""

    @property
    def activation(self) -> str:
        """Activation of experts and dense layers."""

    @property
    def moe(self) -> MoEConfig:
        """The mixture-of-experts layers."""


def num_branches(activation: str) -> int:
    """G: input matrices of a feed-forward network, 2 (gate, up) if the activation is gated, else 1."""
    return 2 if activation in GATED_ACTIVATIONS else 1


def mlp_parameters(*, dim: int, hidden_dim: int, activation: str, bias: bool) -> int:
    """Parameters of one feed-forward network or expert: w_in (G, F, D), w_out (D, F), and their biases."""
    branches = num_branches(activation)
    matrices = (branches + 1) * dim * hidden_dim
    return matrices + (branches * hidden_dim + dim if bias else 0)


def feed_forward(config: HasFeedForwards, num_experts: int) -> Iterator[Parameter]:
    """Every parameter of one feed-forward layer, `ffn` or `moe`, in the order of the model.

    Args:
        num_experts: experts of the layer; 0: it is dense.
    """
    if not num_experts:
        yield from mlp("ffn", "dense_ffn", config, config.ffn_hidden_dim, bias=False)
    else:
        yield from moe(config, num_experts)


def moe(config: HasFeedForwards, num_experts: int) -> Iterator[Parameter]:
    """Every parameter of a `MoELayer`."""
    D, options, E = config.dim, config.moe, num_experts
    if options.router == "cosine":
        C = options.cosine_dim
        yield parameter("moe.router.expert_embeddings", "embedding", "router", expert=E, cosine=C)
        yield parameter("moe.router.log_scale", "scale", "router", one=1)
        yield parameter("moe.router.proj.weight", "router", "router", cosine=C, model=D)
    elif options.router != "hash":
        yield parameter("moe.router.proj.weight", "router", "router", expert=E, model=D, hub="mlp.gate.weight")
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


_AXES_OF_MLP: Mapping[str, tuple[str, ...]] = {
    "w_in": ("branch", "hidden", "model"),
    "w_out": ("model", "hidden"),
    "b_in": ("branch", "hidden"),
    "b_out": ("model",),
}
MLP_CUT: Mapping[str, int] = {name: axes.index("hidden") for name, axes in _AXES_OF_MLP.items() if "hidden" in axes}
"""Axis of each parameter of a `DenseMLP` along which tensor parallelism cuts it."""


def mlp(
    name: str,  # name of the module
    part: str,  # see `Parameter`
    config: HasFeedForwards,  # the model, whose width and activation are read
    hidden_dim: int,  # F
    *,
    bias: bool,  # whether there are biases
    num_experts: int = 0,  # E; 0: a single network, without an expert axis
) -> Iterator[Parameter]:
    """The parameters of a `DenseMLP`, or of the stacked experts of a layer."""
    G = num_branches(config.activation)
    sizes = {"expert": num_experts, "branch": G, "hidden": hidden_dim, "model": config.dim}
    hub = _IN_HUB.get(part)
    ends = ("gate_proj", "up_proj") if G == 2 else ("up_proj",)
    for leaf, axes in _AXES_OF_MLP.items():
        is_bias, is_output = leaf.startswith("b_"), leaf.endswith("_out")
        if is_bias and not bias:
            continue
        kind = "bias" if is_bias else "weight"
        names = ("down_proj",) if is_output else ends
        yield parameter(
            f"{name}.{leaf}",
            "bias" if is_bias else "matrix",
            part,
            **{axis: sizes[axis] for axis in (("expert", *axes) if num_experts else axes)},
            cut="hidden" if leaf in MLP_CUT and not num_experts else None,
            is_output=is_output and not is_bias,
            hub=() if hub is None else tuple(f"{hub}{own}.{kind}" for own in names),
        )
