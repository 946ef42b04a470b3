"""Are a mixture's experts better frozen when its body is fine-tuned to find things? A detector on small Swins.

    python -m benchmarks.claims.vision_detector --images FOLDER      # animals and glyphs below it

A body of four stages learns to classify glyphs, as a mixture and as its dense twin. Then a detector (`benchmarks/claims/detection.py`) on the
maps of all four stages learns to find silhouettes of animals in scenes of 64 x 64 pixels, three times: on the mixture with all that it
has (tuned), with experts and routers as they were (frozen), and on the dense twin. What is finished stands in
docs/results/vision_detector.json at once, and the script begins where it was stopped, in a run too; `--page` writes the table into
docs/results/vision.md.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from benchmarks.claims.detection import (
    THRESHOLDS,
    Detector,
    Matches,
    Scenes,
    average_precision,
    compose,
    detect,
    detection_loss,
    matched,
)
from benchmarks.harness import circumstances
from benchmarks.markdown import markdown_table

import expertmesh as em
from expertmesh.training.heap import keep_freed_memory
from expertmesh_families.swin.family import SWIN
from expertmesh.config.moe import MoEConfig
from expertmesh_families.swin.config import SwinRunConfig
from expertmesh_families.swin.image_files import read_folder
from expertmesh.errors import ConfigError
from expertmesh_families.swin.model import Swin
from expertmesh_families.swin.recipes import swin_mnist
from expertmesh.runs.run_dir import load_run
from expertmesh.training.loop import train

ARMS = {"tuned": "moe", "frozen": "moe", "dense": "dense"}
"""Kind of the body of each arm."""
GLYPHS, ANIMALS = 47, 10
TRAINING_ANIMALS = 7000
RESAMPLES = 500
BEGIN, END = "<!-- what benchmarks.claims.vision_detector found -->", "<!-- end of detector -->"


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        images: folder of the folders of images.
        runs: folder of the run directories.
        seed: of all of it.
        body_steps: of a body on glyphs.
        steps: of a detector.
        scenes: to learn from, and to test on.
        side: height and width of a scene.
        training_animals: the first so many silhouettes are in the scenes to learn from, the others in those to test on.
        changes: other options of the bodies, by dotted name.
    """

    images: Path
    runs: Path
    seed: int = 0
    body_steps: int = 800
    steps: int = 600
    scenes: tuple[int, int] = (2000, 400)
    side: int = 64
    training_animals: int = TRAINING_ANIMALS
    changes: Mapping[str, Any] = field(default_factory=dict)


