"""The one way from a folder to a model and its text format: for a run of ours, or a model as the hub has it.

`find_model` says what a folder holds and reads no weights; `open_model` makes the model. Training places models itself and takes
only the weights, by `Run.load_into`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from expertmesh.checkpoints.compressed_tensors import QuantizedModel, quantization_of
from expertmesh.checkpoints.hub.load_pretrained import hub_run_config, is_hub_folder
from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.config.base import expanded
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.models.gpt.family import GPT
from expertmesh.models.task import Task
from expertmesh.moe.experts import GroupedExperts
from expertmesh.parallel.inference import spread_for_inference
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.serving import as_plain
from expertmesh.runs.arithmetic import Arithmetic
from expertmesh.runs.check_memory import check_weights
from expertmesh.runs.paged import put_slots
from expertmesh.runs.precision import Precision, resolve_device, resolve_precision
from expertmesh.runs.quantized import arrange, put_quantized
from expertmesh.runs.run_dir import TOKENIZER, Run, RunDir, find_run
from expertmesh.text.format import TextFormat, text_format, told_by_files


@dataclass(frozen=True)
class LoadedModel:
    """A trained model in this process. `model, tokenizer = loaded` takes the two apart.

    Attributes:
        run: the folder: path, configuration, family.
        task: what trained it, or could go on.
        model: in evaluation mode, with the weights of the folder, of the type that they have there.
        tokenizer: of the folder; None where models of its family read no text.
        precision: what it computes in, and where; of weights in BF16 or FP16 that type.
        ranks: those that have parts of it; all call it alike.
        shared: where an engine is to serve it over ranks: how they share it, an `EngineRanks`; None: they do not.
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
        """The model as generation wants it, a `CausalLM`, or an `EncoderDecoder` of a family that translates.

        Raises:
            ConfigError: models of its family generate no text.
        """
        return self.task.builder.decoder(self.model)

    @cached_property
    def text(self) -> TextFormat:
        """What text is to the model.

        Raises:
            ConfigError: models of its family generate no text, or files beside the tokenizer are damaged.
            CheckpointError: the tokenizer is missing or damaged.
        """
        tokenizer = self.run.load_tokenizer() if self.tokenizer is None else self.tokenizer
        return text_format(tokenizer, self.run.path / TOKENIZER, model=self.decoder)


