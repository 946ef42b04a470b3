"""The layer against the layers of others and against plain matrix products of the same FLOPs.

    python -m benchmarks.layer                                # training shapes and decoding, all threads, wall time
    python -m benchmarks.layer --threads 1 --clock cpu        # the same where other work shares the machine

Contenders per shape, all with the same weights and a new batch (so a new routing) in every round:

* expertmesh: `MoELayer`, router included.
* transformers: `MixtralSparseMoeBlock`, router included, by `experts_implementation`: eager, grouped_mm and, where its copy of
  the weights fits (decoding), batched_mm.
* einsum: the GShard/fairseq form, one-hot dispatch and combine tensors (T, E, C), with C the fullest expert's rows.
* matrix products: forward, input and weight gradients of all T * K rows at once with one expert's weights; no MoE can
  be faster than about this. Its time is 1.0 in the column "of products".
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from benchmarks.harness import (
    Clock,
    Contender,
    Timing,
    checked,
    circumstances,
    interleaved,
    previous_rows,
    write_report,
)
from torch import Tensor, nn

from expertmesh import MoELayer
from expertmesh.testing.numerics import assert_two_times

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_BATCHES = 7
NOTE = (
    "Median of interleaved rounds, gradients set to None before each, a new batch and so a new routing in every round; "
    "router included. `of products`: time relative to plain matrix products of the same FLOPs. Contenders with one "
    "round are the slow baselines."
)


@dataclass(frozen=True)
class Case:
    """One shape: T tokens, D, F, E experts, K choices, activation, dtype, forward and backward or forward only."""

    num_tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    activation: str
    dtype: torch.dtype
    training: bool = True

    @property
    def num_branches(self) -> int:
        return 2 if self.activation == "swiglu" else 1


class EinsumMoE(nn.Module):
    """Dispatch and combine as dense einsums over (token, expert, place), as in GShard and fairseq."""

    def __init__(self, layer: MoELayer, case: Case) -> None:
        super().__init__()
        self.case = case
        self.router = nn.Parameter(layer.router.proj.weight.detach().clone())
        self.w_in = nn.Parameter(layer.experts.w_in.detach().flatten(1, 2).clone())
        self.w_out = nn.Parameter(layer.experts.w_out.detach().clone())

    def forward(self, x_TD: Tensor) -> Tensor:
        case = self.case
        weights_TK, ids_TK = (x_TD.float() @ self.router.float().T).softmax(-1).topk(case.top_k)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        chosen_TKE = F.one_hot(ids_TK, case.num_experts)
        place_TKE = (chosen_TKE.flatten(0, 1).cumsum(0) - 1).view_as(chosen_TKE)
        place_TK = (place_TKE * chosen_TKE).sum(-1)
        capacity = int(chosen_TKE.sum((0, 1)).max())
        weights_TKE = weights_TK[..., None] * chosen_TKE
        combine_TEC = torch.zeros(*weights_TKE[:, 0].shape, capacity, dtype=x_TD.dtype)
        for j in range(case.top_k):  # one choice at a time, or (T, K, E, C) would not fit
            place_TC = F.one_hot(place_TK[:, j], capacity).to(x_TD.dtype)
            combine_TEC = (
                combine_TEC + weights_TKE[:, j, :, None].to(x_TD.dtype) * place_TC[:, None]
            )
        dispatch_TEC = (combine_TEC != 0).to(x_TD.dtype)
        rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
        h_ECH = rows_ECD @ self.w_in.transpose(1, 2)
        if case.num_branches == 2:
            gate, up = h_ECH.chunk(2, -1)
            a_ECF = F.silu(gate) * up
        else:
            a_ECF = F.gelu(h_ECH)
        return torch.einsum("tec,ecd->td", combine_TEC, a_ECF @ self.w_out.transpose(1, 2))


def make_layer(case: Case) -> MoELayer:
    """Give our layer with the weights that all contenders get."""
    layer = MoELayer(
        dim=case.dim,
        hidden_dim=case.hidden_dim,
        num_experts=case.num_experts,
        top_k=case.top_k,
        activation=case.activation,
        balance_loss="none",
        seed=0,
        dtype=case.dtype,
    )
    with (
        torch.no_grad()
    ):  # values that BF16 and FP32 both hold, so that every precision routes alike
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    return layer


def make_mixtral(layer: MoELayer, case: Case, implementation: str) -> nn.Module:
    """Give transformers' block with our weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=case.dim,
        intermediate_size=case.hidden_dim,
        num_local_experts=case.num_experts,
        num_experts_per_tok=case.top_k,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config).to(case.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.proj.weight)
        block.experts.gate_up_proj.copy_(layer.experts.w_in.flatten(1, 2))
        block.experts.down_proj.copy_(layer.experts.w_out)
    block.gate.float()  # the router in FP32, as ours, so that all choose the same experts
    return _InPrecision(block)


