"""Opening of models from folders: runs of ours, models of the hub, and quantised folders.

`find_model` describes a folder and reads no weights; `open_model` makes the model. Training places models itself and takes
only the weights, by `Run.load_into`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.models.task import Task
from expertmesh.moe.layer import grouped_layers
from expertmesh.parallel.construct import give_memory
from expertmesh.parallel.inference import spread_for_inference
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.serving import as_plain
from expertmesh.runs.arithmetic import Arithmetic
from expertmesh.runs.check_memory import check_weights
from expertmesh.runs.paged import put_slots
from expertmesh.runs.precision import (
    Precision,
    plain_precision,
    resolve_device,
    trained_precision,
)
from expertmesh.runs.quantized import PackedExperts, put_quantized
from expertmesh.runs.run_dir import TOKENIZER, Run, find_model
from expertmesh.text.format import TextFormat, text_format, told_by_files


@dataclass(frozen=True)
class LoadedModel:
    """A trained model in this process. `model, tokenizer = loaded` takes the two apart.

    Attributes:
        run: the folder: path, configuration, family.
        task: the family's task for its configuration.
        model: the model in evaluation mode, with weights of the folder in their stored type.
        tokenizer: tokenizer of the folder; None for families that read no text.
        precision: device and types of its computation; weights in BF16 or FP16 compute in their type.
        ranks: ranks that have parts of the model; all make the same calls.
        shared: `EngineRanks`, by which the ranks of an engine share the model; None: they do not.
    """

    run: Run
    task: Task
    model: nn.Module
    tokenizer: Tokenizer | None
    precision: Precision
    ranks: Ranks
    shared: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Model and tokenizer."""
        return iter((self.model, self.tokenizer))

    @cached_property
    def decoder(self) -> Any:
        """The model's interface for generation: a `CausalLM`, or an `EncoderDecoder` for a family that translates.

        Raises:
            ConfigError: models of its family generate no text.
        """
        return self.task.builder.decoder(self.model)

    @cached_property
    def text(self) -> TextFormat:
        """The model's text format: its tokenizer, special tokens and chat template.

        Raises:
            ConfigError: models of its family generate no text, or files beside the tokenizer are damaged.
            CheckpointError: the tokenizer is missing or damaged.
        """
        tokenizer = self.run.load_tokenizer() if self.tokenizer is None else self.tokenizer
        return text_format(tokenizer, self.run.path / TOKENIZER, model=self.decoder)


def open_model(
    source: str | Path | Run,
    *,
    family: Family | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    es_degree: int | None = None,
    for_autocast: bool = False,
    is_placed: bool = False,
    slots: "Slots | None" = None,
    share: Callable[[nn.Module], object] | None = None,
) -> LoadedModel:
    """Build the model of a folder and load its weights. The ranks share the comparison of checksums.

    Args:
        source: the folder, see `find_model`; or the `Run` that it returned, perhaps changed.
        family: see `find_model`.
        device: device of the computation, see `device_of`; None: the device of the training.
        dtype: type of weights and products (routers keep FP32); None: the type of the files; a run's products have the type of its training.
        ranks: ranks that run the model together, see `spread_for_inference`; every rank must call. None: this process alone.
        es_degree: slices of each expert, see `spread_for_inference`.
        for_autocast: whether the model will only be used under `precision.autocast()`. Experts are then kept in that type, with
            the same results, instead of being cast in each call.
        is_placed: spread the model over the ranks by `parallel` of its configuration, as in training; its tokenizer is not read.
        slots: keep experts in the files and copy those that tokens choose to the device; None: all experts are on the device.
        share: function that cuts the model for the ranks by `expertmesh.parallel.serving`, before it has weights, in place of
            `spread_for_inference`.

    Raises:
        ConfigError: the folder holds no model, this machine lacks the device or type, or the ranks do not fit its layers.
        CheckpointError: there are no usable weights, or no tokenizer.
        PeerError: another rank failed.
    """
    ranks = Ranks() if ranks is None else ranks

    def find() -> tuple[Run, Tokenizer | None, torch.device]:
        run = source if isinstance(source, Run) else find_model(source, family)
        run.check_whole()
        has_text = run.family.generates_text or TOKENIZER in run.family.files
        tokenizer = run.load_tokenizer() if has_text and not is_placed else None
        return run, tokenizer, device_of(run, device)

    sought, tokenizer, place = ranks.on_all(find)
    run = sought.with_weights(ranks)

    def trained() -> Arithmetic | None:
        found = None if run.is_hub else trained_precision(run.arithmetic, run.config.train, place)
        return None if found is None else found.arithmetic

    known = ranks.on_rank0(trained)

    def build() -> LoadedModel:
        weights = run.open_weights(dtype)
        used = _precision_of(weights, dtype, place, known)
        if isinstance(weights, PackedExperts) or slots is not None:
            return _open_empty(
                run,
                weights,
                tokenizer,
                used,
                ranks,
                slots=slots,
                share=share,
                for_autocast=for_autocast,
            )
        task: Task = run.family.open_task(_told(run, tokenizer))
        check_weights(run.family, run.config, used.device, num_ranks=ranks.size)
        if is_placed:
            task.builder.check(ranks.size)
            model = task.builder.place(device=used.device, dtype=used.master_dtype, ranks=ranks)
        else:
            spread, world = share, ranks.world
            if share is None and world is not None:

                def spread(model: nn.Module) -> None:
                    spread_for_inference(model, world, es_degree=es_degree)

            model = _built(task, used, spread, for_autocast=for_autocast)
        read_into(weights, model.state_dict())
        if share is not None:
            as_plain(model)
        return LoadedModel(run, task, model.eval(), tokenizer, used, ranks)

    return ranks.on_all(build)


