"""Random inputs of the experts, and the comparison of an implementation with the FP64 oracle by the two-times rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.ops import reference
from expertmesh.ops.activation import num_branches
from expertmesh.ops.experts.moe_mlp import moe_mlp
from expertmesh.ops.route_metadata import RouteMetadata
from tests.oracle.numerics import Sums, assert_two_times

NAMES = ("x", "w_in", "w_out", "weights", "b_in", "b_out")
ORDERS = 3
"""Orders of summation in which plain PyTorch is computed; the worst counts, as for the whole layer."""


def sums_of_experts(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
) -> Sums:
    """What y of the experts sums, to first order: H's own rounding goes through the activation into the second product.

    Args:
        x_TD: (T, D).
        w_in_EGFD: (E, G, F, D).
        w_out_EDF: (E, D, F).
        expert_ids_TK: (T, K); E means no expert.
        weights_TK: (T, K).
        activation: "swiglu" or "relu2".
    """
    x_TD, w_in_EGFD, w_out_EDF = (t.double() for t in (x_TD, w_in_EGFD, w_out_EDF))
    sizes_TD = torch.zeros_like(x_TD)
    for (t, j), e in zip(np.ndindex(*expert_ids_TK.shape), expert_ids_TK.flatten(), strict=True):
        if e == len(w_in_EGFD):
            continue
        h_GF, terms_GF = w_in_EGFD[e] @ x_TD[t], w_in_EGFD[e].abs() @ x_TD[t].abs()
        if activation == "swiglu":
            gate_F, up_F = torch.nn.functional.silu(h_GF[0]).abs(), h_GF[1].abs()
            # the slope of silu is at most 1.1
            a_F = gate_F * up_F + 1.1 * terms_GF[0] * up_F + gate_F * terms_GF[1]
        else:
            a_F = h_GF[0].relu() * (h_GF[0] + 2 * terms_GF[0])
        sizes_TD[t] += weights_TK[t, j].double().abs() * (w_out_EDF[e].abs() @ a_F)
    length = w_in_EGFD.shape[-1] + w_out_EDF.shape[-1] + expert_ids_TK.shape[1] + 8
    return Sums(sizes_TD.numpy(), length)


def draw_ids(kind: str, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Expert ids (T, K) of a kind of traffic: "dropped" has slots without expert, "hot" one expert, "sparse" empty
    ones."""
    shape = (num_tokens, top_k)
    if kind == "hot":
        return torch.full(shape, num_experts - 1)
    if kind == "sparse":
        return torch.randint(0, num_experts, shape) // 3 * 3
    if kind == "dropped":
        return torch.randint(0, num_experts + 1, shape)
    if kind == "zipf":
        odds = 1.0 / torch.arange(1, num_experts + 1).float()
        return odds.expand(num_tokens, num_experts).multinomial(top_k, replacement=True)
    return torch.rand(num_tokens, num_experts).topk(top_k).indices


