"""A small GPT trained for some steps in one form of parallelism, and in one process; the code of the ranks of a
test."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.comm.mesh import divisors
from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig, ParallelConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.ranks import Ranks
from expertmesh.training.optim import build_optimizer
from tests.oracle.numerics import assert_two_times, relative_error
from tests.support.ranks import world_of
from tests.support.replicas import fill_biases, whole

S, V = 8, 24
SEED = 4

FORMS: dict[str, dict[str, Any]] = {
    "E": {},
    "E+D": {"dp_replicate_degree": 2},
    "E+Z1": {"zero_stage": 1},
    "E+Z2": {"zero_stage": 2},
    "E+Z3": {"zero_stage": 3},
    "E+D+M": {"dp_replicate_degree": 2, "tp_degree": 2},
    "E+D+Z": {"dp_replicate_degree": 2, "zero_stage": 2},
    "E+Z-Offload+M": {"zero_stage": 2, "offload": True, "tp_degree": 2},
}
"""The forms of DeepSpeed's table, as settings."""

ROWS = {"equal": (2,) * 8, "unequal": (1, 3, 2, 1, 1, 2, 1, 3), "zero": (2, 0, 1, 0, 3, 1, 0, 1)}
"""Sequences of each rank, or of the ranks that share them."""


