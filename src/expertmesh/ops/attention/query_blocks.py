"""Attention of whole sequences over blocks of queries: only one block's scores are in memory, forward and backward.

A block reads only the keys from the first to the last that its queries may attend to. The backward recomputes a block's
probabilities, unless sequences are short: then they are kept, in the type of the queries. Scores and softmax are FP32
(FP64 for FP64); products of probabilities and of gradients are in the type of the queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.short_sequence import HALVED_SEQUENCE, SHORT_SEQUENCE
from expertmesh.ops.attention import fixed_keys, paged_native, paged_triton
from expertmesh.ops.attention.scores import PLAIN, ScoreRule, as_mask, in_window
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.transforms import refuse_batched_gradient, refuse_second_derivative

BLOCK_QUERIES = 64
"""Queries per block of a long sequence; short ones are one block, or two halves."""
BLOCK_SCORES = 1 << 18
"""Scores in memory at a time on a CPU (1 MiB in FP32, half of an L2 cache), unless one key head's block has more."""
GPU_BLOCK_SCORES = 1 << 22


def attention(
    q_BHSd: Tensor,  # (B, H, S, d) queries, the last S of L tokens
    k_BhLd: Tensor,  # (B, h, L, d) keys; h divides H
    v_BhLd: Tensor,  # (B, h, L, n) values
    visible: Visible,  # the keys that each query may attend to, without the rule's window and chunks
    rule: ScoreRule | None = None,  # window, chunks, soft cap and sinks; None: none of them
    *,
    is_invariant: bool = False,
) -> Tensor:
    """Compute softmax(rule(q k^T / sqrt(d)) over visible keys) v; differentiable once.

    Args:
        is_invariant: whether a query's result is bitwise the same in every batch; its gradients are ordinary ones.

    Returns:
        (B, H, S, n) in the type of q; queries without a visible key get 0.
    """
    rule = PLAIN if rule is None else rule
    is_plain = runs_plainly(q_BHSd, k_BhLd, v_BhLd, rule.sinks_H)
    keeps = not is_plain and torch.is_grad_enabled() and is_short(q_BHSd, k_BhLd, rule)
    run = _forward if is_plain else _attention
    found: tuple[Tensor, Tensor] = run(
        q_BHSd,
        k_BhLd,
        v_BhLd,
        rule.sinks_H,
        visible.mask,
        visible.first_B,
        visible.is_causal,
        rule.window,
        rule.chunk,
        rule.softcap,
        is_invariant,
        keeps and not is_invariant,
    )
    return found[0]


def is_short(q_BHSd: Tensor, k_BhLd: Tensor, rule: ScoreRule = PLAIN) -> bool:
    """Whether a call's probabilities are kept for the backward: short sequences on a CPU, neither compiled nor
    capped."""
    return (
        q_BHSd.device.type == "cpu"
        and rule.softcap is None
        and not torch.compiler.is_compiling()
        and max(q_BHSd.shape[2], k_BhLd.shape[2]) <= SHORT_SEQUENCE
    )


class _Span(NamedTuple):
    """Span of queries, and the range of keys that these may attend to."""

    queries: slice
    keys: slice


class _HeadGroup(NamedTuple):
    """Sequences and key heads that are computed at once, Z of both."""

    sequences: slice
    heads: slice


