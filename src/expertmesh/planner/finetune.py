"""The model to plan, fine-tuned: as `expertmesh train FOLDER` does it, all of its weights or adapters on frozen
weights."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import finetune
from expertmesh.models.gpt.sizes import GPTSizes
from expertmesh.planner.planned_model import PlannedModel, of_config

Kind = Literal["lora", "full"]
OF_ADAPTERS = {
    "rank": "adapter.rank",
    "expert_rank": "adapter.expert_rank",
    "targets": "adapter.targets",
    "base": "base.storage",
}
"""Options of training by the name that they have in a plan; all are of adapters."""
TOKENS = 1e7
"""Default tokens of a fine-tuning."""


def finetuned(model: PlannedModel, kind: Kind, given: Mapping[str, Any], *, seq_len: int | None = None) -> PlannedModel:
    """The model with the configuration of its fine-tuning, and the words that start it.

    Args:
        model: the model; one that our GPT can run.
        kind: "full", or "lora": low-rank adapters while the weights rest.
        seq_len: tokens of a sequence; None: what the model takes, at most 2,048, as in training.
    """
    if not isinstance(model.sizes, GPTSizes) or model.has_lengths:
        raise ConfigError(
            f"plan {model.name}: cannot be fine-tuned here, because its attention or experts are none of ours;"
            f" leave {named('finetune')} out"
        )
    if kind == "full" and given:
        name = next(iter(given))
        raise ConfigError(
            name,
            _text(given[name]),
            "is an option of adapters",
            f"give {named('finetune', 'lora')}",
        )
    folder = model.folder or f"models/{model.name}"
    options = {OF_ADAPTERS[name]: value for name, value in given.items()}
    if kind == "lora":
        options = {"adapter.kind": "lora", **options}
    architecture = model.sizes.config
    most = min(architecture.max_seq_len, 2048)
    begun = finetune(folder)
    values = {"model": architecture, "data.seq_len": seq_len or most, "train.batch_size": 16}
    config = begun.updated({**values, **options})
    assert isinstance(config, GPTRunConfig)
    words = [shlex.quote(folder), "--data.path DATA"]
    words += [f"--{name.replace('_', '-')} {_text(value)}" for name, value in options.items()]
    guesses = [f"{TOKENS:,.0f} training tokens"]
    if not model.folder:
        guesses.append(f"weights in the folder {folder}")
    found = of_config(model.name, config, words=" ".join(words))
    return replace(found, train_tokens=TOKENS, guesses=tuple(guesses), unread=model.unread, folder=folder)


def _text(value: object) -> str:
    """A value as it is typed."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return ",".join(map(str, value)) if is_list else str(value)  # type: ignore[call-overload]