class _InPrecision(nn.Module):
    """Transformers' block with its router in FP32: (T, D) -> (T, D)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_TD: Tensor) -> Tensor:
        _, weights_TK, ids_TK = self.block.gate(x_TD.float())
        return self.block.experts(x_TD, ids_TK, weights_TK.to(x_TD.dtype))


def as_contender(
    name: str,
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    case: Case,
    *,
    slow: bool = False,
) -> Contender:
    """Time forward and backward (or forward alone) of a module on a new batch per round."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(case.num_tokens, case.dim, generator=generator).to(case.dtype)
        for _ in range(NUM_BATCHES)
    ]
    grad = torch.randn(case.num_tokens, case.dim, generator=generator).to(case.dtype)
    now = {"x": batches[0]}

    def prepare(number: int) -> None:
        module.zero_grad(set_to_none=True)
        now["x"] = batches[number % NUM_BATCHES].detach().requires_grad_(case.training)

    def step() -> None:
        call(now["x"]).backward(grad)

    def forward_only() -> None:
        with torch.no_grad():
            call(now["x"])

    return Contender(name, step if case.training else forward_only, prepare, slow)


def products(case: Case) -> Contender:
    """The same FLOPs as matrix products over all rows with one expert's weights."""
    rows, hidden = case.num_tokens * case.top_k, case.num_branches * case.hidden_dim
    x, d_y = (torch.randn(rows, case.dim).to(case.dtype) for _ in range(2))
    h, a = (
        torch.randn(rows, hidden).to(case.dtype),
        torch.randn(rows, case.hidden_dim).to(case.dtype),
    )
    w_in = torch.randn(hidden, case.dim).to(case.dtype)
    w_out = torch.randn(case.dim, case.hidden_dim).to(case.dtype)

    def forward() -> None:
        torch.mm(x, w_in.T)
        torch.mm(a, w_out.T)

    def step() -> None:
        forward()
        torch.mm(d_y, w_out)
        torch.mm(d_y.T, a)
        torch.mm(h, w_in)
        torch.mm(h.T, x)

    return Contender("matrix products", step if case.training else forward)


def contenders(case: Case, *, einsum: bool = True) -> list[Contender]:
    """All that can run this case here."""
    layer = make_layer(case)
    found = [as_contender("expertmesh", layer, lambda x: layer(x)[0], case)]
    if case.activation == "swiglu":
        names = ["eager", "grouped_mm"] + ([] if case.training else ["batched_mm"])
        for name in names:
            block = make_mixtral(layer, case, name)
            slow = name == "eager" and case.training and case.num_experts > 16
            found.append(as_contender(f"transformers {name}", block, block, case, slow=slow))
    if einsum and case.training:
        dense = EinsumMoE(layer, case)
        found.append(as_contender("einsum", dense, dense, case, slow=True))
    return [*found, products(case)]


