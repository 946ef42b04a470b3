"""Parts of a model that no plan counts and that change its size or its time: a config.json with one is refused by
name."""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.values import shown
from expertmesh.errors import ConfigError

_Values = Mapping[str, Any]
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers in `layer_types` that are counted."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "linear attention": (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_attn_config"),
        *("attn_type_list", "full_attention_interval", "linear_conv_kernel_dim"),
    ),
    "state-space (Mamba) layers": (
        *("mamba_d_state", "mamba_num_heads", "mamba_d_conv", "mamba_expand", "ssm_state_size"),
        *("ssm_cfg", "hybrid_override_pattern", "attn_layer_period", "attn_layer_indices"),
        *("state_size", "hybrid_layer_ids"),
    ),
    "recurrent layers": ("lru_width", "block_types", "wkv_hidden_size", "conv_L_cache"),
    "sparse attention": (
        *("index_topk", "index_n_heads", "sparse_attention_config", "compress_ratios"),
        *("nsa_config", "moba_config", "block_sparse_moba_config"),
    ),
    "per-layer embeddings or shared caches": (
        *("hidden_size_per_layer_input", "altup_num_inputs", "num_kv_shared_layers"),
        *("layer_share_groups", "use_cla"),
    ),
    "a dense MLP beside the experts": ("parallel_attn_mlp_res",),
    "layers that differ in size": ("num_key_value_heads_per_layer", "block_configs"),
    "an encoder beside the decoder": ("encoder_layers", "num_decoder_layers", "decoder_layers"),
}
"""Options that say that a model has such a part, where they are neither null, 0, false nor empty."""
_OTHER = {
    *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "albert"),
    *("rwkv", "rwkv7", "mamba", "mamba2", "xlstm", "retnet"),
    *("modernbert", "mpnet", "nomic_bert", "camembert", "longformer", "vit", "clip", "siglip"),
}
"""Types of models that are encoders, or recurrent."""
_HEADS = ("ForMaskedLM", "ForImageClassification", "ForSpeechSeq2Seq")
"""Ends of the names of classes that are no decoders."""


def refuse_unmodelled(name: str, values: _Values) -> None:
    """Refuse a model with a part that no plan counts."""
    inner = values.get("text_config")
    for found in (values, inner if isinstance(inner, Mapping) else {}):
        part = _part(found)
        if part is not None:
            option, what = part
            raise ConfigError(
                f"plan {name}: config.json has {option}: {what} is not modelled, and a plan without it"
                " would be one of another model; plan a model with attention in every layer"
            )


def _part(v: _Values) -> tuple[str, str] | None:
    """(option with its value, what is not modelled), None: nothing."""
    for what, names in _NAMES.items():
        for name in names:
            if v.get(name):
                return f"{name}={shown(v[name])}", what
    kinds = v.get("layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if kind not in _LAYERS:
            return f"layer_types with {shown(kind)}", "such a layer"
    if v.get("is_encoder_decoder") is True:
        return "is_encoder_decoder=True", "an encoder beside the decoder"
    if v.get("model_type") in _OTHER:
        return f"model_type={shown(v['model_type'])}", "an encoder or a recurrent model"
    classes = v.get("architectures")
    for one in classes if isinstance(classes, list | tuple) else ():
        if str(one).endswith(_HEADS):
            return f"architectures with {shown(one)}", "an encoder"
    return None
