"""The swin family: Swin Transformers that classify images."""

from typing import Any

from expertmesh.models.family import Family, Metric
from expertmesh.models.swin.config import SwinRunConfig, begun_with
from expertmesh.models.swin.costs import swin_costs
from expertmesh.models.swin.recipes import RECIPES


def _task(config: SwinRunConfig) -> Any:
    from expertmesh.models.swin.task import SwinTask

    return SwinTask(config)


SWIN = Family(
    name="swin",
    task=_task,
    config=SwinRunConfig,
    recipes=RECIPES,
    costs=swin_costs,
    items="images",
    metric=Metric("accuracy", "accuracy", "accuracy", higher_is_better=True),
    free=("model.moe.backend",),
    files=("classes.json",),
    begin=begun_with,
)
"""The swin family."""
