"""Sizes of a language model for the models of time and memory: its layers by kind, also from a config.json of the
hub."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from expertmesh.config.values import shown
from expertmesh.costs.hub_sizes import EXPERTS, TOP_K, check_hub_sizes, check_together
from expertmesh.costs.rank_layout import (
    ONE_HOT_MASK_BYTES,
    OURS,
    RankLayout,
    Recomputed,
    Workload,
)
from expertmesh.errors import ConfigError
from expertmesh.spec.model_spec import ModelSpec, Parameter, Role, num_elements, parameter

LOGIT_BYTES = {"whole": (1.0, 8.0), "in_place": (2.0, 0.0), "in_chunks": (1 / 8, 1.0)}
"""Copies of a logit in the compute dtype, and bytes beside them, by `Logits`."""
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Largest number of logits that training holds at a time, by type of device: products of them are still as fast as
larger ones."""


def chunk_rows(vocab_size: int, *, on_gpu: bool) -> int:
    """Largest number of rows whose logits training holds at a time."""
    return max(1, CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"] // vocab_size)


@dataclass(frozen=True)
class Activations:
    """Bytes of a rank's activations of one micro-batch."""

    kept: float  # kept by all layers for the backward
    recomputed: float = 0.0  # of the layer that is recomputed
    dispatch: float = 0.0  # rows in dispatch, and masks of one-hot dispatch
    logits: float = 0.0  # logits with their gradient


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a kind of layer, and the number of such layers."""

    count: int  # number of these layers
    attention_elements: int  # elements of the matrices of attention; a token is multiplied by each once
    # heads times (size of a key + size of a value): multiply-adds of a token with each token that it attends to
    score_width: int
    kept_width: int  # elements of queries, keys, values and output that attention keeps per token
    cache_width: int  # elements that generation keeps per token
    cache_heads: int  # heads of these elements, which tensor parallelism shares out
    window: int | None  # most tokens that a token attends to; None: all before
    dense_hidden: int  # hidden size of all dense MLPs of the layer together: dense layer, shared experts, residual MLP
    dense_elements: int  # elements of their matrices, and of small ones like gates
    num_experts: int  # E; 0: no routed experts
    rows_per_token: float  # routed experts that a token passes, K where tokens choose
    hidden_dim: int  # F of a routed expert
    num_matrices: int  # matrices of an expert: 2, or 3 of a gated one
    dense_parameters: int  # parameters beside the routed experts
    expert_parameters: int  # parameters of one routed expert
    latent_width: int = 0  # the part of these that latent attention's up-projections make
    latent_elements: int = 0  # elements of the matrices of these up-projections
    token_share: float = 1.0  # share of a sequence's tokens that pass the layer, as a source's do an encoder
    keys: float | None = None  # tokens that a token attends to, where it is not those before it; None: these

    def keys_seen(self, seq_len: int) -> float:
        """Mean number of tokens that a token attends to: of a causal sequence itself and those before it."""
        if self.keys is not None:
            return self.keys
        if self.window is None or self.window >= seq_len:
            return (seq_len + 1) / 2
        return self.window - self.window * (self.window - 1) / (2 * seq_len)

    def recomputed_elements(self, parts: Sequence[Recomputed]) -> int:
        """Elements of the dense matrices by which a token is multiplied once more in the backward pass."""
        latent = self.latent_elements if "mla_up_proj" in parts else 0
        return latent + (self.dense_elements if "mlp" in parts and not self.num_experts else 0)

    def kept_bytes(self, dim: int, layout: RankLayout, work: Workload) -> float:
        """Bytes per token: both norms' inputs and outputs, attention, pre-activations and product of the MLP."""
        branches, b = self.num_matrices - 1, work.element_bytes
        saved = b if work.states in OURS else work.saved_bytes
        again, rows = layout.recomputed, layout.fullest(self.rows_per_token, work)
        is_moe = bool(self.num_experts)
        norms = 2 * dim if self.attention_elements else 0
        found: float = max(norms, dim) * b + (0 if "layernorm" in again else norms * saved)
        found += self.kept_width * b - (self.latent_width * b if "mla_up_proj" in again else 0)
        if is_moe or "mlp" not in again:
            found += self.dense_hidden * (branches * b + saved)
        # Ours keeps a token once and the pre-activations of its rows; others keep its rows and their product, too.
        is_ours = work.states in OURS
        wide = branches * self.hidden_dim * b
        if not is_ours and "moe_act" not in again:
            wide += self.hidden_dim * saved
        if layout.checkpointing in ("experts", "moe"):
            wide = 0
        arrived = dim * saved if layout.route_degree > 1 or not is_ours else 0
        if layout.checkpointing == "moe":
            arrived = 0
        return found + rows * (arrived + wide) + 12 * self.num_experts


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder.

    Example:
        >>> from expertmesh.models.gpt.sizes import sizes_of
        >>> sizes_of(em.recipe("gpt-1.3b-moe128").model).num_parameters
        52453017600
    """

    dim: int  # D
    vocab_size: int  # V
    spec: ModelSpec  # its parameters; of a model with unknown shapes, what `spec_of_layers` makes
    blocks: tuple[LayerSizes, ...]  # its layers by kind
    # number that every tensor-parallel degree must divide: the greatest common divisor of all cut sizes
    tensor_divisor: int = 1
    # number whose multiple a rank's tokens of a shared sequence must be: the routing group where experts choose tokens
    routing_group: int = 1
    logit_share: float = 1.0  # share of a sequence's tokens that have logits

    @cached_property
    def outside_parameters(self) -> int:
        """Number of parameters of embedding, output and last norm."""
        return num_elements(self.spec.layers[None])

    def activations(self, layout: RankLayout, work: Workload) -> Activations:
        """Activations of a rank, by the widths of its layers."""
        T, line = layout.tokens_per_pass(work.seq_len), self.dim * work.element_bytes
        each = [block.kept_bytes(self.dim, layout, work) * T for block in self.blocks]
        rows = [layout.fullest(block.rows_per_token, work) * T for block in self.blocks]
        moves = layout.route_degree > 1
        masks = [ONE_HOT_MASK_BYTES * T * r if work.one_hot else 0.0 for r in rows]
        kept, again, masked = self.num_layers * line * T, max(each), max(masks)
        if layout.checkpointing != "full":
            layers = [(b.count, *of) for b, *of in zip(self.blocks, each, masks, strict=True)]
            kept, again = sum(count * one for count, one, _ in layers), 0.0
            masked = sum(count * mask for count, _, mask in layers)
        copies, beside = LOGIT_BYTES[work.logits]
        return Activations(
            kept=kept,
            recomputed=again,
            dispatch=masked + (max(rows) * line / layout.overlap_degree if moves else 0.0),
            logits=T * self.vocab_size * (copies * work.element_bytes + beside),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(block.count for block in self.blocks)

    @property
    def dense_parameters(self) -> int:
        """Number of parameters beside the routed experts."""
        return self.outside_parameters + sum(b.count * b.dense_parameters for b in self.blocks)

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts."""
        return sum(b.count * b.num_experts * b.expert_parameters for b in self.blocks)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        return self.dense_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """Number of parameters that a token uses, the embedding included."""
        used = sum(b.count * b.rows_per_token * b.expert_parameters for b in self.blocks)
        return self.dense_parameters + used

    @cached_property
    def learning_share(self) -> float:
        """Elements that learn over the model's; 1 but where weights rest under adapters."""
        learns = num_elements(one for one in self.spec if one.rests is None)
        return learns / self.num_parameters

    @cached_property
    def widened_bytes(self) -> float:
        """Bytes that a pass moves to widen all packed experts once: their numbers, and twice the wide ones."""
        packed = [one for one in self.spec if one.rests is not None and one.rests.is_packed]
        read = sum(one.rests.num_bytes(one.shape, element_bytes=2) for one in packed if one.rests)
        return read + 4 * num_elements(packed)

    def training_flops(self, seq_len: int) -> float:
        """Operations of forward and backward per token of sequences of one length, as is usual: three times the
        forward."""
        found: float = 2 * self.dim * self.vocab_size * self.logit_share
        for b in self.blocks:
            experts = b.rows_per_token * b.num_matrices * self.dim * b.hidden_dim
            router = self.dim * b.num_experts
            seen = b.score_width * b.keys_seen(seq_len)
            products = b.attention_elements + b.dense_elements + experts + router + seen
            found += b.count * b.token_share * 2 * products
        return 3 * found


def spec_of_layers(dim: int, num_rows: int, layers: Sequence[LayerSizes]) -> ModelSpec:
    """Parameters of a model of known sizes and unknown shapes: of each layer its matrices as one, small ones, and
    experts.

    Args:
        num_rows: rows of embedding and output; 0: a part of a model, which has no last norm.
    """
    found = [_parameter(num_rows * dim, dim, "embedding", cut="model")]
    found.append(_parameter(dim if num_rows else 0, dim, "norm"))
    for index, b in enumerate(layers):
        matrices = b.attention_elements + b.dense_elements
        ones = [_parameter(matrices, dim, "matrix", cut="rows")]
        ones.append(_parameter(b.dense_parameters - matrices, dim, "norm"))
        if b.num_experts:
            ones.append(_parameter(b.expert_parameters, dim, "matrix", expert=b.num_experts))
        found += [one.inside("", layer=index) for one in ones]
    return ModelSpec(tuple(found))


def _parameter(size: int, width: int, role: Role, cut: str | None = None, **experts: int) -> Parameter:
    last = math.gcd(size, width) or 1
    sizes: dict[str, Any] = {
        **experts,
        "rows" if not experts else "hidden": size // last,
        "model": last,
    }
    return parameter("", role, "experts" if experts else "dense", cut=cut, **sizes)


_Values = Mapping[str, Any]


def sizes_of_hub(values: _Values, *, is_part: bool = False) -> ModelSizes:
    """Sizes of the decoder that a config.json of the hub describes, also of families that our GPT cannot compute.

    Known are grouped-query attention, multi-head latent attention (`kv_lora_rank`), windows of every second layer,
    leading dense layers, and shared experts. All layers of one kind count as equal.
    """
    found = values.get("text_config") or values
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"config.json has text_config={shown(found)}: must be a mapping of options; restore it from the hub"
        )
    found = {name: value for name, value in found.items() if value is not None}
    check_hub_sizes(found, is_part=is_part)
    try:
        check_together(found)
        return _sizes_of_hub(found)
    except KeyError as missing:
        raise ConfigError(
            f"config.json has no {missing.args[0]}, without which a model has no size; restore it from the hub"
        ) from None


