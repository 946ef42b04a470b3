"""A GPT with mixture-of-experts layers: forward pass and initial weights, without training or parallelism."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.config.values import Number, python_number
from expertmesh.errors import ConfigError, named
from expertmesh.models.attention import Attention, AttentionContext, DenseContext, rope_tables
from expertmesh.models.cache import KVCache
from expertmesh.models.decoder import LanguageModel
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.models.inputs import MASK, check_cache, check_context, check_home, check_ids
from expertmesh.models.latent_attention import LatentAttention
from expertmesh.models.layers import (
    FeedForward,
    RMSNorm,
    check_model_arguments,
    draw_weights,
    init_by_spec,
)
from expertmesh.models.scored import Head, score_rows
from expertmesh.models.token_rows import TokenRows, embedded_with, put_logits
from expertmesh.moe.check_arguments import check_call_factor, check_top_k
from expertmesh.moe.dispatch import LocalDispatcher, check_at_home
from expertmesh.moe.groups_over_ranks import SharedTokens
from expertmesh.moe.init import draw_seed
from expertmesh.moe.large_sizes import names_large_sizes
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.check import IDS, INTEGERS, WHOLE, Arg, check_tensors
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.op_set import select_op_set
from expertmesh.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class GPTOutput:
    """Logits and routing statistics of one forward pass; a pytree."""

    # (B, S, V), or (B, num_logits, V), or (R, V) for flat tokens or logit_rows_R, in the compute dtype
    logits_BSV: Tensor
    stats: tuple[RoutingStats, ...]  # one RoutingStats per MoE layer, in layer order; empty for a dense model


@dataclass(frozen=True)
class GPTScores:
    """Log-probabilities of given tokens and routing statistics of one forward pass; a pytree."""

    logprobs_R: Tensor  # (R,) log-probabilities of the targets, FP32 or FP64
    stats: tuple[RoutingStats, ...]  # as in `GPTOutput`
    entropies_R: Tensor | None = None  # (R,) entropies in nats, in the same dtype; None: not asked for


for _kind in (GPTOutput, GPTScores):
    torch.utils._pytree.register_dataclass(
        _kind, field_names=[field.name for field in fields(_kind)], drop_field_names=[]
    )


class SequenceGroup(SharedTokens, Protocol):
    """Group of ranks that share sequences, such as `expertmesh.parallel.tensor.SharedSequences`."""

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""

    def own_part(self, x: Tensor, *, dim: int) -> Tensor:
        """Slice along dim with this rank's positions, of a tensor that is equal on all ranks."""

    def gather(self, parameter: Tensor) -> Tensor:
        """The whole parameter, gathered from the ranks that it is sharded over."""


_TENSORS = {
    "token_mask_BS": MASK,
    "document_BS": Arg("BS", INTEGERS, "the number of each token's document"),
    "token_index": Arg("T|BS", INTEGERS, "one per token"),
    "logit_rows_R": Arg("R", IDS, "one per token with logits", below="T", fix="give rows of ids_BS.flatten()"),
    "targets_R": Arg("R", IDS, "the token after each row", below="V", fix="give ids of tokens"),
}
_NUM_LOGITS = Number(1, fix="leave it out for all positions", types=WHOLE, optional=True)