@dataclass(frozen=True)
class Slots:
    """Slots of each layer for experts that stay in their files; see `put_slots`."""

    count: int
    fetch_ahead: bool | None = None


def _open_empty(
    run: Run,
    weights: TensorSource,
    tokenizer: Tokenizer | None,
    precision: Precision,
    ranks: Ranks,
    *,
    slots: Slots | None,
    share: Callable[[nn.Module], object] | None,
    for_autocast: bool,
) -> LoadedModel:
    """Open a model with quantised experts or experts in slots, without memory for their full matrices."""
    what = "quantised" if isinstance(weights, PackedExperts) else "given expert slots"
    if ranks.size > 1 and share is None:
        raise ConfigError(
            f"{run.path}: is {what}, and ranks share such experts in an engine; give em.Engine(..., parallel=), or open the model as it"
            " was trained"
        )
    task: Task = run.family.open_task(_told(run, tokenizer))
    model = task.builder.build(device=torch.device("meta"), dtype=precision.master_dtype)
    if for_autocast:
        _keep_narrow(model, precision)
    if isinstance(weights, PackedExperts):
        put_quantized(model, weights)
    if share is not None:
        share(model)
    if slots is not None:
        put_slots(
            model,
            weights,
            num_slots=slots.count,
            fetch_ahead=slots.fetch_ahead,
            device=precision.device,
        )
    give_memory(model, device=precision.device, in_huge_pages=slots is None)
    read_into(weights, model.state_dict())
    if share is not None:
        as_plain(model)
    return LoadedModel(run, task, model.eval(), tokenizer, precision, ranks)


def _keep_narrow(model: nn.Module, precision: Precision) -> None:
    """Keep experts in the type that autocast casts them to."""
    for _, _, experts in grouped_layers(model):
        experts.to(precision.compute_dtype)


def device_of(run: Run, device: str | torch.device | None) -> torch.device:
    """Device for using a model.

    Args:
        run: the model's folder.
        device: auto, cpu, cuda or cuda:N; None: the device of the training.

    Raises:
        ConfigError: this machine has no such device.
    """
    name = run.config.train.device if device is None else str(device)
    return resolve_device(name, option="device")


def _built(
    task: Task,
    precision: Precision,
    spread: Callable[[nn.Module], object] | None,
    *,
    for_autocast: bool,
) -> nn.Module:
    """The model, spread over the ranks by `spread`; all of its weights are read next."""

    def prepare(model: nn.Module) -> None:
        if for_autocast:
            _keep_narrow(model, precision)
        if spread is not None:
            spread(model)

    return task.builder.build_spread(
        prepare, device=precision.device, dtype=precision.master_dtype, is_read_next=True
    )


def _told(run: Run, tokenizer: Tokenizer | None) -> RunConfig:
    """The run's configuration, with `end_ids` and `start_ids` from the files beside the tokenizer, which old runs lack."""
    config = run.config.model_copy(update={"adapter": AdapterConfig()})  # merged into its weights
    model: Any = getattr(config, "model", None)
    if tokenizer is None or not (run.family.generates_text and hasattr(model, "start_ids")):
        return config
    told = told_by_files(run.path / TOKENIZER, tokenizer)
    ends, start = (*model.end_ids, *told.get("end_ids", ())), model.start_ids
    changes = {
        "model.end_ids": tuple(dict.fromkeys(ends)),
        "model.start_ids": told.get("start_ids") if start is None else start,
    }
    return config.updated(changes) if told else config


def _precision_of(
    weights: TensorSource,
    dtype: torch.dtype | None,
    device: torch.device,
    known: Arithmetic | None,
) -> Precision:
    """The given type, or the training's, or the narrowest of stored weights: converted runs have BF16 beside FP32 routers."""
    if dtype is not None:
        return plain_precision(dtype, device, "as asked for")
    if isinstance(weights, PackedExperts):
        return plain_precision(weights.products_dtype, device, "the type of its scales")
    kept = {tensor.dtype for tensor in weights.tensors.values() if tensor.dtype.is_floating_point}
    narrowest = min(kept, key=lambda one: (one.itemsize, str(one)), default=torch.float32)
    found = None if known is None else Precision.of(device, known)
    if found is not None and narrowest.itemsize >= found.master_dtype.itemsize:
        return found
    return plain_precision(narrowest, device, "the type of its files")
