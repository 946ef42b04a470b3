"""Quantized folders made from a run, a checkpoint or a hub model, under hub names if an architecture fits."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoints.compressed_tensors import Scheme, is_expert, own_pieces
from expertmesh.checkpoints.hub.family import Piece
from expertmesh.checkpoints.hub.find_family import find_hub_family, hub_family
from expertmesh.checkpoints.hub.layout import pieces
from expertmesh.checkpoints.hub.load_pretrained import hub_dtype, read_config
from expertmesh.checkpoints.safetensors import QUANTIZATION, FileTensor, write_shards
from expertmesh.checkpoints.source import TensorSource, read_whole
from expertmesh.config.base import expanded, parse_json
from expertmesh.config.output_file import complete_folder, new_folder
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub.exports import export_family, origin_of
from expertmesh.integrations.hub.save import their_value, write_rest
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.ops.quantized.pack import to_words
from expertmesh.ops.quantized.rounding import FORMATS, GROUP_SIZES, Format, rounded
from expertmesh.runs.arithmetic import read_arithmetic
from expertmesh.runs.calibration import MOST_BYTES, importance_of
from expertmesh.runs.open import open_model
from expertmesh.runs.precision import Precision
from expertmesh.runs.quantized import REPORT
from expertmesh.runs.run_dir import TOKENIZER, Run, RunDir, find_model
from expertmesh.text.format import hub_files
from expertmesh.text.tokenizer import EXTRAS
from expertmesh.training.threads import threads_of_calls

_KEEP = ("router.", "norm.", "embedding.", "output.", "gate.", "expert_bias")
"""Parts of names of tensors that are never quantized."""
_ROWS = 512
"""Approximate tokens of a forward of the calibration, for which the number of threads is chosen."""


class Quantized(NamedTuple):
    """Result of a quantization."""

    path: Path  # the new folder
    what: str  # description in words
    report: dict[str, Any]  # contents of its `quantization.json`


class _Plan(NamedTuple):
    """Tensors to write, and their quantization."""

    scheme: Scheme  # scheme of the quantized matrices
    by_ours: list[tuple[str, list[Piece]]]  # pieces of each of our tensors
    rounds: frozenset[str]  # names of the output matrices that are quantized
    dtype: torch.dtype  # dtype of all other tensors and of the scales
    # weight of an error in each column of w_in and w_out, (E, K) or (E, K, K) by our names; empty: equal weights
    importance: Mapping[str, Tensor]

    def parts(self, name: str, shape: tuple[int, ...], ours: str) -> list[FileTensor]:
        """Tensors of the files that one matrix becomes."""
        if name in self.rounds:
            module = name.removesuffix("weight")
            rows, columns = shape
            found = self.scheme.parts(rows, columns, self.dtype)
            return [FileTensor(module + end, kept.dtype, kept.shape) for end, kept in found.items()]
        is_bias = ours.endswith("expert_bias_E")
        return [FileTensor(name, torch.float32 if is_bias else self.dtype, shape)]


def quantize(
    source: str | Path,  # a run directory, whose newest good checkpoint is used, or a folder saved by transformers
    target: str | Path,  # folder to create; it must not exist
    *,
    format: Format,  # int8 (a scale per row), int4 (one per group of a row) or fp8 (one per block of 128 by 128)
    group_size: int | None = None,  # columns of a group of int4: 32, 64 or 128; None: 64. Other formats have no groups.
    layers: str = "experts",  # "experts", or "all", which adds the matrices of attention and dense MLPs
    dtype: torch.dtype | None = None,
    calibration: str | Path | None = None,
    calibration_bytes: int = MOST_BYTES,
    on_opened: Callable[[Precision], None] | None = None,
) -> Quantized:
    """Quantize a model.

    Args:
        dtype: dtype of all other tensors, of the scales and of matmuls; None: a hub folder's dtype, or a run's compute
            dtype.
        calibration: text file that is typical of the model's input; int4 and int8 scales then minimise the error of the
            outputs for its tokens. None: scales minimise the error of the weights.
        calibration_bytes: memory for the statistics of that text; with less, later columns do not compensate the errors
            of earlier ones.
        on_opened: function that is told in which type the model computes the text of `calibration`.

    Returns:
        Path, description and report of the new folder.

    Example:
        >>> quantize("runs/gpt-moe-demo", "models/demo-int8", format="int8")
    """
    _check_options(format, group_size, layers, calibration)
    source, target = expanded(source), new_folder("target", target)
    run = find_model(source)
    if run.is_quantized:
        raise ConfigError("source", source, "is quantised already", "give what it was made of")
    if run.family.name != "gpt":
        raise ConfigError("source", source, f"is of family {run.family.name}", "quantise a model of family gpt")
    run = run.with_weights()
    weights = run.open_weights(dtype)
    dtype = dtype or _dtype_of(run)
    scheme = Scheme(format) if group_size is None else Scheme(format, group_size)
    plan = _planned(run, weights, scheme, layers, dtype)
    if calibration is not None:
        opened = open_model(run)
        with threads_of_calls(opened.model, opened.precision, num_rows=_ROWS):
            importance = importance_of(opened, expanded(calibration), most_bytes=calibration_bytes, on_read=on_opened)
        plan = plan._replace(importance=importance)
    with complete_folder(target) as partial:
        sizes = _write_weights(weights, plan, partial)
        what = _write_rest(run, plan, partial)
        report = {
            "source": str(source),
            "format": format,
            "group_size": scheme.group_size if format == "int4" else None,
            "layers": layers,
            "calibration": None if calibration is None else str(calibration),
            **sizes,
        }
        (partial / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return Quantized(target, what, report)


def _check_options(format: str, group_size: int | None, layers: str, calibration: str | Path | None) -> None:
    """Refuse values that do not exist, and options without effect."""
    for name, value, known in (("format", format, FORMATS), ("layers", layers, ("experts", "all"))):
        if value not in known:
            raise ConfigError(name, value, f"must be {' or '.join(known)}", f"use {known[0]}")
    if group_size is not None:
        if format != "int4":
            raise ConfigError("group_size", group_size, f"has no effect with {format}", "leave it out")
        if group_size not in GROUP_SIZES:
            raise ConfigError("group_size", group_size, "must be 32, 64 or 128", "use 64")
    if calibration is not None and format == "fp8":
        raise ConfigError("calibration", calibration, "changes nothing in fp8", "leave it out")


def _dtype_of(run: Run) -> torch.dtype:
    if run.is_hub:
        return hub_dtype(read_config(run.path), run.path)
    found = read_arithmetic(run.arithmetic)
    is_bfloat16 = found is not None and found.dtype == "bfloat16"
    return torch.bfloat16 if is_bfloat16 else torch.float32


def _model_of(run: Run) -> ModelConfig:
    """Model configuration of a run."""
    config: Any = run.config
    found: ModelConfig = config.model
    return found


def _hub_type(run: Run) -> str | None:
    """`model_type` of the hub architecture to write; None: our own names."""
    if run.is_hub:
        return hub_family(read_config(run.path)).model_type
    try:
        return export_family(_model_of(run), origin_of(run.path)).model_type
    except ConfigError:
        return None


def _planned(run: Run, weights: TensorSource, scheme: Scheme, layers: str, dtype: torch.dtype) -> _Plan:
    model_type = _hub_type(run)
    found = own_pieces(weights.tensors) if model_type is None else pieces(_model_of(run), model_type, one_by_one=True)
    by_ours = [(ours, list(several)) for ours, several in groupby(found, lambda p: p.ours)]
    rounds: dict[str, Any] = {}
    for ours, several in by_ours:
        is_other = layers == "all" and not any(kept in ours for kept in _KEEP)
        for piece in several:
            if is_expert(ours) or (is_other and len(piece.hub_shape) == 2 and piece.hub_name.endswith(".weight")):
                rounds[piece.hub_name] = piece.hub_shape
    if not rounds:
        raise ConfigError("source", run.path, "has no routed experts", "quantise a mixture")
    for name, (_, columns) in rounds.items():
        scheme.check(columns, name)
    return _Plan(scheme, by_ours, frozenset(rounds), dtype, {})


def _write_weights(weights: TensorSource, plan: _Plan, folder: Path) -> dict[str, int]:
    """Write the files tensor by tensor; returns their total size before and after."""
    parts = [
        part
        for ours, several in plan.by_ours
        for name, shape in {p.hub_name: p.hub_shape for p in several}.items()
        for part in plan.parts(name, shape, ours)
    ]
    total = write_shards(folder, parts, _values(weights, plan))
    before = sum(
        torch.Size(shape).numel() * plan.dtype.itemsize
        for _, several in plan.by_ours
        for shape in {p.hub_name: p.hub_shape for p in several}.values()
    )
    return {"bytes": total, "bytes_before": before}


def _values(weights: TensorSource, plan: _Plan) -> Iterator[Tensor]:
    """Tensors of the files, in order."""
    for ours, several in plan.by_ours:
        tensor = read_whole(weights, ours)
        for name, shape in {p.hub_name: p.hub_shape for p in several}.items():
            kept = tensor.dtype if name in plan.rounds else plan.parts(name, shape, ours)[0].dtype
            found = their_value(FileTensor(name, kept, shape), several, tensor)
            if name not in plan.rounds:
                yield found
                continue
            if not found.isfinite().all():  # rounding would hide it
                raise ConfigError(f"{weights.path}: {name} has numbers that are not finite; mend the model first")
            first = next(p for p in several if p.hub_name == name).ours_at[0].start
            importance = plan.importance.get(ours)
            yield from _rounded(found, plan, None if importance is None else importance[first % len(importance)])
        del tensor  # freed before the next one is read


def _rounded(matrix: Tensor, plan: _Plan, importance: Tensor | None) -> list[Tensor]:
    scheme = plan.scheme
    values, scales = rounded(
        matrix,
        scheme.format,
        group_size=scheme.group_size,
        scale_dtype=plan.dtype,
        importance=importance,
    )
    if scheme.format == "fp8":
        return [values, scales]
    words = to_words(values, 4 if scheme.format == "int4" else 8)
    return [words, scales, torch.tensor(matrix.shape)]


def _write_rest(run: Run, plan: _Plan, folder: Path) -> str:
    """Write all files except the weights; returns a description in words."""
    modules = {
        p.hub_name.removesuffix(".weight")
        for _, several in plan.by_ours
        for p in several
        if p.hub_name.endswith(".weight") and len(p.hub_shape) == 2
    }
    ignored = sorted(modules - {name.removesuffix(".weight") for name in plan.rounds})
    more: dict[str, Any] = {QUANTIZATION: plan.scheme.config(ignored)}
    name = str(plan.dtype).removeprefix("torch.")
    model_type = _hub_type(run)
    if run.is_hub:
        for path in hub_files(run.path).values():
            target = folder / path.relative_to(run.path)
            target.parent.mkdir(exist_ok=True)
            if path.name != "config.json":
                shutil.copyfile(path, target)
        if (run.path / TOKENIZER).is_file():
            shutil.copyfile(run.path / TOKENIZER, folder / TOKENIZER)
        values = parse_json((run.path / "config.json").read_bytes())
        more |= {"dtype": name, "torch_dtype": name}
        what = hub_family(values).architecture
    elif model_type is not None:
        family = find_hub_family(model_type)
        write_rest(run.path, _model_of(run), family, folder, plan.dtype)
        values, what = json.loads((folder / "config.json").read_text()), family.architecture
    else:
        values, recipe = RunDir(run.path).read_values()
        values, what = {"recipe": recipe, **values, "dtype": name}, "model under our own names"
        for path in [run.path / TOKENIZER, run.arithmetic]:
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        if (run.path / EXTRAS).is_dir():
            shutil.copytree(run.path / EXTRAS, folder / EXTRAS)
    (folder / "config.json").write_text(json.dumps({**values, **more}, indent=2) + "\n")
    return f"{what} in {plan.scheme.format}"
