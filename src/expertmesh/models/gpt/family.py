"""The GPT family: decoder-only language models of text."""

from typing import Any

from expertmesh.models.family import Family, Metric
from expertmesh.models.gpt.config import GPTRunConfig, begun_with
from expertmesh.models.gpt.recipes import RECIPES, finetune
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.adapter_targets import check_targets


def _task(config: GPTRunConfig) -> Any:
    from expertmesh.models.gpt.task import GPTTask

    return GPTTask(config)


def _begun(config: GPTRunConfig, other: GPTRunConfig) -> GPTRunConfig:
    found = begun_with(config, other)
    check_targets(found.adapter, gpt_spec(found.model))
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
