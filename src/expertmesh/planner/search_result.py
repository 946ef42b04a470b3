"""`SearchResult`: the layouts that a search found, with time, price and flags of the best."""

from dataclasses import dataclass
from typing import Any

from expertmesh.config.run import ParallelConfig, RunConfig
from expertmesh.costs.rank_layout import OURS, RankLayout
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.planned_model import PlannedModel
from expertmesh.planner.search import SAFE, Candidate, Goal, Problem, front

ERROR_BAR = (0.74, 1.35)
"""Measured over predicted time: three of four published rows lie within, each of a source that nothing was fitted
on."""
MEMORY_BAR = (0.95, 1.10)
"""Measured over predicted peak of memory: four of five published peaks lie within; nothing is fitted on them."""


@dataclass(frozen=True)
class SearchResult:
    """Layouts of a model on a cluster, with costs."""

    model: PlannedModel
    problem: Problem  # inputs of the search
    goal: Goal
    candidates: tuple[Candidate, ...]  # candidates that fit, best first
    guesses: tuple[str, ...]  # guessed inputs, in words

    @property
    def best(self) -> Candidate:
        """The best layout."""
        return self.candidates[0]

    @property
    def front(self) -> list[Candidate]:
        """Pareto front by memory and time, fastest first."""
        return front(list(self.candidates))

    @property
    def safer(self) -> Candidate | None:
        """The best layout that leaves memory free; None: the best one does, or none does."""
        if self.best.filled <= SAFE:
            return None
        return next((c for c in self.candidates if c.filled <= SAFE), None)

    @property
    def train_s(self) -> float:
        """Seconds of the whole training by the best layout."""
        return self.model.train_tokens / self.best.tokens_per_s

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices together."""
        return self.train_s * self.problem.cluster.num_gpus / 3600

    @property
    def usd(self) -> tuple[float, ...]:
        """Lowest and highest price of the training; empty: the device has no price."""
        return tuple(price * self.gpu_hours for price in self.problem.cluster.device.usd_per_hour)

    @property
    def command(self) -> str:
        """Command that starts the best layout on each node; "": training cannot, or no words name the model."""
        if not (self.flags and self.model.words):
            return ""
        cluster = self.problem.cluster
        launch = f"torchrun --nnodes={cluster.num_nodes} --nproc-per-node={cluster.node_size}"
        return " ".join([launch, "-m expertmesh train", self.model.words, *self.flags])

    @property
    def flags(self) -> list[str]:
        """Options of `expertmesh train` that make the best layout."""
        return flags_of(self.best, self.model.config)


def flags_of(candidate: Candidate, config: RunConfig | None = None) -> list[str]:
    """Options of `expertmesh train` that make a layout; empty for layouts that this project cannot run."""
    layout, problem = candidate.layout, candidate.problem
    work = problem.work
    is_ours = work.states in OURS and work.stack == "eager" and work.precision != "float8"
    if layout.pp_degree > 1 or not is_ours:
        return []
    per_pass = layout.dp_degree * layout.micro_batch
    flags = [
        f"--train.batch-size {problem.batch}",
        f"--train.micro-batch-size {per_pass}",
        f"--train.dtype {work.precision}",
        f"--parallel.zero-stage {layout.zero_stage}",
    ]
    usual = GPTRunConfig() if config is None else config
    if isinstance(usual, GPTRunConfig):
        flags.insert(2, f"--data.seq-len {work.seq_len}")
    has_experts = any(block.num_experts for block in problem.sizes.blocks)
    flags += _switches(layout, usual) + _degrees(layout, usual.parallel, has_experts=has_experts)
    moments = OURS[work.states]
    if moments != usual.optim.state_dtype:
        flags.append(f"--optim.state-dtype {moments}")
    return flags


def _switches(layout: RankLayout, usual: Any) -> list[str]:
    """Switches of recomputation and offload, as far as the configuration has them otherwise."""
    found = {
        "train.activation-checkpointing": (
            layout.checkpointing == "full",
            usual.train.activation_checkpointing,
        ),
        "model.moe.recompute-h": (
            layout.checkpointing == "experts" or (layout.checkpointing == "full" and usual.model.moe.recompute_h),
            usual.model.moe.recompute_h,
        ),
        "parallel.offload": (layout.offload, usual.parallel.offload),
    }
    return [f"--{name}{'' if wanted else ' false'}" for name, (wanted, given) in found.items() if wanted != given]


def _degrees(layout: RankLayout, usual: ParallelConfig, *, has_experts: bool) -> list[str]:
    """Degrees of a layout, and whatever a configuration has in their way."""
    found: dict[str, tuple[object, object]] = {
        "tp-degree": (layout.tp_degree, usual.tp_degree),
        "dp-replicate-degree": (layout.dp_replicate_degree, usual.dp_replicate_degree),
        "dp-shard-degree": ("none", usual.dp_shard_degree or "none"),
    }
    if has_experts:
        found |= {
            "ep-degree": ("none", usual.ep_degree or "none"),
            "es-degree": ("none", usual.es_degree or "none"),
            "route-degree": (layout.route_degree, None),
            "overlap-degree": (layout.overlap_degree, usual.overlap_degree),
            "all-to-all": (layout.all_to_all, usual.all_to_all),
            "replicated-experts": (layout.replicated_experts, usual.replicated_experts),
        }
        if layout.all_to_all == "flat" and not usual.adaptive:
            found["ranks-per-node"] = ("none", usual.ranks_per_node or "none")
        if layout.route_degree == 1:
            found["dispatch-dtype"] = ("same", usual.dispatch_dtype)
    return [f"--parallel.{name} {wanted}" for name, (wanted, given) in found.items() if wanted != given]
