"""`HubFamily`, the description of an architecture of the hub for our GPT; `families/` has a file for each. Never
imports torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from expertmesh.checkpoints.box import Box
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.spec.model_spec import Parameter

Values = Mapping[str, Any]
"""Values of a config.json, by option."""
Fits = tuple[Any, ...] | Callable[[ModelConfig], bool]
"""Values of an option of ours that an architecture allows, or a predicate on the configuration."""
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""Our activations by the hub's names, all of gated feed-forward blocks."""
_DEFAULTS: Values = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {"is_causal": (True, None)}


def anything(config: ModelConfig) -> bool:
    """Predicate of `Fits` that allows every value."""
    return True


PLAIN: Mapping[str, Fits] = {
    "moe.num_experts": lambda c: len(set(c.moe.num_experts)) == 1,
    "activation": tuple(ACTIVATIONS.values()),
    "latent.kv_lora_rank": (None,),
    "sinks": (False,),
    "sliding_window": (None,),
    "full_attention_every": (None,),
    "qk_norm_scope": ("head",),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "out_bias": (False,),
    "rope_fraction": (1,),
    "first_dense_layers": (0,),
    "moe_every": (1,),
    "moe.router": ("topk",),
    "moe.score_function": ("softmax", "softmax_after_topk"),
    "moe.bias_update_rate": (0,),
    "moe.weight_scale": (1,),
    "moe.num_expert_groups": (1,),
    "moe.group_score": ("top2_sum",),
    "moe.num_shared_experts": (0,),
    "moe.shared_hidden_dim": lambda c: c.moe.shared_hidden_dim in (None, c.moe.num_shared_experts * c.moe.hidden_dim),
    "moe.shared_gate": (False,),
    "moe.logit_temperature": (1,),
    "moe.residual": (False,),
    "moe.bias": (False,),
    "moe.router_bias": (False,),
    "moe.eval_capacity_factor": (None,),
    "moe.max_capacity_factor": (None,),
}
"""Options of ours that change a model's results, with the values that fit an architecture whose `fits` lacks them."""


class Piece(NamedTuple):
    """Mapping of a part of a tensor in the hub's files to a part of our tensor."""

    ours: str  # name in the state dict of our GPT
    ours_at: Box  # box in our tensor; sizes of one stand for dimensions that the hub's tensor lacks
    hub_name: str  # name in the hub's files
    hub_at: Box  # box in the hub's tensor; as many elements in the same order
    hub_shape: tuple[int, ...]  # shape of the hub's whole tensor
    is_turned: bool = False  # whether the last two dimensions of the part are transposed in the hub's tensor

    def turned(self, part: Any) -> Any:
        """View of a part with its dimensions transposed if `is_turned`, from the hub's order to ours or back."""
        return part.mT if self.is_turned else part


@dataclass(frozen=True, kw_only=True)
class HubFamily:
    """Description of an architecture of the hub.

    Attributes:
        model_type: its name in config.json.
        architecture: transformers' class.
        title: its name for display.
        read: function from a config.json, defaults filled in, to the options of our `ModelConfig` beyond the common
            ones, with `moe`.
        write: function from a configuration that fits to the options of its config.json beyond the common ones.
        fits: options of ours whose allowed values differ from `PLAIN`; see `misfits`.
        ways: advice for an option that does not fit, where there is any.
        defaults: transformers' defaults of options that config.json leaves out; sizes of weights have none.
        nulls: options whose null is a value of its own, not the default.
        refused: option of config.json -> the values with which our GPT computes the same.
        renamed: pairs of a part of the spec's `hub` names and the part that replaces it in the architecture's files.
        experts: function to the pieces of experts that are one tensor in its files; None: each expert has tensors of
            its own.
        aliases: further names of the architecture in config.json.
    """

    model_type: str
    architecture: str
    title: str
    read: Callable[[Values], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fits: Mapping[str, Fits]
    ways: Mapping[str, str] = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    experts: Callable[[Parameter, tuple[str, ...]], Iterator[Piece]] | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Add the defaults, refusals and nulls of all architectures."""
        object.__setattr__(self, "defaults", {**_DEFAULTS, **self.defaults})
        object.__setattr__(self, "refused", {**_REFUSED, **self.refused})
        object.__setattr__(self, "nulls", ("num_key_value_heads", *self.nulls))

    def filled(self, values: Values) -> Values:
        """The values of a config.json, missing options filled in with transformers' defaults."""
        given = {n: v for n, v in values.items() if v is not None or n in self.nulls}
        return {**self.defaults, **given}

    def hub_name(self, name: str) -> str:
        """Name in the architecture's files of a tensor, from its name in the spec."""
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return name

    def misfits(self, config: ModelConfig) -> list[str]:
        """Names of our options whose values do not fit this architecture."""
        return [
            name
            for name, fit in {**PLAIN, **self.fits}.items()
            if not (fit(config) if callable(fit) else option(config, name) in fit)
        ]


def option(config: ModelConfig, name: str) -> Any:
    """The value of an option by its dotted name."""
    return reduce(getattr, name.split("."), config)


def other_model(what: str, model_type: str, wanted: str) -> ConfigError:
    """The error for a config.json with an option that our GPT does not compute."""
    return ConfigError(
        f"{what}: a {model_type} with it does not run as a GPT of expertmesh, only with {wanted}; run its experts "
        "through expertmesh.integrations.transformers.apply(model)"
    )
