"""Sizes of an encoder-decoder that its time and memory depend on, for the planner."""

from collections import Counter
from dataclasses import dataclass, field

from expertmesh.costs.flops import rows_per_token
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.run_costs import SampleSizes
from expertmesh.costs.sizes import Activations, LayerSizes, ModelSizes
from expertmesh.spec.feed_forward import num_branches
from expertmesh.spec.model_spec import num_elements
from expertmesh_families.seq2seq.config import Seq2SeqConfig, Seq2SeqRunConfig
from expertmesh_families.seq2seq.costs import activation_elements
from expertmesh_families.seq2seq.spec import seq2seq_spec


@dataclass(frozen=True)
class TranslationSizes(ModelSizes):
    """Sizes of an encoder-decoder, whose sequence is a source with its target."""

    elements: int = field(kw_only=True)  # elements that a sample keeps for the backward pass

    def activations(self, layout: RankLayout, work: Workload) -> Activations:
        """Activations of a rank, as `train --dry-run` counts them."""
        return SampleSizes(self.spec, self.elements).activations(layout, work)


def sizes_of_translation(config: Seq2SeqRunConfig) -> tuple[TranslationSizes, int]:
    """Sizes of the model of a run, and tokens of a source and its target."""
    model = config.model
    spec, S, T = seq2seq_spec(model), model.max_source_len, model.max_seq_len
    encoder, decoder = model.experts_per_layer()
    kinds = [(S, float(S), experts) for experts in encoder]
    kinds += [(T, (T + 1) / 2 + S, experts) for experts in decoder]
    blocks = tuple(
        _block(model, kind, number, share=kind[0] / (S + T), layer=kinds.index(kind))
        for kind, number in Counter(kinds).items()
    )
    sizes = TranslationSizes(
        model.dim,
        model.vocab_size,
        spec,
        blocks,
        logit_share=T / (S + T),
        elements=activation_elements(model),
    )
    return sizes, S + T


def _block(
    config: Seq2SeqConfig,
    kind: tuple[int, float, int],
    number: int,
    *,
    share: float,
    layer: int,
) -> LayerSizes:
    """Sizes of a kind of layer: (tokens, keys that a token sees, experts)."""
    _, keys, num_experts = kind
    moe, ones = config.moe, seq2seq_spec(config).layers[layer]
    attention = num_elements(one for one in ones if one.part == "attention")
    routed = num_elements(one for one in ones if one.is_expert)
    beside = [one for one in ones if not one.is_expert]
    matrices = num_elements(one for one in beside if len(one.shape) > 1)
    router = num_elements(one for one in beside if one.part == "router" and len(one.shape) > 1)
    shared = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
    hidden = shared + (config.ffn_hidden_dim if moe.residual else 0)
    return LayerSizes(
        count=number,
        attention_elements=attention,
        score_width=2 * config.dim,
        kept_width=6 * config.dim,
        cache_width=2 * config.dim,
        cache_heads=config.num_heads,
        window=None,
        dense_hidden=hidden if num_experts else config.ffn_hidden_dim,
        dense_elements=matrices - attention - router,
        num_experts=num_experts,
        rows_per_token=rows_per_token(moe, num_experts) if num_experts else 0,
        hidden_dim=moe.hidden_dim if num_experts else 0,
        num_matrices=num_branches(config.activation) + 1,
        dense_parameters=num_elements(beside),
        expert_parameters=routed // num_experts if num_experts else 0,
        token_share=share,
        keys=keys,
    )
