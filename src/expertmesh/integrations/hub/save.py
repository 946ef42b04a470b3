"""Export of a checkpoint to a hub folder, written tensor by tensor."""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.hub.family import HubFamily, Piece
from expertmesh.checkpoints.hub.layout import pieces
from expertmesh.checkpoints.hub.load_pretrained import HubModel
from expertmesh.checkpoints.safetensors import SHARD_BYTES, FileTensor, write_shards
from expertmesh.checkpoints.source import check_range, read_whole
from expertmesh.config.base import parse_json
from expertmesh.config.output_file import complete_folder, new_folder
from expertmesh.integrations.hub.adapter_folder import check_logits
from expertmesh.integrations.hub.exports import export_family, hub_config, origin_of, say_left_out
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.runs.run_dir import checkpoint_weights
from expertmesh.text.chat import OWN_TEMPLATE, OwnFormat, TemplateFormat
from expertmesh.text.format import find_format, text_format
from expertmesh.text.tokenizer import EXTRAS, end_of_text_id, load_tokenizer, with_start
from expertmesh.text.tokenizer_files import CONFIG

_CLASS = "PreTrainedTokenizerFast"
"""transformers' class that takes a tokenizer.json as it is."""
_log = logging.getLogger("expertmesh.integrations")


def save_pretrained(
    checkpoint: Path,  # checkpoint of any number of ranks
    run_dir: Path,  # run directory with tokenizer.json, and a hub model's other files if the model came from the hub
    config: GPTRunConfig,  # configuration of the run
    folder: Path,  # folder to create; it must not exist. Missing parent folders are created.
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,  # maximum bytes of a file
    check: bool = True,  # compare the logits of merged and of unmerged adapters, of a run that has some
) -> HubFamily:
    """Write a checkpoint in the format of transformers, vLLM and SGLang; the folder appears only when it is complete.

    Args:
        dtype: dtype of the weights; None: the experts' dtype in the checkpoint, with FP64 written as FP32, because no
            other program computes in FP64.
    """
    family = export_family(config.model, origin_of(run_dir))
    new_folder("to", folder)
    with complete_folder(folder) as partial:
        written = dtype or _dtype_of(checkpoint)
        _write_weights(checkpoint, config.model, family, partial, written, shard_bytes)
        write_rest(run_dir, config.model, family, partial, written)
        if check and config.adapter.rests:
            check_logits(checkpoint, HubModel(partial))
    say_left_out(config.model, family)
    return family


def _dtype_of(checkpoint: Path) -> torch.dtype:
    """Dtype of the experts' weights to write; the router is FP32 in any case."""
    found = checkpoint_weights(checkpoint).tensors
    dtype = next(kept.dtype for name, kept in found.items() if name.endswith("experts.w_in"))
    if dtype != torch.float64:
        return dtype
    _log.warning(
        "%s has float64 weights, in which transformers and vLLM do not compute: written as float32",
        checkpoint,
    )
    return torch.float32


