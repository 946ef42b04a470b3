"""The seq2seq family: encoder-decoders that translate."""

from typing import Any

from expertmesh.models.family import Family, Metric
from expertmesh_families.seq2seq.config import Seq2SeqRunConfig, begun_with
from expertmesh_families.seq2seq.recipes import RECIPES


def _task(config: Seq2SeqRunConfig) -> Any:
    from expertmesh_families.seq2seq.task import Seq2SeqTask

    return Seq2SeqTask(config)


SEQ2SEQ = Family(
    name="seq2seq",
    task=_task,
    config=Seq2SeqRunConfig,
    recipes=RECIPES,
    costs="expertmesh_families.seq2seq.costs:seq2seq_costs",
    sizes="expertmesh_families.seq2seq.sizes:sizes_of_translation",
    items="tokens",
    metric=Metric("loss", "nats per target token", "nats/token"),
    free=("model.moe.backend",),
    files=("tokenizer.json",),
    begin=begun_with,
)
"""The seq2seq family."""
