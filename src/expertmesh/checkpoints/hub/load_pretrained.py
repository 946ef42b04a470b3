"""Loading of a hub checkpoint into our GPT: configuration, weights, and a run configuration around them."""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box, overlap
from expertmesh.checkpoints.hub.configs import model_config, say_left_out
from expertmesh.checkpoints.hub.family import Piece
from expertmesh.checkpoints.hub.find_family import hub_family
from expertmesh.checkpoints.hub.fp8 import Fp8Files
from expertmesh.checkpoints.hub.layout import pieces
from expertmesh.checkpoints.hub.widened import hub_files, is_widened
from expertmesh.checkpoints.safetensors import (
    READABLE,
    HubFiles,
    check_tensors,
    read_json,
    sub_slice,
)
from expertmesh.checkpoints.source import Stored, read_into
from expertmesh.config.base import expanded, parse_json
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import MIN_VOCAB_SIZE, GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.parallel.construct import give_memory
from expertmesh.text.format import hub_start

_SEQ_LEN = 1024
"""Sequence length of runs with a model of the hub, unless the model's maximum is shorter."""
_log = logging.getLogger("expertmesh.integrations")


def load_pretrained(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parallel: ParallelConfig | None = None,
) -> GPT:
    """Make our GPT from a folder in transformers' format and load its weights.

    Files are read through memory maps, part by part into the parameters, so that peak memory is the model's, or on
    several ranks the rank's part of it.

    Args:
        folder: folder with config.json and safetensors files, of Mixtral, Qwen3-MoE, Qwen2-MoE, OLMoE, GLM-4-MoE,
            Dots1, DeepSeek-V2, DeepSeek-V3 (also Kimi-K2 and Moonlight) or gpt-oss. Weights in FP8 with a scale per
            block and experts in MXFP4 are widened.
        device: device of the parameters.
        dtype: type of the parameters (the router keeps FP32); None: the type in config.json, or else of most weights.
            Tensors of a wider type are rounded to it, as in transformers, with a warning.
        parallel: degrees for spreading the model over the ranks that torchrun started, before it has memory; None: not
            spread.

    Returns:
        The model, in training mode like every new module.

    Raises:
        ConfigError: the folder or its config.json is not of such a model, or the degrees do not fit the ranks.
        CheckpointError: a tensor is missing, extra, transposed, of a wrong type or cut short; names it.

    Example:
        >>> model = load_pretrained("models/Qwen3-30B-A3B")
    """
    folder = expanded(folder)
    values = read_config(folder)
    config = model_config(values, start_ids=hub_start(folder))
    source = HubModel(folder, dtype=dtype)
    say_left_out(values)
    model = GPT(config, device="meta", dtype=dtype or hub_dtype(values, folder))
    if parallel is not None:
        parallelize_gpt(model, parallel)
    give_memory(model, device=device, offload=parallel is not None and parallel.offload)
    read_into(source, model.state_dict())
    return model


class HubModel:
    """The weights of a hub folder under the names of our GPT; a `TensorSource`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        values = read_config(folder)
        self.path = folder
        self.config = model_config(values)  # configuration of the model, without `start_ids`, which the tokenizer tells
        self._files = hub_files(folder, values)
        found = list(pieces(self.config, hub_family(values).model_type))
        shapes = {piece.hub_name: piece.hub_shape for piece in found}
        _leave_out_ahead(self._files, values)
        if self.config.tie_embeddings:
            self._files.tie("model.embed_tokens.weight", "lm_head.weight")
        check_tensors(self._files, shapes)
        state = GPT(self.config, device="meta", dtype=dtype or hub_dtype(values, folder)).state_dict()
        # shapes and types of the tensors of our GPT
        self.tensors = {name: Stored(tuple(t.shape), t.dtype) for name, t in state.items()}
        self._pieces: dict[str, list[Piece]] = {name: [] for name in state}
        for piece in found:
            self._pieces[piece.ours].append(piece)
        if dtype is None:
            _say_rounded(found, self._files, state)

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part out of the mapped files of all pieces that overlap with it; see `TensorSource.read`."""
        dtype = self.tensors[name].dtype
        if not self._pieces[name]:
            into.zero_()  # a buffer of ours, which begins so
        for piece in self._pieces[name]:
            shared = overlap(box, piece.ours_at)
            if shared is None:
                continue
            ours, within = shared
            at, sizes = _there(piece, within)
            view = piece.turned(into[ours].view(sizes))
            self._files.copy(piece.hub_name, at, view, dtype=dtype)

    def stored_fp8(self, name: str, expert: int) -> tuple[Tensor, Tensor] | None:
        """An expert's values and FP32 scales as the files have them; None: not in FP8, or not in blocks of 128 by
        128."""
        files = self._files
        if not isinstance(files, Fp8Files) or not files.has_square_blocks:
            return None
        own = [p for p in self._pieces[name] if p.ours_at[0] == slice(expert, expert + 1)]
        pairs = [pair for p in own if (pair := files.stored(p.hub_name)) is not None]
        if not own or len(pairs) < len(own):
            return None
        values, scales = zip(*pairs, strict=True)
        is_branched = len(own[0].ours_at) == 4
        wide = [scale.float() for scale in scales]
        return (torch.stack(values), torch.stack(wide)) if is_branched else (values[0], wide[0])


