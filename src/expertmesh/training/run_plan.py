"""A call of `train` before its first step: `resolve` its options, `check` them, and `open_run` what they name."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints
from expertmesh.comm.bind import bind_ranks
from expertmesh.config.run import RunConfig, with_epochs
from expertmesh.data.data_progress import notes_known
from expertmesh.models.bound_files import check_run, newest_state
from expertmesh.models.family import Family
from expertmesh.models.registry import find_family
from expertmesh.models.task import Data, Task
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.ranks import Ranks, open_ranks
from expertmesh.runs.arithmetic import write_arithmetic
from expertmesh.runs.data_paths import with_whole_paths
from expertmesh.runs.precision import Precision, is_exact, resolve_device, settle_precision
from expertmesh.runs.run_dir import Run, RunDir
from expertmesh.training.branch import branch_point
from expertmesh.training.check_run_memory import check_run_memory
from expertmesh.training.ends import Ends
from expertmesh.training.fits_ranks import check_ranks
from expertmesh.training.init_from import run_of_init_from, with_init_from
from expertmesh.training.kept_samples import Sampler, check_samples
from expertmesh.training.named_trackers import check_installed
from expertmesh.training.optim import build_optimizer, freeze
from expertmesh.training.place_base import place_model, with_format
from expertmesh.training.state import RunProgress, TrainState, check_same_run
from expertmesh.training.teacher import find_teacher, open_teacher, teacher_bytes
from expertmesh.training.threads import Threads, computing_with, settle_threads


@dataclass
class RunPlan:
    """State of a call of `train`: fields of `resolve`, then of `check`, then of `open_run`."""

    family: Family
    recipe: str
    task: Task
    device: torch.device
    run_dir: RunDir
    ends: Ends
    sampler: Sampler | None

    ranks: Ranks = field(init=False)
    trunk: Path | None = field(init=False)
    """Checkpoint of `train.branch_from` that a new branch begins with."""
    begin: Run | None = field(init=False)
    """Run or hub folder of `train.init_from`, unless the run is resumed without it."""

    data: Data = field(init=False)
    precision: Precision = field(init=False)
    threads: Threads | None = field(init=False)
    """CPU threads of this process; None: not chosen, on a GPU."""
    state: TrainState = field(init=False)
    store: CheckpointStore = field(init=False)

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        config: RunConfig = self.task.config
        return config


def resolve(config: RunConfig, *, recipe: str, family: Family | None, sampler: Sampler | None) -> RunPlan:
    """The plan of a configuration: whole paths, the model of `train.init_from`, task and device."""
    family = find_family(config.family) if family is None else family
    config = with_whole_paths(config.model_copy(update={"family": family.name}))
    config = with_init_from(config, family)
    return RunPlan(
        family=family,
        recipe=recipe,
        task=family.open_task(config),
        device=resolve_device(config.train.device),
        run_dir=RunDir(config.train.run_dir),
        ends=Ends(config.train),
        sampler=sampler,
    )


def check(plan: RunPlan, stack: ExitStack) -> None:
    """Open the ranks and the run folder, and refuse what does not fit them, the machine, or the run that is there."""
    config, family, task, run_dir = plan.config, plan.family, plan.task, plan.run_dir
    if plan.device.index is not None:  # random state and memory are read from the current GPU
        stack.enter_context(torch.cuda.device(plan.device))
    plan.ranks = ranks = stack.enter_context(
        open_ranks(
            device_type=plan.device.type,
            timeout_s=config.parallel.timeout_s,
            tp_degree=config.parallel.tp_degree,
            reduces_once=config.parallel.zero_stage == 1,
            offload=config.parallel.offload,
        )
    )
    ranks.check_equal(config.model_dump_json(), what="the configuration")
    check_samples(config, family, plan.sampler, num_ranks=ranks.size)
    ranks.on_rank0(lambda: check_ranks(task, ranks))
    ranks.on_rank0(lambda: check_run_memory(family, config, plan.device, num_ranks=ranks.size))

    def check_folder() -> Path | None:
        check_installed(config.train.trackers)
        stack.enter_context(run_dir.locked())
        run_dir.check_resume(config.train.resume)
        run_dir.check_writable()
        if run_dir.config.exists():
            saved, _ = run_dir.read_values()
            state, where = newest_state(run_dir.path)
            check_run(run_dir.path, saved, state, family, where=where)
            check_same_run(saved, config, family=family, where=run_dir.path)
        if config.distill.teacher is not None:
            find_teacher(config, family)  # checked before work that takes long
        is_new_branch = config.train.branch_from and not list_checkpoints(run_dir.checkpoints)
        return branch_point(config, family=family) if is_new_branch else None

    plan.trunk = ranks.on_rank0(check_folder)
    plan.begin = None if plan.trunk else run_of_init_from(config, family, run_dir, ranks)


def open_run(plan: RunPlan, stack: ExitStack) -> None:
    """Prepare data, precision, threads, model and optimizer."""
    seed, ranks = plan.config.train.seed, plan.ranks
    has_gpu = plan.device.type == "cuda"
    stack.enter_context(bind_ranks(plan.config.parallel.bind, has_gpu=has_gpu))
    # a run on the CPU leaves the GPUs of its machine alone, unless the caller has used them
    gpus = range(torch.cuda.device_count() if has_gpu or torch.cuda.is_initialized() else 0)
    stack.enter_context(torch.random.fork_rng(gpus))
    torch.manual_seed(seed)
    if list_checkpoints(plan.run_dir.checkpoints):
        stack.enter_context(notes_known())  # already printed when the run started
    plan.data = _prepared(plan.task, ranks)
    plan.precision, plan.threads = _settle(plan)
    if plan.threads is not None:
        stack.enter_context(computing_with(plan.threads))
    stack.enter_context(plan.precision.products())
    torch.manual_seed(seed)  # data preparation may have drawn random numbers
    plan.begin = ranks.on_all(lambda: with_format(plan.begin, plan.config, plan.precision))
    plan.state = ranks.on_all(lambda: _build(plan))
    train = plan.config.train
    plan.store = CheckpointStore(
        plan.run_dir.checkpoints,
        keep_last=train.keep_last,
        keep_every=train.keep_every,
        ranks=ranks,
    )
    stack.callback(plan.store.close)


def _prepared(task: Task, ranks: Ranks) -> Data:
    """Data of a task, prepared on rank 0 first; the task's configuration gets the steps of its epochs."""
    found: list[Data] = []
    ranks.on_rank0(lambda: found.append(task.prepare()))  # fills the cache
    data = ranks.on_all(lambda: found[0] if found else task.prepare())
    ranks.check_equal(data.key, what="the data")
    num_samples = getattr(data, "num_training", None)
    config = ranks.on_all(lambda: with_epochs(task.config, num_samples=num_samples))
    task.config = task.builder.config = config
    return data


