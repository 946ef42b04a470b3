"""`SearchResult`: the layouts that a search found, with time, price and flags of the best."""

from dataclasses import dataclass

from expertmesh.costs.rank_layout import OURS
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.planned_model import PlannedModel
from expertmesh.planner.search import Candidate, Goal, Problem, front

ERROR_BAR = (0.79, 1.46)
"""Measured over predicted time: the tenth and the ninetieth percentile of the rows that nothing was fitted on."""


@dataclass(frozen=True)
class SearchResult:
    """Layouts of a model on a cluster, with costs.

    Attributes:
        model: the model.
        problem: inputs of the search.
        goal: goal of the search.
        candidates: candidates that fit, best first.
        guesses: guessed inputs, in words.
    """

    model: PlannedModel
    problem: Problem
    goal: Goal
    candidates: tuple[Candidate, ...]
    guesses: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The best layout."""
        return self.candidates[0]

    @property
    def front(self) -> list[Candidate]:
        """Pareto front by memory and time, fastest first."""
        return front(list(self.candidates))

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
    def flags(self) -> list[str]:
        """Options of `expertmesh train` that make the best layout."""
        return flags_of(self.best, self.model.config)


def flags_of(candidate: Candidate, config: GPTRunConfig | None = None) -> list[str]:
    """Options of `expertmesh train` that make a layout; empty for layouts that this project cannot run.

    Args:
        candidate: candidate with the layout.
        config: configuration of the recipe that the options change; None: unknown.
    """
    layout, problem = candidate.layout, candidate.problem
    if layout.pp_degree > 1 or problem.work.states not in OURS:
        return []
    per_pass = layout.dp_degree * layout.micro_batch
    flags = [
        f"--train.batch-size {problem.batch}",
        f"--train.micro-batch-size {per_pass}",
        f"--data.seq-len {problem.work.seq_len}",
        f"--train.dtype {problem.work.precision}",
        f"--parallel.zero-stage {layout.zero_stage}",
    ]
    train, moe = (None, None) if config is None else (config.train, config.model.moe)
    for flag, wanted, given in (
        (
            "--train.activation-checkpointing",
            layout.checkpointing == "full",
            train is not None and train.activation_checkpointing,
        ),
        (
            "--model.moe.recompute-h",
            layout.checkpointing == "experts",
            moe is not None and moe.recompute_h,
        ),
    ):
        if wanted != given:
            flags.append(flag if wanted else f"{flag} false")
    if layout.tp_degree > 1:
        flags.append(f"--parallel.tp-degree {layout.tp_degree}")
    if layout.dp_replicate_degree > 1:
        flags.append(f"--parallel.dp-replicate-degree {layout.dp_replicate_degree}")
    if any(block.num_experts for block in problem.sizes.blocks):
        flags.append(f"--parallel.route-degree {layout.route_degree}")
        if layout.overlap_degree > 1:
            flags.append(f"--parallel.overlap-degree {layout.overlap_degree}")
        if layout.all_to_all != "flat":
            flags.append(f"--parallel.all-to-all {layout.all_to_all}")
    if layout.offload:
        flags.append("--parallel.offload")
    if problem.work.states != "ours":
        flags.append(f"--optim.state-dtype {problem.work.states.removesuffix('_moments')}")
    return flags
