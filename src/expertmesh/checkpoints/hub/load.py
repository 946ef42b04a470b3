"""A GPT of ours with the weights of a hub checkpoint."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.checkpoints.hub.configs import hub_family, model_config, say_left_out
from expertmesh.checkpoints.hub.layout import Piece, pieces
from expertmesh.checkpoints.safetensors import READABLE, HubFiles, check_tensors, read_json
from expertmesh.config.base import expanded
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.parallel.construct import give_memory
from expertmesh.text.format import hub_start

_log = logging.getLogger("expertmesh.integrations")


def load_pretrained(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parallel: ParallelConfig | None = None,
) -> GPT:
    """Make a GPT of ours from a folder as transformers saves one, and load its weights.

    Files are read through memory maps, part by part into the parameters, so that the peak is the model, or on several ranks each
    rank's part of it.

    Args:
        folder: with config.json and safetensors files, of Mixtral, Qwen3-MoE, Qwen2-MoE, OLMoE or GLM-4-MoE.
        device: of the parameters.
        dtype: of the parameters (the router keeps FP32); None: that of config.json, or of most weights if it says none. Tensors of
            a wider type are rounded to it, as in transformers, and that is said.
        parallel: how to spread the model over the ranks that torchrun started, before it has memory; None: whole, here.

    Returns:
        The model, in training mode as every fresh module.

    Raises:
        ConfigError: the folder or its config.json is not of such a model, or the degrees do not fit the ranks.
        CheckpointError: a tensor is missing, extra, transposed, of a wrong type or cut short; names it.

    Example:
        >>> model = load_pretrained("models/Qwen3-30B-A3B")
    """
    folder = expanded(folder)
    values = read_config(folder)
    config = model_config(values, start_ids=hub_start(folder))
    say_left_out(values)
    model = GPT(config, device="meta", dtype=dtype or hub_dtype(values, folder))
    if parallel is None:
        model.to_empty(device=device)
    else:
        parallelize_gpt(model, parallel)
        give_memory(model, device=device, offload=parallel.offload)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    fill(model, folder, is_chosen=dtype is not None)
    return model


def fill(model: nn.Module, folder: Path, *, is_chosen: bool = False) -> None:
    """Write the weights of a hub checkpoint into a model, whole or spread over ranks: each rank reads what it holds.

    Args:
        model: a GPT of the folder's `model_config`, with memory.
        folder: see `load_pretrained`.
        is_chosen: whether the user chose the parameters' type; what is rounded to it is not said then.

    Raises:
        ConfigError: see `load_pretrained`.
        CheckpointError: see `load_pretrained`; nothing is written then.
    """
    found, files = checked_pieces(folder)
    state = model.state_dict()
    if not is_chosen:
        _say_rounded(found, files, state)
    copy_pieces(found, files, state)


def tensor_maker(
    model: nn.Module, folder: Path, *, is_chosen: bool = False
) -> Callable[[str], Tensor]:
    """Give a function that reads one tensor of a model on the meta device from a hub checkpoint, by its name in the state dict.

    Args:
        model: a GPT of the folder's `model_config`.
        folder: see `load_pretrained`.
        is_chosen: see `fill`.

    Raises:
        ConfigError: see `load_pretrained`.
        CheckpointError: see `load_pretrained`.
    """
    found, files = checked_pieces(folder)
    described = model.state_dict()
    if not is_chosen:
        _say_rounded(found, files, described)
    by_ours: dict[str, list[Piece]] = {name: [] for name in described}
    for piece in found:
        by_ours[piece.ours].append(piece)

    def make(name: str) -> Tensor:
        # what no piece covers is a buffer of ours, which begins with zeros
        tensor = torch.zeros_like(described[name], device="cpu")
        copy_pieces(by_ours[name], files, {name: tensor})
        return tensor

    return make


def checked_pieces(folder: Path) -> tuple[list[Piece], HubFiles]:
    """What of the tensors of a folder goes where in ours, and the files, in which all is as it must be.

    Args:
        folder: see `load_pretrained`.

    Raises:
        ConfigError: see `load_pretrained`.
        CheckpointError: see `load_pretrained`.
    """
    values = read_config(folder)
    config, family = model_config(values), hub_family(values)
    files = HubFiles(folder)
    found = list(pieces(config, family.model_type))
    shapes = {piece.theirs: piece.theirs_shape for piece in found}
    files.leave_out(_ahead(values))
    if config.tie_embeddings:
        files.tie("model.embed_tokens.weight", "lm_head.weight")
    check_tensors(files, shapes)
    return found, files


def _say_rounded(found: list[Piece], files: HubFiles, tensors: dict[str, Tensor]) -> None:
    """Say which tensors lose digits in the type that they get."""
    types = {piece.theirs: tensors[piece.ours].dtype for piece in found}
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


def _ahead(values: dict[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of layers behind the model's last, which predict further tokens; transformers leaves them out, too."""
    # transformers 5 has two names for it, and one such layer where a config.json says nothing
    named = [values[n] for n in ("num_nextn_predict_layers", "num_mtp_layers") if n in values]
    last, more = values["num_hidden_layers"], (named[0] or 0) if named else 1
    return tuple(f"model.layers.{last + i}." for i in range(more))


