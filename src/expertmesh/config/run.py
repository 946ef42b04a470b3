"""The configuration of a training run of any model, in the sections of the command line."""

import math
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from expertmesh.config.adapter import AdapterConfig, with_learning_rate
from expertmesh.config.base import Config, FieldError, saved_run
from expertmesh.config.dispatch_options import AllToAll, DispatchDtype
from expertmesh.config.fields import Spelling
from expertmesh.config.frozen_base import IDLE_BASE, FrozenBaseConfig
from expertmesh.config.objective import with_usual
from expertmesh.errors import ConfigError, named

Frozen = Literal["experts", "router"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]
StateDtype = Literal["float32", "bfloat16", "int8", "fp16-scaled", "torchao-int8", "torchao-int4"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Resume = Literal["auto", "never", "required"]
Bind = Literal["auto", "off"]
ExpertOrder = Literal["slices_inner", "experts_inner"]


def check_encoding(name: str, value: str | None) -> None:
    """Refuses a name of an encoding of text that Python does not know."""
    try:
        "a".encode(value or "utf-8")
    except (LookupError, UnicodeError, ValueError):
        raise FieldError(
            name,
            value,
            "must be an encoding of text that Python knows",
            "use for example latin-1, cp1252, shift_jis or utf-16-le",
        ) from None


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float:
    """Seconds of a duration: a number of them, with units (90m, 1h 30m), or as job schedulers write it.

    Schedulers have minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    days, dash, clock = text.rpartition("-")
    number, parts = "[0-9]+(?:[.][0-9]+)?", clock.split(":")
    if re.fullmatch("(?:[0-9]+-)?[0-9]+(?::[0-5][0-9]){0,2}", text) and (dash or len(parts) > 1):
        units = "hms"[: len(parts)] if dash else "hms"[-len(parts) :]
        found = [(days or "0", "d"), *zip(parts, units, strict=True)]
    elif re.fullmatch(f"(?:{number}[smhd] *)+", text):
        found = re.findall(f"({number})([smhd])", text)
    else:
        try:
            return float(text)
        except ValueError:
            rule = "must be a finite number of seconds, or a time such as 90m, 1h30m, 12:00:00 or 1-12:00:00"
            raise FieldError((), text, rule, "write one") from None
    return sum(float(part) * _UNITS_S[unit] for part, unit in found)


DEVICE_RULE = "must be auto, cpu, cuda or cuda:N"


def is_device(name: str) -> bool:
    """Whether a name is auto, cpu, cuda or cuda:N."""
    return re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name) is not None


class OptimConfig(Config):
    """The optimizer and its learning-rate schedule."""

    name: Optimizer = "adamw"
    """adamw, or muon: Muon for attention, dense and expert matrices (per expert), AdamW for the rest."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a ratio of the peak."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after the warm-up: cosine or linear decay, constant, or warmup-stable-decay (wsd)."""
    warmup_steps: int = Field(default=50, ge=0)
    """Number of linear warm-up steps."""
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """Warm-up as a fraction of the schedule's steps; none: warmup_steps."""
    schedule_steps: int | None = Field(default=None, gt=0)
    """Length of the schedule in steps, if training spans several runs; none: train.steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps in the final linear decay of wsd."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices; norms, biases and embeddings are not decayed."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Maximum global gradient norm (gradient clipping)."""
    state_dtype: StateDtype = "float32"
    """Dtype of the moments of large tensors; int8: a scale per block; fp16-scaled: a scale per tensor (fairseq's
    fp16-adam-stats); torchao-*: torchao's AdamW, one process only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        idle = {
            "decay_fraction": ("schedule", "wsd", self.schedule != "wsd"),
            "min_lr_ratio": ("schedule", "cosine", self.schedule == "constant"),
            "momentum": ("name", "muon", self.name == "adamw"),
        }
        for name, (cause, needed, is_idle) in idle.items():
            if is_idle:
                usual = type(self).model_fields[name].default
                rule = f"has no effect with {named(f'optim.{cause}', getattr(self, cause))}"
                fix = f"leave it at {usual}, or use {named(f'optim.{cause}', needed)}"
                self.refuse_idle(name, rule, fix)
        if self.warmup_ratio is not None:
            rule = f"has no effect with {named('optim.warmup_ratio', self.warmup_ratio)}"
            self.refuse_idle("warmup_steps", rule, "leave one of the two out")
        if self.name == "muon" and self.state_dtype.startswith("torchao"):
            raise FieldError(
                "state_dtype",
                self.state_dtype,
                f"is an AdamW, and {named('optim.name', 'muon')} is given",
                f"use int8, or {named('optim.name', 'adamw')}",
            )
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Number of warm-up steps of a schedule of so many steps."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps)


class TrainConfig(Config):
    """The training loop."""

    steps: int = Field(default=1000, gt=0)
    """Number of optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Number of epochs (may be fractional) instead of train.steps, rounded up to a whole batch; none: train.steps."""
    batch_size: int = Field(default=16, gt=0)
    """Global batch size: sequences (or other samples) per optimizer step."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Batch size of one forward pass; smaller than batch_size means gradient accumulation; none: batch_size."""
    gradient_accumulation_steps: int | None = Field(default=None, gt=0)
    """Number of forward passes per optimizer step, instead of micro_batch_size; none: batch_size / micro_batch_size."""
    seed: int = Field(default=0, ge=0)
    """Random seed of initialization, data order and router noise."""
    run_dir: Annotated[str, Spelling("DIR")] = "runs/default"
    """Folder for metrics, checkpoints and the resolved configuration."""
    device: Annotated[str, Spelling("NAME")] = "auto"
    """Device: auto, cpu, cuda or cuda:N."""
    dtype: Dtype = "auto"
    """Compute precision; auto: bfloat16 if the GPU supports it or AMX pays off at this model size, else float32; saved
    with the run."""
    init_from: Annotated[str | None, Spelling("RUN")] = None
    """Run to initialize from: its newest weights, model options and tokenizer; none: random weights."""
    branch_from: Annotated[str | None, Spelling("RUN")] = None
    """Run with optim.schedule=wsd to branch from: this run resumes from its checkpoint of the step at which this run's
    decay begins; none: no branch."""
    freeze: tuple[Frozen, ...] = ()
    """Frozen parts of the MoE layers; useful with init_from."""
    resume: Resume = "never"
    """Resuming: auto, from the newest intact checkpoint if there is one; required, fail without a checkpoint; never,
    the run directory must be new."""
    checkpoint_every: int = Field(default=200, gt=0)
    """Number of steps between checkpoints; the last step is always saved."""
    keep_last: int = Field(default=2, gt=0)
    """Number of newest checkpoints to keep, besides the best."""
    keep_every: int | None = Field(default=None, gt=0)
    """Number of steps between checkpoints that are kept permanently, a multiple of checkpoint_every; none: only
    keep_last and the best are kept."""
    eval_every: int = Field(default=100, gt=0)
    """Number of steps between evaluations; the first and the last step are always evaluated."""
    eval_batches: int = Field(default=16, gt=0)
    """Number of validation batches per evaluation."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    max_bad_steps: int = Field(default=10, gt=0)
    """Number of consecutive steps with a non-finite loss or gradient after which the run stops."""
    log_every: int | None = Field(default=None, gt=0)
    """Number of steps between progress lines if not on a terminal (metrics.jsonl has every step); none: 40 lines."""
    max_time: float | None = Field(default=None, gt=0)
    """Time limit in seconds, or as 90m, 1h30m or 12:00:00; then the run saves and stops; none: no limit."""
    patience: int | None = Field(default=None, gt=0)
    """Early stopping: number of consecutive evaluations without improvement of best_by; none: no early stopping."""
    best_by: str = "loss"
    """Evaluation metric that selects the best checkpoint, for example loss, bits_per_byte or accuracy; accuracies and
    rewards are maximized, others minimized."""
    sample_every: int | None = Field(default=None, gt=0)
    """Number of steps between samples, which are printed and written to samples.jsonl: answers to the first validation
    prompts; none: no samples."""
    tensorboard: bool = True
    """Whether TensorBoard events are written, if the package is installed."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that receive the metrics of every step."""

    @field_validator("max_time", mode="before")
    @classmethod
    def _read_duration(cls, value: Any) -> Any:
        return duration_s(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require_once("freeze", "trackers")
        if self.epochs is not None:
            rule = f"has no effect with {named('train.epochs', self.epochs)}"
            self.refuse_idle("steps", rule, "leave one of the two out")
            self.require(
                self.branch_from is None,
                "epochs",
                f"conflicts with {named('train.branch_from')}, whose decay begins at a step",
                f"use {named('train.steps')}",
            )
        count = self.gradient_accumulation_steps or 1
        self.require(
            self.batch_size % count == 0,
            "gradient_accumulation_steps",
            f"must divide {named('train.batch_size')}, {self.batch_size}",
            "choose a divisor",
        )
        self.require(
            self.gradient_accumulation_steps is None or self.micro_batch_size is None,
            "gradient_accumulation_steps",
            f"conflicts with {named('train.micro_batch_size', self.micro_batch_size)}, which says the same otherwise",
            "give one of them, and none to the other",
        )
        self.require(
            self.init_from is None or self.branch_from is None,
            "branch_from",
            f"conflicts with {named('train.init_from')}",
            "leave one of them out",
        )
        self.require(
            self.keep_every is None or self.keep_every % self.checkpoint_every == 0,
            "keep_every",
            f"must be a multiple of {named('train.checkpoint_every')}, {self.checkpoint_every}",
            "choose one",
        )
        self.require(
            is_device(self.device),
            "device",
            DEVICE_RULE,
            "for example cpu",
        )
        self.require(
            self.micro_batch_size is None or self.batch_size % self.micro_batch_size == 0,
            "micro_batch_size",
            f"must divide {named('train.batch_size')}, {self.batch_size}",
            "choose a divisor",
        )
        return self

    @property
    def samples_per_pass(self) -> int:
        """Samples of a forward pass, on all ranks."""
        return self.micro_batch_size or self.batch_size // (self.gradient_accumulation_steps or 1)


class SlicesConfig(Config):
    """Parallelism of experts over the ranks that torchrun starts."""

    es_degree: int | None = Field(default=None, gt=0)
    """Expert tensor-parallel degree: number of ranks that shard one expert's hidden size; none: all if that divides."""

    def given(self) -> dict[str, Any]:
        """Options that were set."""
        return self.model_dump(include=self.model_fields_set)


class ServingDegrees(SlicesConfig):
    """Parallelism of generation over the ranks that torchrun starts."""

    tp_degree: int = Field(default=1, gt=0)
    """Tensor-parallel degree: number of consecutive ranks that shard attention, dense matrices and the KV cache."""
    ep_degree: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Expert-parallel degree: number of parts that a layer's experts are divided into, each on other ranks; none:
    number of ranks / es_degree."""
    es_degree: int | None = Field(default=None, gt=0)
    """Expert tensor-parallel degree: number of ranks that shard one expert's hidden size; none: the fewest that divide
    the experts evenly over the ranks."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of a collective in seconds."""


class ParallelConfig(ServingDegrees):
    """CPU threads, and parallelism over the ranks that torchrun starts."""

    tp_degree: int = Field(default=1, gt=0)
    """Tensor-parallel degree: number of consecutive ranks that shard dense matrices and (sequence parallelism)
    tokens."""
    ep_degree: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Expert-parallel degree, one number or one per MoE layer: route_degree / es_degree; none: from route_degree."""
    num_threads: int | None = Field(default=None, gt=0)
    """Number of CPU threads of this process, kept with the run; none: OMP_NUM_THREADS, else by the model's size."""
    dp_replicate_degree: int = Field(default=1, gt=0)
    """Number of model replicas (HSDP), each sharded over ranks / dp_replicate_degree."""
    dp_shard_degree: int | None = Field(default=None, gt=0)
    """Number of ranks over which a replica's parameters are sharded (FSDP); none: ranks / dp_replicate_degree."""
    route_degree: int | None = Field(default=None, gt=0)
    """Number of ranks per all-to-all group of expert parallelism; further ranks shard the same experts' weights (FSDP);
    1: no all-to-all; none: all ranks."""
    overlap_degree: int = Field(default=1, gt=0)
    """Number of chunks of tokens, where the dispatch of one overlaps with the computation of another; 1: no overlap."""
    all_to_all: AllToAll = "flat"
    """All-to-all algorithm: flat, straight to the experts' ranks; hierarchical, once per node first; auto, the faster
    one by the cost model."""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """Number of consecutive ranks per node, used by parallel.adaptive and by a hierarchical or auto all_to_all; none:
    as torchrun started them."""
    dispatch_dtype: DispatchDtype = "same"
    """Dtype of dispatched tokens: their own (same), or 8 bits with a scale for every 128 elements."""
    replicated_experts: int = Field(default=0, ge=0)
    """Number of hot experts per layer (most tokens in the last step) whose weights every rank receives, so that their
    tokens are not dispatched."""
    adaptive: bool = False
    """Whether route_degree, overlap_degree, all_to_all and replicated_experts are tuned per layer and load; options set
    explicitly are not tuned."""
    bind: Bind = "auto"
    """CPU binding: auto, each rank to the cores of one NUMA node unless the launcher has bound it; off, no binding."""
    expert_order: ExpertOrder = "slices_inner"
    """Rank order if both degrees of experts exceed 1: consecutive ranks hold slices of the same experts (slices_inner),
    or different experts (experts_inner)."""
    zero_stage: int = Field(default=3, ge=1, le=3)
    """ZeRO stage; 3: gather weights per use; 2: gather dense weights once per micro-batch, experts once per step; 1: as
    2, and reduce dense gradients once per step."""
    offload: bool = False
    """Whether parameters, gradients and optimizer state are kept in host memory (offload); weights are copied to the
    device for each use."""

    def ep_degree_of(self, moe_layer: int, *, num_moe_layers: int) -> int | None:
        """The ep_degree of one MoE layer, counted from 0 among them; None where route_degree decides."""
        given = self.ep_degree
        if len(given) > 1 and len(given) != num_moe_layers:
            raise ConfigError(
                "parallel.ep_degree",
                given,
                f"{len(given)} numbers for {num_moe_layers} MoE layers",
                "give one number, or one per MoE layer",
            )
        if not given:
            return None
        return given[moe_layer] if len(given) > 1 else given[0]

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = " ".join(map(str, self.ep_degree))
        self.require(
            not given or self.route_degree is None,
            "route_degree",
            f"conflicts with {named('ep_degree', given)}, which names the same thing",
            "give only one of the two",
        )
        self.require(
            self.ranks_per_node is None or self.all_to_all != "flat" or self.adaptive,
            "ranks_per_node",
            "has no effect with all_to_all=flat",
            "leave it out, or use all_to_all=hierarchical",
        )
        for still, why in (
            (self.adaptive, "adaptive=True it is measured whether any are"),
            (self.route_degree == 1, f"{named('route_degree', '1')} no token is dispatched"),
        ):
            self.require(
                self.dispatch_dtype == "same" or not still,
                "dispatch_dtype",
                f"rounds dispatched tokens, and with {why}",
                "leave one out",
            )
        self.require(
            not self.offload or self.zero_stage > 1,
            "offload",
            f"conflicts with {named('parallel.zero_stage', 1)}, which keeps the dense layers' whole gradients on the "
            "device for a"
            " step",
            "use 2 there, or 3 to keep no weights on it either",
        )
        return self


class DistillConfig(Config):
    """Knowledge distillation from a teacher (Hinton et al. 2015), staged as in Mixture-of-Students."""

    teacher: Annotated[str | None, Spelling("RUN")] = None
    """Run of the teacher, with the same family, vocabulary and data; none: no distillation."""
    beta: float = Field(default=1.0, gt=0)
    """Weight of the KL divergence from the teacher, relative to the data loss."""
    temperature: float = Field(default=1.0, gt=0)
    """Distillation temperature: divisor of both models' logits; the divergence is multiplied by its square."""
    until: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the schedule's steps with distillation."""
    decay: Literal["stop", "linear"] = "stop"
    """Schedule of the weight: constant until distillation stops (stop), or linear decay to zero (linear)."""
    init_from_teacher: bool = False
    """Whether layers start from the teacher's weights, each from the nearest layer of the same shapes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.teacher is None:
            for name in type(self).model_fields:
                fix = f"leave it out, or give {named('distill.teacher')}"
                self.refuse_idle(name, "has no effect without a teacher", fix)
        return self

    def weight(self, step: int, *, total_steps: int) -> float:
        """Weight of the divergence in a step, counted from 0; 0 where the teacher is silent, or there is none."""
        end = self.until * total_steps
        if self.teacher is None or step >= end:
            return 0.0
        return self.beta * (1.0 - step / end) if self.decay == "linear" else self.beta


class RunConfig(Config):
    """All options that define a training run. A family of models has a subclass with a model and data of its own.

    Sections may be given as dictionaries. `updated` makes a changed copy, by dotted names. A run of a GPT on text is a
    `expertmesh.models.gpt.config.GPTRunConfig`, which `expertmesh.recipe` returns.

    Raises:
        ConfigError: a name is unknown or a value breaks a rule.

    Example:
        >>> config = em.RunConfig(train={"steps": 100, "run_dir": "runs/mine"})
        >>> longer = config.updated({"train.steps": 200, "optim.lr": 3e-4})
        >>> longer.train.steps
        200
    """

    family: str = ""
    """Family of the model: gpt, or module:name of your own."""
    model: Config = Config()
    """Options of the model."""
    data: Config = Config()
    """Options of the data."""
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    distill: DistillConfig = DistillConfig()
    adapter: AdapterConfig = AdapterConfig()
    base: FrozenBaseConfig = FrozenBaseConfig()

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """A validated copy with some values replaced; other options that lose their effect by it get their defaults.

        Args:
            changes: New values by dotted name, e.g. `{"train.steps": 20, "model.moe.top_k": 1}`, or in sections: of one
                that is given as a mapping, what is not named stays. A whole configuration takes a section's place.

        Raises:
            ConfigError: A name is unknown or a value breaks a rule.
        """
        with saved_run() as reset:
            fitting = super().updated(changes)
        # options that are changed and have no effect are refused
        return super(RunConfig, fitting).updated(changes) if reset else fitting

    @property
    def routers_rest(self) -> bool:
        """Whether routers do not learn, and balance losses are off."""
        return "router" in self.train.freeze or self.adapter.routers_rest

    @property
    def total_schedule_steps(self) -> int:
        """Steps that schedules span."""
        return self.optim.schedule_steps or self.train.steps

    @model_validator(mode="after")
    def _check_freeze(self) -> Self:
        moe = getattr(self.model, "moe", None)
        if self.train.freeze and moe is not None:
            self.require(  # the run of init_from may have experts
                moe.num_experts or self.train.init_from is not None,
                "train.freeze",
                "the model has no experts",
                "leave it out",
            )
            self.require(
                "router" not in self.train.freeze or moe.router != "hash",
                "train.freeze",
                f"a hash learns nothing, with {named('model.moe.router', 'hash')}",
                "leave router out",
            )
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if not self.adapter.rests:
            rule, fix = IDLE_BASE
            try:
                self.refuse_idle("base", rule, fix)
            except FieldError:
                raise FieldError(("base", "storage"), self.base.storage, rule, fix) from None
        if self.adapter.rests:
            kind = named("adapter.kind", self.adapter.kind)
            self.require(
                self.train.init_from is not None,
                "adapter.kind",
                f"needs a trained model, and {named('train.init_from')} names none",
                f"write its folder in place of the recipe, or give {named('train.init_from')}",
            )
            self.require(
                not self.train.freeze,
                "train.freeze",
                f"has no effect with {kind}, where all but adapters rests",
                "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _check_beginning(self) -> Self:
        for name in ("init_from", "branch_from"):
            self.require(
                getattr(self.train, name) is None or not self.distill.init_from_teacher,
                "distill.init_from_teacher",
                f"conflicts with {named(f'train.{name}')}, whose weights would take the place of the teacher's",
                "leave one of them out",
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        self.require(
            self.train.branch_from is None or self.optim.schedule == "wsd",
            "train.branch_from",
            f"needs a schedule that is constant until its decay, and {named('optim.schedule')} is "
            f"{self.optim.schedule}",
            f"use {named('optim.schedule', 'wsd')} in both runs",
        )
        is_known = self.train.epochs is None or self.optim.schedule_steps is not None
        warmup = self.optim.num_warmup_steps(self.total_schedule_steps)
        self.require(
            not is_known or warmup <= self.total_schedule_steps,
            "optim.warmup_steps",
            f"must be at most the steps of the schedule, {self.total_schedule_steps}",
            f"lower it, or raise {named('train.steps')}",
        )
        return self


_EITHER = (("train.steps", "train.epochs"), ("optim.warmup_steps", "optim.warmup_ratio"))
"""Options of which the second, where it is set, takes the place of the first."""


def _without_the_other(default: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes that unset a recipe's second of two options where the first is given."""
    return {second: None for first, second in _EITHER if first in changes and attrgetter(second)(default) is not None}


def with_epochs(config: RunConfig, *, num_samples: int | None) -> RunConfig:
    """The configuration with train.steps in the place of train.epochs, if that is set.

    Args:
        num_samples: number of training samples; None: not known.
    """
    train = config.train
    if train.epochs is None:
        return config
    if num_samples is None:
        raise ConfigError(
            "train.epochs",
            train.epochs,
            f"the data of family {config.family} do not say how many training samples they have (num_training)",
            f"use {named('train.steps')}",
        )
    steps = max(1, math.ceil(train.epochs * num_samples / train.batch_size))
    changes = {"train.epochs": None, "train.steps": steps}
    return config.updated(with_fitting_warmup(config, changes))


def with_fitting_warmup(default: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a recipe, with its warm-up shortened where it is longer than the new steps.

    Args:
        changes: new values by dotted name. A warm-up among them, also in a whole section "optim", is kept as it is.

    Returns:
        The changes; where the steps are too few for the recipe's warm-up, with a warm-up of the same share of the
        steps.
    """
    usual = with_usual(changes, begins_with=default.train.init_from)
    changes = {**_without_the_other(default, changes), **with_learning_rate(usual)}
    warmup = default.optim.warmup_steps
    own = {"optim", "optim.warmup_steps", "optim.warmup_ratio"}
    lengths = {"train", "train.steps", "optim.schedule_steps"}
    given = changes.keys()
    if own & given or default.optim.warmup_ratio is not None or not lengths & given:
        return changes
    steps = default.updated({**changes, "optim.warmup_steps": 0}).total_schedule_steps
    if warmup > steps:
        warmup = warmup * steps // default.total_schedule_steps
    return {**changes, "optim.warmup_steps": warmup}
