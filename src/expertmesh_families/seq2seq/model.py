"""An encoder-decoder with mixture-of-experts layers on both sides: forward pass and initial weights.

After Z-code M3 (Kim et al. 2021, arXiv 2109.10465): a deep encoder, a shallow decoder, MoE in every other layer of
both.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.models.attention import Attention, DenseContext, rope_tables
from expertmesh.models.decoder import LanguageModel
from expertmesh.models.inputs import check_cache, check_home, check_ids, check_mask
from expertmesh.models.layers import (
    FeedForward,
    RMSNorm,
    check_model_arguments,
    draw_weights,
    init_by_spec,
)
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.init import draw_seed
from expertmesh.moe.large_sizes import names_large_sizes
from expertmesh.moe.token_dropout import TokenDropout
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.attention.dense import attention
from expertmesh.ops.attention.visible import Visible, visible_source
from expertmesh.ops.check import IDS, INTEGERS, Arg, check_device, check_tensor
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.op_set import DEFAULT_OPS
from expertmesh.ops.plain_call import can_look_at
from expertmesh.spec.model_spec import ModelSpec
from expertmesh_families.seq2seq.cache import Seq2SeqCache
from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.positions import UntiedPositions
from expertmesh_families.seq2seq.spec import seq2seq_spec

_INDEX = Arg("T", INTEGERS, "one per token")
_PLACES = Arg("N", IDS, "one per logit", below="T", fix="give places in target_BS.flatten()")
Memory = tuple[Tensor, Tensor]
"""Keys and values of the sources for one layer, (sources, H, S, head_dim) each."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of one side besides their hidden states; T = B * S."""

    ids_T: Tensor  # (T,) token ids, for hash routers
    mask_T: Tensor | None  # (T,) bool, False for padding; None: there is none
    index_T: Tensor | None  # (T,) global token indices, which key noise and dropout; None: 0, 1, 2, ...
    rope: tuple[Tensor, Tensor]  # cosines and sines of the positions
    context: DenseContext  # context of self-attention


@dataclass(frozen=True)
class Seq2SeqOutput:
    """Logits and routing statistics of one forward pass; a pytree."""

    logits_NV: Tensor  # (N, V) logits of the N target tokens without padding, row by row, in the compute dtype
    stats: tuple[RoutingStats, ...]  # one RoutingStats per MoE layer, the encoder's first; empty for a dense model


torch.utils._pytree.register_dataclass(Seq2SeqOutput, field_names=["logits_NV", "stats"], drop_field_names=[])
torch.utils._pytree.register_dataclass(
    Tokens, field_names=["ids_T", "mask_T", "index_T", "rope", "context"], drop_field_names=[]
)


