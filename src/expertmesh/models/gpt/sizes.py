"""Sizes of a GPT that its time and memory depend on, for the planner."""

import math
from collections import Counter
from dataclasses import dataclass, field

from expertmesh.costs.flops import rows_per_token
from expertmesh.costs.rank_layout import OURS, RankLayout, Workload
from expertmesh.costs.sizes import Activations, LayerSizes, ModelSizes
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.kept_activations import gpt_activations
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.feed_forward import num_branches
from expertmesh.spec.model_spec import Parameter, num_elements


@dataclass(frozen=True)
class GPTSizes(ModelSizes):
    """Sizes of a GPT with its activations layer by layer, unless another software trains it."""

    config: ModelConfig = field(kw_only=True)
    adapts: bool = False  # whether experts have adapters

    def activations(self, layout: RankLayout, work: Workload) -> Activations:
        """Activations of a rank."""
        if work.states not in OURS:
            return super().activations(layout, work)
        return gpt_activations(self.config, layout, work, adapts=self.adapts)


def sizes_of(config: ModelConfig) -> GPTSizes:
    """Sizes of a GPT, with parameters counted by `gpt_spec`."""
    spec = gpt_spec(config)
    of_layers = list(zip(config.experts_per_layer(), map(config.window_of, range(config.num_layers)), strict=True))
    kinds = Counter(of_layers)
    blocks = tuple(
        _block(config, kind[0], number, spec.layers[of_layers.index(kind)], window=kind[1])
        for kind, number in sorted(kinds.items(), key=lambda of: (of[0][0], of[0][1] or 0))
    )
    return GPTSizes(
        config.dim,
        config.vocab_size,
        spec,
        blocks,
        math.gcd(*tensor_sizes(config).values()),
        config.choosing_group,
        config=config,
    )


def tensor_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes that a tensor-parallel degree must divide, by option; norms over all heads of a projection allow 1
    alone."""
    if config.qk_norm and config.qk_norm_scope == "projection":
        return {"model.qk_norm_scope": 1}
    experts, moe = config.experts_per_layer(), config.moe
    sizes = {"model.num_heads": config.num_heads, "model.num_kv_heads": config.kv_heads}
    if 0 in experts or (any(experts) and moe.residual):
        sizes["model.ffn_hidden_dim"] = config.ffn_hidden_dim
    if any(experts) and moe.shared_hidden_dim:
        sizes["model.moe.shared_hidden_dim"] = moe.shared_hidden_dim
    elif any(experts) and moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.hidden_dim
        sizes["model.moe.num_shared_experts x hidden_dim"] = shared
    return sizes


def _block(
    config: ModelConfig,
    num_experts: int,
    number: int,
    layer: tuple[Parameter, ...],
    *,
    window: int | None,
) -> LayerSizes:
    moe, head = config.moe, config.head_size
    attention = num_elements(p for p in layer if p.part == "attention" and len(p.shape) > 1)
    routed = num_elements(p for p in layer if p.is_expert)
    router = num_elements(p for p in layer if p.part == "router" and len(p.shape) > 1)
    dense = num_elements(p for p in layer if not p.is_expert and len(p.shape) > 1)
    shared = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
    hidden = shared + (config.ffn_hidden_dim if moe.residual else 0)
    if not num_experts:
        hidden = config.ffn_hidden_dim
    width, keys = config.num_heads * head, config.kv_heads * head
    score_width = 2 * width
    kept_width = 2 * width + 2 * keys + (width + keys) * (2 if config.qk_norm else 1)
    made = 0  # by up-projections of latents
    if config.is_latent:
        values = config.num_heads * config.latent.v_head_dim
        score_width = width + values
        small = (config.latent.q_lora_rank or 0) + (config.latent.kv_lora_rank or 0)
        kept_width, made = 3 * width + 2 * values + small, 3 * width + values
    return LayerSizes(
        count=number,
        attention_elements=attention,
        score_width=score_width,
        kept_width=kept_width,
        cache_width=config.cache_numbers,
        cache_heads=config.cache_heads,
        window=window,
        dense_hidden=hidden,
        dense_elements=dense - attention - router,
        num_experts=num_experts,
        rows_per_token=rows_per_token(moe, num_experts) if num_experts else 0,
        hidden_dim=moe.hidden_dim if num_experts else 0,
        num_matrices=num_branches(config.activation) + 1,
        dense_parameters=num_elements(p for p in layer if not p.is_expert),
        expert_parameters=routed // num_experts if num_experts else 0,
        latent_width=made,
        latent_elements=_up_projections(config) if made else 0,
    )


def _up_projections(config: ModelConfig) -> int:
    """Elements of the matrices that make queries, keys and values of latents."""
    latent, heads = config.latent, config.num_heads
    queries = (latent.q_lora_rank or config.dim) * heads * config.head_size
    keys = config.head_size - latent.qk_rope_head_dim
    return queries + (latent.kv_lora_rank or 0) * heads * (keys + latent.v_head_dim)
