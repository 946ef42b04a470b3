"""Published measurements with their settings: what the model of time and memory is fitted on, and judged by."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from expertmesh.config.cluster import Cluster
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.sizes import ModelSizes, sizes_of_hub
from expertmesh.costs.step_time import RawStep, raw_step

_USUAL_SEQ = 4096
RENAMED = {"tp": "tp_degree", "pp": "pp_degree", "vpp": "virtual_stages", "cp": "cp_degree"}
RENAMED |= {"ep": "route_degree", "mbs": "micro_batch", "overlap": "overlap_degree"}
OF_LAYOUT = set(RankLayout.__dataclass_fields__) - {"num_ranks", "accumulation"}
OF_WORK = set(Workload.__dataclass_fields__) - {"seq_len"}


@dataclass(frozen=True)
class PublishedMeasurement:
    """One measurement.

    Attributes:
        name: of the row.
        source: where it was published, by the letters of published.toml.
        model: its name there.
        sizes: of the model.
        cluster: that it ran on.
        layout: of a rank.
        work: what was trained.
        measured: the value.
        unit: of it: tokens_per_s or tflops of one GPU; live_gib or device_gib; exchange_ms or compute_ms.
        is_fitted: whether the constants are fitted on it.
        guesses: inputs that the source does not give.
        cause: of a large error, as far as it is known.
    """

    name: str
    source: str
    model: str
    sizes: ModelSizes
    cluster: Cluster
    layout: RankLayout
    work: Workload
    measured: float
    unit: str = "tokens_per_s"
    is_fitted: bool = False
    guesses: tuple[str, ...] = ()
    cause: str = ""

    @property
    def measured_s(self) -> float:
        """Seconds of one step that the measurement means."""
        tokens = self.layout.tokens_per_step(self.work.seq_len) / self.layout.num_ranks
        if self.unit == "tflops":
            return tokens * self.sizes.training_flops(self.work.seq_len) / (self.measured * 1e12)
        return tokens / self.measured

    def raw(self) -> RawStep:
        """What the model counts for it at the hardware's peaks."""
        return raw_step(self.sizes, self.layout, self.work, self.cluster)


@cache
def _table() -> dict[str, Any]:
    text = files("expertmesh.planner").joinpath("published.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def published_models() -> Mapping[str, ModelSizes]:
    """Models of the table by name."""
    return {name: sizes_of_hub(values) for name, values in _table()["models"].items()}


@cache
def published_points(kind: str = "points") -> tuple[PublishedMeasurement, ...]:
    """Rows in the order of the table.

    Args:
        kind: "points": training throughput; "memory": peaks; "parts": of a step.
    """
    return tuple(point_of(name, values) for name, values in _table()[kind].items())


@cache
def published_serving() -> Mapping[str, Mapping[str, Any]]:
    """Rows of generation, as they stand in the table."""
    found: Mapping[str, Mapping[str, Any]] = _table()["serving"]
    return found


def point_of(
    name: str, values: Mapping[str, Any], sizes: ModelSizes | None = None
) -> PublishedMeasurement:
    """A row of the table as a point.

    Args:
        name: of the row.
        values: its settings.
        sizes: of its model; None: of the model of the table that it names.
    """
    v = {**_table()["settings"][values["settings"]], **values}
    v = {RENAMED.get(key, key): value for key, value in v.items()}
    if sizes is None:
        model = dict(_table()["models"][v["model"]])
        if "num_experts" in v:
            model["num_experts"] = v["num_experts"]
        sizes = sizes_of_hub(model)
    cluster = find_cluster(v["cluster"])
    given = {key: v[key] for key in OF_LAYOUT if key in v}
    layout = RankLayout(num_ranks=cluster.num_gpus, **given)
    per_pass = layout.dp_degree * layout.micro_batch
    layout = replace(layout, accumulation=v["gbs"] // per_pass)
    work = Workload(v.get("seq", _USUAL_SEQ), **{key: v[key] for key in OF_WORK if key in v})
    return PublishedMeasurement(
        name=name,
        source=v["source"],
        model=v["model"],
        sizes=sizes,
        cluster=cluster,
        layout=layout,
        work=work,
        measured=v["measured"],
        unit=v.get("unit", "tokens_per_s"),
        is_fitted=v.get("fit", False),
        guesses=tuple(v.get("guess", ())),
        cause=v.get("cause", ""),
    )