def body_config(plan: Plan, kind: str) -> SwinRunConfig:
    """Four stages on glyphs: `swin-mnist` with one stage more, experts in the second and the third, or none."""
    moe: dict[str, Any] = MoEConfig(num_experts=()).model_dump()
    if kind == "moe":
        moe = swin_mnist().model.moe.model_dump()
    changes = {
        "model.num_classes": GLYPHS,
        "model.depths": (2, 2, 2, 2),
        "model.num_heads": (1, 2, 4, 8),
        "model.moe": moe,
        "data.path": (str(plan.images / "glyphs"),),
        "optim.warmup_steps": min(plan.body_steps // 4, 100),
        "train.steps": plan.body_steps,
        "train.run_dir": str(plan.runs / f"body_{kind}"),
        **_run_options(plan, plan.body_steps),
    }
    return swin_mnist().updated({**changes, **plan.changes})


def _run_options(plan: Plan, steps: int) -> dict[str, Any]:
    return {
        "train.seed": plan.seed,
        "train.dtype": "float32",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.resume": "auto",
        "train.keep_last": 1,
        "train.checkpoint_every": max(steps // 10, 1),
        "train.eval_every": max(steps // 4, 1),
        "train.eval_batches": 4,
    }


def detector_on(plan: Plan, kind: str) -> Detector:
    """A detector on a trained body, whose windows are then larger and whose experts have room for all outside of training."""
    found = load_run(plan.runs / f"body_{kind}", SWIN)
    assert isinstance(found.config, SwinRunConfig)
    model = found.config.model
    changes: dict[str, Any] = {
        "model.image_size": plan.side,
        "model.pretrained_window_sizes": model.learned_windows,
    }
    if model.moe.num_experts:
        changes["model.moe.eval_capacity_factor"] = None
    body = Swin(found.config.updated(changes).model, seed=plan.seed)
    found.load_into(body.state_dict())
    torch.manual_seed(plan.seed)
    return Detector(body, num_classes=ANIMALS)


def scenes_of(plan: Plan) -> tuple[Scenes, Scenes]:
    """Scenes to learn from, and to test on, of other silhouettes."""
    folder = read_folder(
        plan.images / "animals", num_train=plan.training_animals, validation_fraction=0.2
    )
    found = []
    for number, side in enumerate((folder.training, folder.validation)):
        images = np.stack([side.read(i) for i in range(len(side.labels_N))])
        seed = 2 * plan.seed + number
        count = plan.scenes[number]
        found.append(compose(images, side.labels_N, count=count, side=plan.side, seed=seed))
    return found[0], found[1]


def train_body(plan: Plan, kind: str) -> dict[str, Any] | None:
    """Train a body; None where a signal ended that, which goes on the next time."""
    result = train(body_config(plan, kind), recipe="swin-mnist", family=SWIN)
    if result.stopped_by is not None or result.evaluation is None:
        return None
    accuracy = round(float(result.evaluation["accuracy"]), 4)
    return {"steps": result.step, "seconds": round(result.seconds, 1), "accuracy": accuracy}


def train_arm(plan: Plan, arm: str) -> dict[str, Any] | None:
    """Train a detector and measure it; None where a signal ended the training, which goes on the next time."""

    def detector() -> Detector:
        return detector_on(plan, ARMS[arm])

    training, test = scenes_of(plan)
    options = {
        "optim.lr": 1e-3,
        "optim.warmup_steps": min(plan.steps // 4, 50),
        "train.steps": plan.steps,
        "train.batch_size": 16,
        "train.run_dir": str(plan.runs / arm),
        "train.freeze": ("experts", "router") if arm == "frozen" else (),
        **_run_options(plan, plan.steps),
    }
    result = em.train(
        detector, options, data=tuple(training), validation=tuple(test), loss=detection_loss
    )
    if result.stopped_by is not None:
        return None
    model = em.load(plan.runs / arm, module=detector).model
    assert isinstance(model, Detector)
    answers = [one for part in test.images_SCHW.split(16) for one in detect(model, part)]
    matches = packed(matched(answers, test, num_classes=ANIMALS))
    areas_T = 100 * average_precision(unpacked(matches))
    return {
        "steps": result.step,
        "seconds": round(result.seconds, 1),
        "learning": sum(p.numel() for p in model.parameters() if p.requires_grad)
        - frozen_parameters(model, arm),
        "AP": round(float(areas_T.mean()), 2),
        "AP50": round(float(areas_T[0]), 2),
        "AP75": round(float(areas_T[THRESHOLDS.index(0.75)]), 2),
        "matches": matches,
    }


def frozen_parameters(model: Detector, arm: str) -> int:
    """Parameters of experts and routers, where the arm froze them."""
    layers = [layer for _, layer in model.backbone.moe_blocks()] if arm == "frozen" else []
    parts = [part for layer in layers for part in (layer.experts, layer.router)]
    return sum(p.numel() for part in parts for p in part.parameters())


def packed(matches: Matches) -> dict[str, Any]:
    """Matches as text; scores to three digits."""
    bits_N = np.packbits(matches.hits_NT, axis=1, bitorder="little").tobytes()
    return {
        "count": len(matches.scenes_N),
        "scenes": matches.scenes_N.astype("<u2").tobytes().hex(),
        "labels": matches.labels_N.astype("u1").tobytes().hex(),
        "scores": matches.scores_N.astype("<f2").tobytes().hex(),
        "hits": bits_N.hex(),
        "truths": matches.truths_SC.astype("u1").tobytes().hex(),
    }


def unpacked(found: Mapping[str, Any]) -> Matches:
    """What `packed` was given."""

    def read(name: str, kind: str) -> np.ndarray:
        return np.frombuffer(bytes.fromhex(found[name]), dtype=kind)

    num_bytes = -(-len(THRESHOLDS) // 8)
    bits = read("hits", "u1").reshape(found["count"], num_bytes)
    hits = np.unpackbits(bits, axis=1, count=len(THRESHOLDS), bitorder="little").astype(bool)
    truths = read("truths", "u1").reshape(-1, ANIMALS).astype(int)
    return Matches(
        read("scenes", "<u2").astype(int),
        read("labels", "u1").astype(int),
        read("scores", "<f2").astype(float),
        hits,
        truths,
    )


def difference(first: Matches, second: Matches) -> dict[str, Any]:
    """Points of AP (mean over `THRESHOLDS`) by which the first is better, and a 95 % interval by a bootstrap over scenes."""

    def points(weights_S: np.ndarray | None = None) -> float:
        areas = [average_precision(one, weights_S).mean() for one in (first, second)]
        return 100 * float(areas[0] - areas[1])

    count = len(first.truths_SC)
    draws = np.random.default_rng(0)
    means = [
        points(np.bincount(draws.integers(count, size=count), minlength=count))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return {"points": round(points(), 2), "interval": [round(float(low), 2), round(float(high), 2)]}


def claims(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Differences between the arms that are finished."""
    return {
        f"{first} - {second}": difference(
            unpacked(arms[first]["matches"]), unpacked(arms[second]["matches"])
        )
        for first, second in (("frozen", "tuned"), ("tuned", "dense"), ("frozen", "dense"))
        if first in arms and second in arms
    }


def learn(plan: Plan, results: Path) -> bool:
    """Train and measure what is not in the results yet; whether all was done.

    Args:
        plan: what to run.
        results: JSON file, to which everything finished is added.
    """
    record = json.loads(results.read_text()) if results.exists() else {}
    # the mixture's arms first: they are the question
    steps: list[tuple[str, str, Callable[[Plan, str], dict[str, Any] | None]]] = [
        ("bodies", "moe", train_body),
        ("arms", "frozen", train_arm),
        ("arms", "tuned", train_arm),
        ("bodies", "dense", train_body),
        ("arms", "dense", train_arm),
    ]
    for part, name, train_one in steps:
        if name in record.setdefault(part, {}):
            continue
        print(f"== {name}", flush=True)
        found = train_one(plan, name)
        if found is None:
            return False
        record[part][name] = found | {"circumstances": circumstances(clock="wall")}
        record["claims"] = claims(record.get("arms", {}))
        results.parent.mkdir(parents=True, exist_ok=True)
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.rename(results)
    return True


def write_page(results: Path, page: Path) -> None:
    """Put the tables of the results so far between the marks of the page.

    Args:
        results: JSON file.
        page: with `BEGIN` and `END` in it.
    """
    record = json.loads(results.read_text())
    columns = ("steps", "AP", "AP50", "AP75", "learning", "seconds")
    arms = [
        {"detector on": f"{ARMS[name]}, {name}" if ARMS[name] == "moe" else name}
        | {column: f"{found[column]:,}" for column in columns}
        for name, found in record["arms"].items()
    ]
    differences = [
        {
            "difference": name,
            "points of AP": f"{claim['points']:+.2f}",
            "95 % interval": "{:+.2f} to {:+.2f}".format(*claim["interval"]),
        }
        for name, claim in record["claims"].items()
    ]
    tables = [markdown_table(rows) for rows in (arms, differences) if rows]
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(
        before + BEGIN + "\n\n" + "\n\n".join(tables) + "\n\n" + END + rest.partition(END)[2]
    )


def main(
    images: Path,
    runs: Path = Path("runs/vision_detector"),
    out: Path = Path("docs/results/vision_detector.json"),
    to: Path = Path("docs/results/vision.md"),
    page: bool = False,
    seed: int = 0,
) -> int:
    """Train what is missing, or write the page.

    Args:
        images: folder with animals and glyphs.
        runs: folder of the run directories.
        out: file of the results.
        to: page for the tables.
        page: only write the tables.
        seed: of bodies, scenes and detectors; each seed needs folder and file of its own.
    """
    torch.set_num_threads(1)
    try:
        if page:
            write_page(out, to)
            return 0
        keep_freed_memory()
        return 0 if learn(Plan(images, runs, seed), out) else 143
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
