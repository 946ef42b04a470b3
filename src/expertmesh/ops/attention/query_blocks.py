"""Attention with a soft cap or sinks over blocks of queries: only one block's scores are in memory, forward and backward.

The backward pass recomputes a block's scores, using the saved log-sum-exp of each query. A block reads only the keys
from the first to the last that its queries may attend to.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.transforms import refuse_batched_gradient, refuse_second_derivative

BLOCK_QUERIES = 64
"""Queries per block if a call has more scores than `BLOCK_SCORES`."""
BLOCK_SCORES = 1 << 22
"""Scores in memory at a time (16 MiB in FP32), unless one key head's block has more."""


def attention(
    q_BHSd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, visible: Visible, rule: ScoreRule
) -> Tensor:
    """Compute softmax(rule(q k^T / sqrt(d)) over visible keys) v, in FP32 (FP64 for FP64); differentiable once.

    Args:
        q_BHSd: (B, H, S, d) queries, the last S of L tokens.
        k_BhLd: (B, h, L, d) keys; h divides H.
        v_BhLd: (B, h, L, n) values.
        visible: the keys that each query may attend to, without the rule's window and chunks.
        rule: window, chunks, soft cap and sinks.

    Returns:
        (B, H, S, n) in the type of q; queries without a visible key get 0.
    """
    mask = visible.mask
    sizes = (visible.is_causal, rule.window, rule.chunk, rule.softcap)
    if runs_plainly(q_BHSd, k_BhLd, v_BhLd, rule.sinks_H):
        return _forward(q_BHSd, k_BhLd, v_BhLd, rule.sinks_H, mask, *sizes)[0]
    y: Tensor = _attention(q_BHSd, k_BhLd, v_BhLd, rule.sinks_H, mask, *sizes)[0]
    return y


@dataclass(frozen=True)
class _Block:
    """Block of a call: sequences, key heads, queries, and the range of keys that these may attend to."""

    sequences: slice
    heads: slice
    queries: slice
    keys: slice


