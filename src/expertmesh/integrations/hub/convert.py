"""Conversion of a hub folder to a run directory, and of a run or checkpoint to a hub folder."""

from pathlib import Path
from typing import NamedTuple

import torch

from expertmesh.checkpoints.hub.configs import say_left_out
from expertmesh.checkpoints.hub.find_family import hub_family
from expertmesh.checkpoints.hub.load_pretrained import (
    HubModel,
    hub_dtype,
    hub_run_config,
    read_config,
)
from expertmesh.checkpoints.peft_writing import ExpertLayout
from expertmesh.checkpoints.source import read_whole
from expertmesh.config.base import expanded, saved_run
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.output_file import new_folder
from expertmesh.errors import ConfigError, command, named
from expertmesh.integrations.hub.adapter_folder import write_adapter_folder
from expertmesh.integrations.hub.save import save_pretrained
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.family import GPT as GPT_FAMILY
from expertmesh.models.gpt.model import GPT
from expertmesh.runs.run_dir import TOKENIZER
from expertmesh.text.format import hub_files
from expertmesh.text.tokenizer import load_tokenizer
from expertmesh.training.export import find_checkpoint
from expertmesh.training.init_from import save_as_run
from expertmesh.training.state import read_run_state


class Converted(NamedTuple):
    """Result of a conversion."""

    path: Path  # the new folder
    what: str  # description in words


def convert(
    source: str | Path,  # a folder saved by transformers, or a run directory or checkpoint of this package
    target: str | Path,  # folder to create, which must not exist: a run directory for a hub source, else a hub folder
    *,
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    expert_layout: ExpertLayout = "fused",
    check: bool = True,
) -> Converted:
    """Convert a checkpoint; the direction follows from the source.

    Args:
        dtype: dtype of the weights; None: unchanged, except that FP64 is exported as FP32, with a warning.
        adapter_only: write a folder of peft with the adapters of a run; else they are merged into the weights.
        expert_layout: adapters of experts on transformers' tensors of all experts (fused), or on each expert's matrices
            (per-expert), for vLLM.
        check: before a run with adapters is done, compare the logits of adapters, merged weights and, with
            adapter_only, adapters in the engine.

    Example:
        >>> convert("models/Qwen3-30B-A3B", "runs/qwen3")
    """
    source, target = expanded(source), expanded(target)
    if not source.is_dir():
        fetch = how_to_fetch(source)
        raise ConfigError("from", source, "is no folder", f"give a hub model's or a run's{fetch}")
    check_only_files(source, what=str(source))
    if target.suffix == ".safetensors":
        raise ConfigError(
            "to",
            target,
            "convert makes a folder",
            f"for one file under the names of expertmesh use: {command(f'export {source} --output {target}')}",
        )
    new_folder("to", target)
    if expert_layout != "fused" and not adapter_only:
        rule = f"has no effect without {named('adapter_only', True)}"
        raise ConfigError("expert_layout", expert_layout, rule, "leave one of them out")
    if (source / "config.json").is_file() and "model_type" in read_config(source):
        if adapter_only:
            rule = "is a model of the hub, without adapters of its own"
            raise ConfigError("from", source, rule, "give the run that trained them")
        return _from_hub(source, target, dtype)
    checkpoint = find_checkpoint(source)
    if adapter_only:
        if dtype is not None:
            raise ConfigError("dtype", dtype, "adapters are written as they are", "leave it out")
        count = write_adapter_folder(checkpoint, target, layout=expert_layout, check=check)
        return Converted(target, f"{count} adapters of {checkpoint}")
    run_dir = checkpoint.parent.parent
    values = read_run_state(checkpoint, "config")["config"]
    if (name := values.get("family", GPT_FAMILY.name)) != GPT_FAMILY.name:
        raise ConfigError(
            "from",
            source,
            f"is of family {name}, and models of the hub are like those of family {GPT_FAMILY.name}",
            f"keep it here, or use {command('export')}",
        )
    with saved_run():
        config = GPTRunConfig.model_validate(values)
    family = save_pretrained(checkpoint, run_dir, config, target, dtype=dtype, check=check)
    return Converted(target, f"a {family.architecture} of {checkpoint}")


def _from_hub(source: Path, target: Path, dtype: torch.dtype | None) -> Converted:
    values = read_config(source)
    family, config = hub_family(values), hub_run_config(source, run_dir=target)
    if not (source / TOKENIZER).is_file():
        raise ConfigError(
            "from",
            source,
            "has no tokenizer.json",
            "save the tokenizer there with transformers' save_pretrained",
        )
    load_tokenizer(source / TOKENIZER, vocab_size=config.model.vocab_size)
    # on the meta device: each tensor is read when it is written
    model = GPT(config.model, device="meta", dtype=dtype or hub_dtype(values, source))
    weights = HubModel(source, dtype=dtype)
    say_left_out(values)
    recipe = f"from {family.model_type}"
    files = {TOKENIZER: source / TOKENIZER, **hub_files(source)}
    save_as_run(
        model,
        config,
        recipe=recipe,
        files=files,
        make=lambda name: read_whole(weights, name),
    )
    parameters = sum(p.numel() for p in model.parameters())
    return Converted(target, f"a run {recipe}, {parameters:,} parameters")