def _settle(plan: RunPlan) -> tuple[Precision, Threads | None]:
    """Precision and number of threads, chosen once and saved with the run."""
    config, family, ranks = plan.config, plan.family, plan.ranks
    record, given = plan.run_dir.arithmetic, config.parallel.num_threads
    goes_on = ranks.on_rank0(lambda: bool(list_checkpoints(plan.run_dir.checkpoints)))
    # by the whole step's products, which are the same on any number of ranks
    asked = {"products": family.products_of(config), "is_exact": is_exact(config.model_dump())}
    precision = ranks.on_rank0(lambda: settle_precision(config.train, record=record, **asked))
    if precision.device.type != "cpu" and given is None:
        return precision, None
    began_with = precision.arithmetic.threads
    threads = settle_threads(
        ranks,
        family.products_of(config, num_parts=ranks.num_row_parts),
        given=given,
        # older runs did not save it and used torch's number
        began_with=torch.get_num_threads() if goes_on and began_with is None else began_with,
    )
    kept = replace(precision.arithmetic, threads=threads.count)
    ranks.on_rank0(lambda: write_arithmetic(record, kept))
    return precision, threads


def _build(plan: RunPlan) -> TrainState:
    """Model, teacher and optimizer, before any checkpoint is read."""
    config, task, precision, ranks = plan.config, plan.task, plan.precision, plan.ranks
    compute_dtype = precision.compute_dtype
    task.builder.bytes_beside = teacher_bytes(config, plan.family, num_ranks=ranks.size, compute_dtype=compute_dtype)
    task.builder.plans = plan.run_dir.plans
    model = place_model(task, plan.begin, precision, ranks)
    task.teacher = open_teacher(plan.family, task, plan.data, precision=precision, ranks=ranks, student=model)
    model.train(not task.evaluates)
    freeze(model, config.train.freeze)
    optimizer = build_optimizer(model, config.optim, compute_dtype=compute_dtype, num_ranks=ranks.size)
    follow_optimizer(model, optimizer)
    return TrainState(model, optimizer, precision.scaler(ranks), RunProgress(), ranks)
