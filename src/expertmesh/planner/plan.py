"""`expertmesh.plan`: the best layouts of a model on a cluster, their costs, and why other layouts lost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from expertmesh.config.cluster import Cluster, Precision
from expertmesh.config.run import OptimConfig
from expertmesh.config.values import Number, check_choice
from expertmesh.costs.hardware import find_cluster, known_devices
from expertmesh.costs.memory import GIB
from expertmesh.costs.rank_layout import IMBALANCE, Stack, States, workload_of
from expertmesh.costs.step_time import efficiency_of
from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.arguments import (
    MOST_AT_ONCE,
    MOST_IMBALANCE,
    MOST_TOKENS,
    cluster_of,
    number,
    path_text,
    whole,
)
from expertmesh.planner.finetune import Kind as Finetune
from expertmesh.planner.finetune import finetuned
from expertmesh.planner.fit import fit_with
from expertmesh.planner.own import own_points
from expertmesh.planner.planned_model import PlannedModel, planned_model
from expertmesh.planner.search import (
    TENSOR_DEGREES,
    Candidate,
    ChosenDegrees,
    Goal,
    Problem,
    can_cut,
    can_slice,
    divisors,
    fitting,
    layouts,
    powers_of_two,
    search,
    with_batch,
)
from expertmesh.planner.search_result import SearchResult
from expertmesh.planner.table import plan_text

_MOST_TIMES_MORE = 1024


class Plan(SearchResult):
    """A `SearchResult` that prints itself."""

    def text(self) -> str:
        """The plan as a table for a terminal."""
        return plan_text(self)

    def __str__(self) -> str:
        """Text of `text`."""
        return self.text()


def plan(
    model: str | Path | GPTRunConfig,
    *,
    cluster: str | Path | Cluster,
    goal: Goal = "throughput",
    tokens_per_batch: int | None = None,
    max_context: int | None = None,
    tokens: float | None = None,
    imbalance: float | None = None,
    states: States | None = None,
    pp: int = 1,
    vpp: int = 1,
    tp: int | None = None,
    ep: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    precision: Precision | None = None,
    stack: Stack = "eager",
    finetune: Finetune | None = None,
    rank: int | None = None,
    expert_rank: int | None = None,
    targets: Sequence[str] | None = None,
    base: str | None = None,
    filled: float = 1.0,
    measured: str | Path | None = None,
) -> Plan:
    """Plan a model on a cluster: the best layouts, memory and time by part, days and price. Imports no torch.

    Args:
        model: a recipe's name, a configuration, a run, a config.json of the hub or its folder, or a published model.
        cluster: "h100x64", a TOML file, or a `Cluster`.
        goal: "throughput", "memory" or "latency".
        tokens_per_batch: tokens of one optimizer step; None: the recipe's.
        max_context: tokens of a sequence; None: the recipe's.
        tokens: tokens of the whole training, for days and price; None: the recipe's.
        imbalance: rows of the fullest rank over the mean; None: 1.15, as of natural routing.
        states: states kept of each parameter, see `costs.rank_layout.States`; None: a configuration's
            `optim.state_dtype`, "ours" for another model.
        pp: pipeline stages, to reproduce published runs; this project has none.
        vpp: virtual stages of each pipeline stage.
        tp: ranks that share sequences and dense matrices; None: searched, as are the next three.
        ep: ranks that tokens travel over.
        zero: ZeRO stage.
        micro_batch: sequences of a data-parallel rank in one pass.
        precision: precision of products; None: the recipe's. FP8 models other software.
        stack: kind of software, see `costs.rank_layout.Workload`; "eager" is what training has.
        finetune: "full" or "lora": fine-tuning as `expertmesh train FOLDER` does it, with its batch and sequences.
        rank: rank of the adapters, as are the next three an option of "lora"; None: as in training.
        expert_rank: rank of the adapters of routed experts.
        targets: matrices with adapters.
        base: storage of the resting weights, see `config.frozen_base`.
        filled: share of the sequences' tokens that is text: 1 where texts are packed, less where they are padded.
        measured: a TOML file of your own measurements, on which the constants are fitted again (docs/planner.md).

    Returns:
        A `Plan`; `print(plan)` shows it.

    Raises:
        ConfigError: a value breaks a rule, or no layout fits; names hardware that would fit.

    Example:
        >>> found = em.plan("gpt-1.3b-moe128", cluster="a100-80x128")
        >>> found.best.fits, found.best.memory.device_bytes < 80 * 2**30
        (True, True)
    """
    adapters = {"rank": rank, "expert_rank": expert_rank, "targets": targets, "base": base}
    found = _asked(planned_model(model), finetune, adapters, max_context)
    Number(0, 1, "give the share of text", is_open=True).check("filled", filled)
    where = cluster_of(cluster)
    check_choice("goal", goal, get_args(Goal))
    if tokens is not None:
        fix = "give the tokens of the training"
        tokens = number("tokens", tokens, most=MOST_TOKENS, fix=fix)
    problem, guesses = _problem(found, where, tokens_per_batch, max_context, imbalance, states, pp, vpp, tp)
    problem = _chosen(problem, tp, ep, zero, micro_batch)
    if precision is not None:
        check_choice("precision", precision, _PRECISIONS)
        guesses = tuple(g for g in guesses if not g.startswith("products in"))
    check_choice("stack", stack, get_args(Stack))
    work = replace(problem.work, precision=precision or problem.work.precision, stack=stack)
    problem = replace(problem, work=work)
    if measured is not None:
        refitted = fit_with(own_points(path_text("measured", measured, "a file")))
        problem = replace(problem, efficiency=efficiency_of(where, refitted))
    if tokens is not None:
        found = replace(found, train_tokens=tokens)
        guesses = tuple(g for g in guesses if "training tokens" not in g)
    found = replace(found, train_tokens=found.train_tokens / filled)
    candidates = search(problem, goal)
    if not candidates:
        raise ConfigError(_nothing_fits(found, problem))
    return Plan(found, problem, goal, tuple(candidates), guesses)


def _asked(model: PlannedModel, finetune: object, adapters: Mapping[str, Any], max_context: object) -> PlannedModel:
    """The model as trained from the beginning, or fine-tuned."""
    given = {name: value for name, value in adapters.items() if value is not None}
    if finetune is None:
        for name, value in given.items():
            fix = f"give {named('finetune', 'lora')}"
            raise ConfigError(name, value, "is an option of adapters", fix)
        return model
    check_choice("finetune", finetune, get_args(Finetune))
    seq_len = None if max_context is None else _tokens("max_context", max_context)
    return finetuned(model, finetune, given, seq_len=seq_len)  # type: ignore[arg-type]


_PRECISIONS = tuple(one for one in get_args(Precision) if one != "float64")


def _chosen(problem: Problem, tp: object, ep: object, zero: object, micro_batch: object) -> Problem:
    """The problem with given degrees, checked."""
    ranks = problem.cluster.num_gpus // problem.pp_degree
    given = {"tp": tp, "ep": ep, "zero": zero, "micro_batch": micro_batch}
    most = {"tp": ranks, "ep": ranks, "zero": 3, "micro_batch": MOST_AT_ONCE}
    fix = "leave it out to have it searched, or choose another"
    found = {
        name: None if value is None else whole(name, value, most=most[name], fix=fix) for name, value in given.items()
    }
    for name in ("tp", "ep"):
        degree = found[name]
        if degree is not None and ranks % degree:
            stages = "" if problem.pp_degree == 1 else " of a pipeline stage"
            raise ConfigError(name, degree, f"must divide the {ranks} devices{stages}", "choose a divisor")
    if found["tp"] is not None and not can_cut(problem, found["tp"]):
        rule = "must divide heads, dense layers and the sequence, and keep within a node"
        raise ConfigError("tp", found["tp"], rule, f"choose a divisor of {problem.sizes.tensor_divisor}")
    return replace(
        problem,
        chosen=ChosenDegrees(found["tp"], found["ep"], found["micro_batch"], found["zero"]),
    )


def _problem(
    model: PlannedModel,
    cluster: Cluster,
    tokens_per_batch: int | None,
    max_context: int | None,
    imbalance: float | None,
    states: States | None,
    pp: int,
    vpp: int,
    tp: int | None = None,
) -> tuple[Problem, tuple[str, ...]]:
    """(search problem, guessed inputs in words)."""
    guesses = [*model.unread, *model.guesses]
    if tokens_per_batch is not None:
        tokens_per_batch = _tokens("tokens_per_batch", tokens_per_batch)
    if max_context is not None:
        max_context = _tokens("max_context", max_context)
        if model.has_lengths:
            rule = "is the model's own: the lengths of sources and targets"
            raise ConfigError("max_context", max_context, rule, "leave it out")
    if imbalance is not None:
        fix = "leave it out, or give the rows of the fullest rank over the mean"
        imbalance = number("imbalance", imbalance, most=MOST_IMBALANCE, fix=fix)
    if states is not None:
        check_choice("states", states, get_args(States))
    pp, vpp = _stages(pp, vpp, cluster, model.sizes.num_layers)
    seq_len = model.seq_len if max_context is None else max_context
    if max_context is not None:
        guesses = [g for g in guesses if not g.startswith("sequences of")]
    if tokens_per_batch is not None:
        guesses = [g for g in guesses if "tokens per step" not in g]
        if tokens_per_batch % seq_len:
            fix = f"use {max(tokens_per_batch // seq_len, 1) * seq_len}"
            raise ConfigError(
                "tokens_per_batch",
                tokens_per_batch,
                f"must be a multiple of the {seq_len} tokens of a sequence",
                fix,
            )
        batch = tokens_per_batch // seq_len
    else:
        given = max(model.batch_tokens // seq_len, 1)
        ranks, divisor = cluster.num_gpus // pp, model.sizes.tensor_divisor
        degrees = [n for n in TENSOR_DEGREES if divisor % n == 0 and n <= cluster.node_size]
        degrees = degrees if tp is None else [tp]
        batch = given if model.config is not None and _splits(given, ranks, degrees) else -(-given // ranks) * ranks
        if batch != given:
            guesses = [g for g in guesses if "tokens per step" not in g]
            said = f"{batch * seq_len:,} tokens per step, {batch // ranks:,} sequences for each device"
            guesses.append(said if pp == 1 else f"{said} of a pipeline stage")
    is_cpu = cluster.device.bf16_tflops < 10
    precision = _precision(model, is_cpu)
    if model.config is None or model.config.train.dtype == "auto":
        guesses.append(f"products in {precision}")
    if imbalance is None:
        guesses.append(f"the fullest rank has {IMBALANCE:g} times the mean rows (imbalance)")
    optim = OptimConfig() if model.config is None else model.config.optim
    work = workload_of(optim, seq_len, precision, on_gpu=not is_cpu)
    work = replace(work, states=states or work.states, imbalance=imbalance or IMBALANCE)
    guesses.append("the network reaches its nominal bandwidth but for the fitted share (bench comm measures it)")
    if cluster.host.memory_gib:
        guesses.append(
            f"{cluster.host.memory_gib:g} GiB of host memory per device, and {cluster.host.gb_per_s:g} GB/s to it"
        )
    return (
        Problem(
            model.sizes,
            cluster,
            work,
            batch,
            efficiency_of(cluster),
            pp_degree=pp,
            virtual_stages=vpp,
        ),
        tuple(guesses),
    )


def _splits(batch: int, ranks: int, degrees: Sequence[int]) -> bool:
    """Whether some tensor degree leaves data-parallel ranks that divide a step's sequences."""
    whole_ones = (n for n in degrees if isinstance(n, int) and n > 0 and ranks % n == 0)
    return any(batch % (ranks // n) == 0 for n in whole_ones)


def _precision(model: PlannedModel, is_cpu: bool) -> Precision:
    given = "auto" if model.config is None else model.config.train.dtype
    if given == "float64":
        raise ConfigError("train.dtype", given, "is for tests on CPUs", "plan float32, bfloat16 or float16")
    if given == "auto":
        return "float32" if is_cpu else "bfloat16"
    return given


def _tokens(name: str, value: object) -> int:
    return whole(name, value, most=MOST_AT_ONCE, fix="leave it out, or choose another")


def _stages(pp: object, vpp: object, cluster: Cluster, layers: int) -> tuple[int, int]:
    """Stages of a pipeline and virtual stages of each, checked."""
    fix = f"leave it out for no pipeline, or share out the {layers} layers"
    stages = whole("pp", pp, most=layers, fix=fix)
    if cluster.num_gpus % stages:
        raise ConfigError("pp", stages, f"must divide the {cluster.num_gpus} devices", "choose a divisor")
    virtual = whole("vpp", vpp, most=layers, fix=fix)
    if virtual > 1 and stages == 1:
        raise ConfigError(
            "vpp",
            virtual,
            "divides the stages of a pipeline, and there is none",
            f"give {named('pp')}, too",
        )
    if stages * virtual > layers:
        rule = f"makes {stages * virtual} stages of {layers} layers"
        raise ConfigError("vpp", virtual, rule, f"use at most {layers // stages}")
    return stages, virtual


def _nothing_fits(model: PlannedModel, problem: Problem) -> str:
    """Error message, in one line, with the missing memory and hardware that would fit."""
    cluster = problem.cluster
    smallest = [
        Candidate(problem, replace(sized, offload=offload))
        for layout in layouts(problem)
        if layout.checkpointing == "full" and layout.zero_stage == problem.zero_stages[0]
        for sized in list(with_batch(problem, layout))[-1:]
        for offload in (False, True)
        if not offload or sized.zero_stage > 1
    ]
    head = f"plan {model.name} on {cluster.name}"
    if not smallest and problem.chosen != ChosenDegrees():
        return f"{head}: no layout has the chosen degrees; leave one of them out"
    if not smallest:
        least = cluster.num_gpus // max(problem.pp_degree, 1)
        return (
            f"{head}: {problem.batch} sequences per step cannot be split over {least} devices;"
            f" use a multiple of {least * problem.work.seq_len:,} for {named('tokens_per_batch')}, or fewer devices"
        )
    plain = min((c for c in smallest if not c.layout.offload), key=lambda c: c.memory.device_bytes)
    has = cluster.device.memory_gib
    needs = plain.memory.device_bytes / GIB
    said = f"{head}: fits nowhere: at least {needs:.1f} GiB of a device's {has:.1f} GiB are needed"
    for off in sorted((c for c in smallest if c.layout.offload), key=lambda c: c.memory.device_bytes)[:1]:
        device, host = off.memory.device_bytes / GIB, off.memory.host_bytes / GIB
        said += f", with offload {device:.1f} and {host:.1f} of the host's {cluster.host.memory_gib:.1f}"
    stage = cluster.num_gpus // problem.pp_degree
    widest = max(n for n in divisors(stage) if can_slice(problem.sizes, n))
    if widest < stage:
        said += f", and slices of experts are whole on {widest} devices at most"
    return f"{said}; {_remedy(problem)}"


def _first(problem: Problem) -> Candidate | None:
    """A layout that fits; the fastest where all of them offload."""
    offloads = False
    for one in fitting(problem, smallest=True):
        if not one.layout.offload:
            return one
        offloads = True
    return search(problem)[0] if offloads else None


def _offloaded(fits: Candidate) -> str:
    """Price of fitting by offload, in words."""
    return f" with offload, {fits.seconds.total_s:,.0f} s a step" if fits.layout.offload else ""


def _remedy(problem: Problem) -> str:
    """Fix for a model that fits nowhere: more devices of this kind, or as many of another kind."""
    found = []
    for times in powers_of_two(_MOST_TIMES_MORE)[1:]:
        number = problem.cluster.num_gpus * times
        if number > 2**20 or (number > problem.cluster.ranks_per_node and number % problem.cluster.ranks_per_node):
            break
        cluster = problem.cluster.model_copy(update={"num_gpus": number})
        more = replace(problem, cluster=cluster, batch=problem.batch * times)
        if (fits := _first(more)) is not None:
            found.append(f"{number} devices{_offloaded(fits)}")
            break
    for name in known_devices():
        try:
            cluster = find_cluster(f"{name}x{problem.cluster.num_gpus}")
        except ConfigError:
            continue
        if cluster.device.memory_gib <= problem.cluster.device.memory_gib:
            continue
        if (fits := _first(replace(problem, cluster=cluster))) is not None:
            found.append(f"{problem.cluster.num_gpus} x {name}{_offloaded(fits)}")
    if not found:
        return "no device known here has enough memory; use a smaller model or shorter sequences"
    return f"it would fit on {' or '.join(found[:3])}"