@dataclass(frozen=True)
class ExpertsCase:
    """Inputs of `moe_mlp` and a gradient for its output.

    Attributes:
        x_TD: (T, D).
        w_in_EGFD: (E, G, F, D), interleaved in memory if asked for.
        w_out_EDF: (E, D, F).
        weights_TK: (T, K) FP32.
        b_in_EGF: (E, G, F) or None.
        b_out_ED: (E, D) or None.
        grad_TD: (T, D).
        metadata: of the expert ids.
        activation: its name.
    """

    x_TD: Tensor
    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    weights_TK: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    grad_TD: Tensor
    metadata: RouteMetadata
    activation: str

    @staticmethod
    def draw(
        shape: tuple[int, int, int, int, int],
        *,
        kind: str = "uniform",
        activation: str = "swiglu",
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        interleaved: bool = False,
        device: str = "cpu",
    ) -> "ExpertsCase":
        """Draw a case of shape (T, D, F, E, K) from torch's default generator."""
        T, D, F, E, K = shape
        G = num_branches(activation)
        w_in = torch.randn(E, G, F, D) / D**0.5
        if interleaved:
            w_in = w_in.transpose(1, 2).contiguous().transpose(1, 2)
        maps = reference.route_metadata(draw_ids(kind, T, K, E), E)

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        return ExpertsCase(
            place(torch.randn(T, D)),
            place(w_in),
            place(torch.randn(E, D, F) / F**0.5),
            torch.rand(T, K).to(device),
            place(torch.randn(E, G, F)) if bias else None,
            place(torch.randn(E, D)) if bias else None,
            place(torch.randn(T, D)),
            RouteMetadata(*(m.to(device) for m in maps)),
            activation,
        )

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """Fresh leaves in the order of NAMES, of another type if given."""
        tensors = (
            self.x_TD,
            self.w_in_EGFD,
            self.w_out_EDF,
            self.weights_TK,
            self.b_in_EGF,
            self.b_out_ED,
        )
        return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]

    def run(
        self,
        backend: str,
        dtype: torch.dtype | None = None,
        *,
        sizes: list[int] | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Output and every gradient by name; with sizes from weights in such slices along F."""

        def cut(tensor: Tensor | None) -> Any:
            if tensor is None or sizes is None:
                return tensor
            return [part.contiguous() for part in tensor.split(sizes, 2)]

        leaves = self.leaves(dtype)
        x, w_in, w_out, weights, b_in, b_out = leaves
        assert x is not None and w_in is not None and w_out is not None and weights is not None
        y = moe_mlp(
            x,
            cut(w_in),
            cut(w_out),
            weights,
            self.metadata,
            activation=self.activation,
            b_in_EGF=cut(b_in),
            b_out_ED=b_out,
            backend=backend,
            **options,
        )
        named = [(n, leaf) for n, leaf in zip(NAMES, leaves, strict=True) if leaf is not None]
        grads = torch.autograd.grad(y, [leaf for _, leaf in named], self.grad_TD.to(y.dtype))
        return {"y": y.detach(), **dict(zip([n for n, _ in named], grads, strict=True))}

    def plain(self, order: int) -> dict[str, Tensor]:
        """The results of plain PyTorch in the same precision, with D and F summed in an order; 0 is the natural one."""
        if order == 0:
            return self.run("reference")
        D, F = self.x_TD.shape[1], self.w_out_EDF.shape[2]
        generator = torch.Generator().manual_seed(order)
        order_D = torch.randperm(D, generator=generator).to(self.x_TD.device)
        order_F = torch.randperm(F, generator=generator).to(self.x_TD.device)
        b_in, b_out = self.b_in_EGF, self.b_out_ED
        moved = replace(
            self,
            x_TD=self.x_TD[:, order_D],
            w_in_EGFD=self.w_in_EGFD[:, :, order_F][..., order_D],
            w_out_EDF=self.w_out_EDF[:, order_D][..., order_F],
            b_in_EGF=None if b_in is None else b_in[..., order_F],
            b_out_ED=None if b_out is None else b_out[..., order_D],
            grad_TD=self.grad_TD[:, order_D],
        )
        results, back_D, back_F = moved.run("reference"), order_D.argsort(), order_F.argsort()
        undo: dict[str, Callable[[Tensor], Tensor]] = {
            "y": lambda v: v[:, back_D],
            "x": lambda v: v[:, back_D],
            "w_in": lambda v: v[:, :, back_F][..., back_D],
            "w_out": lambda v: v[:, back_D][..., back_F],
            "weights": lambda v: v,
            "b_in": lambda v: v[..., back_F],
            "b_out": lambda v: v[..., back_D],
        }
        return {name: undo[name](value) for name, value in results.items()}

    def check(self, run: Callable[[], dict[str, Tensor]]) -> None:
        """Assert the two-times rule for the results of `run`, against plain PyTorch in the same precision."""
        check_together([self], lambda _: run())


def check_together(cases: Sequence[ExpertsCase], run: Callable[[ExpertsCase], dict[str, Tensor]]) -> None:
    """Assert the two-times rule for several draws of one kind as if they were one result.

    The rule compares largest errors. Of a few numbers these are luck: the routing weight's gradient of a single token
    is one number, plain PyTorch's error in it may be anywhere near zero, and so may the number itself. Over 200 such
    draws the kernels' root-mean-square error was 0.97 times plain PyTorch's, yet 17 were beyond the rule. Draws with
    few elements are therefore judged together, where the largest error of many speaks for the arithmetic.

    Args:
        cases: draws of equal type and shapes.
        run: gives the output and every gradient of a case by name.

    Raises:
        AssertionError: too far off.
    """
    found: dict[str, list[tuple[Tensor, list[Tensor], Tensor]]] = {}
    for case in cases:
        ours = run(case)
        plain = [case.plain(order) for order in range(ORDERS)]
        oracle = case.run("reference", torch.float64)
        assert ours.keys() == oracle.keys()
        for name, value in ours.items():
            references = [results[name] for results in plain]
            found.setdefault(name, []).append((value, references, oracle[name]))
    for name, triples in found.items():
        values, by_case, oracles = zip(*triples, strict=True)
        assert_two_times(
            torch.stack(values),
            [torch.stack(same_order) for same_order in zip(*by_case, strict=True)],
            torch.stack(oracles),
            what=name,
            dtype=cases[0].x_TD.dtype,
        )