def _sizes_of_hub(v: _Values) -> ModelSizes:
    D, L, V = v["hidden_size"], v["num_hidden_layers"], v["vocab_size"]
    experts = _first(v, *EXPERTS)
    gated = v.get("hidden_act", "silu") != "gelu_plain"
    matrices = 3 if gated else 2
    attention = _attention(v, D)
    window = v.get("sliding_window") if v.get("use_sliding_window", True) else None
    every = 2 if window and experts else 1
    kinds: Counter[tuple[bool, int | None]] = Counter()
    order = []
    dense_first = v.get("first_k_dense_replace", 0)
    step = v.get("decoder_sparse_step") or v.get("interleave_moe_layer_step") or 1
    for layer in range(L):
        is_moe = bool(experts) and layer >= dense_first and (layer + 1) % step == 0
        limit = window if window and layer % every == 0 else None
        kinds[is_moe, limit] += 1
        order.append((is_moe, limit))
    of_kind = {}
    for (is_moe, limit), count in sorted(kinds.items(), key=str):
        F = _first(v, "moe_intermediate_size", "intermediate_size") if is_moe else 0
        dense_hidden = _shared(v, F)
        if not is_moe:
            dense_hidden = _first(v, "intermediate_size_mlp") or v["intermediate_size"]
        dense = matrices * D * dense_hidden
        small = 2 * D + (D * experts if is_moe else 0)
        of_kind[is_moe, limit] = LayerSizes(
            count=count,
            **attention,
            window=limit,
            dense_hidden=dense_hidden,
            dense_elements=dense,
            num_experts=experts if is_moe else 0,
            rows_per_token=_first(v, *TOP_K) if is_moe else 0,
            hidden_dim=F,
            num_matrices=matrices,
            dense_parameters=attention["attention_elements"] + dense + small,
            expert_parameters=matrices * D * F,
        )
    blocks = tuple(of_kind.values())
    tied = v.get("tie_word_embeddings", False)
    heads = v["num_attention_heads"]
    keys = heads if "kv_lora_rank" in v else v.get("num_key_value_heads", heads)
    divisor = math.gcd(heads, keys, *(block.dense_hidden for block in blocks))
    spec = spec_of_layers(D, (1 if tied else 2) * V, [of_kind[kind] for kind in order])
    return ModelSizes(D, V, spec, blocks, tensor_divisor=divisor)


