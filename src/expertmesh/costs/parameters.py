"""Exact parameter counts and shapes of a GPT, from its configuration alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

from expertmesh.config.model import ModelConfig, MoEConfig

GATED_ACTIVATIONS = frozenset({"swiglu", "geglu", "reglu"})


def mlp_parameters(*, dim: int, hidden_dim: int, activation: str, bias: bool) -> int:
    """Parameters of one feed-forward network or expert: w_in (G, F, D), w_out (D, F), and their biases."""
    branches = 2 if activation in GATED_ACTIVATIONS else 1
    matrices = (branches + 1) * dim * hidden_dim
    return matrices + (branches * hidden_dim + dim if bias else 0)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by what they do. `total` is all of them, each counted once.

    Attributes:
        embedding: token embedding.
        output: output projection; 0 when it is the embedding.
        attention: projections and query-key norms.
        norms: the norms of the residual stream.
        dense_ffn: feed-forward layers without experts.
        router: the router of all MoE layers.
        experts: routed experts.
        shared: shared experts.
        residual: residual MLPs and coefficients.
        inactive_experts: routed experts' parameters that one token does not use: all but K experts per MoE layer.
    """

    embedding: int
    output: int
    attention: int
    norms: int
    dense_ffn: int
    router: int
    experts: int
    shared: int
    residual: int
    inactive_experts: int

    @property
    def total(self) -> int:
        """All parameters."""
        parts = (f.name for f in fields(self) if f.name != "inactive_experts")
        return sum(getattr(self, name) for name in parts)

    @property
    def active(self) -> int:
        """Parameters that one token uses, the embedding included (the convention of "47B, 13B active")."""
        return self.total - self.inactive_experts


_PART_OF = {
    "embedding": "embedding",
    "output": "output",
    "attention": "attention",
    "attention_norm": "norms",
    "ffn_norm": "norms",
    "final_norm": "norms",
    "ffn": "dense_ffn",
    "router": "router",
    "experts": "experts",
    "shared_experts": "shared",
    "shared_gate": "shared",
    "residual_mlp": "residual",
    "residual_coefficient": "residual",
}
"""What the parameters of a module count as."""


_MATRICES = (
    *(f"attention.{name}.weight" for name in ("q", "kv", "qkv", "out")),
    *(f"places.{name}.weight" for name in ("q", "k")),
    *("w_in", "w_out"),
)
"""What the names of matrices that Muon takes end in, of a GPT and an encoder-decoder."""


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of a GPT exactly, without building it.

    Args:
        config: the model.

    Returns:
        The counts; `total` equals the sum over `GPT(config, device="meta").parameters()`.

    Raises:
        ConfigError: the numbers of experts do not fit the layers.
    """
    counts, inactive = dict.fromkeys(_PART_OF.values(), 0), 0
    for parameter in parameter_shapes(config):
        module = parameter.name.removeprefix(f"layers.{parameter.layer}.").removeprefix("moe.")
        counts[_PART_OF[module.partition(".")[0]]] += parameter.num_elements
        if parameter.is_expert:
            experts = parameter.shape[0]
            unused = max(experts - config.moe.top_k, 0)
            inactive += parameter.num_elements // experts * unused
    return ParameterCount(**counts, inactive_experts=inactive)


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of a GPT.

    Attributes:
        name: in the model.
        shape: its sizes.
        layer: number of its layer; None: it is outside the layers.
        tensor_axis: along which tensor parallelism cuts it (even the size permitting); None: every rank has it whole.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    tensor_axis: int | None = None

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it is one of routed experts."""
        return ".moe.experts." in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether Muon is for it: the matrices of attention, dense layers and experts."""
        return self.name.endswith(_MATRICES)


def parameter_shapes(config: ModelConfig) -> Iterator[ParameterShape]:
    """Every parameter of a GPT in the order of the model, without building it.

    Args:
        config: the model.

    Raises:
        ConfigError: the numbers of experts do not fit the layers.
    """
    D, V = config.dim, config.vocab_size
    yield ParameterShape("embedding.weight", (V, D), None, 1)
    for layer, num_experts in enumerate(config.experts_per_layer()):
        for name, shape, axis in _layer_shapes(config, num_experts):
            yield ParameterShape(f"layers.{layer}.{name}", shape, layer, axis)
    yield ParameterShape("final_norm.weight", (D,), None)
    if not config.tie_embeddings:
        yield ParameterShape("output.weight", (V, D), None, 1)


_Shape = tuple[str, tuple[int, ...], int | None]


def _layer_shapes(config: ModelConfig, num_experts: int) -> Iterator[_Shape]:
    D, head = config.dim, config.head_size
    width = config.num_heads * head
    yield "attention_norm.weight", (D,), None
    rows = width + 2 * config.kv_heads * head
    yield "attention.qkv.weight", (rows, D), 0
    if config.qkv_bias:
        yield "attention.qkv.bias", (rows,), 0
    yield "attention.out.weight", (D, width), 1
    if config.qk_norm:
        whole = config.qk_norm_scope == "projection"
        yield "attention.q_norm.weight", (width if whole else head,), None
        yield "attention.k_norm.weight", (config.kv_heads * head if whole else head,), None
    yield "ffn_norm.weight", (D,), None
    yield from feed_forward_shapes(config, num_experts)


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


def feed_forward_shapes(config: HasFeedForwards, num_experts: int) -> Iterator[_Shape]:
    """Name, shape and axis of tensor parallelism of each parameter of one layer's feed-forward, dense or MoE.

    Args:
        config: the model.
        num_experts: of the layer; 0: dense.
    """
    D = config.dim
    if not num_experts:
        yield from _mlp_shapes("ffn", config, config.ffn_hidden_dim, bias=False)
        return
    moe = config.moe
    if moe.router == "cosine":
        yield "moe.router.expert_embeddings", (num_experts, moe.cosine_dim), None
        yield "moe.router.log_scale", (1,), None
        yield "moe.router.proj.weight", (moe.cosine_dim, D), None
    elif moe.router != "hash":
        yield "moe.router.proj.weight", (num_experts, D), None
    experts = _mlp_shapes("moe.experts", config, moe.hidden_dim, bias=moe.bias)
    yield from ((name, (num_experts, *shape), None) for name, shape, _ in experts)
    if moe.num_shared_experts or moe.shared_hidden_dim:
        hidden_dim = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
        yield from _mlp_shapes("moe.shared_experts", config, hidden_dim, bias=moe.bias)
        if moe.shared_gate:
            yield "moe.shared_gate.weight", (1, D), None
    if moe.residual:
        yield from _mlp_shapes("moe.residual_mlp", config, config.ffn_hidden_dim, bias=moe.bias)
        yield "moe.residual_coefficient.weight", (2, D), None
        yield "moe.residual_coefficient.bias", (2,), None


def _mlp_shapes(
    name: str, config: HasFeedForwards, hidden_dim: int, *, bias: bool
) -> Iterator[_Shape]:
    branches = 2 if config.activation in GATED_ACTIVATIONS else 1
    yield f"{name}.w_in", (branches, hidden_dim, config.dim), 1
    yield f"{name}.w_out", (config.dim, hidden_dim), 1
    if bias:
        yield f"{name}.b_in", (branches, hidden_dim), 1
        yield f"{name}.b_out", (config.dim,), None
