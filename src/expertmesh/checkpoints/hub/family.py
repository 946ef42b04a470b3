"""What our GPT must know of one architecture of the hub, in one object; `families/` has one file for each. Without torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from expertmesh.checkpoints.box import Box
from expertmesh.errors import ConfigError
from expertmesh.layout.spec import Parameter
from expertmesh.models.gpt.config import ModelConfig

Values = Mapping[str, Any]
"""Of a config.json."""
Fits = tuple[Any, ...] | Callable[[ModelConfig], bool]
"""Values of an option of ours that an architecture has, or whether it has a model's."""
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""Of a gated feed-forward block, the hub's names and ours."""
_DEFAULTS: Values = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {"is_causal": (True, None)}


def anything(config: ModelConfig) -> bool:
    """That every value of an option goes out."""
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
    "moe.shared_hidden_dim": lambda c: (
        c.moe.shared_hidden_dim in (None, c.moe.num_shared_experts * c.moe.hidden_dim)
    ),
    "moe.shared_gate": (False,),
    "moe.logit_temperature": (1,),
    "moe.residual": (False,),
    "moe.bias": (False,),
    "moe.router_bias": (False,),
    "moe.eval_capacity_factor": (None,),
    "moe.max_capacity_factor": (None,),
}
"""Of our options those that change what a model computes, and their values in an architecture that says nothing of them."""


class Piece(NamedTuple):
    """A part of a tensor that both have.

    Attributes:
        ours: name in the state dict of our GPT.
        ours_at: where it lies there; sizes of one stand for dimensions that theirs lacks.
        theirs: name in the hub's files.
        theirs_at: where it lies there; as many elements in the same order.
        theirs_shape: of their whole tensor.
        is_turned: whether the last two dimensions of the part are the other way round there.
    """

    ours: str
    ours_at: Box
    theirs: str
    theirs_at: Box
    theirs_shape: tuple[int, ...]
    is_turned: bool = False

    def turned(self, part: Any) -> Any:
        """The tensor at `theirs_at` in our order, and the other way round: a view."""
        return part.mT if self.is_turned else part


@dataclass(frozen=True, kw_only=True)
class HubFamily:
    """One architecture of the hub.

    Attributes:
        model_type: its name in config.json.
        architecture: transformers' class.
        title: its name for people.
        read: of config.json, defaults filled in -> what our `ModelConfig` has beyond the common ones, its `moe` among them.
        write: of a model that fits -> what its config.json has beyond the common options.
        fits: of our options those that it has other values of than `PLAIN` says; see `misfits`.
        ways: what to do about an option that does not fit, in words, where there is something.
        defaults: what config.json says where it leaves an option out, as transformers has it; sizes of weights have none.
        nulls: options whose null is a value of its own, not the default.
        refused: option of config.json -> the values with which our GPT computes the same.
        renamed: what its files call otherwise than the spec's `hub` does, ours and theirs.
        experts: parts of experts that are one tensor in its files; None: each has tensors of its own.
        aliases: further names that the same architecture has in config.json.
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
        """Adds what all have."""
        object.__setattr__(self, "defaults", {**_DEFAULTS, **self.defaults})
        object.__setattr__(self, "refused", {**_REFUSED, **self.refused})
        object.__setattr__(self, "nulls", ("num_key_value_heads", *self.nulls))

    def filled(self, values: Values) -> Values:
        """The values of a config.json, what it leaves out as transformers has it."""
        given = {n: v for n, v in values.items() if v is not None or n in self.nulls}
        return {**self.defaults, **given}

    def theirs(self, name: str) -> str:
        """What its files call a tensor that the spec calls `name`."""
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return name

    def misfits(self, config: ModelConfig) -> list[str]:
        """Names of the options with whose values a model of ours is none of this architecture."""
        return [
            name
            for name, fit in {**PLAIN, **self.fits}.items()
            if not (fit(config) if callable(fit) else option(config, name) in fit)
        ]


def option(config: ModelConfig, name: str) -> Any:
    """The value of an option by its dotted name."""
    return reduce(getattr, name.split("."), config)


def other_model(what: str, model_type: str, wanted: str) -> ConfigError:
    """That a config.json asks for what our GPT does not compute."""
    return ConfigError(
        f"{what}: a {model_type} with it does not run as a GPT of expertmesh, only with {wanted}; run its experts "
        "through expertmesh.integrations.transformers.apply(model)"
    )