def find_model(path: str | Path, family: Family | None = None) -> Run:
    """What a folder says of its model; no weights are read.

    Args:
        path: a run directory, or a folder as transformers saves one, of an architecture that runs as our GPT; or one of `expertmesh quantize`.
        family: of a run of a family that is none of this package.

    Raises:
        ConfigError: it is neither, or of another family.
    """
    folder = expanded(path)
    is_quantized = quantization_of(folder) is not None
    if is_hub_folder(folder):
        config = hub_run_config(folder, is_quantized=is_quantized)
        return Run(folder, config, GPT, folder, is_quantized)
    if is_quantized:
        found, family = RunDir(folder).read_config(family, is_quantized=True)
        return Run(folder, found, family, folder, is_quantized)
    return find_run(path, family)


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
    """Build the model of a folder and load its weights, whose bytes are compared with their checksums by all ranks together.

    Args:
        source: the folder, see `find_model`; or what that returned, perhaps with changes.
        family: see there.
        device: that computes, see `device_of`; None: that of the training.
        dtype: of weights and products (routers keep FP32); None: that of the weights in the folder where it is narrower than FP32,
            else what the training computed in.
        ranks: those that run the model together, see `spread_for_inference`; every rank must call. None: this process alone.
        es_degree: slices of each expert, see there.
        for_autocast: the model will only be used under `precision.autocast()`, which casts the weights of all experts in
            each call, for one token, too: they are kept in that type, with the same results.
        is_placed: spread it over the ranks as its configuration's `parallel` says, as training does; its tokenizer is not read.
        slots: let the experts stay in the files, and copy those that tokens choose; None: all are on the device.
        share: how the ranks share the model, in the place of `spread_for_inference`: cuts it by `expertmesh.parallel.serving` before it has
            weights.

    Raises:
        ConfigError: this is no such folder, the device or type is not to be had here, or the ranks do not fit its layers.
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

    def choose() -> Arithmetic:
        train = run.config.train
        return resolve_precision(train, record=run.arithmetic, device=place).arithmetic

    precision = Precision.of(place, ranks.on_rank0(choose))

    def build() -> LoadedModel:
        weights = run.open_weights(dtype)
        narrow = weights.scale_dtype if isinstance(weights, QuantizedModel) else None
        found = narrow if dtype is None else dtype
        used = (
            _of_stored(weights, precision)
            if found is None
            else replace(precision, compute_dtype=found, master_dtype=found)
        )
        if narrow is not None or slots is not None:
            return _open_empty(
                run, weights, tokenizer, used, ranks, slots=slots, for_autocast=for_autocast
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
    """How experts that stay in their files come to the device.

    Attributes:
        count: experts of each layer that are there at a time.
        fetch_ahead: whether a layer has the next one's experts fetched; None: unless a CPU computes, which would do the copying, too.
    """

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
    for_autocast: bool,
) -> LoadedModel:
    """A model whose experts are quantised or in slots: it never has memory for their matrices as they are trained."""
    what = "quantised" if isinstance(weights, QuantizedModel) else "given expert slots"
    if ranks.size > 1:
        raise ConfigError(
            f"{run.path}: is {what}, and such experts are on one process; start one, or open the model as it was trained"
        )
    task: Task = run.family.open_task(_told(run, tokenizer))
    model = task.builder.build(device=torch.device("meta"), dtype=precision.master_dtype)
    if for_autocast:
        _keep_narrow(model, precision)
    if isinstance(weights, QuantizedModel):
        put_quantized(model, weights)
    if slots is not None:
        put_slots(
            model,
            weights,
            num_slots=slots.count,
            fetch_ahead=slots.fetch_ahead,
            device=precision.device,
        )
    model.to_empty(device=precision.device)
    read_into(weights, model.state_dict())
    arrange(model)
    return LoadedModel(run, task, model.eval(), tokenizer, precision, ranks)


def _keep_narrow(model: nn.Module, precision: Precision) -> None:
    """Keep experts in the type that autocast casts them to."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.to(precision.compute_dtype)


def device_of(run: Run, device: str | torch.device | None) -> torch.device:
    """Where a model is used.

    Args:
        run: its folder.
        device: auto, cpu, cuda or cuda:N; None: that of the training.

    Raises:
        ConfigError: there is no such device here.
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
    """The model with memory, spread over the ranks if there are several."""

    def prepare(model: nn.Module) -> None:
        if for_autocast:
            _keep_narrow(model, precision)
        if spread is not None:
            spread(model)

    device, dtype = precision.device, precision.master_dtype
    if spread is not None:
        return task.builder.build_spread(prepare, device=device, dtype=dtype)
    model = task.builder.build(device=device, dtype=dtype)
    prepare(model)
    return model


def _told(run: Run, tokenizer: Tokenizer | None) -> RunConfig:
    """The run's configuration; its model knows what the files beside the tokenizer say of texts, old runs' too."""
    config = run.config
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


def _of_stored(weights: TensorSource, precision: Precision) -> Precision:
    """The precision for weights as they are stored, but for routers and other tensors that are kept wider: a converted run has BF16 ones."""
    found = [kept.dtype for kept in weights.tensors.values() if kept.dtype.is_floating_point]
    narrowest = min(found, key=lambda dtype: dtype.itemsize, default=precision.master_dtype)
    if narrowest.itemsize >= precision.master_dtype.itemsize:
        return precision
    return replace(precision, compute_dtype=narrowest, master_dtype=narrowest)
