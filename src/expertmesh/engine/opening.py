"""Opening of a model folder for the engine: whole in this process, or sharded over ranks."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from expertmesh.config.engine import EngineConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.engine.parallel import EngineRanks, open_shared
from expertmesh.errors import ConfigError
from expertmesh.runs.open import Slots, open_model
from expertmesh.runs.run_dir import find_model
from expertmesh.text.format import TextFormat


def open_served(
    path: str | Path,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    parallel: ParallelConfig | None,
) -> tuple[Any, TextFormat, EngineRanks | None]:
    """Model of a folder, its text format, and the ranks that share it."""
    if tokenizer is not None:
        raise ConfigError("tokenizer: the folder has its own; leave it out")
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    if config.implementation == "transformers":
        if parallel is not None:
            raise ConfigError(
                "implementation",
                "transformers",
                "is served by one process",
                "leave parallel out, or open the model as our GPT",
            )
        # by name: integrations are above the engine, and are imported on use only
        door = import_module("expertmesh.integrations.transformers.decoder")
        opened_there: tuple[Any, TextFormat] = door.open_decoder(
            path, device=config.device, dtype=dtype, max_len=config.max_len
        )
        return *opened_there, None
    run = find_model(path)
    if not run.family.generates_text:
        raise ConfigError(f"{path}: is of family {run.family.name}, which writes no text; the engine serves a gpt")
    if config.deterministic:
        run = replace(run, config=run.config.updated({"model.batch_invariant": True}))
    slots = None
    if config.expert_slots is not None:
        slots = Slots(config.expert_slots, config.expert_fetch_ahead)
    if parallel is not None:
        opened = open_shared(run, parallel, device=config.device, dtype=dtype, slots=slots)
        return opened.model, opened.text, opened.shared
    opened = open_model(run, device=config.device, dtype=dtype, slots=slots)
    return opened.model, opened.text, None