@dataclass(frozen=True)
class _Operands:
    """Operands of one call; queries by key head, sinks in the accumulation dtype. See `Visible` and `ScoreRule`."""

    q_BhGSd: Tensor
    k_BhLd: Tensor
    v_BhLd: Tensor
    sinks_hG: Tensor | None
    mask: Tensor | None
    is_causal: bool
    rule: ScoreRule
    dtype: torch.dtype

    @staticmethod
    def of(
        q_BHSd: Tensor,
        k_BhLd: Tensor,
        v_BhLd: Tensor,
        sinks_H: Tensor | None,
        mask: Tensor | None,
        _first_B: Tensor | None,
        is_causal: bool,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
    ) -> "_Operands":
        h, dtype = k_BhLd.shape[1], accumulate_dtype(q_BHSd.dtype)
        sinks_hG = None if sinks_H is None else sinks_H.to(dtype).view(h, -1)
        rule = ScoreRule(window=window, chunk=chunk, softcap=softcap)
        q_BhGSd = q_BHSd.unflatten(1, (h, -1))
        return _Operands(q_BhGSd, k_BhLd, v_BhLd, sinks_hG, mask, is_causal, rule, dtype)

    def spans(self) -> list[_Span]:
        """Spans that cover the queries, the last first: if there is no window, it sees all keys."""
        S, L = self.q_BhGSd.shape[3], self.k_BhLd.shape[2]
        rows = -(-S // 2) if HALVED_SEQUENCE <= S <= SHORT_SEQUENCE else min(S, BLOCK_QUERIES)
        spans = []
        for start in range(0, S, max(rows, 1)):
            stop = min(start + rows, S)
            keys = slice(self.rule.first_seen(L - S + start), L - S + stop if self.is_causal else L)
            spans.append(_Span(slice(start, stop), keys))
        return spans[::-1]

    def parts(self, spans: list[_Span]) -> Iterator[_HeadGroup]:
        """Parts of the call, each with all spans."""
        B, h, G, _, d = self.q_BhGSd.shape
        most = BLOCK_SCORES if self.q_BhGSd.device.type == "cpu" else GPU_BLOCK_SCORES
        widest = max((_size(queries) * max(_size(keys), d) for queries, keys in spans), default=1)
        at_once = max(most // (G * max(widest, 1)), 1)
        sequences, heads = max(at_once // h, 1), min(at_once, h)
        for b in range(0, B, sequences):
            for i in range(0, h, heads):
                yield _HeadGroup(slice(b, min(b + sequences, B)), slice(i, min(i + heads, h)))

    def num_kept(self) -> int:
        """Probabilities of all blocks."""
        columns = [_size(q) * (_size(k) + int(self.sinks_hG is not None)) for q, k in self.spans()]
        return prod(self.q_BhGSd.shape[:3]) * sum(columns)

    def rows(self, t_BhGSd: Tensor, part: _HeadGroup, span: _Span) -> Tensor:
        """(Z, R, d) rows of a block, R = G * queries."""
        return t_BhGSd[part.sequences, part.heads, :, span.queries].flatten(2, 3).flatten(0, 1)

    def scores(self, q_ZRd: Tensor, k_ZLd: Tensor, part: _HeadGroup, span: _Span) -> Tensor:
        """(Z, R, L) capped scores, with one more column if there are sinks; -inf for hidden keys.

        A query that sees no key sees all, so that its probabilities are finite.
        """
        empty, factor = k_ZLd.new_empty(1, 1, 1), q_ZRd.shape[-1] ** -0.5
        s_ZRL = torch.baddbmm(empty, q_ZRd.to(self.dtype), k_ZLd[:, span.keys].mT, beta=0, alpha=factor)
        if self.rule.softcap is not None:
            s_ZRL.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
        hidden = self._hidden(part, span)
        if hidden is not None:
            if self.mask is not None:
                hidden = hidden & ~hidden.all(-1, keepdim=True)
            bias = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            _by_head(s_ZRL, part, span).add_(bias)
        if self.sinks_hG is not None:
            sinks_hR = self.sinks_hG[part.heads].repeat_interleave(_size(span.queries), 1)
            sinks_ZR = sinks_hR.repeat(_size(part.sequences), 1)
            s_ZRL = torch.cat((s_ZRL, sinks_ZR[..., None]), -1)
        return s_ZRL

    def without_blind(self, y_ZRd: Tensor, part: _HeadGroup, span: _Span) -> Tensor:
        """Rows with 0 for queries that see no key."""
        hidden = None if self.mask is None else self._hidden(part, span)
        if hidden is None:
            return y_ZRd
        blind = hidden.all(-1, keepdim=True)
        if blind.is_cpu and not blind.any():
            return y_ZRd
        return _by_head(y_ZRd, part, span).masked_fill(blind, 0).view(y_ZRd.shape)

    def _hidden(self, part: _HeadGroup, span: _Span) -> Tensor | None:
        """Bool, broadcastable to (B, h, G, S, L), True for keys hidden from a block's queries; None: no key is
        hidden."""
        found = None
        if self.mask is not None:
            sequences = part.sequences if self.mask.shape[0] > 1 else slice(None)
            rows = span.queries if self.mask.shape[2] > 1 else slice(None)
            found = ~self.mask[sequences, :, rows, span.keys].unsqueeze(1)
        rule = self.rule
        if not self.is_causal and rule.window is None and rule.chunk is None:
            return found
        S, L, device = self.q_BhGSd.shape[3], self.k_BhLd.shape[2], self.k_BhLd.device
        queries_S1 = torch.arange(span.queries.start, span.queries.stop, device=device)[:, None]
        queries_S1 = queries_S1 + L - S
        keys_L = torch.arange(span.keys.start, span.keys.stop, device=device)
        out_SL = keys_L > (queries_S1 if self.is_causal else L)
        if rule.window is not None:
            out_SL = out_SL | (keys_L <= queries_S1 - rule.window)
        if rule.chunk is not None:
            out_SL = out_SL | (keys_L < queries_S1 // rule.chunk * rule.chunk)
        return out_SL if found is None else found | out_SL


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size


def _softmax(s_ZRL: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None or out.dtype == s_ZRL.dtype:
        return torch.softmax(s_ZRL, -1, out=out)
    return out.copy_(torch.softmax(s_ZRL, -1))


def _by_head(t_ZRd: Tensor, part: _HeadGroup, span: _Span) -> Tensor:
    """(B, h, G, S, d) view of a block's rows."""
    return t_ZRd.unflatten(0, (-1, _size(part.heads))).unflatten(2, (-1, _size(span.queries)))


def _flat(t_BhLd: Tensor, part: _HeadGroup) -> Tensor:
    """(Z, L, d) keys or values of a part."""
    return t_BhLd[part].flatten(0, 1)


def _forward(q_BHSd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """Compute y (B, H, S, n), and the probabilities that are kept, block after block; `more` as in the operator's
    schema."""
    *rule, is_invariant, keeps = more
    if is_invariant:
        return _invariant(q_BHSd, k_BhLd, v_BhLd, *rule), q_BHSd.new_empty(0)
    with without_autocast(q_BHSd.device):
        call = _Operands.of(q_BHSd, k_BhLd, v_BhLd, *rule)
        y_BHSd = _empty(q_BHSd, v_BhLd)
        y_BhGSd = y_BHSd.unflatten(1, (k_BhLd.shape[1], -1))
        kept, place = q_BHSd.new_empty(call.num_kept() if keeps else 0), 0
        spans = call.spans()
        for part in call.parts(spans):
            k_ZLd, v_ZLd = _flat(k_BhLd, part).to(call.dtype), _flat(v_BhLd, part)
            for span in spans:
                q_ZRd = call.rows(call.q_BhGSd, part, span)
                s_ZRL = call.scores(q_ZRd, k_ZLd, part, span)
                if keeps:
                    own = kept[place : place + s_ZRL.numel()].view_as(s_ZRL)
                    place += s_ZRL.numel()
                    p_ZRL = _softmax(s_ZRL, own)
                else:
                    p_ZRL = _softmax(s_ZRL)
                p_ZRL = p_ZRL[..., : _size(span.keys)].to(q_BHSd.dtype)
                y = call.without_blind(torch.bmm(p_ZRL, v_ZLd[:, span.keys]), part, span)
                y_BhGSd[part.sequences, part.heads, :, span.queries] = _by_head(y, part, span)
        return y_BHSd, kept


def _empty(q_BHSd: Tensor, v_BhLd: Tensor) -> Tensor:
    """(B, H, S, n), with the numbers of a token adjacent."""
    B, H, S, _ = q_BHSd.shape
    return q_BHSd.new_empty(B, S, H, v_BhLd.shape[3]).transpose(1, 2)


def _invariant(
    q_BHSd: Tensor,
    k_BhLd: Tensor,
    v_BhLd: Tensor,
    sinks_H: Tensor | None,
    mask: Tensor | None,
    first_B: Tensor | None,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention in one order of sums: by the kernel over pages in C or Triton, or by fixed blocks of keys."""
    (B, _, S, _), L, device = q_BHSd.shape, k_BhLd.shape[2], q_BHSd.device
    rule = ScoreRule(window=window, chunk=chunk, softcap=softcap, sinks_H=sinks_H)
    ways: tuple[Any, ...] = (paged_native, paged_triton) if is_causal else (paged_native,)
    over_pages = next((one for one in ways if one.serves(q_BHSd, k_BhLd, v_BhLd)), None)
    if over_pages is not None and mask is None and is_causal:
        return over_pages.of_sequences(q_BHSd, k_BhLd, v_BhLd, rule=rule)
    seen = in_window(Visible(S, is_causal, mask), rule, num_keys=L, device=device)
    mask_BSL = as_mask(seen, num_keys=L, device=device)[:, 0].expand(B, S, L)
    first_B = None if first_B is None else first_B.expand(B)
    rule = ScoreRule(softcap=softcap, sinks_H=sinks_H)
    if over_pages is not None:
        return over_pages.of_sequences(q_BHSd, k_BhLd, v_BhLd, first_B, mask_BSL, rule=rule)
    return fixed_keys.attention(q_BHSd, k_BhLd, v_BhLd, mask_BSL, first_B, rule)


def _gradients(
    grad_BHSd: Tensor, kept: Tensor, q_BHSd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, *rule: Any
) -> list[Tensor]:
    """Gradients of queries, keys, values and, if given, sinks."""
    h, own = k_BhLd.shape[1], q_BHSd.dtype
    with without_autocast(q_BHSd.device):
        call = _Operands.of(q_BHSd, k_BhLd, v_BhLd, *rule)
        grad_BhGSd = grad_BHSd.unflatten(1, (h, -1))
        d_q, d_k, d_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BHSd, k_BhLd, v_BhLd))
        d_q_BhGSd = d_q.unflatten(1, (h, -1))
        d_sinks = None if call.sinks_hG is None else torch.zeros_like(call.sinks_hG)
        place, spans = 0, call.spans()
        for part in call.parts(spans):
            k_ZLd, v_ZLd = _flat(k_BhLd, part), _flat(v_BhLd, part)
            wide_k, wide_v = k_ZLd.to(call.dtype), v_ZLd.to(call.dtype)
            # of few blocks, sums are in the type of the products
            of_k, of_v = (_Sum(_flat(t, part), own if kept.numel() else call.dtype) for t in (d_k, d_v))
            for span in spans:
                q_ZRd = call.rows(call.q_BhGSd, part, span)
                grad_ZRd = call.without_blind(call.rows(grad_BhGSd, part, span), part, span)
                scores = None
                if kept.numel():
                    shape = *q_ZRd.shape[:2], _size(span.keys) + (d_sinks is not None)
                    p = kept[place : place + prod(shape)].view(shape)
                    place += prod(shape)
                else:
                    scores = call.scores(q_ZRd, wide_k, part, span)
                    p = _softmax(scores)
                d_s, of_sinks = _score_gradients(call, grad_ZRd, p, scores, wide_v[:, span.keys])
                if d_sinks is not None:
                    d_sinks[part.heads] += _by_head(of_sinks, part, span).sum((0, 3, 4))
                d_s, p = d_s.to(own), p[..., : _size(span.keys)].to(own)
                of_q = torch.bmm(d_s, k_ZLd[:, span.keys])
                d_q_BhGSd[part.sequences, part.heads, :, span.queries] = _by_head(of_q, part, span)
                of_v.add(p.mT, grad_ZRd, span.keys)
                of_k.add(d_s.mT, q_ZRd, span.keys)
            of_k.finish()
            of_v.finish()
    found = [d_q, d_k, d_v]
    return found if d_sinks is None else [*found, d_sinks.flatten().to(rule[0].dtype)]


class _Sum:
    """Sum of products over blocks, the gradient of a part's keys or values."""

    def __init__(self, out_ZLd: Tensor, dtype: torch.dtype) -> None:
        self.out_ZLd, self.dtype = out_ZLd, dtype
        self.total: Tensor | None = None

    def add(self, x_ZLR: Tensor, y_ZRd: Tensor, keys: slice) -> None:
        if self.total is not None:
            self.total[:, keys] += torch.bmm(x_ZLR, y_ZRd)
        elif x_ZLR.shape[1] == self.out_ZLd.shape[1]:
            self.total = torch.bmm(x_ZLR, y_ZRd, out=self.out_ZLd).to(self.dtype)
        else:
            self.total = torch.zeros_like(self.out_ZLd, dtype=self.dtype)
            self.total[:, keys] += torch.bmm(x_ZLR, y_ZRd)

    def finish(self) -> None:
        if self.total is not None and self.total is not self.out_ZLd:
            self.out_ZLd.copy_(self.total)


def _score_gradients(
    call: _Operands, grad_ZRd: Tensor, p: Tensor, scores: Tensor | None, v_ZLd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of scores, divided by sqrt(d), and of sinks, (Z, R, 0) without them."""
    L, scale, dtype = v_ZLd.shape[1], call.q_BhGSd.shape[-1] ** -0.5, call.dtype
    # d scores = p (d p - sum(p d p)) / sqrt(d); the factor is cheapest here
    d_p = torch.bmm(grad_ZRd.to(dtype) * scale, v_ZLd.mT)
    if call.sinks_hG is not None:  # a sink has no value
        d_p = F.pad(d_p, (0, 1))
    d_all = torch._softmax_backward_data(d_p, p.to(dtype), -1, dtype)
    d_s, d_sinks = d_all[..., :L], d_all[..., L:] / scale
    if call.rule.softcap is not None:
        assert scores is not None
        capped = scores[..., :L].clamp(min=-call.rule.softcap) / call.rule.softcap
        d_s = d_s * (1 - capped.square_())
    return d_s, d_sinks


_RULE = "Tensor? sinks_H, Tensor? mask, Tensor? first_B, bool is_causal, int? window, int? chunk, float? softcap"
_attention = torch.library.custom_op(
    "expertmesh::block_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q_BHSd, Tensor k_BhLd, Tensor v_BhLd, {_RULE}, bool is_invariant, bool keeps) -> (Tensor, Tensor)",
)
_attention_backward = torch.library.custom_op(
    "expertmesh::block_attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor kept, Tensor q_BHSd, Tensor k_BhLd, Tensor v_BhLd, {_RULE}) -> Tensor[]",
)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return _empty(q, v), q.new_empty(_Operands.of(q, k, v, *more[:-2]).num_kept() if more[-1] else 0)


@_attention_backward.register_fake
def _(grad: Tensor, kept: Tensor, *inputs: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in inputs[:4] if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.rule = inputs[6:10]
    ctx.set_materialize_grads(False)  # kept probabilities have none


def _backward(ctx: Any, grad_BHSd: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_BHSd is None:
        return (None,) * 12
    refuse_batched_gradient("the backward of attention in blocks", grad_BHSd)
    *inputs, kept = ctx.saved_tensors
    found = _attention_backward(grad_BHSd, kept, *inputs, *ctx.rule)
    return *found, *(None for _ in range(12 - len(found)))


_attention.register_autograd(_backward, setup_context=_save)
refuse_second_derivative(
    _attention_backward,
    "attention in blocks",
    fix="use FP32 or FP64, without masks, sinks and caps",
)
