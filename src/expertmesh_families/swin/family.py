"""The swin family: Swin Transformers that classify images."""

from typing import Any

from expertmesh.models.family import Family, Metric
from expertmesh_families.swin.config import SwinRunConfig, begun_with
from expertmesh_families.swin.recipes import RECIPES


def _task(config: SwinRunConfig) -> Any:
    from expertmesh_families.swin.task import SwinTask

    return SwinTask(config)


SWIN = Family(
    name="swin",
    task=_task,
    config=SwinRunConfig,
    recipes=RECIPES,
    costs="expertmesh_families.swin.costs:swin_costs",
    items="images",
    metric=Metric("accuracy", "accuracy", "accuracy", higher_is_better=True),
    free=("model.moe.backend",),
    files=("classes.json",),
    begin=begun_with,
)
"""The swin family."""
