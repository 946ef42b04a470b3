"""The GPT family: decoder-only language models of text."""

from pathlib import Path
from typing import Any

from expertmesh.errors import ConfigError, named
from expertmesh.models.family import Family, Metric
from expertmesh.models.gpt.config import GPTRunConfig, begun_with
from expertmesh.models.gpt.recipes import RECIPES, finetune
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.adapter_targets import check_targets


def _task(config: GPTRunConfig) -> Any:
    from expertmesh.models.gpt.objectives import task_class

    return task_class(config.objective.name)(config)


def _begun(config: GPTRunConfig, other: GPTRunConfig) -> GPTRunConfig:
    found = begun_with(config, other)
    adapted = check_targets(found.adapter, gpt_spec(found.model))
    if found.tokens.add:
        from expertmesh.text.new_tokens import grown_vocabulary

        if "output.weight" in adapted:
            rule = "conflicts with an adapter of the head, whose rows of these tokens learn themselves"
            raise ConfigError(
                "tokens.add", " ".join(found.tokens.add), rule, f"leave head out of {named('adapter.targets')}"
            )
        tokenizer = Path(str(found.data.encode_with))
        grown = grown_vocabulary(tokenizer, found.tokens, vocab_size=found.model.vocab_size)
        found = found.updated({"model.vocab_size": grown.size})
    return found


GPT = Family(
    name="gpt",
    task=_task,
    config=GPTRunConfig,
    recipes=RECIPES,
    costs="expertmesh.models.gpt.costs:gpt_costs",
    products="expertmesh.models.gpt.costs:dominant_products",
    items="tokens",
    metric=Metric("bits_per_byte", "bits per byte", "bits/byte"),
    fixed=("data.seq_len", "data.document_mask", "data.pack"),
    free=("model.moe.backend",),
    generates_text=True,
    files=("tokenizer.json",),
    begin=_begun,
    finetune=finetune,
)
"""The GPT family."""