@dataclass(frozen=True)
class FormCase:
    """A model, a layout and a batch.

    Attributes:
        form: of `FORMS`.
        num_ranks: of the world.
        top_k: K.
        activation: of experts and dense layers.
        bias: in the experts.
        group: tokens of a routing group of a layer with capacity; 8 is a sequence, which ranks may share.
        drops: drop policy of a layer with capacity, or "none": dropless.
        rows: of `ROWS`.
        route: route_degree: "one", "middle" or "all".
        overlap: overlap_degree.
        ranks_per_node: of the hierarchical all-to-all; None: the flat one.
        replicated: replicated_experts.
        es_degree: slices of each expert; None: the default.
        order: of the ranks that hold the experts.
        subgroup: the world is every other rank of twice as many, and the others are a world too.
        num_experts: E.
        dense_parts: shared experts and the residual MLP beside the experts.
        micro_batches: of the first step; the others have one.
        recompute: activation checkpointing in the first step.
        dtype: of the parameters; "bfloat16": FP32 parameters under autocast.
    """

    form: str = "E"
    num_ranks: int = 4
    top_k: int = 2
    activation: str = "swiglu"
    bias: bool = False
    group: int = 4
    drops: str = "none"
    rows: str = "equal"
    route: str = "all"
    overlap: int = 1
    ranks_per_node: int | None = None
    replicated: int = 0
    es_degree: int | None = None
    order: str = "slices_inner"
    subgroup: bool = False
    num_experts: int = 8
    dense_parts: bool = False
    micro_batches: int = 1
    recompute: bool = False
    dtype: str = "float64"

    @property
    def num_processes(self) -> int:
        """Ranks of the pool that runs it."""
        return self.num_ranks * (2 if self.subgroup else 1)

    @property
    def num_storage_ranks(self) -> int:
        """W, ranks that hold one copy of the experts."""
        return self.num_ranks // self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return int(FORMS[self.form].get("dp_replicate_degree", 1))

    @property
    def route_degree(self) -> int | None:
        """As a number; None: there is no such one."""
        degrees = divisors(self.num_storage_ranks)
        middle = degrees[1:-1]
        named = {
            "one": degrees[0] if len(degrees) > 1 else None,
            "middle": middle[len(middle) // 2] if middle else None,
            "all": degrees[-1],
        }
        return named[self.route]

    def parallel(self) -> ParallelConfig:
        """The configuration that a user would give."""
        return ParallelConfig(
            route_degree=self.route_degree,
            overlap_degree=self.overlap,
            all_to_all="flat" if self.ranks_per_node is None else "hierarchical",
            ranks_per_node=self.ranks_per_node,
            replicated_experts=self.replicated,
            es_degree=self.es_degree,
            expert_order=self.order,  # type: ignore[arg-type]
            **FORMS[self.form],
        )

    def model(self) -> ModelConfig:
        """One dense layer and one MoE layer."""
        drops: dict[str, Any] = {}
        if self.drops != "none":
            drops = {"capacity_factor": 1.0, "min_capacity": 1, "drop_policy": self.drops}
            drops["routing_group_size"] = self.group
        return ModelConfig(
            vocab_size=V,
            max_seq_len=S,
            dim=16,
            num_layers=2,
            num_heads=4,
            ffn_hidden_dim=16,
            activation=self.activation,  # type: ignore[arg-type]
            moe_every=2,
            moe=MoEConfig(
                num_experts=(self.num_experts,),
                top_k=self.top_k,
                hidden_dim=24,
                bias=self.bias,
                router_noise="gumbel",
                **drops,
                num_shared_experts=int(self.dense_parts),
                residual=self.dense_parts,
                aux_loss_weight=0.5,
                z_loss_weight=0.1,
            ),
        )

    @property
    def tp_degree(self) -> int:
        """Ranks that share sequences."""
        return int(FORMS[self.form].get("tp_degree", 1))

    def num_rows(self) -> tuple[int, ...]:
        """Sequences of each rank, or of the ranks that share them."""
        return ROWS[self.rows][: self.num_ranks // self.tp_degree]


@dataclass
class Trained:
    """Results of some steps; tensors are whole.

    Attributes:
        logits_BSV: of this process's sequences in the first micro-batch.
        gradients: of the first step, after clipping.
        norms: of each step, before clipping.
        losses: of each step.
        parameters: after the last step.
    """

    logits_BSV: Tensor
    gradients: dict[str, Tensor]
    norms: list[float]
    losses: list[float]
    parameters: dict[str, Tensor]


def build(case: FormCase) -> GPT:
    """The model, with the same weights in every process, and biases that are not zero."""
    model = GPT(case.model(), dtype=torch.float64, seed=SEED)
    fill_biases(model, scale=0.1)
    model = model.float()  # what FP32 can hold is the same number in FP64
    return model.double() if case.dtype == "float64" else model


def run_whole(case: FormCase, *, steps: int, half: int = 0) -> Trained:
    """All sequences of all ranks of one world in one process; with subgroups each half has its own sequences."""
    rows = slice(0, sum(case.num_rows()))
    return _train(build(case), case, Ranks(), rows, steps=steps, half=half)


def run_form(case: FormCase, *, steps: int) -> Trained:
    """This rank's sequences through the spread model."""
    world = world_of(case.subgroup)
    model = build(case)
    parallelize_gpt(model, case.parallel(), world=world)
    sizes, place = case.num_rows(), world.position // case.tp_degree
    first = sum(sizes[:place])
    ranks = Ranks(world, tp_degree=case.tp_degree, reduces_once=case.parallel().zero_stage == 1)
    rows = slice(first, first + sizes[place])
    half = dist.get_rank() % 2 if case.subgroup else 0
    return _train(model, case, ranks, rows, steps=steps, half=half)


def _train(model: GPT, case: FormCase, ranks: Ranks, rows: slice, *, steps: int, half: int) -> Trained:
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
    follow_optimizer(model, optimizer)
    generator = torch.Generator().manual_seed(half)
    trained = Trained(torch.empty(0), {}, [], [], {})
    for step in range(steps):
        key_noise(model, seed=SEED, step=step)
        optimizer.zero_grad()
        model.set_activation_checkpointing(case.recompute and step == 0)
        parts = case.micro_batches if step == 0 else 1
        loss = torch.zeros((), dtype=torch.float64)
        for part in range(parts):
            total = (sum(case.num_rows()), S + 1)
            batch_BS = torch.randint(0, V, total, generator=generator)[rows]
            ranks.announce_micro_batch(model, is_last=part == parts - 1)
            part_loss, logits_BSV = _backward(model, case, ranks, batch_BS, rows, parts)
            loss += part_loss
            if step == part == 0:
                trained.logits_BSV = logits_BSV
        norm = ranks.clip_grad_norm_(model.parameters(), 0.1)
        if step == 0:
            trained.gradients = {n: whole(p.grad).clone() for n, p in _parameters(model)}
        optimizer.step()
        trained.norms.append(float(norm))
        trained.losses.append(float(ranks.sum_(loss, what="the loss")))
    trained.parameters = {n: whole(p.detach()).clone() for n, p in _parameters(model)}
    return trained


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.grad is not None]


def _backward(
    model: GPT, case: FormCase, ranks: Ranks, batch_BS: Tensor, rows: slice, num_parts: int
) -> tuple[Tensor, Tensor]:
    """One micro-batch: this process's part of the step's loss, and logits."""
    total, half = sum(case.num_rows()), case.dtype == "bfloat16"
    index = torch.arange(rows.start * S, rows.stop * S)
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        output = model(batch_BS[:, :-1], token_index=index)
    targets_BS = ranks.positions(batch_BS[:, 1:])
    exact = torch.promote_types(output.logits_BSV.dtype, torch.float32)
    loss = nn.functional.cross_entropy(
        output.logits_BSV.to(exact).flatten(0, 1), targets_BS.flatten(), reduction="sum"
    ) / (total * S)
    share = targets_BS.numel() / (total * S)
    for stats in output.stats:
        loss = loss + share * (stats.aux_loss + stats.z_loss)
    loss = loss / num_parts
    loss.backward()
    return loss.detach(), output.logits_BSV.detach()


def assert_as_exact(case: FormCase, results: Sequence[Trained]) -> None:
    """The two-times rule for one step of one world, against one process in the same precision and in FP64."""
    oracle = run_whole(replace(case, dtype="float64"), steps=1)
    same = run_whole(case, steps=1)
    logits_BSV = _all_logits(results, case.tp_degree)
    assert_two_times(logits_BSV, same.logits_BSV, oracle.logits_BSV, what="logits")
    # Together: the few numbers of a bias may be lucky in one of the two.
    ours, near, exact = (
        torch.cat([gradients[name].flatten() for name in sorted(gradients)])
        for gradients in (results[0].gradients, same.gradients, oracle.gradients)
    )
    assert_two_times(ours, near, exact, what="gradients")


def differences(case: FormCase, results: Sequence[Trained], *, steps: int) -> dict[str, float]:
    """Relative errors of what the processes of a pool found, against one process; the worse where there are two
    worlds."""
    worst: dict[str, float] = {}
    for half in range(2 if case.subgroup else 1):
        parts = results[half::2] if case.subgroup else results
        whole = run_whole(case, steps=steps, half=half)
        for name, error in _differences(parts, whole, case.tp_degree).items():
            worst[name] = max(error, worst.get(name, 0.0))
    return worst


def _all_logits(parts: Sequence[Trained], tp_degree: int) -> Tensor:
    sharing = [parts[i : i + tp_degree] for i in range(0, len(parts), tp_degree)]
    return torch.cat([torch.cat([p.logits_BSV for p in group], dim=1) for group in sharing])


def _differences(parts: Sequence[Trained], whole: Trained, tp_degree: int) -> dict[str, float]:
    found = {"logits": relative_error(_all_logits(parts, tp_degree), whole.logits_BSV)}
    for name in ("losses", "norms"):
        ours, theirs = (np.array(getattr(t, name)) for t in (parts[0], whole))
        found[name] = relative_error(ours, theirs)
    for kind in ("gradients", "parameters"):
        mine, others = getattr(parts[0], kind), getattr(whole, kind)
        found |= {f"{kind} {n}": math.inf for n in mine.keys() ^ others.keys()}
        both = mine.keys() & others.keys()
        found |= {f"{kind} {n}": relative_error(mine[n], others[n]) for n in sorted(both)}
    return found


def covering_factors() -> dict[str, Sequence[Any]]:
    """What the covering set of cases is made of."""
    return {
        "form": tuple(FORMS),
        "num_ranks": (2, 4, 8),
        "top_k": (1, 2, 4),
        "activation": ("swiglu", "gelu"),
        "bias": (False, True),
        "group": (4, 8),
        "drops": ("none", "first", "random", "priority"),
        "rows": tuple(ROWS),
        "route": ("one", "middle", "all"),
        "overlap": (1, 2, 4, 8),
        "ranks_per_node": (None, 2, 3),
        "replicated": (0, 1, 3),
        "es_degree": (None, 2),
        "order": ("slices_inner", "experts_inner"),
        "subgroup": (False, True),
        "num_experts": (8, 6),
        "dense_parts": (False, True),
        "micro_batches": (1, 2),
        "recompute": (False, True),
    }


CONSTRAINED = ("form", "num_ranks", "route", "es_degree", "subgroup", "num_experts")
"""Factors that `allowed` looks at."""


def cost(row: Mapping[str, Any]) -> float:
    """For `covering`: grows with the processes, but two small cases are not better than one large one."""
    case = FormCase(**{name: row[name] for name in ("num_ranks", "subgroup")})
    return float(case.num_processes**0.75)


def allowed(row: Mapping[str, Any]) -> bool:
    """Whether there is such a layout on at most eight processes."""
    case = FormCase(**{name: row[name] for name in CONSTRAINED})
    sharing = case.num_replicas * case.tp_degree
    if case.num_processes > 8 or case.num_ranks % sharing or case.route_degree is None:
        return False
    W, f = case.num_storage_ranks, case.es_degree
    return f is None or (W % f == 0 and case.num_experts % (W // f) == 0)