def check_sequence(config: ModelConfig, seq_len: int, *, tp_degree: int) -> None:
    """Check that ranks which share sequences can split them evenly."""
    if seq_len % tp_degree:
        near = max(seq_len // tp_degree, 1) * tp_degree
        raise ConfigError(
            f"sequences of {seq_len} tokens on {named('parallel.tp_degree', tp_degree)}: it must divide them; use "
            f"{named('data.seq_len', near)}"
        )
    size, part = config.choosing_group, seq_len // tp_degree
    if part % size:
        raise ConfigError(
            "model.moe.routing_group_size",
            size,
            f"with router=expert_choice and {named('parallel.tp_degree', tp_degree)} it must divide the {part} tokens "
            "of a "
            "sequence that a rank has",
            f"use {math.gcd(size, part)}, or none",
        )


class Block(FeedForward):
    """Transformer layer: x + attention(norm(x)), then x + feed_forward(norm(x)), where the feed-forward is dense or
    MoE."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_index: int,  # index of the layer, from 0
        num_experts: int,  # experts of this layer; 0: a dense feed-forward layer
        device: torch.device | str | None = None,  # the device of the parameters
        dtype: torch.dtype | None = None,  # the type of the parameters
    ) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        how: dict[str, Any] = {
            "arithmetic": select_op_set(config.batch_invariant),
            "device": device,
            "dtype": dtype,
        }
        self.attention_norm = RMSNorm(dim, eps=eps, **how)
        self.attention = _attention(config, layer_index, how)
        self.ffn_norm = RMSNorm(dim, eps=eps, **how)
        self.make_feed_forward(
            config.moe_layer,
            num_experts,
            dim=dim,
            hidden_dim=config.ffn_hidden_dim,
            activation=config.activation,
            layer_index=layer_index,
            **how,
        )

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        ids_T: Tensor,
        token_mask_T: Tensor | None,
        token_index: Tensor | None,
        choices: Mapping[str, Any],
    ) -> tuple[Tensor, RoutingStats | None]:
        """Output (B, S, D), and the routing statistics of a MoE layer; `choices` are passed to `MoELayer`."""
        attended = self.attention(self.attention_norm(x_BSD), cos=cos, sin=sin, context=context)
        x_BSD = x_BSD + attended
        h_TD = self.ffn_norm(x_BSD).flatten(0, 1)
        y_TD, stats = self.feed_forward(
            h_TD, token_mask=token_mask_T, token_ids=ids_T, token_index=token_index, **choices
        )
        return x_BSD + y_TD.view_as(x_BSD), stats


def _attention(config: ModelConfig, layer_index: int, how: dict[str, Any]) -> Attention | LatentAttention:
    if config.is_latent:
        return LatentAttention(
            dim=config.dim,
            num_heads=config.num_heads,
            latent=config.latent,
            score_factor=config.rope_scaling.score_factor,
            layer_index=layer_index,
            **how,
        )
    return Attention(
        dim=config.dim,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        qk_norm=config.qk_norm,
        qk_norm_scope=config.qk_norm_scope,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        sinks=config.sinks,
        window=config.window_of(layer_index),
        norm_eps=config.norm_eps,
        layer_index=layer_index,
        **how,
    )


class GPT(LanguageModel):
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, MoE in every n-th layer.

    With config.batch_invariant, in evaluation, the logits of a token are the same to the bit for all other sequences
    and padding in the batch, with a cache and without.

    Args:
        config: the model.
        device: the device of the parameters; "meta" makes none (then `to_empty` and `init_weights`).
        dtype: the type of the parameters; None: torch's default.
        seed: the seed of the initial weights; None: a fresh one from torch's default generator.

    Raises:
        ConfigError: a value breaks a rule.

    Example:
        >>> import torch
        >>> model = em.GPT(em.recipe("gpt-moe-test").model, seed=0)
        >>> output = model(torch.randint(512, (2, 16)))
        >>> output.logits_BSV.shape, len(output.stats)
        (torch.Size([2, 16, 512]), 2)
    """

    @names_large_sizes
    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        check_model_arguments(config, ModelConfig, dtype)
        super().__init__()
        self.config = config
        self.arithmetic = select_op_set(config.batch_invariant)
        self.activation_checkpointing = False
        self.shared: SequenceGroup | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.dim, device="meta", dtype=dtype)
        self.layers = nn.ModuleList(
            Block(config, layer_index=index, num_experts=experts, device="meta", dtype=dtype)
            for index, experts in enumerate(config.experts_per_layer())
        )
        self.final_norm = RMSNorm(
            config.dim,
            eps=config.norm_eps,
            arithmetic=self.arithmetic,
            device="meta",
            dtype=dtype,
        )
        self.output: Head | None = None
        if not config.tie_embeddings:
            self.output = Head(
                config.dim,
                config.vocab_size,
                arithmetic=self.arithmetic,
                device="meta",
                dtype=dtype,
            )
        self.token_rows: nn.ModuleDict | None = None
        draw_weights(self, device=device, seed=seed)

    def learn_rows(self, ids: Sequence[int], *, dtype: torch.dtype) -> None:
        """Give some tokens rows of their own, without values yet, which learn while embedding and output rest.

        Args:
            ids: the tokens, ascending.
            dtype: dtype of the rows.
        """
        tables = ("embedding",) if self.output is None else ("embedding", "output")
        how: dict[str, Any] = {"device": self.device, "dtype": dtype}
        self.token_rows = nn.ModuleDict({name: TokenRows(ids, self.config.dim, **how) for name in tables})

    @property
    def spec(self) -> ModelSpec:
        """Specification of its parameters; see `expertmesh.spec.model_spec`."""
        return gpt_spec(self.config)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter: N(0, init_std^2), norms 1, biases 0.

        Projections back to the residual stream have init_std / sqrt(2 num_layers) (Radford et al. 2019, 2.3). The
        numbers depend on the seed and the parameter's name only, not on the device or the number of ranks.

        Args:
            seed: seed of the weights; None: a fresh one from torch's default generator.
        """
        seed = draw_seed() if seed is None else seed
        std = self.config.init_std
        out_std = std * (2 * self.config.num_layers) ** -0.5
        init_by_spec(self, self.spec, seed=seed, std=std, out_std=lambda name: out_std)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Set whether training saves only the input of every layer and recomputes the rest in the backward pass."""
        self.activation_checkpointing = enabled

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated text besides the tokenizer's end of text."""
        result: tuple[int, ...] = self.config.end_ids
        return result

    @property
    def counts_padding(self) -> bool:
        """Whether positions are columns of the batch, padding included, in the current mode; see `DenseContext.of`."""
        return not self.arithmetic.in_mode(self.training).batch_invariant

    @property
    def start_ids(self) -> tuple[int, ...] | None:
        """Tokens put before a prompt; see `ModelConfig.start_ids`."""
        result: tuple[int, ...] | None = self.config.start_ids
        return result

    def next_logits(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: KVCache) -> Tensor:
        """Logits (B, V) of the token after the last column, without a capacity; see
        `expertmesh.models.decoder.CausalLM`.

        Raises:
            ConfigError: an argument has a wrong shape, dtype, device or range, or the cache is full or does not fit the
                model or the batch; the cache is left unchanged.
        """
        self._check_inputs(ids_BS, token_mask_BS, None, None, max_len=self.config.max_seq_len)
        check_cache(cache, config=self.config, weight=self.embedding.weight)
        output: GPTOutput = self(
            ids_BS,
            token_mask_BS=token_mask_BS,
            context=cache.begin(ids_BS, token_mask_BS=token_mask_BS, counts_padding=self.counts_padding),
            num_logits=1,
            capacity_factor=self.config.moe.dropless_factor,
            losses=False,
        )
        return output.logits_BSV[:, 0]

    def share_sequences(self, shared: SequenceGroup) -> None:
        """Restrict this rank to its own positions and heads; called by `parallelize_gpt`."""
        self.shared = shared
        for block in self.layers:
            assert isinstance(block, Block)
            block.attention.num_heads //= shared.size
            block.attention.num_kv_heads //= shared.size

    def _embed(self, ids_BS: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Embedded tokens (B, S, D) and the embedding matrix (V, D).

        Where ranks share sequences, the tokens are this rank's, and per-token entries of `call` are cut to them, in
        place.
        """
        if self.shared is None:
            return self._with_own_rows(self.embedding(ids_BS), ids_BS), self.embedding.weight
        B, S = ids_BS.shape
        check_sequence(self.config, S, tp_degree=self.shared.size)
        if call["token_index"] is None:
            call["token_index"] = torch.arange(B * S, device=ids_BS.device)
        for name in ("ids_T", "token_mask_T", "token_index"):
            if call[name] is not None:
                call[name] = self.shared.own_part(call[name].view(B, S), dim=1).flatten()
        size = self.config.moe.routing_group_size
        if size is None or S // self.shared.size % size:
            call["choices"] = {**call["choices"], "shared_tokens": self.shared}
        table_VD, own_BS = self.shared.gather(self.embedding.weight), call["ids_T"].view(B, S // self.shared.size)
        return self._with_own_rows(F.embedding(own_BS, table_VD), own_BS), table_VD

    def _with_own_rows(self, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
        """Embedded tokens, with the rows that some of them have beside the embedding."""
        return x_BSD if self.token_rows is None else embedded_with(self.token_rows["embedding"](), x_BSD, ids_BS)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions; see `rope_tables`."""
        return rope_tables(
            positions,
            head_dim=self.config.turning_dim,
            scaling=self.config.rope_scaling,
            base=self.config.rope_base,
            fraction=self.config.rope_fraction,
            dtype=accumulate_dtype(self.embedding.weight.dtype),
            arithmetic=self.arithmetic.in_mode(self.training),
        )

    def _context(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, document_BS: Tensor | None) -> DenseContext:
        """Attention context of whole sequences, without a cache."""
        if document_BS is not None and not self.counts_padding:
            raise ConfigError(
                "document_BS with batch_invariant: document masks need whole sequences; leave one of them out"
            )
        return DenseContext.of(
            ids_BS.shape[1],
            device=ids_BS.device,
            is_token_BL=token_mask_BS,
            document_BS=document_BS,
            counts_padding=self.counts_padding,
        )

    def _check_inputs(
        self,
        ids_BS: Tensor,
        token_mask_BS: Tensor | None,
        document_BS: Tensor | None,
        token_index: Tensor | None,
        *,
        num_logits: int | None = None,
        logit_rows_R: Tensor | None = None,
        targets_R: Tensor | None = None,
        max_len: int | None,
    ) -> None:
        """Raise ConfigError for arguments that do not fit the model or the tokens; see `forward`."""
        check_ids(ids_BS, vocab_size=self.config.vocab_size, max_len=max_len)
        check_home("ids_BS", ids_BS, self.embedding, self.embedding.weight)
        B, S = ids_BS.shape
        given = {
            "token_mask_BS": token_mask_BS,
            "document_BS": document_BS,
            "token_index": token_index,
            "logit_rows_R": logit_rows_R,
            "targets_R": targets_R,
        }
        sizes = {"B": B, "S": S, "T": B * S, "V": self.config.vocab_size}
        if targets_R is not None and logit_rows_R is not None:
            sizes["R"] = len(logit_rows_R)
        elif targets_R is not None:
            num_sharing = 1 if self.shared is None else self.shared.size
            sizes["R"] = B * min(S, num_logits or S) // num_sharing
        check_tensors(_TENSORS, given, sizes, device=ids_BS.device)
        _NUM_LOGITS.check("num_logits", num_logits)
        if num_logits is not None and logit_rows_R is not None:
            raise ConfigError(
                f"num_logits={num_logits}: logit_rows_R says which tokens get logits; leave one of the two out"
            )

    def _choices(
        self, top_k: Any, capacity_factor: Any, dispatch: DispatchOptions | None, losses: bool
    ) -> dict[str, Any]:
        """Arguments of this call for all MoE layers, checked before the first layer runs."""
        check_call_factor(capacity_factor, arithmetic=self.arithmetic.in_mode(self.training))
        counts = [n for n in self.config.experts_per_layer() if n]
        if counts and top_k is not None:
            moe = self.config.moe
            check_top_k(
                top_k,
                min(counts),
                num_groups=moe.num_expert_groups,
                num_limited_groups=moe.num_limited_groups,
            )
        if not counts and (top_k is not None or capacity_factor not in (None, math.inf)):
            name, value = ("top_k", top_k) if top_k is not None else ("capacity_factor", capacity_factor)
            raise ConfigError(f"{name}={value}: has no effect in a dense model; leave it out")
        layers: Any = (block.moe for block in self.layers)
        if all(layer is None or isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
            check_at_home(dispatch or AS_USUAL)
        return {
            "top_k": top_k,
            "capacity_factor": capacity_factor,
            "dispatch": dispatch,
            "losses": losses,
        }

    def forward(
        self,
        ids_BS: Tensor,
        *,
        token_mask_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
        token_index: Tensor | None = None,
        context: AttentionContext | None = None,
        num_logits: int | None = None,
        logit_rows_R: Tensor | None = None,
        targets_R: Tensor | None = None,
        scoring: Mapping[str, Any] = MappingProxyType({}),
        top_k: int | None = None,
        capacity_factor: float | None = None,
        dispatch: DispatchOptions | None = None,
        losses: bool = True,
    ) -> GPTOutput | GPTScores:
        """Logits of the next token at every position, or at this rank's positions where ranks share sequences.

        Does not synchronise with the device: values of ids are checked on CPUs only, and not inside torch.compile.

        Args:
            ids_BS: (B, S) int64 token ids; S is at most config.max_seq_len. With a context also (T,): flat tokens of
                any sequences, whose positions the context has. All per-token arguments are then (T,), too.
            token_mask_BS: (B, S) bool, False for padding, which no token sees and no expert computes.
            document_BS: (B, S) document numbers: tokens see only tokens with the same number. Positions continue from
                one document to the next, which changes nothing because rotary positions are relative.
            token_index: (B * S,) int64 global token indices that key the router's noise; None: 0, 1, 2, ...
            context: attention context, with earlier keys (`KVCache.begin` makes one); None: the given sequences alone.
            num_logits: number of last positions with logits, at least 1; None: all positions.
            logit_rows_R: (R,) int64 indices of the T = B * S tokens with logits; None: all, or num_logits.
            targets_R: (R,) int64 tokens, one for each row that would get logits; see Returns.
            scoring: with targets_R, options of `score_rows`: temperature, entropy.
            top_k: experts per token in all MoE layers, for this call only; None: each layer's own.
            capacity_factor: capacity factor of all MoE layers, for this call only; inf: dropless; None: each layer's
                own.
            dispatch: dispatch options of this call for a model spread over ranks, equal on all ranks; None: as it was
                spread.
            losses: see `MoELayer.forward`.

        Returns:
            Logits, (R, V) with logit_rows_R and (T, V) for flat tokens, and the routing statistics of every MoE layer.
            With targets_R their log-probabilities in place of logits, computed in chunks of rows (`score_rows`).

        Raises:
            ConfigError: an argument has a wrong shape, dtype, device or range, there are more tokens than
                config.max_seq_len, or document_BS is given with a context or batch_invariant.
        """
        is_flat = context is not None and isinstance(ids_BS, Tensor) and ids_BS.ndim == 1
        if is_flat:
            ids_BS = ids_BS[None]
            token_mask_BS = None if token_mask_BS is None else token_mask_BS[None]
        self._check_inputs(
            ids_BS,
            token_mask_BS,
            document_BS,
            token_index,
            num_logits=num_logits,
            logit_rows_R=logit_rows_R,
            targets_R=targets_R,
            max_len=None if is_flat else self.config.max_seq_len,
        )
        choices = self._choices(python_number(top_k), python_number(capacity_factor), dispatch, losses)
        if context is not None:
            check_context(context, ids_BS, config=self.config, weight=self.embedding.weight)
        if self.shared is not None and (context is not None or num_logits is not None):
            raise ConfigError(f"decoding on ranks that share sequences; use {named('tp_degree', '1')}")
        is_decoding = context is not None
        if context is None:
            context = self._context(ids_BS, token_mask_BS=token_mask_BS, document_BS=document_BS)
        elif document_BS is not None:
            raise ConfigError("document_BS with a context: document masks need whole sequences; leave one of them out")
        cos, sin = self._rope(context.positions)
        call: dict[str, Any] = {
            "cos": cos,
            "sin": sin,
            "context": context,
            "ids_T": ids_BS.flatten(),
            "token_mask_T": None if token_mask_BS is None else token_mask_BS.flatten(),
            "token_index": None if token_index is None else token_index.flatten(),
            "choices": choices,
        }
        x_BSD, table_VD = self._embed(ids_BS, call)
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and not is_decoding
        all_stats = []
        for block in self.layers:
            x_BSD, stats = (partial(_recomputed, block) if recompute else block)(x_BSD, **call)
            if stats is not None:
                all_stats.append(stats)
        x = _rows_of(x_BSD, num_logits, logit_rows_R)
        x = x[0] if is_flat and logit_rows_R is None else x
        if targets_R is None:
            return GPTOutput(self._read_out(x, table_VD), tuple(all_stats))
        scores = self._read_out(x.reshape(-1, x.shape[-1]), table_VD, targets_R, **scoring)
        return GPTScores(scores.logprobs_R, tuple(all_stats), scores.entropies_R)

    def _read_out(self, x: Tensor, table_VD: Tensor, targets_R: Tensor | None = None, **scoring: Any) -> Any:
        """Logits (..., V) of hidden states (..., D); with targets, the targets' `Scores` for (R, D)."""
        x = self.final_norm(x)
        if self.token_rows is not None:
            scoring["own"] = self.token_rows["embedding" if self.output is None else "output"]()
        if self.output is not None:
            whole = None if self.shared is None else self.shared.gather(self.output.weight)
            return self.output(x, targets_R, whole, **scoring)
        linear = self.arithmetic.in_mode(self.training).linear
        if targets_R is not None:
            return score_rows(x, table_VD, targets_R, linear=linear, **scoring)
        logits, own = linear(x, table_VD), scoring.get("own")
        return logits if own is None else put_logits(logits, own, x, linear)


def _recomputed(block: nn.Module, x_BSD: Tensor, **call: Any) -> Any:
    """A block's result, of which the backward pass keeps the input alone."""
    again = partial(_in_mode, block, block.training)
    return checkpoint(again, x_BSD, use_reentrant=False, **call)


def _in_mode(block: nn.Module, training: bool, x_BSD: Tensor, **call: Any) -> Any:
    """A block's result in the mode of its first call, which a backward pass may come after."""
    was, _ = block.training, block.train(training)
    try:
        return block(x_BSD, **call)
    finally:
        block.train(was)


def _rows_of(x_BSD: Tensor, num_logits: int | None, rows_R: Tensor | None) -> Tensor:
    """Hidden states that pass the head: the last of each sequence, given rows (R, D), or all."""
    if rows_R is not None:
        return x_BSD.flatten(0, 1).index_select(0, rows_R)
    return x_BSD if num_logits is None else x_BSD[:, max(x_BSD.shape[1] - num_logits, 0) :]