def _first(v: _Values, *names: str) -> Any:
    """Value of the first of several names that config.json has; 0 where it has none."""
    return next((v[name] for name in names if name in v), 0)


def _shared(v: _Values, hidden_dim: int) -> int:
    if "shared_expert_intermediate_size" in v:
        return int(v["shared_expert_intermediate_size"])
    if "intermediate_size_mlp" in v:  # Llama 4 has one beside the routed experts, and no option for it
        return hidden_dim
    return int(_first(v, "n_shared_experts", "num_shared_experts") * hidden_dim)


def _attention(v: _Values, D: int) -> dict[str, int]:
    H = v["num_attention_heads"]
    if "kv_lora_rank" in v:
        rank, rope, value = v["kv_lora_rank"], v["qk_rope_head_dim"], v["v_head_dim"]
        key = v["qk_nope_head_dim"] + rope
        q_rank = v.get("q_lora_rank")
        queries = D * q_rank + q_rank * H * key if q_rank else D * H * key
        elements = queries + D * (rank + rope)
        elements += rank * H * (v["qk_nope_head_dim"] + value) + H * value * D
        return {
            "attention_elements": elements,
            "score_width": H * (key + value),
            "kept_width": 2 * H * key + 2 * H * value + (q_rank or 0) + rank + H * key,
            "latent_width": 3 * H * key + H * value,
            "latent_elements": (q_rank or D) * H * key + rank * H * (v["qk_nope_head_dim"] + value),
            "cache_width": rank + rope,
            "cache_heads": 1,
        }
    head = v["head_dim"] if "head_dim" in v else D // H
    keys = v.get("num_key_value_heads", H) * head
    width = H * head
    return {
        "attention_elements": 2 * D * width + 2 * D * keys,
        "score_width": 2 * width,
        "kept_width": 2 * width + 2 * keys + width + keys,
        "cache_width": 2 * keys,
        "cache_heads": v.get("num_key_value_heads", H),
    }