def _there(piece: Piece, within: Box) -> tuple[Box, list[int]]:
    """Box of a part of a piece in the hub's tensor, and the part's sizes in our order."""
    ours = [range(at.start, at.stop) for at in piece.ours_at]
    lead, last = list(piece.hub_at), []
    if piece.is_turned:
        lead[-2:] = lead[:-3:-1]
    left = list(zip(map(len, ours), within, strict=True))
    for at in reversed(lead):
        size = len(range(at.start, at.stop, at.step or 1))
        while left and left[-1][0] != size and left[-1][0] == 1:
            left.pop()  # a dimension that the hub's tensor lacks
        matches = bool(left) and left[-1][0] == size
        last.append(sub_slice(at, left.pop()[1] if matches else slice(0, 1)))
    there = last[::-1]
    sizes = [len(range(at.start, at.stop, at.step)) for at in there]
    if piece.is_turned:
        there[-2:] = there[:-3:-1]
    return tuple(there), sizes


def _say_rounded(found: list[Piece], files: HubFiles, tensors: dict[str, Tensor]) -> None:
    """Warn of tensors that are rounded to a narrower type."""
    types = {piece.hub_name: tensors[piece.ours].dtype for piece in found}
    rounded = []
    for name, ours in types.items():
        theirs = files.entries[name].dtype
        assert isinstance(theirs, torch.dtype)
        if torch.promote_types(ours, theirs) != ours:
            rounded.append((name, theirs, ours))
    if rounded:
        name, theirs, ours = rounded[0]
        more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        _log.warning(
            "%s: %s%s rounded from %s to the %s of config.json, as in transformers; keep them by dtype=%s",
            *(files.folder, name, f"{more} are" if more else " is"),
            *(str(dtype).removeprefix("torch.") for dtype in (theirs, ours, theirs)),
        )


def _leave_out_ahead(files: HubFiles, values: dict[str, Any]) -> None:
    """Drop layers for multi-token prediction from the files, with a warning."""
    beginnings = _ahead(values)
    found = [e.shape for n, e in files.entries.items() if n.startswith(beginnings)]
    files.leave_out(beginnings)
    if found:
        _log.warning(
            "%s: %s* predicts a further token, and is left out: %s numbers that are not counted among the model's",
            *(files.folder, "*, ".join(beginnings), f"{sum(map(math.prod, found)):,}"),
        )


def _ahead(values: dict[str, Any]) -> tuple[str, ...]:
    """Name prefixes of layers for multi-token prediction, which follow the model's last; transformers drops them,
    too."""
    # transformers 5 has two names for it, and one such layer where a config.json says nothing
    named = [values[n] for n in ("num_nextn_predict_layers", "num_mtp_layers") if n in values]
    last, more = values["num_hidden_layers"], (named[0] or 0) if named else 1
    return tuple(f"model.layers.{last + i}." for i in range(more))


def read_config(folder: Path, *, is_quantized: bool = False) -> dict[str, Any]:
    """The values of a folder's config.json, with `eos_token_id` from generation_config.json if it has one."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: is no folder; give one with config.json and safetensors files{how_to_fetch(folder)}"
        )
    check_only_files(folder, what=str(folder), depth=1)
    values = read_json(folder / "config.json")
    if (
        not is_quantized
        and (found := [n for n in ("quantization_config", "compression_config") if values.get(n)])
        and not is_widened(values)
    ):
        raise ConfigError(
            f"{folder}: {found[0]} is set: quantised weights answer (expertmesh generate, em.Engine), and do nothing "
            "else; give the model in float32, bfloat16 or float16"
        )
    if (folder / "generation_config.json").is_file():
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        values |= {} if ends is None else {"eos_token_id": ends}
    return values


def is_hub_folder(folder: Path) -> bool:
    """Whether a folder has the config.json of a hub model, of any architecture."""
    path = folder / "config.json"
    try:
        values = parse_json(path.read_bytes()) if path.is_file() else None
    except (ValueError, OSError):
        return False
    return isinstance(values, dict) and "model_type" in values


def hub_run_config(folder: Path, *, run_dir: Path | None = None, is_quantized: bool = False) -> GPTRunConfig:
    """The configuration of a run with the model of a hub folder, other options at their defaults."""
    values = read_config(folder, is_quantized=is_quantized)
    model = model_config(values, start_ids=hub_start(folder))
    if model.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"{folder}: has {model.vocab_size} tokens, and a run at least {MIN_VOCAB_SIZE}: the 256 bytes and the end "
            "of a document; add tokens with transformers' resize_token_embeddings, or load it in Python by "
            "expertmesh.integrations.hub.load_pretrained"
        )
    return GPTRunConfig.model_validate(
        {
            "model": model,
            "data": {"seq_len": min(model.max_seq_len, _SEQ_LEN)},
            "train": {"run_dir": str(folder if run_dir is None else run_dir)},
        }
    )


def hub_dtype(values: dict[str, Any], folder: Path) -> torch.dtype:
    """The type of a checkpoint's weights in config.json; if it has none, the type of most elements."""
    name = values.get("dtype") or values.get("torch_dtype")
    if name is None:
        return HubFiles(folder).usual_dtype()
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in READABLE:
        raise ConfigError(
            f"{folder}: dtype={name} in config.json; expertmesh reads float32, bfloat16, float16 and float64; convert "
            "the weights"
        )
    result: torch.dtype = dtype
    return result