def check(case: Case) -> None:
    """Compare ours, forward and backward, with others' in this precision and in FP64, at a smaller size.

    Raises:
        AssertionError: ours breaks the two-times rule, or a rival computes something else.
    """
    small = Case(48, 64, 96, case.num_experts, case.top_k, case.activation, case.dtype)
    layer = make_layer(small)
    exact_case = Case(48, 64, 96, case.num_experts, case.top_k, case.activation, torch.float64)
    x = torch.randn(48, 64).bfloat16()
    grad = torch.randn(48, 64).bfloat16()

    def results(
        module: nn.Module, call: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = call(leaf)
        y.backward(grad.to(dtype))
        return [
            y.detach(),
            leaf.grad,
            *[p.grad.flatten() for p in sorted(module.parameters(), key=lambda p: p.numel())],
        ]

    def rival(like: MoELayer, of: Case) -> nn.Module:
        if of.activation == "swiglu":
            return make_mixtral(like, of, "eager")
        return EinsumMoE(like, of)

    ours = results(layer, lambda v: layer(v)[0], small.dtype)
    peer = rival(layer, small)
    exact = EinsumMoE(layer, exact_case).double()
    theirs, oracle = results(peer, peer, small.dtype), results(exact, exact, torch.float64)
    names = ("y", "x gradient", "router gradient", "w_out gradient", "w_in gradient")
    for name, a, b, c in zip(names, ours, theirs, oracle, strict=True):
        assert_two_times(
            a, b.to(a.dtype), c, what=f"{name} ({case.activation}, {case.dtype})", dtype=small.dtype
        )


def rows_of(case: Case, timings: list[Timing]) -> list[dict[str, Any]]:
    """Give table rows of one case."""
    by_name = {timing.name: timing for timing in timings}
    base = by_name["matrix products"].median_s
    ours = by_name["expertmesh"].median_s
    return [
        {
            "tokens": case.num_tokens,
            "E": case.num_experts,
            "K": case.top_k,
            "activation": case.activation,
            "dtype": str(case.dtype).removeprefix("torch."),
            "pass": "forward+backward" if case.training else "forward",
            "contender": timing.name,
            "median ms": timing.median_s * 1e3,
            "of products": timing.median_s / base,
            "expertmesh is faster by": timing.median_s / ours,
            "rounds": timing.rounds,
        }
        for timing in timings
    ]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the rows of the new rows' case, and order all by case."""
    keys = ("pass", "E", "K", "activation", "dtype", "tokens")

    def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in keys)

    kept = [row for row in old if case_of(row) != case_of(new[0])]
    order = {
        "forward+backward": 0,
        "forward": 1,
        "swiglu": 0,
        "gelu": 1,
        "float32": 0,
        "bfloat16": 1,
    }
    return sorted(
        [*kept, *new], key=lambda row: [order.get(value, value) for value in case_of(row)]
    )


def peers() -> dict[str, str]:
    """Give the installed rivals and their versions."""
    import transformers

    return {"transformers": transformers.__version__}


def main(
    threads: int = 0,
    clock: Clock = "wall",
    rounds: int = 5,
    dim: int = 512,
    hidden_dim: int = 1024,
    tokens: int = 4096,
    shapes: tuple[str, ...] = ("16x2", "64x8"),
    activations: tuple[str, ...] = ("swiglu", "gelu"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    decode: tuple[int, ...] = (1, 8, 32),
    einsum: bool = True,
    update: bool = False,
    name: str = "layer_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        threads: of PyTorch; 0: its default.
        clock: wall, or cpu (one thread's CPU time).
        rounds: timed rounds of training shapes.
        dim: D.
        hidden_dim: F.
        tokens: T of training shapes.
        shapes: ExK of training shapes.
        activations: swiglu, gelu.
        dtypes: float32, bfloat16.
        decode: T of decoding shapes (E=64, K=8); none: leave out.
        einsum: include the einsum baseline.
        update: keep the rows of other cases in the result files, if they come from the same circumstances.
        name: of the result files.
        out: folder of the result files.
    """
    if threads:
        torch.set_num_threads(threads)
    around = circumstances(clock=clock, peers=peers())
    cases = [
        Case(tokens, dim, hidden_dim, *map(int, shape.split("x")), activation, DTYPES[dtype])
        for shape in shapes
        for activation in activations
        for dtype in dtypes
    ]
    cases += [
        Case(t, dim, hidden_dim, 64, 8, "swiglu", DTYPES[dtype], False)
        for t in decode
        for dtype in dtypes
    ]
    table: list[dict[str, Any]] = []
    for case in cases:
        torch.manual_seed(0)
        checked("layer", lambda case=case: check(case))
        found = contenders(case, einsum=einsum)
        many = rounds if case.training else rounds * 4
        new = rows_of(case, interleaved(found, rounds=many, clock=clock))
        table = merged(previous_rows(out / name, around) if update else table, new)
        write_report(
            out / name,
            title=f"The layer on the CPU (D={dim}, F={hidden_dim})",
            command=f"python -m benchmarks.layer --threads {torch.get_num_threads()} --clock {clock} --rounds {rounds}",
            notes=[NOTE],
            around=around,
            rows=table,
        )


if __name__ == "__main__":
    tyro.cli(main)