def copy_pieces(found: Iterable[Piece], files: HubFiles, tensors: dict[str, Tensor]) -> None:
    """Copy each piece into the tensor of ours that has it, or into the part of it that this rank holds."""
    with torch.no_grad():
        for piece in found:
            source = files.tensor(piece.theirs)[piece.theirs_at]
            sizes = [at.stop - at.start for at in piece.ours_at]
            for local, offsets in _chunks(tensors[piece.ours]):
                ours, theirs = [], []
                for at, offset, length in zip(piece.ours_at, offsets, local.shape, strict=True):
                    start, stop = max(at.start, offset), min(at.stop, offset + length)
                    ours.append(slice(start - offset, max(stop, start) - offset))
                    theirs.append(slice(start - at.start, max(stop, start) - at.start))
                if all(at.stop > at.start for at in ours):
                    local[tuple(ours)].copy_(source.reshape(sizes)[tuple(theirs)])


def _chunks(tensor: Tensor) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
    """What this rank holds of a tensor, and where that lies in the whole."""
    if not isinstance(tensor, DTensor):
        return [(tensor, (0,) * tensor.dim())]
    local: Any = tensor.to_local()
    chunks = tensor.__create_chunk_list__()
    return [(local, tuple(chunk.offsets)) for chunk in chunks] if local.numel() else []


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, with the ends of a text as generation_config.json has them, which may be more.

    Raises:
        ConfigError: there is no such folder or file, or the weights are quantised.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: is no folder; give one with config.json and safetensors files{how_to_fetch(folder, as_run=False)}"
        )
    check_only_files(folder, what=str(folder), depth=1)
    values = read_json(folder / "config.json")
    if found := [n for n in ("quantization_config", "compression_config") if values.get(n)]:
        raise ConfigError(
            f"{folder}: {found[0]} is set; expertmesh reads float32, bfloat16 and float16, so dequantise it first"
        )
    if (folder / "generation_config.json").is_file():
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        values |= {} if ends is None else {"eos_token_id": ends}
    return values


def hub_dtype(values: dict[str, Any], folder: Path) -> torch.dtype:
    """The type of a checkpoint's weights, as config.json says; if it says none, that of most of them.

    Raises:
        ConfigError: it says another than float32, bfloat16, float16 and float64.
    """
    name = values.get("dtype") or values.get("torch_dtype")
    if name is None:
        return HubFiles(folder).usual_dtype()
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in READABLE:
        raise ConfigError(
            f"{folder}: dtype={name} in config.json; expertmesh reads float32, bfloat16, float16 and float64; convert the weights"
        )
    return dtype