def _write_weights(
    checkpoint: Path,
    config: ModelConfig,
    family: HubFamily,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    by_ours = [(o, list(g)) for o, g in groupby(pieces(config, family.model_type), lambda p: p.ours)]
    targets = [t for _, several in by_ours for t in _targets(several, dtype)]
    values = _values(checkpoint, by_ours, dtype)
    write_shards(folder, targets, values, shard_bytes=shard_bytes)


def _targets(several: list[Piece], dtype: torch.dtype) -> list[FileTensor]:
    """Output tensors that one of our tensors becomes, in the order of their first parts."""
    shapes = {piece.hub_name: piece.hub_shape for piece in several}
    is_bias = several[0].ours.endswith("expert_bias_E")
    return [FileTensor(n, torch.float32 if is_bias else dtype, s) for n, s in shapes.items()]


def _values(checkpoint: Path, by_ours: list[tuple[str, list[Piece]]], dtype: torch.dtype) -> Iterator[Tensor]:
    source = checkpoint_weights(checkpoint)
    for ours, several in by_ours:
        tensor = read_whole(source, ours)
        for target in _targets(several, dtype):
            yield their_value(target, several, tensor)
        del tensor  # freed before the next one is read


def their_value(target: FileTensor, several: list[Piece], tensor: Tensor) -> Tensor:
    """Output tensor assembled from parts of one of our tensors."""
    found = torch.empty(target.shape, dtype=target.dtype)
    for piece in several:
        if piece.hub_name == target.name:
            part = piece.turned(found[piece.hub_at])
            given = tensor[piece.ours_at].reshape(part.shape)
            check_range(given, part.copy_(given), target.name)
    return found


def write_rest(run_dir: Path, config: ModelConfig, family: HubFamily, folder: Path, dtype: torch.dtype) -> None:
    """Write all files of a hub folder except the weights; see `save_pretrained` for the arguments."""
    values = hub_config(config, family, dtype=str(dtype).removeprefix("torch."))
    extras = run_dir / EXTRAS
    if extras.is_dir():
        leave = shutil.ignore_patterns("config.json")
        shutil.copytree(extras, folder, ignore=leave, dirs_exist_ok=True)
    if (extras / "config.json").is_file():  # the model came from the hub
        saved = parse_json((extras / "config.json").read_bytes())
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        values |= {name: saved[name] for name in ids if name in saved}
        _add_ends(run_dir, folder, saved)
        if (run_dir / "tokenizer.json").is_file():  # older runs with added tokens keep the hub's beside it
            shutil.copyfile(run_dir / "tokenizer.json", folder / "tokenizer.json")
        if config.start_ids is not None and (folder / "tokenizer.json").is_file():
            _write_tokenizer(folder / "tokenizer.json", config.start_ids, folder)
    elif (run_dir / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(run_dir / "tokenizer.json")
        text = text_format(tokenizer, run_dir / "tokenizer.json", model=config)
        _write_tokenizer(run_dir / "tokenizer.json", text.start_ids, folder)
        begin, end = text.first_ids[0], end_of_text_id(tokenizer)
        if OwnFormat(tokenizer).has_marks and not extras.is_dir():  # trained on conversations in our own format
            (folder / "chat_template.jinja").write_text(OWN_TEMPLATE)
        values |= {"bos_token_id": begin, "eos_token_id": end}
        told = {"bos_token_id": begin, "eos_token_id": list(text.end_ids)}
        _write_json(folder / "generation_config.json", told)
        if not (folder / CONFIG).is_file():
            written = {
                "tokenizer_class": _CLASS,
                "bos_token": tokenizer.id_to_token(begin),
                "eos_token": tokenizer.id_to_token(end),
                "model_max_length": config.max_seq_len,
                "clean_up_tokenization_spaces": False,
            }
            _write_json(folder / CONFIG, written)
    _write_json(folder / "config.json", values)


def _write_tokenizer(path: Path, start_ids: Sequence[int], folder: Path) -> None:
    """Write a tokenizer.json that itself puts the model's start tokens before a text, as transformers expects of it."""
    written, content = folder / "tokenizer.json", with_start(path, start_ids)
    if content is None:
        if path != written:
            shutil.copyfile(path, written)
        return
    written.write_text(content, encoding="utf-8")
    if not (folder / CONFIG).is_file():
        return
    # transformers makes the start anew for these options, and for the classes of some models
    values = parse_json((folder / CONFIG).read_bytes())
    kept = {k: v for k, v in values.items() if k not in ("add_bos_token", "add_eos_token")}
    kept["tokenizer_class"] = _CLASS
    has_template = "chat_template" in values or (folder / "chat_template.jinja").is_file()
    if start_ids and not has_template:  # a template may write the bos_token
        kept["bos_token"] = load_tokenizer(path).id_to_token(start_ids[0])
    _write_json(folder / CONFIG, kept)


def _add_ends(run_dir: Path, folder: Path, saved: dict[str, Any]) -> None:
    """Add end tokens of the run's chat template to generation_config.json."""
    path = folder / "generation_config.json"
    values = parse_json(path.read_bytes()) if path.is_file() else {}
    known = values.get("eos_token_id", saved.get("eos_token_id"))
    ends = known if isinstance(known, list) else [] if known is None else [known]
    form = find_format(load_tokenizer(run_dir / "tokenizer.json"), run_dir / "tokenizer.json")
    more = [i for i in form.ends if i not in ends] if isinstance(form, TemplateFormat) else []
    if more:
        _write_json(path, {**values, "eos_token_id": [*ends, *more]})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
