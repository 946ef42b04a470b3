"""`--deepspeed ds.json`: what DeepSpeed's configuration says of a training, as options of ours; the rest is refused by
name."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from expertmesh.config.base import expanded
from expertmesh.config.launched import launched_rank
from expertmesh.config.no_counterpart import line
from expertmesh.config.values import shown
from expertmesh.errors import ConfigError, Line

Options = dict[str, Any]
_log = logging.getLogger("expertmesh.train")

FOR_SPEED = {
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "zero_allow_untested_optimizer"),  # noqa: E501
    *("zero_force_ds_cpu_optimizer", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather"),  # noqa: E501
    *("communication_data_type", "aio", "checkpoint", "timers", "dataloader_drop_last"),
}  # fmt: skip
"""Sections about speed, logs and files of DeepSpeed's own, without effect here."""
ZERO_FOR_SPEED = {
    *("allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients", "cpu_offload_use_pin_memory"),  # noqa: E501
    *("elastic_checkpoint", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1", "load_from_fp32_weights"),  # noqa: E501
    *("log_trace_cache_warnings", "memory_efficient_linear", "overlap_comm", "override_module_apply", "parameter_alignment"),  # noqa: E501
    *("pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "sub_group_size"),
    *("use_multi_rank_bucket_allreduce", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_allgather_sequential"),  # noqa: E501
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold"),  # noqa: E501
    *("stage3_use_all_reduce_for_fetch_params",),
}  # fmt: skip
"""Options of `zero_optimization` about speed and files, without effect here."""
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "muon": "muon",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_deepspeed_file(path: str) -> Options:
    """Options by dotted name from a JSON file of DeepSpeed; values of "auto" are left to the recipe."""
    try:
        given = json.loads(expanded(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:160]
        raise ConfigError(f"--deepspeed {path}: cannot be read as JSON ({reason}); give DeepSpeed's file") from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"--deepspeed {path}: holds {shown(given)}, no object; give DeepSpeed's file")
    try:
        return options_of_deepspeed(given, num_ranks=launched_rank()[1])
    except ConfigError as error:
        raise ConfigError(f"--deepspeed {path}: {error}") from None


def options_of_deepspeed(given: Mapping[str, Any], *, num_ranks: int) -> Options:
    """Options by dotted name of DeepSpeed's configuration on so many ranks.

    Example:
        >>> options_of_deepspeed({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, num_ranks=1)
        {'parallel.zero_stage': 2, 'train.dtype': 'bfloat16'}
    """
    found: Options = {}
    for name, value in given.items():
        if value in ("auto", None):
            continue
        if name in _SECTIONS:
            _check_kind(name, value, _KINDS.get(name, Mapping))
            found |= dict(_SECTIONS[name](value, num_ranks))
        elif name in _BATCH:
            _check_kind(name, value, int)
        elif name not in FOR_SPEED and _is_on(value):
            _refuse(name, value, "leave it out")
    idle = sorted(FOR_SPEED & given.keys())
    idle += [f"zero_optimization.{name}" for name in sorted(ZERO_FOR_SPEED & set(given.get("zero_optimization") or ()))]
    if idle:
        _log.warning(Line(f"of DeepSpeed's options these have no effect here: {', '.join(idle)}"))
    return found | _batch(given, num_ranks)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another JSON type, and counts below 1."""
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (kind is int and value < 1):
        raise ConfigError(f"{name}={shown(value)}: must be {_CALLED[kind]}; correct it")


_CALLED: dict[Any, str] = {
    Mapping: "an object",
    int: "an integer of at least 1",
    (int, float): "a number",
    list: "a list",
}


def _is_on(value: Any) -> bool:
    """Whether a section asks for anything."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    return bool(value)


def _refuse(name: str, value: Any, way_out: str) -> None:
    raise ConfigError(line(f"{name}={shown(value)}", way_out))


def _params(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Values in `params` of a section that DeepSpeed does not choose itself."""
    params = section.get("params") or {}
    _check_kind(f"{name}.params", params, Mapping)
    return _said(params)


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a section that DeepSpeed does not choose itself."""
    return {name: value for name, value in section.items() if value not in ("auto", None)}


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(given: Mapping[str, Any], num_ranks: int) -> Options:
    """The global batch, and how many passes it takes."""
    known = _said({name: given.get(name) for name in _BATCH})
    batch, micro, passes = (known.get(name) for name in _BATCH)
    if batch is None:
        if micro is None:
            return {} if passes is None else {"train.gradient_accumulation_steps": passes}
        batch = micro * (passes or 1) * num_ranks
    if passes is None:
        passes = batch // (micro * num_ranks) if micro else 1
    if micro is not None and micro * passes * num_ranks != batch:
        raise ConfigError(
            f"train_batch_size={batch}: is not train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={passes} times {num_ranks} ranks; correct one of them"
        )
    return {"train.batch_size": batch, "train.gradient_accumulation_steps": passes}


def _optimizer(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
    kind, given = str(section.get("type", "Adam")), _params(section, "optimizer")
    if kind.lower() not in _OPTIMIZERS:
        _refuse("optimizer.type", kind, "use AdamW or Muon")
    yield "optim.name", _OPTIMIZERS[kind.lower()]
    names = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum"}
    for name, value in given.items():
        if name == "betas":
            if not isinstance(value, list) or len(value) != 2:
                raise ConfigError(f"optimizer.params.betas={shown(value)}: must be two numbers; correct it")
            yield from zip(("optim.beta1", "optim.beta2"), value, strict=True)
        elif name in names:
            yield f"optim.{names[name]}", value
        elif name == "adam_w_mode" and not value:
            _refuse("optimizer.params.adam_w_mode", value, "use decoupled weight decay")
        elif name not in ("torch_adam", "adam_w_mode", "fused", "foreach"):
            _refuse(f"optimizer.params.{name}", value, "leave it out")


def _scheduler(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
    kind, given = str(section.get("type")), _params(section, "scheduler")
    if kind not in _SCHEDULES:
        _refuse("scheduler.type", kind, f"use one of {', '.join(_SCHEDULES)}")
    yield "optim.schedule", _SCHEDULES[kind]
    if kind == "WarmupDecayLR":
        yield "optim.min_lr_ratio", 0.0
    if kind != "WarmupCosineLR" and given.pop("warmup_type", "log") != "linear":
        _refuse("scheduler.params.warmup_type", "log", 'write "warmup_type": "linear"')
    names = {
        "warmup_num_steps": "optim.warmup_steps",
        "warmup_max_lr": "optim.lr",
        "total_num_steps": "optim.schedule_steps",
        "cos_min_ratio": "optim.min_lr_ratio",
    }
    for name, value in given.items():
        if name in names:
            yield names[name], value
        elif value and name != "last_batch_iteration":
            _refuse(f"scheduler.params.{name}", value, "leave it out")


def _zero(section: Mapping[str, Any], num_ranks: int) -> Iterator[tuple[str, Any]]:
    given = _said(section)
    stage = given.get("stage", 0)
    if stage == 0 and num_ranks > 1:
        yield "parallel.dp_replicate_degree", num_ranks
    elif stage:
        yield "parallel.zero_stage", stage
    for name, value in given.items():
        if name in ("offload_optimizer", "offload_param"):
            _check_kind(f"zero_optimization.{name}", value, Mapping)
            device = value.get("device") or "none"
            if device not in ("none", "cpu"):
                _refuse(f"zero_optimization.{name}.device", device, "use cpu")
            if device == "cpu":
                yield "parallel.offload", True
        elif name == "cpu_offload":
            if value:
                yield "parallel.offload", True
        elif name not in {"stage"} | ZERO_FOR_SPEED and (value is True or value not in (False, 1, -1)):
            _refuse(f"zero_optimization.{name}", value, "leave it out")


def _dtype(dtype: str) -> Callable[[Mapping[str, Any], int], Iterator[tuple[str, Any]]]:
    def read(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
        if section.get("enabled") is True:
            yield "train.dtype", dtype

    return read


def _clipping(value: float, _: int) -> Iterator[tuple[str, Any]]:
    if not value:
        _refuse(
            "gradient_clipping",
            value,
            "give a norm, for example 1.0, or leave it out for that of the recipe",
        )
    yield "optim.grad_clip", value


def _experts(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
    if section.get("enabled"):
        for name, value in _said(section).items():
            if name == "autoep_size":
                yield "parallel.ep_degree", (value,)
            elif name not in ("enabled", "preset_model"):  # a recipe names its model
                _refuse(f"expert_parallel.{name}", value, "leave it out")


def _tensors(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
    for name, value in _said(section).items():
        if name == "autotp_size":
            yield "parallel.tp_degree", max(value, 1)
        elif _is_on(value):
            _refuse(f"tensor_parallel.{name}", value, "leave it out")


def _tracker(name: str) -> Callable[[Mapping[str, Any], int], Iterator[tuple[str, Any]]]:
    def read(section: Mapping[str, Any], _: int) -> Iterator[tuple[str, Any]]:
        if section.get("enabled"):
            yield "train.trackers", (name,)

    return read


def _plain(name: str) -> Callable[[Any, int], Iterator[tuple[str, Any]]]:
    return lambda value, _: iter([(name, value)])


_SECTIONS: dict[str, Callable[[Any, int], Iterator[tuple[str, Any]]]] = {
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "zero_optimization": _zero,
    "bf16": _dtype("bfloat16"),
    "fp16": _dtype("float16"),
    "gradient_clipping": _clipping,
    "expert_parallel": _experts,
    "tensor_parallel": _tensors,
    "tensorboard": _tracker("tensorboard"),
    "wandb": _tracker("wandb"),
    "steps_per_print": _plain("train.log_every"),
}
"""Sections with a counterpart, and how they are read."""
_KINDS: dict[str, Any] = {"gradient_clipping": (int, float), "steps_per_print": int}
"""Types of the sections that are no objects."""