class CrossAttention(nn.Module):
    """Attention of target tokens to a source, without positions (Vaswani et al. 2017, 3.2.3)."""

    def __init__(self, *, dim: int, num_heads: int, **place: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = Linear(dim, dim, bias=False, **place)
        self.kv = Linear(dim, 2 * dim, bias=False, **place)
        self.out = Linear(dim, dim, bias=False, **place)

    def memory(self, source_BSD: Tensor) -> Memory:
        """Keys and values of sources, (B, H, S, head_dim) each."""
        keys, values = self.kv(source_BSD).chunk(2, dim=-1)
        return self._heads(keys), self._heads(values)

    def forward(self, x_BSD: Tensor, memory: Memory, visible: Visible) -> Tensor:
        """Attend to the sources, (B, S, D) -> (B, S, D).

        Args:
            x_BSD: (B, S, D) target tokens.
            memory: keys and values of B sources, or of fewer: then B / sources neighbouring rows share a source.
        """
        keys, values = memory
        B, S, _ = x_BSD.shape
        q = self._heads(self.q(x_BSD))
        # rows of one source are queries of one attention, so that its keys are not copied and are read once
        q = q.unflatten(0, (len(keys), B // max(len(keys), 1))).transpose(1, 2).flatten(2, 3)
        y = attention(q, keys, values, visible)
        y = y.unflatten(2, (-1, S)).transpose(1, 2).flatten(0, 1)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x_BSD: Tensor) -> Tensor:
        result: Tensor = x_BSD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return result


class Layer(FeedForward):
    """Layer: x + attention(norm(x)), in the decoder x + cross_attention(norm(x), source), then x +
    feed_forward(norm(x))."""

    def __init__(
        self,
        config: Seq2SeqConfig,  # the model
        *,
        layer_index: int,  # index of the layer in the model, the encoder's layers first
        cache_index: int | None,  # index of the layer in the decoder; None: the layer is the encoder's
        num_experts: int,  # experts of this layer; 0: a dense feed-forward layer
        **place: Any,
    ) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.attention_norm = RMSNorm(dim, eps=eps, **place)
        self.attention = Attention(
            dim=dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_size,
            qk_norm=False,
            norm_eps=eps,
            layer_index=cache_index or 0,
            **place,
        )
        self.cross_norm: RMSNorm | None = None
        self.cross_attention: CrossAttention | None = None
        if cache_index is not None:
            self.cross_norm = RMSNorm(dim, eps=eps, **place)
            self.cross_attention = CrossAttention(dim=dim, num_heads=config.num_heads, **place)
        self.ffn_norm = RMSNorm(dim, eps=eps, **place)
        self.make_feed_forward(
            config.moe,
            num_experts,
            dim=dim,
            hidden_dim=config.ffn_hidden_dim,
            activation=config.activation,
            layer_index=layer_index,
            **place,
        )
        self.dropouts = nn.ModuleList(TokenDropout(config.dropout, site=4 * layer_index + i) for i in range(3))

    def forward(
        self,
        x_BSD: Tensor,  # (B, S, D) hidden states of the tokens
        tokens: Tokens,  # ids, mask, indices, positions and context of the tokens
        source: Tensor | Memory | None = None,
        source_visible: Visible | None = None,  # see `CrossAttention`
        capacity_factor: float | None = None,  # see `MoELayer.forward`
        losses: bool = True,  # see `MoELayer.forward`
    ) -> tuple[Tensor, RoutingStats | None]:
        """Output (B, S, D), and the routing statistics of a MoE layer.

        Args:
            source: in the decoder: output of the encoder, or keys and values computed from it.
        """
        cos, sin = tokens.rope
        after_attention, after_cross, after_ffn = self.dropouts
        y_BSD = self.attention(self.attention_norm(x_BSD), cos=cos, sin=sin, context=tokens.context)
        x_BSD = x_BSD + after_attention(y_BSD, tokens.index_T)
        if self.cross_attention is not None:
            assert self.cross_norm is not None and source is not None and source_visible is not None
            memory = self.cross_attention.memory(source) if isinstance(source, Tensor) else source
            y_BSD = self.cross_attention(self.cross_norm(x_BSD), memory, source_visible)
            x_BSD = x_BSD + after_cross(y_BSD, tokens.index_T)
        h_TD = self.ffn_norm(x_BSD).flatten(0, 1)
        y_TD, stats = self.feed_forward(
            h_TD,
            token_mask=tokens.mask_T,
            token_ids=tokens.ids_T,
            token_index=tokens.index_T,
            capacity_factor=capacity_factor,
            losses=losses,
        )
        return x_BSD + after_ffn(y_TD.view_as(x_BSD), tokens.index_T), stats


class Seq2Seq(LanguageModel):
    """An encoder-decoder: RMSNorm, rotary or untied positions in self-attention, MoE in every n-th layer of both sides.

    It implements `expertmesh.models.decoder.EncoderDecoder`, the interface for decoding.

    Args:
        device: device of the parameters; "meta" allocates none (then `to_empty` and `init_weights`).
    """

    cache_type = Seq2SeqCache

    @names_large_sizes
    def __init__(
        self,
        config: Seq2SeqConfig,  # the model
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,  # dtype of the parameters; None: torch's default
        seed: int | None = None,  # seed of the initial weights; None: a fresh one from torch's default generator
    ) -> None:
        check_model_arguments(config, Seq2SeqConfig, dtype)
        super().__init__()
        self.config = config
        place: dict[str, Any] = {"device": "meta", "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.dim, **place)
        encoder, decoder = config.experts_per_layer()
        self.encoder = nn.ModuleList(
            Layer(config, layer_index=index, cache_index=None, num_experts=experts, **place)
            for index, experts in enumerate(encoder)
        )
        self.decoder = nn.ModuleList(
            Layer(
                config,
                layer_index=len(encoder) + index,
                cache_index=index,
                num_experts=experts,
                **place,
            )
            for index, experts in enumerate(decoder)
        )
        self.encoder_norm = RMSNorm(config.dim, eps=config.norm_eps, **place)
        self.final_norm = RMSNorm(config.dim, eps=config.norm_eps, **place)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False, **place)
        self.dropouts = nn.ModuleList(TokenDropout(config.dropout, site=4 * side + 3) for side in range(2))
        self.source_places: UntiedPositions | None = None
        self.target_places: UntiedPositions | None = None
        if config.positions == "untied":
            self.source_places, self.target_places = (
                UntiedPositions(
                    max_len=max_len,
                    dim=config.dim,
                    num_heads=config.num_heads,
                    norm_eps=config.norm_eps,
                    **place,
                )
                for max_len in (config.max_source_len, config.max_seq_len)
            )
        draw_weights(self, device=device, seed=seed)

    @property
    def spec(self) -> ModelSpec:
        """Specification of its parameters; see `expertmesh.spec.model_spec`."""
        return seq2seq_spec(self.config)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter: N(0, init_std^2), norms 1, biases 0.

        Projections back to the residual stream have init_std / sqrt(n), where n is their number in the encoder or
        decoder. The numbers depend on the seed and the parameter's name only, not on the device or the number of ranks.

        Args:
            seed: seed of the weights; None: a fresh one from torch's default generator.
        """
        seed = draw_seed() if seed is None else seed
        std = self.config.init_std
        out_std = {
            "encoder": std * (2 * len(self.encoder)) ** -0.5,
            "decoder": std * (3 * len(self.decoder)) ** -0.5,
        }
        init_by_spec(
            self,
            self.spec,
            seed=seed,
            std=std,
            out_std=lambda name: out_std[name.partition(".")[0]],
        )

    @property
    def max_source_len(self) -> int:
        """Maximum tokens of a source."""
        result: int = self.config.max_source_len
        return result

    def encode(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Seq2SeqCache) -> None:
        """Encode the sources, without a capacity; see `expertmesh.models.decoder.EncoderDecoder`."""
        self._check_side("ids_BS", ids_BS, "token_mask_BS", token_mask_BS, is_source=True)
        check_cache(cache, config=self.config, weight=self.embedding.weight)
        cache.check_new(ids_BS[:, :0])
        if cache.length:
            raise ConfigError(
                f"cache holds {cache.length} tokens already; a source is read first, make another with new_cache()"
            )
        source_BSD, _ = self._encode(
            ids_BS,
            token_mask_BS,
            None,
            capacity_factor=self.config.moe.dropless_factor,
            losses=False,
        )
        cache.memory = []
        for layer in self.decoder:
            assert isinstance(layer, Layer) and layer.cross_attention is not None
            cache.memory.append(layer.cross_attention.memory(source_BSD))
        cache.memory_mask = None if token_mask_BS is None else token_mask_BS[:, None, None]

    def next_logits(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Seq2SeqCache) -> Tensor:
        """Logits (B, V) of the token after the last column, without a capacity; see
        `expertmesh.models.decoder.CausalLM`."""
        check_ids(ids_BS, vocab_size=self.config.vocab_size, max_len=None)
        check_home("ids_BS", ids_BS, self.embedding, self.embedding.weight)
        if token_mask_BS is not None:
            check_mask("token_mask_BS", token_mask_BS, ids_BS)
        check_cache(cache, config=self.config, weight=self.embedding.weight)
        if not hasattr(cache, "memory"):
            raise ConfigError("cache has no source; call encode() with it first")
        context = cache.begin(ids_BS, token_mask_BS=token_mask_BS)
        tokens = self._tokens(ids_BS, context, token_mask_BS, None, self.target_places, num_keys=cache.length)
        source_visible = Visible(ids_BS.shape[1], is_causal=False, mask=cache.memory_mask)
        x_BSD = self.embedding(ids_BS)
        for layer, memory in zip(self.decoder, cache.memory, strict=True):
            x_BSD, _ = layer(
                x_BSD,
                tokens,
                memory,
                source_visible,
                capacity_factor=self.config.moe.dropless_factor,
                losses=False,
            )
        return self._logits(x_BSD[:, -1])

    def forward(
        self,
        source_BS: Tensor,  # (B, S) int64 ids of the sources, padded on the right
        target_BS: Tensor,  # (B, S') int64 ids of the targets so far, padded on the right
        *,
        source_mask_BS: Tensor | None = None,
        target_mask_BS: Tensor | None = None,
        source_index_T: Tensor | None = None,
        target_index_T: Tensor | None = None,  # (B * S',) int64 global token indices of the targets; None: 0, 1, 2, ...
        target_places_N: Tensor | None = None,
    ) -> Seq2SeqOutput:
        """Logits of the next token after every target token.

        Args:
            source_mask_BS: (B, S) bool, False for padding, which no token sees and no expert computes; None: there is
                none.
            target_mask_BS: (B, S') bool, False for padding, which gets no logits; None: there is none.
            source_index_T: (B * S,) int64 global token indices that key noise and dropout; None: 0, 1, 2, ...
            target_places_N: (N,) int64 indices in target_BS.flatten() of the tokens with logits, row by row; None: the
                tokens of target_mask_BS, whose number needs a device synchronisation.

        Returns:
            Logits and the routing statistics of every MoE layer.
        """
        self._check_side("source_BS", source_BS, "source_mask_BS", source_mask_BS, is_source=True)
        self._check_side("target_BS", target_BS, "target_mask_BS", target_mask_BS, is_source=False)
        self._check_indices(source_BS, target_BS, source_index_T, target_index_T, target_places_N)
        source_BSD, all_stats = self._encode(source_BS, source_mask_BS, source_index_T)
        # padding is on the right, so causal attention hides it from all real tokens
        context = DenseContext.of(target_BS.shape[1], device=target_BS.device)
        tokens = self._tokens(target_BS, context, target_mask_BS, target_index_T, self.target_places)
        x_BSD = self.dropouts[1](self.embedding(target_BS), target_index_T)
        source_visible = visible_source(source_mask_BS, num_queries=target_BS.shape[1])
        for layer in self.decoder:
            x_BSD, stats = layer(x_BSD, tokens, source_BSD, source_visible)
            all_stats += [] if stats is None else [stats]
        x = x_BSD.flatten(0, 1)
        if target_places_N is not None:
            x = x.index_select(0, target_places_N)
        elif target_mask_BS is not None:
            x = x_BSD[target_mask_BS]
        return Seq2SeqOutput(self._logits(x), tuple(all_stats))

    def _check_side(
        self, name: str, ids_BS: Tensor, mask_name: str, mask_BS: Tensor | None, *, is_source: bool
    ) -> None:
        """Raise ConfigError for ids or a mask that do not fit sources, or targets; see `forward`."""
        what, most = ("source", self.config.max_source_len) if is_source else ("target", self.config.max_seq_len)
        check_ids(ids_BS, vocab_size=self.config.vocab_size, max_len=most, name=name, what=what)
        check_home(name, ids_BS, self.embedding, self.embedding.weight)
        if mask_BS is None:
            return
        check_mask(mask_name, mask_BS, ids_BS)
        if not can_look_at(mask_BS):
            return
        if is_source and not bool(mask_BS.any(1).all()):
            raise ConfigError(f"{mask_name} has a row without a token; every source must have one; leave the row out")
        if is_source and self.source_places is None:
            return  # rotary scores depend on distances only
        if bool((mask_BS[:, 1:] & ~mask_BS[:, :-1]).any()):
            whose = "sources with untied positions" if is_source else "targets"
            raise ConfigError(f"{mask_name} has padding before a token; {whose} are padded on the right; move it there")

    def _check_indices(
        self,
        source_BS: Tensor,
        target_BS: Tensor,
        source_index_T: Tensor | None,
        target_index_T: Tensor | None,
        target_places_N: Tensor | None,
    ) -> None:
        """Raise ConfigError for indices that do not fit sources and targets; see `forward`."""
        if len(source_BS) != len(target_BS):
            raise ConfigError(
                f"source_BS has {len(source_BS)} rows and target_BS {len(target_BS)}; give one target per source"
            )
        check_device("target_BS", target_BS, source_BS.device, of="source_BS")
        given = {"source_index_T": source_index_T, "target_index_T": target_index_T}
        for (name, index_T), ids in zip(given.items(), (source_BS, target_BS), strict=True):
            if index_T is not None:
                check_tensor(name, index_T, _INDEX, {"T": ids.numel()}, device=ids.device)
        if target_places_N is not None:
            sizes = {"T": target_BS.numel()}
            check_tensor("target_places_N", target_places_N, _PLACES, sizes, device=target_BS.device)

    def _encode(
        self,
        ids_BS: Tensor,
        token_mask_BS: Tensor | None,
        index_T: Tensor | None,
        *,
        capacity_factor: float | None = None,
        losses: bool = True,
    ) -> tuple[Tensor, list[RoutingStats]]:
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        is_token_BS = token_mask_BS
        if is_token_BS is None:
            is_token_BS = torch.ones_like(ids_BS[:1], dtype=torch.bool)
        visible = visible_source(is_token_BS, num_queries=ids_BS.shape[1])
        context = DenseContext(positions_S, visible)
        tokens = self._tokens(ids_BS, context, token_mask_BS, index_T, self.source_places)
        x_BSD = self.dropouts[0](self.embedding(ids_BS), index_T)
        all_stats = []
        for layer in self.encoder:
            x_BSD, stats = layer(x_BSD, tokens, capacity_factor=capacity_factor, losses=losses)
            all_stats += [] if stats is None else [stats]
        return self.encoder_norm(x_BSD), all_stats

    def _tokens(
        self,
        ids_BS: Tensor,
        context: DenseContext,
        token_mask_BS: Tensor | None,
        index_T: Tensor | None,
        untied: UntiedPositions | None,
        *,
        num_keys: int | None = None,
    ) -> Tokens:
        positions_S = context.positions
        rope = rope_tables(
            positions_S,
            head_dim=self.config.head_size,
            base=self.config.rope_base,
            dtype=accumulate_dtype(self.embedding.weight.dtype),
            fraction=1.0 if untied is None else 0.0,  # untied positions do not rotate
            arithmetic=DEFAULT_OPS.in_mode(self.training),
        )
        if untied is not None:
            num_keys = len(positions_S) if num_keys is None else num_keys
            context = replace(context, places=untied(positions_S, num_keys))
        mask_T = None if token_mask_BS is None else token_mask_BS.flatten()
        return Tokens(ids_BS.flatten(), mask_T, index_T, rope, context)

    def _logits(self, x: Tensor) -> Tensor:
        table_VD = self.embedding.weight if self.output is None else self.output.weight
        return cpu_products.linear(self.final_norm(x), table_VD)
