"""Conversion of an upcycled model to transformers' Mixtral or Qwen3-MoE, for its own saving and loading."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from expertmesh.checkpoints.hub.parts import loss_coefficient, training_only
from expertmesh.errors import ConfigError
from expertmesh.models.upcycle import MoEBlock
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.layer import MoELayer

_log = logging.getLogger("expertmesh.integrations")


class _Sparse(NamedTuple):
    """MoE class of transformers whose other parts equal a dense class's."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]


_MIXTRAL, _QWEN3 = (
    _Sparse(MixtralConfig, MixtralForCausalLM),
    _Sparse(Qwen3MoeConfig, Qwen3MoeForCausalLM),
)
_SPARSE = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3}
_OTHER_WAY = "keep its state_dict, and read it by load_state_dict into a model that em.upcycle made the same way"


def as_moe_model(model: PreTrainedModel) -> PreTrainedModel:
    """Convert an upcycled Llama or Mistral to transformers' Mixtral, and an upcycled Qwen3 to its Qwen3-MoE.

    Weights are shared with the upcycled model, not copied, with two exceptions: the router is cast to the dtype of the
    other weights, and `granularity` g is multiplied into the experts' second matrices. Outputs are equal up to
    rounding. Options that count in training only and that the class lacks are left out, which a log line says. The
    result works wherever transformers' models do (`save_pretrained`, `push_to_hub`, vLLM, `expertmesh convert`).

    Args:
        model: a model whose feed-forward blocks were replaced by `em.upcycle`: all of them (`every=1`), or for Qwen3
            every n-th.

    Raises:
        ConfigError: neither class supports the model; names the option.

    Example:
        >>> em.upcycle(model, every=1, num_experts=8)
        >>> as_moe_model(model).save_pretrained("models/upcycled")
    """
    dense: Any = model.config if isinstance(model, PreTrainedModel) else None
    kind = getattr(dense, "model_type", type(model).__name__)
    if kind not in _SPARSE or not type(model).__name__.endswith("ForCausalLM"):
        raise ConfigError(
            f"{type(model).__name__}: transformers has no class with experts for it that is read here, as for "
            f"{', '.join(_SPARSE)} with a language model's head; {_OTHER_WAY}"
        )
    blocks: list[Any] = [layer.mlp for layer in model.model.layers]
    layers = [block.layer if isinstance(block, MoEBlock) else None for block in blocks]
    step = _step(layers, kind)
    some = [layer for layer in layers if layer is not None]
    _check(some, dense)
    sparse = _SPARSE[kind]
    if lost := training_only(some[0].options, has_balance_loss=True):
        _log.warning(
            "%s has no place for %s: counts in training only, and is left out",
            sparse.model.__name__,
            ", ".join(lost),
        )
    config = sparse.config(**_values(dense, sparse, some, step))
    with torch.device("meta"):
        target = sparse.model(config)
    state = {name: t for name, t in model.state_dict().items() if ".mlp.layer." not in name}
    for index, layer in enumerate(layers):
        if layer is not None:
            state |= _weights(layer, f"model.layers.{index}.mlp.", model.dtype)
    target.load_state_dict(state, assign=True)
    inner: Any = target.model
    inner.rotary_emb = type(inner.rotary_emb)(config).to(model.device)  # its buffers are in no file
    target.tie_weights()
    target.generation_config = model.generation_config
    return target.train(model.training)


def _step(layers: list[MoELayer | None], kind: str) -> int:
    """Distance of layers with experts: every n-th layer has them."""
    first = next((i for i, layer in enumerate(layers) if layer is not None), None)
    if first is None:
        raise ConfigError("model: has no block that em.upcycle replaced; upcycle it first, with every=1")
    step = first + 1
    is_even = all((layer is not None) == ((i + 1) % step == 0) for i, layer in enumerate(layers))
    if not is_even or (step > 1 and kind != "qwen3"):
        missing = sum(layer is None for layer in layers)
        raise ConfigError(
            f"model: {missing} of its {len(layers)} blocks are dense, and a Mixtral has experts in all of them (a "
            f"Qwen3-MoE in every n-th); upcycle with every=1, or {_OTHER_WAY}"
        )
    return step


