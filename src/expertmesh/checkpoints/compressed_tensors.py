"""Quantised weights in the format of compressed-tensors: the scheme in config.json, and the folder as a `TensorSource`.

A matrix `NAME.weight` (N, K) of such a folder is `NAME.weight_packed`, `NAME.weight_scale` and `NAME.weight_shape`
where it is int8 or int4, and `NAME.weight` and `NAME.weight_scale` in FP8. Matrices of routed experts stay quantised in
memory, all others are widened when they are read. Tensors have the hub's names, or, for models that no hub architecture
describes, our names, except for the matrices of experts (`own_pieces`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box, overlap, whole_box
from expertmesh.checkpoints.hub.family import Piece
from expertmesh.checkpoints.hub.widened import is_widened
from expertmesh.checkpoints.safetensors import QUANTIZATION, HubFiles, check_names, read_json
from expertmesh.checkpoints.source import Stored
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.ops.experts.quantized_formats import QUANTIZED
from expertmesh.ops.experts.weights import Kept
from expertmesh.ops.quantized.pack import bytes_of_words, from_nibbles, int8_of_bytes
from expertmesh.ops.quantized.rounding import BLOCK, GROUP_SIZES, Format, Rounded, widened

_BRANCHES = {2: ("gate_proj", "up_proj"), 1: ("up_proj",)}
_READ = "expertmesh reads int8 per channel, int4 in groups of 32, 64 or 128, and FP8 per block of 128, all symmetric"


@dataclass(frozen=True)
class Scheme:
    """Quantisation scheme of a folder's matrices."""

    format: Format  # int8, int4 or fp8
    group_size: int = 64  # columns of a group in int4

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a config.json; `ignored` are the modules that stay unquantised."""
        grouping: dict[Format, dict[str, Any]] = {
            "int8": {"strategy": "channel"},
            "int4": {"strategy": "group", "group_size": self.group_size},
            "fp8": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        }
        weights = {
            "num_bits": 4 if self.format == "int4" else 8,
            "type": "float" if self.format == "fp8" else "int",
            "symmetric": True,
            "dynamic": False,
            **grouping[self.format],
        }
        inputs = None
        if self.format == "fp8":  # vLLM quantises tokens by blocks; here they keep their type
            inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
            inputs |= {"strategy": "group", "group_size": BLOCK}
        name = "float-quantized" if self.format == "fp8" else "pack-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": name,
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    def parts(self, N: int, K: int, scale_dtype: torch.dtype) -> dict[str, Stored]:
        """Tensors that represent a matrix (N, K) in a file, by the endings of their names."""
        kept = self.kept((N, K), scale_dtype)
        weight, scale = Stored(*kept[""]), Stored(*kept["_scale"])
        if self.format == "fp8":
            return {"weight": weight, "weight_scale": scale}
        per_word = 8 if self.format == "int4" else 4
        return {
            "weight_packed": Stored((N, -(-K // per_word)), torch.int32),
            "weight_scale": scale,
            "weight_shape": Stored((2,), torch.int64),
        }

    def kept(self, shape: tuple[int, ...], scale_dtype: torch.dtype) -> dict[str, Kept]:
        """Tensors that hold matrices (..., N, K) in memory, by the endings of their names."""
        return QUANTIZED[self.format].kept(shape, scale_dtype, self.group_size)

    def check(self, K: int, name: str) -> None:
        """Refuse a matrix whose K columns the groups do not divide."""
        if self.format != "int4" or K % self.group_size == 0:
            return
        fitting = [str(size) for size in GROUP_SIZES if K % size == 0]
        fix = f"use {' or '.join(fitting)}" if fitting else "use int8"
        raise ConfigError("group_size", self.group_size, f"must divide the {K} columns of {name}", fix)


def scheme_of(values: Mapping[str, Any], where: Path) -> Scheme:
    """The quantisation scheme in the values of a config.json."""
    found = values[QUANTIZATION]
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method != "compressed-tensors":
        raise ConfigError(
            f"{where}: {QUANTIZATION} is of {method!r}, and expertmesh reads compressed-tensors, fp8 and mxfp4; "
            "quantise the model in BF16 with expertmesh quantize"
        )
    groups = found.get("config_groups")
    weights = [g.get("weights") for g in groups.values()] if isinstance(groups, dict) else []
    if len(weights) == 1 and isinstance(weights[0], dict):
        w = weights[0]
        is_plain = w.get("symmetric", True) is True and not w.get("actorder")
        kind = (w.get("type", "int"), w.get("num_bits"), w.get("strategy"))
        if is_plain and kind == ("int", 8, "channel"):
            return Scheme("int8")
        if is_plain and kind == ("int", 4, "group") and w.get("group_size") in GROUP_SIZES:
            return Scheme("int4", w["group_size"])
        if is_plain and kind[:2] == ("float", 8) and w.get("block_structure") == [BLOCK, BLOCK]:
            return Scheme("fp8")
    raise ConfigError(
        f"{where}: {QUANTIZATION} has weights in a form that is not read; {_READ}; quantise the model in BF16 with "
        "expertmesh quantize"
    )


def is_expert(name: str) -> bool:
    """Whether a tensor of ours holds matrices of routed experts."""
    return name.endswith((".experts.w_in", ".experts.w_out"))


def own_pieces(tensors: Mapping[str, Stored]) -> Iterator[Piece]:
    """Pieces between our tensors and a folder with our own names, where each matrix of a stack is a tensor of its
    own."""
    for name, (shape, _) in tensors.items():
        folder, _, kind = name.rpartition(".")
        if kind not in ("w_in", "w_out") or len(shape) < 2:
            yield Piece(name, whole_box(shape), name, whole_box(shape), shape)
            continue
        N, K = shape[-2:]
        stack = range(shape[0]) if is_expert(name) else [None]
        for e in stack:
            at = () if e is None else (slice(e, e + 1),)
            beginning = folder if e is None else f"{folder}.{e}"
            if kind == "w_out":
                theirs = f"{beginning}.down_proj.weight"
                yield Piece(name, (*at, *whole_box((N, K))), theirs, whole_box((N, K)), (N, K))
                continue
            for branch, word in enumerate(_BRANCHES[shape[-3]]):
                of_branch = (*at, slice(branch, branch + 1), *whole_box((N, K)))
                theirs = f"{beginning}.{word}.weight"
                yield Piece(name, of_branch, theirs, whole_box((N, K)), (N, K))


class QuantizedModel:
    """The weights of a quantised folder under the names of our model with quantised experts; a `TensorSource`."""

    def __init__(
        self,
        folder: Path,  # folder with config.json and safetensors files
        scheme: Scheme,  # scheme of config.json
        pieces: list[Piece],  # pieces between the model's tensors and the files'
        tensors: Mapping[str, Stored],  # tensors of the model without quantisation, with the dtypes that they get
        *,
        left_out: tuple[str, ...] = (),  # prefixes of tensors in the files that the model lacks
    ) -> None:
        self.path, self.scheme, self._plain = folder, scheme, tensors
        self._files = HubFiles(folder)
        self._files.leave_out(left_out)
        self._pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
        for piece in pieces:
            self._pieces[piece.ours].append(piece)
        self._of_expert: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            if is_expert(piece.ours):
                self._of_expert.setdefault((piece.ours, piece.ours_at[0].start), []).append(piece)
        self._check(pieces)

    def _check(self, pieces: list[Piece]) -> None:
        shapes = {piece.hub_name: piece.hub_shape for piece in pieces}
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
        of_experts = {piece.hub_name for piece in pieces if is_expert(piece.ours)}
        for name, shape in shapes.items():
            if name not in of_experts and not self._is_quantized(name):
                wanted[name] = shape, None
                continue
            module = name.removesuffix("weight")
            rows, columns = shape
            for end, kept in self.scheme.parts(rows, columns, torch.float32).items():
                wanted[module + end] = kept.shape, None if end == "weight_scale" else kept.dtype
        found = self._files.entries
        fix = "quantise the model again"
        check_names(self.path, wanted=set(wanted), found=set(found), fix=fix)
        for name, (size, dtype) in wanted.items():
            entry = found[name]
            is_float = isinstance(entry.dtype, torch.dtype) and entry.dtype.is_floating_point
            if entry.shape != size or (not is_float if dtype is None else entry.dtype != dtype):
                kind = str(entry.dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{self.path}: {name} is {kind} of shape {entry.shape}, and {self.scheme.format} needs "
                    f"{'a floating-point type' if dtype is None else str(dtype).removeprefix('torch.')} of shape "
                    f"{size}; quantise the model again"
                )

    def _is_quantized(self, name: str) -> bool:
        """Whether a matrix of the files is quantised."""
        return f"{name}_scale" in self._files.entries

    @cached_property
    def products_dtype(self) -> torch.dtype:
        """Type of the scales, in which all products of these weights are computed."""
        found = next(e.dtype for n, e in self._files.entries.items() if n.endswith("weight_scale"))
        assert isinstance(found, torch.dtype)
        return found

    @cached_property
    def num_bytes(self) -> dict[str, int]:
        """Bytes in the files of routed experts ("experts") and of all other tensors ("rest")."""
        modules = {
            piece.hub_name.removesuffix("weight")
            for name, pieces in self._pieces.items()
            if is_expert(name)
            for piece in pieces
        }
        sums = {"experts": 0, "rest": 0}
        for name in self._files.entries:
            is_of_expert = name.rpartition(".")[0] + "." in modules
            sums["experts" if is_of_expert else "rest"] += self._files.tensor(name).nbytes
        return sums

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """Experts as they are in the files, other tensors as in the model."""
        found: dict[str, Stored] = {}
        for name, stored in self._plain.items():
            if not is_expert(name):
                found[name] = stored
                continue
            kept = self.scheme.kept(stored.shape, self.products_dtype)
            found |= {name + end: Stored(*one) for end, one in kept.items()}
        return found

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part out of mapped files (of experts, all branches); see `TensorSource.read`."""
        is_scale = name.endswith("_scale") and is_expert(name.removesuffix("_scale"))
        ours = name.removesuffix("_scale") if is_scale else name
        if not self._pieces.get(ours):
            into.zero_()  # a buffer of ours, which begins so
            return
        if is_expert(ours):
            for e in range(box[0].start, box[0].stop):
                for piece in self._of_expert[ours, e]:
                    self._read_expert(piece, box[-2:], into[e - box[0].start], is_scale=is_scale)
            return
        for piece in self._pieces[ours]:
            shared = overlap(box, piece.ours_at)
            if shared is None:
                continue
            at, theirs = shared
            sizes = [s.stop - s.start for s in piece.ours_at]
            part = piece.turned(self._wide(piece.hub_name)[piece.hub_at]).reshape(sizes)[theirs]
            into[at].copy_(part.to(self._plain[ours].dtype))

    def _read_expert(self, piece: Piece, box: Box, into: Tensor, *, is_scale: bool) -> None:
        """Fill the rows and columns of a box of an expert's part of a tensor, or of one of its branches."""
        target = into[piece.ours_at[1].start] if len(piece.ours_at) == 4 else into
        module = piece.hub_name.removesuffix("weight")
        source = self._files.tensor(f"{module}weight_scale") if is_scale else self._bytes(module)
        target.copy_(source[box])

    def _bytes(self, module: str) -> Tensor:
        """Quantised values of a matrix, as quantised experts hold them."""
        if self.scheme.format == "fp8":
            return self._files.tensor(f"{module}weight")
        data = bytes_of_words(self._files.tensor(f"{module}weight_packed"))
        return int8_of_bytes(data) if self.scheme.format == "int8" else data

    def _wide(self, name: str) -> Tensor:
        """A tensor outside the experts, widened if it is quantised."""
        if not self._is_quantized(name):
            return self._files.tensor(name)
        module = name.removesuffix("weight")
        values, scales = self._bytes(module), self._files.tensor(f"{name}_scale")
        if self.scheme.format == "int4":
            values = from_nibbles(values)
        if self.scheme.format != "fp8":
            values = values[:, : int(self._files.tensor(f"{module}weight_shape")[1])]
        return widened(Rounded(values, scales))


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The values of a folder's config.json if its weights are quantised; None: they are not, or are widened when they
    are read."""
    if not (folder / "config.json").is_file():
        return None
    try:
        values = read_json(folder / "config.json")
    except ConfigError:  # the reader of the folder's real kind reports it
        return None
    return values if values.get(QUANTIZATION) and not is_widened(values) else None
