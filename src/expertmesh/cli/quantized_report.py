"""Part of `expertmesh report` for quantized folders: their size, and their quality next to the source model's."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertmesh.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from expertmesh.runs.open import LoadedModel


def report_quantized(folder: Path, *, most_samples: int | None = None) -> None:
    """Print sizes, and the metric of the folder and of its source on the source's validation data, if available."""
    from expertmesh.checkpoints.compressed_tensors import QuantizedModel
    from expertmesh.runs.open import open_model
    from expertmesh.runs.run_dir import find_model

    found = find_model(folder)
    weights = found.open_weights()
    assert isinstance(weights, QuantizedModel)
    scheme, sizes = weights.scheme, weights.num_bytes
    groups = f" in groups of {scheme.group_size}" if scheme.format == "int4" else ""
    print(f"{folder}: experts in {scheme.format}{groups}")
    total = sum(sizes.values())
    print(f"  {total:,} bytes, of which {sizes['experts']:,} are the experts'")
    report = _report(folder)
    if report.get("bytes_before"):
        share = total / report["bytes_before"]
        print(f"  before {report['bytes_before']:,} bytes: {share:.0%} are left")
    source = report.get("source")
    try:
        if source is None:
            raise ConfigError("nothing says what it was made of")
        before = find_model(source)
        if before.is_hub:
            raise ConfigError(f"{source} came without the data that it was trained on")
        _compare(open_model(before), open_model(found), most_samples)
    except (ConfigError, CheckpointError) as error:
        print(f"not measured beside what it was made of: {error}")


def _report(folder: Path) -> dict[str, Any]:
    from expertmesh.config.base import parse_json
    from expertmesh.runs.quantized import REPORT

    try:
        found = parse_json((folder / REPORT).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _compare(before: "LoadedModel", after: "LoadedModel", most: int | None) -> None:
    from expertmesh.data.data_progress import notes_known
    from expertmesh.models.task import Begin
    from expertmesh.parallel.ranks import Ranks
    from expertmesh.training.evaluate import evaluate, watched
    from expertmesh.training.threads import threads_of_calls

    train, metric = before.run.config.train, before.run.family.metric
    with notes_known():
        data = before.task.prepare()
    before.task.begin(before.model, data, Begin(train.steps, before.run.path, Ranks()))
    values = []
    for one in (before, after):
        with threads_of_calls(one.model, one.precision, num_rows=64 * train.samples_per_pass):
            result = evaluate(
                before.task,
                one.model,
                data,
                batch_size=train.samples_per_pass,
                max_samples=train.eval_batches * train.batch_size if most is None else most,
                precision=one.precision,
                watch=watched(data),
            )
        values.append((result[metric.key], result["loss"]))
    (first, loss), (second, other) = values
    print(f"validation {metric.text}, on the trainer's sample")
    print(f"  {before.run.path}  {first:.4f}")
    print(f"  {after.run.path}  {second:.4f}")
    print(f"it cost {second - first:+.5f} {metric.text}, {other - loss:+.5f} in the loss")


def is_quantized(name: str) -> bool:
    """Whether a folder holds quantized weights; False for an unreadable folder."""
    from expertmesh.checkpoints.compressed_tensors import quantization_of
    from expertmesh.config.base import expanded

    try:
        return quantization_of(expanded(name)) is not None
    except ConfigError:
        return False