def _check(layers: list[MoELayer], dense: Any) -> None:
    """Raise ConfigError for options that the MoE classes do not support."""
    o, experts = layers[0].options, layers[0].experts
    divided = o.score_function == "softmax_after_topk" or o.normalize_weights in ("topk", "kept")
    rules: list[tuple[str, Any, bool]] = [
        ("router", o.router, o.router == "topk" and not o.own_router),
        ("score_function", o.score_function, o.score_function != "sigmoid"),
        ("normalize_weights", o.normalize_weights, divided),
        ("activation", o.activation, o.activation.endswith("glu")),
        ("bias", o.bias, not o.bias),
        ("bias_update_rate", o.bias_update_rate, not o.bias_update_rate),
        ("logit_temperature", o.logit_temperature, o.logit_temperature == 1),
        ("num_expert_groups", o.num_expert_groups, o.num_expert_groups == 1),
        ("num_shared_experts", o.num_shared_experts, layers[0].shared_experts is None),
        ("residual", o.residual, not o.residual),
        ("eval_capacity_factor", o.eval_capacity_factor, o.eval_capacity_factor is None),
        ("max_capacity_factor", o.max_capacity_factor, o.max_capacity_factor is None),
        ("adapters", "em.lora", getattr(experts, "adapters", None) is None),
        ("dispatcher", "of several ranks", isinstance(layers[0].dispatcher, LocalDispatcher)),
        ("mlp_bias", getattr(dense, "mlp_bias", False), not getattr(dense, "mlp_bias", False)),
        ("attention_bias", True, dense.model_type == "qwen3" or not _has_bias(dense)),
        (
            "layer_types",
            "with windows",
            dense.model_type != "qwen3" or set(dense.layer_types or ()) <= {"full_attention"},
        ),
    ]
    for name, value, fits in rules:
        if not fits:
            raise ConfigError(
                f"{name}={value}: Mixtral and Qwen3-MoE of transformers have nothing like it; leave it out, or "
                f"{_OTHER_WAY}"
            )
    free = {"layer_index", "seed"}
    for layer in layers:
        if layer.options.model_dump(exclude=free) != o.model_dump(exclude=free):
            raise ConfigError(
                "model: its layers with experts differ in their options, and those of a Mixtral or Qwen3-MoE are "
                f"alike; upcycle them alike, or {_OTHER_WAY}"
            )


def _has_bias(dense: Any) -> bool:
    return bool(getattr(dense, "attention_bias", False))


def _values(dense: Any, sparse: _Sparse, layers: list[MoELayer], step: int) -> dict[str, Any]:
    """Values of the configuration: options shared by both classes, and the experts'."""
    o = layers[0].options
    known = sparse.config().to_dict()
    own = ("model_type", "architectures", "transformers_version")
    common = {n: v for n, v in dense.to_dict().items() if n in known and n not in own}
    found = {
        **common,
        "num_experts_per_tok": o.top_k,
        "router_aux_loss_coef": loss_coefficient(o, len(layers)),
        "dtype": dense.dtype,
    }
    if sparse is _MIXTRAL:
        return {**found, "num_local_experts": o.num_experts, "intermediate_size": o.hidden_dim}
    return {
        **found,
        "num_experts": o.num_experts,
        "moe_intermediate_size": o.hidden_dim,
        "decoder_sparse_step": step,
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }


@torch.no_grad()
def _weights(layer: MoELayer, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a layer under transformers' names."""
    w_in, w_out, router = (layer.get_parameter(n) for n in ("experts.w_in", "experts.w_out", "router.proj.weight"))
    scale = layer.options.weight_scale
    return {
        f"{prefix}gate.weight": _learned(router.to(dtype), router),
        f"{prefix}experts.gate_up_proj": _learned(w_in.flatten(1, 2), w_in),
        f"{prefix}experts.down_proj": _learned(w_out if scale == 1 else w_out * scale, w_out),
    }


def _learned(tensor: Tensor, of: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=of.requires_grad)
