"""Are a contender's results right at full size? A few tokens and experts against an FP64 oracle, with its own routing.

A token's output and gradient depend on that token alone, an expert's weight gradient on that expert's rows alone: so a
sample can be computed exactly at any size, with the tiles and addresses of the timed run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks.race.contenders import OURS, Racer, WeightSet
from benchmarks.race.shapes import RaceShape
from tests.oracle.numerics import assert_two_times
from torch import Tensor

FAR_OFF = 0.05
"""A peer whose results are further off than this, relatively, computes something else."""
_MARGIN = 1e-3
"""Sampled tokens choose their experts by at least this difference of logits, so that rounding does not decide."""
_TOKENS, _EXPERTS, _ROWS = 16, 2, 128


@dataclass(frozen=True)
class Results:
    """Of the sample: outputs, gradients of x, and rows of the gradients of some experts' weights."""

    y_SD: Tensor
    x_SD: Tensor
    w_in: Tensor
    w_out: Tensor


@dataclass(frozen=True)
class Sample:
    """Tokens, experts, and rows of an expert's matrices."""

    tokens_S: Tensor
    expert_ids_TK: Tensor
    experts: tuple[int, ...]
    rows_F: Tensor
    rows_D: Tensor

    @staticmethod
    def draw(shape: RaceShape, racer: Racer, x_TD: Tensor, generator: torch.Generator) -> "Sample":
        """Tokens whose choice is clear; the experts with most and fewest rows."""
        with torch.no_grad():
            ids_TK = racer.expert_ids(x_TD)
            logits_TE = x_TD.float() @ racer.router().float().T
        best = logits_TE.topk(min(shape.top_k + 1, shape.num_experts)).values
        last = shape.top_k - 1
        clear_T = best[:, last] - best[:, min(last + 1, best.shape[1] - 1)] > _MARGIN
        if shape.top_k == shape.num_experts:
            clear_T = torch.ones_like(clear_T)
        order = torch.randperm(shape.num_tokens, generator=generator, device=x_TD.device)
        tokens_S = order[clear_T[order]][:_TOKENS]
        load_E = ids_TK.flatten().bincount(minlength=shape.num_experts)
        by_load = load_E.argsort().tolist()
        experts = tuple(dict.fromkeys([by_load[-1], by_load[0]]))[:_EXPERTS]

        def rows(size: int) -> Tensor:
            return torch.arange(0, size, max(size // _ROWS, 1), device=x_TD.device)

        return Sample(tokens_S, ids_TK, experts, rows(shape.hidden_dim), rows(shape.dim))


def of_racer(racer: Racer, sample: Sample, x_TD: Tensor, grad_TD: Tensor) -> Results:
    """Run a contender forward and backward and take the sample of its results."""
    leaf = x_TD.detach().requires_grad_()
    y = racer(leaf)
    y.backward(grad_TD)
    w_in_EGFD, w_out_EDF = racer.gradients()
    experts = list(sample.experts)
    return Results(
        y.detach()[sample.tokens_S],
        leaf.grad[sample.tokens_S],
        w_in_EGFD[experts][:, :, sample.rows_F].clone(),
        w_out_EDF[experts][:, sample.rows_D].clone(),
    )


def computed(
    shape: RaceShape,
    weights: WeightSet,
    router_ED: Tensor,
    sample: Sample,
    x_TD: Tensor,
    grad_TD: Tensor,
    dtype: torch.dtype,
) -> Results:
    """The sample one expert at a time: in FP64 the oracle, in BF16 what plain PyTorch gives."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    router = router_ED.detach().to(wide)

    def routing_weights(x: Tensor, ids: Tensor) -> Tensor:
        # normalised weights of a softmax are the softmax of the chosen logits
        return (x.to(wide) @ router.T).gather(1, ids).softmax(-1)

    def expert(x: Tensor, w_in_GFD: Tensor, w_out_DF: Tensor) -> Tensor:
        h = F.linear(x, w_in_GFD.flatten(0, 1))
        if shape.num_branches == 2:
            gate, up = h.chunk(2, -1)
            a = F.silu(gate) * up
        else:
            a = F.gelu(h)
        return F.linear(a, w_out_DF)

    ids_SK = sample.expert_ids_TK[sample.tokens_S]
    leaf_SD = x_TD[sample.tokens_S].detach().to(dtype).requires_grad_()
    grad_SD = grad_TD[sample.tokens_S].to(wide)
    s_SK = routing_weights(leaf_SD, ids_SK)
    y_SD = torch.zeros_like(grad_SD)
    d_x_SD, d_s_SK = torch.zeros_like(y_SD), torch.zeros_like(s_SK)
    for e in ids_SK.unique().tolist():
        row, slot = (ids_SK == e).nonzero(as_tuple=True)
        x = leaf_SD.detach()[row].requires_grad_()
        s = s_SK.detach()[row, slot].requires_grad_()
        y = s[:, None] * expert(x, weights.w_in_EGFD[e].to(dtype), weights.w_out_EDF[e].to(dtype)).to(wide)
        d_x, d_s = torch.autograd.grad(y, (x, s), grad_SD[row])
        y_SD.index_add_(0, row, y.detach())
        d_x_SD.index_add_(0, row, d_x.to(wide))
        d_s_SK[row, slot] = d_s
    (through_router,) = torch.autograd.grad(s_SK, leaf_SD, d_s_SK)
    d_x_SD += through_router.to(wide)
    d_w_in, d_w_out = [], []
    for e in sample.experts:
        row, slot = (sample.expert_ids_TK == e).nonzero(as_tuple=True)
        x = x_TD[row].detach().to(dtype)
        s = routing_weights(x, sample.expert_ids_TK[row]).detach().gather(1, slot[:, None])
        w_in = weights.w_in_EGFD[e].to(dtype).requires_grad_()
        w_out = weights.w_out_EDF[e].to(dtype).requires_grad_()
        y = s * expert(x, w_in, w_out).to(wide)
        grads = torch.autograd.grad(y, (w_in, w_out), grad_TD[row].to(wide))
        d_w_in.append(grads[0][:, sample.rows_F])
        d_w_out.append(grads[1][sample.rows_D])
    narrow = torch.float64 if dtype == torch.float64 else dtype
    return Results(y_SD.to(narrow), d_x_SD.to(narrow), torch.stack(d_w_in), torch.stack(d_w_out))


def check(
    shape: RaceShape,
    racer: Racer,
    weights: WeightSet,
    x_TD: Tensor,
    grad_TD: Tensor,
    generator: torch.Generator,
    *,
    run: Callable[[Racer, Sample, Tensor, Tensor], Results] = of_racer,
) -> float:
    """Compare a contender, run by `run`, with the oracle; ours by the two-times rule, a peer by whether it computes the
    same at all.

    Returns:
        The largest relative distance from the oracle.

    Raises:
        AssertionError: the results are wrong.
    """
    racer.take(weights)
    sample = Sample.draw(shape, racer, x_TD, generator)
    router_ED = racer.router().detach()
    found = run(racer, sample, x_TD, grad_TD)
    racer.take(weights)  # gradients may go
    about = (shape, weights, router_ED, sample, x_TD, grad_TD)
    exact = computed(*about, torch.float64)
    plain = computed(*about, torch.bfloat16) if racer.name == OURS else None
    worst = 0.0
    for name in ("y_SD", "x_SD", "w_in", "w_out"):
        value, oracle = getattr(found, name), getattr(exact, name)
        what = f"{name.split('_')[0] if name[1] == '_' else name} of {racer.name} at {shape.name}"
        distance = float((value.double() - oracle).norm() / oracle.norm().clamp_min(1e-30))
        worst = max(worst, distance)
        assert distance < FAR_OFF, f"{what} is off by {distance:.3f}"
        if plain is not None:
            assert_two_times(value, getattr(plain, name), oracle, what=what, dtype=torch.bfloat16)
    return worst