@dataclass(frozen=True)
class _Scores:
    """Computation of the scores of one call.

    Attributes:
        q_BhGSd: queries by key head.
        k_BhLd: keys, in the accumulation dtype.
        sinks_hG: sinks by key head, in the accumulation dtype; None: no sinks.
        mask: see `Visible`.
        rule: window, chunk and soft cap; its sinks are not read.
        is_causal: see `Visible`.
    """

    q_BhGSd: Tensor
    k_BhLd: Tensor
    sinks_hG: Tensor | None
    mask: Tensor | None
    rule: ScoreRule
    is_causal: bool

    @staticmethod
    def of(
        q_BHSd: Tensor,
        k_BhLd: Tensor,
        sinks_H: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
    ) -> "_Scores":
        h, dtype = k_BhLd.shape[1], accumulate_dtype(q_BHSd.dtype)
        sinks_hG = None if sinks_H is None else sinks_H.to(dtype).view(h, -1)
        rule = ScoreRule(window=window, chunk=chunk, softcap=softcap)
        q_BhGSd = q_BHSd.unflatten(1, (h, -1))
        return _Scores(q_BhGSd, k_BhLd.to(dtype), sinks_hG, mask, rule, is_causal)

    def blocks(self) -> Iterator[_Block]:
        """Blocks of the call, which cover each (sequence, head, query) once."""
        B, h, G, S, _ = self.q_BhGSd.shape
        L = self.k_BhLd.shape[2]
        rows = S if B * h * G * S * L <= BLOCK_SCORES else BLOCK_QUERIES
        for start in range(0, S, rows):
            stop = min(start + rows, S)
            first = self.rule.first_seen(L - S + start)
            last = L - S + stop if self.is_causal else L
            at_once = max(BLOCK_SCORES // (G * (stop - start) * (last - first)), 1)
            sequences, heads = max(at_once // h, 1), min(at_once, h)
            for b in range(0, B, sequences):
                for i in range(0, h, heads):
                    yield _Block(
                        slice(b, min(b + sequences, B)),
                        slice(i, min(i + heads, h)),
                        slice(start, stop),
                        slice(first, last),
                    )

    def queries(self, at: _Block) -> Tensor:
        """(B, h, G * S, d) queries of a block, in the accumulation dtype."""
        part = self.q_BhGSd[at.sequences, at.heads, :, at.queries]
        return part.flatten(2, 3).to(self.k_BhLd.dtype)

    def of_block(self, q_BhRd: Tensor, at: _Block) -> Tensor:
        """(B, h, G * S, L) scores, capped, -inf for masked keys."""
        keys = self.k_BhLd[at.sequences, at.heads, at.keys]
        s_BhRL = (q_BhRd @ keys.mT).mul_(q_BhRd.shape[-1] ** -0.5)
        if self.rule.softcap is not None:
            s_BhRL.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
        hidden = self._hidden(at)
        if hidden is not None:
            count = at.queries.stop - at.queries.start
            s_BhRL.unflatten(2, (-1, count)).masked_fill_(hidden, -math.inf)
        return s_BhRL

    def sinks(self, at: _Block) -> Tensor | None:
        """(h, G * S, 1) sinks of a block's rows."""
        if self.sinks_hG is None:
            return None
        count = at.queries.stop - at.queries.start
        return self.sinks_hG[at.heads].repeat_interleave(count, 1)[..., None]

    def _hidden(self, at: _Block) -> Tensor | None:
        """Bool mask, broadcastable to (B, h, G, S, L), True for keys hidden from a block's queries; None: no key is hidden."""
        found = None
        if self.mask is not None:
            sequences = at.sequences if self.mask.shape[0] > 1 else slice(None)
            rows = at.queries if self.mask.shape[2] > 1 else slice(None)
            found = ~self.mask[sequences, :, rows, at.keys].unsqueeze(1)
        if not self.is_causal and self.rule.window is None and self.rule.chunk is None:
            return found
        S, L, device = self.q_BhGSd.shape[3], self.k_BhLd.shape[2], self.k_BhLd.device
        queries_S1 = torch.arange(at.queries.start, at.queries.stop, device=device)[:, None] + L - S
        keys_L = torch.arange(at.keys.start, at.keys.stop, device=device)
        out_SL = keys_L > (queries_S1 if self.is_causal else L)
        if self.rule.window is not None:
            out_SL = out_SL | (keys_L <= queries_S1 - self.rule.window)
        if self.rule.chunk is not None:
            out_SL = out_SL | (keys_L < queries_S1 // self.rule.chunk * self.rule.chunk)
        return out_SL if found is None else found | out_SL


def _forward(
    q_BHSd: Tensor,
    k_BhLd: Tensor,
    v_BhLd: Tensor,
    *rule: Any,
) -> tuple[Tensor, Tensor]:
    """Compute y (B, H, S, n) and the log-sum-exp of each query (B, H, S), inf without a visible key.

    `rule` holds the remaining arguments of `_Scores.of`.
    """
    (B, H, S, _), n = q_BHSd.shape, v_BhLd.shape[3]
    with without_autocast(q_BHSd.device):
        scores = _Scores.of(q_BHSd, k_BhLd, *rule)
        dtype, h = scores.k_BhLd.dtype, k_BhLd.shape[1]
        v_BhLd = v_BhLd.to(dtype)
        y_BhGSd = q_BHSd.new_empty(B, h, H // h, S, n)
        totals_BhGS = q_BHSd.new_empty(B, h, H // h, S, dtype=dtype)
        for at in scores.blocks():
            s_BhRL, sinks = scores.of_block(scores.queries(at), at), scores.sinks(at)
            largest = s_BhRL.amax(-1, keepdim=True)
            if sinks is not None:
                largest = torch.maximum(largest, sinks)
            largest.masked_fill_(largest == -math.inf, 0.0)
            p_BhRL = s_BhRL.sub_(largest).exp_()
            total = p_BhRL.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + (sinks - largest).exp()
            y_BhRd = p_BhRL.div_(total.clamp_min(torch.finfo(dtype).tiny))
            y_BhRd = y_BhRd @ v_BhLd[at.sequences, at.heads, at.keys]
            place = at.sequences, at.heads, slice(None), at.queries
            y_BhGSd[place] = y_BhRd.unflatten(2, (H // h, -1)).to(q_BHSd.dtype)
            logs = (largest + total.log()).masked_fill_(total == 0, math.inf)
            totals_BhGS[place] = logs.unflatten(2, (H // h, -1))[..., 0]
    return y_BhGSd.flatten(1, 2), totals_BhGS.flatten(1, 2)


def _gradients(
    grad_BHSd: Tensor,
    totals_BHS: Tensor,
    q_BHSd: Tensor,
    k_BhLd: Tensor,
    v_BhLd: Tensor,
    *rule: Any,
) -> list[Tensor]:
    """Gradients of queries, keys, values and, if given, sinks."""
    h, scale, sinks_H = k_BhLd.shape[1], q_BHSd.shape[3] ** -0.5, rule[0]
    with without_autocast(q_BHSd.device):
        scores = _Scores.of(q_BHSd, k_BhLd, *rule)
        keys, dtype = scores.k_BhLd, scores.k_BhLd.dtype
        values_BhLd = v_BhLd.to(dtype)
        grad_BhGSd, totals_BhGS = (t.unflatten(1, (h, -1)) for t in (grad_BHSd, totals_BHS))
        d_q = torch.empty_like(q_BHSd, memory_format=torch.contiguous_format).unflatten(1, (h, -1))
        d_k, d_v = (torch.zeros_like(t) for t in (keys, values_BhLd))
        d_sinks = None if scores.sinks_hG is None else torch.zeros_like(scores.sinks_hG)
        for at in scores.blocks():
            place = at.sequences, at.heads, slice(None), at.queries
            of_keys = at.sequences, at.heads, at.keys
            q_BhRd, total = scores.queries(at), totals_BhGS[place].flatten(2, 3)[..., None]
            s_BhRL = scores.of_block(q_BhRd, at)
            p_BhRL = (s_BhRL - total).exp_()
            grad_BhRd = grad_BhGSd[place].flatten(2, 3).to(dtype)
            d_v[of_keys] += p_BhRL.mT @ grad_BhRd
            d_p = grad_BhRd @ values_BhLd[of_keys].mT
            # softmax backward: p (d p - sum(p d p)); a sink has no value, so its d p is 0
            sums = (p_BhRL * d_p).sum(-1, keepdim=True)
            d_s = d_p.sub_(sums).mul_(p_BhRL)
            if (softcap := scores.rule.softcap) is not None:
                d_s.mul_(1 - (s_BhRL / softcap).masked_fill_(s_BhRL == -math.inf, 0.0).square_())
            d_q[place] = (d_s @ keys[of_keys] * scale).unflatten(2, d_q[place].shape[2:4])
            d_k[of_keys] += d_s.mT @ (q_BhRd * scale)
            sinks = scores.sinks(at)
            if sinks is not None:
                assert d_sinks is not None
                shares = ((sinks - total).exp_() * sums).unflatten(2, d_q[place].shape[2:4])
                d_sinks[at.heads] -= shares.sum((0, 3, 4))
    found = [d_q.flatten(1, 2), d_k.to(k_BhLd.dtype), d_v.to(v_BhLd.dtype)]
    if d_sinks is not None:
        found.append(d_sinks.flatten().to(sinks_H.dtype))
    return found


_RULE = "Tensor? sinks_H, Tensor? mask, bool is_causal, int? window, int? chunk, float? softcap"
_attention = torch.library.custom_op(
    "expertmesh::score_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q_BHSd, Tensor k_BhLd, Tensor v_BhLd, {_RULE}) -> (Tensor, Tensor)",
)
_attention_backward = torch.library.custom_op(
    "expertmesh::score_attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor totals, Tensor q_BHSd, Tensor k_BhLd, Tensor v_BhLd, {_RULE}) -> Tensor[]",
)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    totals = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), totals


@_attention_backward.register_fake
def _(grad: Tensor, totals: Tensor, *inputs: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in inputs[:4] if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.rule = inputs[5:]


def _backward(ctx: Any, grad_BHSd: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    refuse_batched_gradient("the backward of attention with sinks or a cap", grad_BHSd)
    *inputs, totals = ctx.saved_tensors
    found = _attention_backward(grad_BHSd, totals, *inputs, *ctx.rule)
    return *found, *(None for _ in range(9 - len(found)))


_attention.register_autograd(_backward, setup_context=_save)
refuse_second_derivative(
    _attention_backward, "attention with sinks or a cap", fix="use a model without them"
)
