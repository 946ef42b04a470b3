"""Published measurements with their settings, for the fit and the validation of the models of time and memory."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.config.cluster import Cluster
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.rank_layout import RankLayout, Stage, Workload
from expertmesh.costs.sizes import ModelSizes, sizes_of_hub
from expertmesh.costs.step_time import RawStep, raw_step
from expertmesh.costs.weight_formats import Weights
from expertmesh.models.gpt.sizes import sizes_of

_USUAL_SEQ = 4096
RENAMED = {"tp": "tp_degree", "pp": "pp_degree", "vpp": "virtual_stages", "cp": "cp_degree"}
RENAMED |= {"ep": "route_degree", "mbs": "micro_batch", "overlap": "overlap_degree"}
OF_LAYOUT = set(RankLayout.__dataclass_fields__) - {"num_ranks", "accumulation", "layer_routes"}
OF_WORK = set(Workload.__dataclass_fields__) - {"seq_len", "on_gpu"}


@dataclass(frozen=True)
class PublishedMeasurement:
    """A published measurement, a row of published.toml."""

    name: str  # name of the row
    source: str  # its publication, by the letters of published.toml
    model: str  # name of the model there
    sizes: ModelSizes
    cluster: Cluster  # the cluster of the run
    layout: RankLayout  # layout of the run
    work: Workload  # sequences, precision and software of the run
    measured: float  # the value
    stage: Stage = "most"  # pipeline stage of the rank whose memory it is
    # its unit: tokens_per_s or tflops of one GPU; live_gib or device_gib; exchange_ms or compute_ms; token_ms
    unit: str = "tokens_per_s"
    is_fitted: bool = False  # whether the constants are fitted on the row
    guesses: tuple[str, ...] = ()  # inputs that the source does not give
    cause: str = ""  # cause of a large error of the model, as far as it is known

    @property
    def measured_s(self) -> float:
        """Seconds of one step, converted from the measured rate."""
        tokens = self.layout.tokens_per_step(self.work.seq_len) / self.layout.num_ranks
        if self.unit == "tflops":
            return tokens * self.sizes.training_flops(self.work.seq_len) / (self.measured * 1e12)
        return tokens / self.measured

    def raw(self) -> RawStep:
        """Modelled seconds of the step's parts at the hardware's peaks."""
        return raw_step(self.sizes, self.layout, self.work, self.cluster)


@cache
def _table() -> dict[str, Any]:
    text = files("expertmesh.planner").joinpath("published.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def published_models() -> Mapping[str, ModelSizes]:
    """Sizes of the models in published.toml, by name; of those that our GPT can run to the parameter."""
    return {name: _sizes(values) for name, values in _table()["models"].items()}


def _sizes(row: Mapping[str, Any]) -> ModelSizes:
    row = {name: value for name, value in row.items() if name != "files"}
    if "model_type" not in row:
        return sizes_of_hub(row, is_part=True)
    return sizes_of(model_config({**row, **dict.fromkeys(row.get("nulls", ()))}))


def published_files(name: str) -> Weights | None:
    """Formats of the files of a model in published.toml; None: BF16."""
    text = _table()["models"][name].get("files")
    return None if text is None else Weights.of(text)


@cache
def published_points(kind: str = "points") -> tuple[PublishedMeasurement, ...]:
    """Rows of published.toml, in their order.

    Args:
        kind: "points": training throughput; "memory": peak memory; "parts": parts of a step.
    """
    return tuple(point_of(name, values) for name, values in _table()[kind].items())


@cache
def published_serving() -> Mapping[str, Mapping[str, Any]]:
    """Rows of generation in published.toml, as plain values by name."""
    found: Mapping[str, Mapping[str, Any]] = _table()["serving"]
    return found


def point_of(name: str, values: Mapping[str, Any], sizes: ModelSizes | None = None) -> PublishedMeasurement:
    """A measurement from a row of TOML. `sizes`: sizes of its model; None: the row names a model of published.toml."""
    v = {**_table()["settings"][values["settings"]], **values}
    v = {RENAMED.get(key, key): value for key, value in v.items()}
    if sizes is None:
        model = {k: value for k, value in _table()["models"][v["model"]].items() if k != "files"}
        if "num_experts" in v:
            model["num_experts"] = v["num_experts"]
        sizes = sizes_of_hub(model, is_part=True)
    cluster = find_cluster(v["cluster"])
    given = {key: v[key] for key in OF_LAYOUT if key in v}
    given["recomputed"] = tuple(v.get("recomputed", ()))
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
        stage=v.get("stage", "most"),
        unit=v.get("unit", "tokens_per_s"),
        is_fitted=v.get("fit", False),
        guesses=tuple(v.get("guess", ())),
        cause=v.get("cause", ""),
    )
