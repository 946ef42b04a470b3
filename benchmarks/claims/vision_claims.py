"""What experts do for images: mixtures against dense twins on 67 classes, dropping at inference, frozen experts, neighbours.

    python -m benchmarks.claims.vision_claims --images FOLDER      # mnist10k, animals, glyphs below it

All models have the shape of `swin-mnist`, 16 experts (8 for digits, as the recipe) or none, and train for some minutes with one thread.
What a finished run measured is written to docs/results/vision.json at once, and the script begins where it was stopped, in a run too.
`--only glyphs` trains the runs whose names begin so; `--page` writes what the numbers of now say into docs/results/vision.md. Runs of
other lengths or of other numbers of few images belong into another file (`--out`) and another folder (`--runs`).

* glyphs, animals, digits: beside the nearest neighbours by pixels
* glyphs-changed, animals-changed: the same for twice the steps, with stronger changes of the images in training
* few: `glyphs` fine-tuned on few silhouettes of each class, other ones for each seed: dense, experts tuned, experts frozen
* union: digits, silhouettes and glyphs, 67 classes; each mixture is measured again with less room for its experts' rows, as that of digits
* narrow: the same with models of half the width, which have less room without experts, for twice the steps
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from benchmarks.harness import circumstances
from benchmarks.markdown import markdown_table

from expertmesh.training.heap import keep_freed_memory
from expertmesh_families.swin.family import SWIN
from expertmesh.config.moe import MoEConfig
from expertmesh_families.swin.config import SwinRunConfig
from expertmesh_families.swin.costs import count_multiply_adds, swin_costs
from expertmesh_families.swin.image_files import read_folder
from expertmesh.errors import ConfigError
from expertmesh_families.swin.recipes import swin_mnist
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run
from expertmesh.training.init_from import with_init_from
from expertmesh.training.loop import train

FOLDERS = {
    "union": {"mnist10k": 8000, "animals": 7000, "glyphs": 0},
    "glyphs": {"glyphs": 0},
    "animals": {"animals": 7000},
    "digits": {"mnist10k": 8000},
}
"""Folders of each set of data, and how many images of each to learn from; 0: its own split."""
FOLDERS["narrow"] = FOLDERS["union"]
FOLDERS |= {f"{name}-changed": FOLDERS[name] for name in ("glyphs", "animals")}
CLASSES = {"union": 67, "narrow": 67, "digits": 10}
CLASSES |= dict.fromkeys(("glyphs", "glyphs-changed"), 47) | dict.fromkeys(
    ("animals", "animals-changed"), 10
)
BESIDE_NEIGHBOURS = ("glyphs", "animals", "digits")
CHANGED: dict[str, dict[str, Any]] = {
    "glyphs-changed": {"data.stretch": 0.35, "data.shear": 0.25, "data.mixup": 0.2, "data.mix": 0.5},
    "animals-changed": {"data.flip": True, "data.rotate": 20.0, "data.zoom": 0.2, "data.stretch": 0.25, "data.shear": 0.15},
}  # fmt: skip
"""Options of the runs with stronger changes of images; written before they ran, and not chosen among others."""
NUM_EXPERTS = 16
RATES = (3e-3, 6e-3, 12e-3)
SWEEP_SEED = 99
"""Of the runs on the union that choose a rate; it is not reported."""
CAPACITIES = ((1.25, "priority"), (0.5, "priority"), (0.5, "first"), (0.25, "priority"), (0.25, "first"))  # fmt: skip
RESAMPLES = 2000
BEGIN, END = "<!-- what benchmarks.claims.vision_claims found -->", "<!-- end -->"


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        images: folder of the folders of images.
        runs: folder of the run directories.
        seeds: each arm is trained with each.
        steps: of the runs on each set of data; those on few images are "few". 1,200 are the recipe's own.
        per_class: images of each class that are few.
        changes: other options of all runs, by dotted name.
        rates: peak learning rates of "moe" and of "dense"; on few images a third.
    """

    images: Path
    runs: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: Mapping[str, int] = field(
        default_factory=lambda: (
            dict.fromkeys(BESIDE_NEIGHBOURS, 1200)
            | dict.fromkeys(CHANGED, 2400)
            | {"union": 600, "narrow": 1200, "few": 150}
        )
    )
    per_class: int = 20
    changes: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=lambda: {"moe": 6e-3, "dense": 6e-3})


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        data: "union", "narrow" (the union for a model of half the width), "glyphs", "animals", "digits", "few" or one of CHANGED.
        kind: "moe" or "dense"; on few images "tuned" or "frozen" experts, or "dense".
        seed: of the run, and of which images are few.
    """

    data: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.data}_{self.kind}_{self.seed}"

    @property
    def begins_with(self) -> "Trial | None":
        """The run whose weights it begins with."""
        if self.data != "few":
            return None
        return Trial("glyphs", "dense" if self.kind == "dense" else "moe", self.seed)


def trials(plan: Plan) -> Iterator[Trial]:
    """All runs, those of a seed together, each after the one that it begins with."""
    for seed in plan.seeds:
        yield Trial("glyphs", "moe", seed)
        yield from (Trial("few", kind, seed) for kind in ("tuned", "frozen"))
        yield from (Trial(data, "moe", seed) for data in ("animals", "digits", *CHANGED))
        yield from (Trial("union", kind, seed) for kind in ("moe", "dense"))
        yield from (Trial("narrow", kind, seed) for kind in ("moe", "dense"))
        yield from (Trial(data, "dense", seed) for data in ("glyphs", "few"))


def configuration(plan: Plan, trial: Trial) -> SwinRunConfig:
    """The run of a trial: `swin-mnist` on other data, with more experts or none."""
    of_few = trial.data == "few"
    data = "animals" if of_few else trial.data
    folders = {plan.images / name: count for name, count in FOLDERS[data].items()}
    if of_few:
        folders = {few_images(plan, trial.seed): 0}
    steps = plan.steps[trial.data]
    moe: dict[str, Any] = MoEConfig(num_experts=()).model_dump()
    if trial.kind != "dense":
        more = {"num_experts": (NUM_EXPERTS,), "router_noise_std": 1 / NUM_EXPERTS}
        moe = swin_mnist().model.moe.model_dump() | ({} if data == "digits" else more)
    begin = trial.begins_with
    changes: dict[str, Any] = {
        "model.num_classes": CLASSES[data],
        "model.moe": moe,
        "data.path": tuple(map(str, folders)),
        "data.train_images": tuple(folders.values()),
        "optim.lr": plan.rates["dense" if trial.kind == "dense" else "moe"] / (3 if of_few else 1),
        "optim.warmup_steps": min(steps // 4, 100 if data == "union" else 150),
        "train.steps": steps,
        "train.batch_size": 32 if of_few else 64,
        "train.seed": trial.seed,
        "train.dtype": "float32",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.eval_every": max(steps // 4, 1),
        "train.eval_batches": 8,
        "train.checkpoint_every": max(steps // 16, 1),
        "train.keep_last": 1,
        "train.run_dir": str(plan.runs / trial.name),
        "train.resume": "auto",
        "train.init_from": None if begin is None else str(plan.runs / begin.name),
        "train.freeze": ("experts", "router") if trial.kind == "frozen" else (),
    }
    if data == "narrow":
        changes["model.dim"] = 16
    config = swin_mnist().updated({**changes, **CHANGED.get(data, {}), **plan.changes})
    found = with_init_from(config, SWIN)
    assert isinstance(found, SwinRunConfig)
    return found


def few_images(plan: Plan, seed: int) -> Path:
    """A folder with some silhouettes of each class to learn from, and all that are for tests."""
    folder = plan.runs / f"few_{plan.per_class}_of_animals_{seed}"
    whole = read_folder(
        str(plan.images / "animals"),
        num_train=FOLDERS["animals"]["animals"],
        validation_fraction=0.2,
    )
    order = np.random.default_rng(seed).permutation(len(whole.training.labels_N))
    kept: list[int] = []
    for label in range(len(whole.classes)):
        kept += [i for i in order if whole.training.labels_N[i] == label][: plan.per_class]
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, side, places in (
        ("train", whole.training, kept),
        ("test", whole.validation, range(len(whole.validation.labels_N))),
    ):
        images = np.stack([side.read(int(i)) for i in places])
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", side.labels_N[list(places)])
    return folder


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an IDX file of bytes."""
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    path.write_bytes(bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes())


def run(plan: Plan, trial: Trial) -> dict[str, Any] | None:
    """Train and measure; None where a signal ended the training, which goes on the next time."""
    config = configuration(plan, trial)
    result = train(config, recipe="swin-mnist", family=SWIN)
    if result.stopped_by is not None:
        return None
    costs = swin_costs(config, num_ranks=1, dtype="float32")
    found: dict[str, Any] = {
        "steps": result.step,
        "images": result.items,
        "seconds": round(result.seconds, 1),
        "learning_rate": config.optim.lr,
        "parameters": costs.parameters,
        "active_parameters": costs.active,
        "multiply_adds": count_multiply_adds(config.model),
        "right": {"no limit": right(config, {})},
    }
    if trial.data in ("union", "narrow", "digits") and trial.kind == "moe":
        for capacity, policy in CAPACITIES:
            changes = {
                "model.moe.eval_capacity_factor": capacity,
                "model.moe.drop_policy": policy,
            }
            found["right"][f"{capacity} {policy}"] = right(config, changes)
    if trial.data == "few":
        found["per_class"] = plan.per_class
    return found


@torch.no_grad()
def right(config: SwinRunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Which test images the run's model classifies rightly, 64 at a time, as bits; without changes its experts have room for all."""
    found = load_run(config.train.run_dir)
    if config.model.moe.num_experts:
        changes = {"model.moe.eval_capacity_factor": None, **changes}
    opened = open_model(replace(found, config=found.config.updated(dict(changes))))
    task, model = opened.task, opened.model
    bits = [
        model(images).logits_BC.argmax(1) == labels
        for images, labels, *_ in task.prepare().validation(None, 64)
    ]
    return packed(torch.cat(bits).numpy())


def packed(bits: np.ndarray) -> dict[str, Any]:
    """Bits as text, with what they are for people."""
    share = round(float(bits.mean()), 4)
    return {"accuracy": share, "count": len(bits), "bits": np.packbits(bits).tobytes().hex()}


def unpacked(found: Mapping[str, Any]) -> np.ndarray:
    """(images,) the bits of `packed`."""
    raw = np.frombuffer(bytes.fromhex(found["bits"]), dtype=np.uint8)
    return np.unpackbits(raw, count=found["count"]).astype(bool)


def neighbours(plan: Plan, data: str) -> dict[str, Any]:
    """What the nearest training image by pixels has right, or the five nearest, whichever is better on these very images."""
    config = configuration(plan, Trial(data, "moe", 0))
    images: Any = SWIN.open_task(config).prepare()
    found = [
        packed(images.neighbours(count, most_distances=1 << 40).numpy()) | {"neighbours": count}
        for count in (1, 5)
    ]
    return max(found, key=lambda one: one["accuracy"])


def difference(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Points by which the first of each pair is better, and a 95 % interval by a bootstrap over seeds and images alike.

    Args:
        pairs: for each seed, which images two arms have right.
    """
    gains = np.stack([100.0 * first - 100.0 * second for first, second in pairs])
    draws = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        seeds = draws.integers(len(gains), size=len(gains))
        images = draws.integers(gains.shape[1], size=gains.shape[1])
        means[number] = gains[seeds].mean(0)[images].mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "points": round(float(gains.mean()), 2),
        "interval": [round(float(low), 2), round(float(high), 2)],
        "seeds": len(gains),
    }


def claims(runs: Mapping[str, Any], neighbours_of: Mapping[str, Any]) -> dict[str, Any]:
    """What the finished runs say; an arm counts for the seeds of which its pair is finished, too."""
    found: dict[str, Any] = {}

    def compare(name: str, first: tuple[str, str], second: tuple[str, str]) -> None:
        (arm, room), (other, other_room) = first, second
        pairs = [
            (unpacked(runs[f"{arm}_{s}"]["right"][room]), unpacked(runs[f"{other}_{s}"]["right"][other_room]))
            for s in range(1000)
            if f"{arm}_{s}" in runs and f"{other}_{s}" in runs
        ]  # fmt: skip
        if pairs:
            found[name] = difference(pairs)

    free = "no limit"
    compare("67 classes: mixture - dense twin", ("union_moe", free), ("union_dense", free))
    narrow = "67 classes, half the width, twice the steps: mixture - dense twin"
    compare(narrow, ("narrow_moe", free), ("narrow_dense", free))
    for room in ("0.5", "0.25"):
        first, priority = ("union_moe", f"{room} first"), ("union_moe", f"{room} priority")
        compare(f"room {room}, batch-prioritised - no limit", priority, ("union_moe", free))
        trained = ("union_moe", "1.25 priority")
        compare(f"room {room}, batch-prioritised - that of training", priority, trained)
        compare(f"room {room}, batch-prioritised - first come", priority, first)
    compare("47 glyphs: mixture - dense twin", ("glyphs_moe", free), ("glyphs_dense", free))
    compare("few labels: frozen - tuned experts", ("few_frozen", free), ("few_tuned", free))
    compare("few labels: tuned experts - dense", ("few_tuned", free), ("few_dense", free))
    compare("few labels: frozen experts - dense", ("few_frozen", free), ("few_dense", free))
    for data in (*neighbours_of, *CHANGED):
        known = neighbours_of.get(data.removesuffix("-changed"))
        mine = [r["right"][free] for run, r in runs.items() if run.startswith(f"{data}_moe_")]
        if mine and known:
            pairs = [(unpacked(m), unpacked(known)) for m in mine]
            found[f"{data}: mixture - nearest neighbours"] = difference(pairs)
    return found


def table_of_rates(sweep: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracies on the union of the runs that chose the rates."""
    rows = [
        {"peak rate, on the union": kind}
        | {rate: f"{100 * share:.1f}" for rate, share in found.items()}
        for kind, found in sweep.items()
    ]
    return markdown_table(rows)


def table_of_runs(runs: Mapping[str, Any]) -> str:
    """Accuracies of every arm, by seed."""
    arms: dict[tuple[str, str, str], dict[int, str]] = {}
    for name, found in runs.items():
        data, kind, seed = name.split("_")
        for room, measured in found["right"].items():
            arm = (f"{data}, {kind}", f"{found['steps']:,}", room)
            arms.setdefault(arm, {})[int(seed)] = f"{100 * measured['accuracy']:.1f}"
    seeds = sorted({seed for of_arm in arms.values() for seed in of_arm})
    rows = [
        {"arm": arm, "steps": steps, "room": room} | {f"seed {s}": found.get(s, "") for s in seeds}
        for (arm, steps, room), found in arms.items()
    ]
    return markdown_table(rows)


def table_of_neighbours(known: Mapping[str, Any]) -> str:
    """What the nearest neighbours by pixels have right of each set of data."""
    rows = [
        {
            "nearest neighbours": data,
            "how many vote": found["neighbours"],
            "test images": f"{found['count']:,}",
            "right, %": f"{100 * found['accuracy']:.1f}",
        }
        for data, found in known.items()
    ]
    return markdown_table(rows)


def table_of_claims(found: Mapping[str, Any]) -> str:
    """Differences with their intervals."""
    rows = [
        {
            "difference": name,
            "points": f"{claim['points']:+.2f}",
            "95 % interval": "{:+.2f} to {:+.2f}".format(*claim["interval"]),
            "seeds": claim["seeds"],
        }
        for name, claim in found.items()
    ]
    return markdown_table(rows)


def machines(runs: Mapping[str, Any]) -> list[str]:
    """A sentence for each machine, with the runs that it did where there are several.

    Raises:
        ConfigError: a run has no circumstances.
    """
    names: dict[str, list[str]] = {}
    for name, found in runs.items():
        around = found.get("circumstances")
        if around is None:
            raise ConfigError(
                f"run {name}: has no circumstances in the record, and a page needs those of every run; measure it again"
            )
        machine = (
            f"{around['cpu']}; {around['threads']} thread(s); torch {around['versions']['torch']}"
        )
        names.setdefault(machine, []).append(name)
    if len(names) == 1:
        return [f"{machine}." for machine in names]
    return [f"{', '.join(of)}: {machine}." for machine, of in names.items()]


def check_record(plan: Plan, runs: Mapping[str, Any]) -> None:
    """Whether the runs of a record are runs of this plan.

    Raises:
        ConfigError: one has other steps or another number of few images.
    """
    for name, found in runs.items():
        data = name.split("_")[0]
        wanted = {"steps": plan.steps[data]} | (
            {"per_class": plan.per_class} if data == "few" else {}
        )
        for what, value in wanted.items():
            if found.get(what) != value:
                raise ConfigError(
                    f"run {name} of the record: {what} {found.get(what)}, but the plan has {value}; "
                    "choose the record's --scale, or other --out and --runs"
                )


def write_page(results: Path) -> None:
    """Put the tables of the results so far between the marks of the page beside them.

    Raises:
        ConfigError: see `machines`.
    """
    record = json.loads(results.read_text())
    page = results.with_suffix(".md")
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    runs, known = record["runs"], record["neighbours"]
    text = [
        " ".join(machines(runs)) + " Accuracy in %, by seed.",
        table_of_runs(runs),
        table_of_rates(record["sweep"]),
        *([table_of_neighbours(known)] if known else []),
        table_of_claims(claims(runs, known)),
    ]
    page.write_text(before + BEGIN + "\n\n" + "\n\n".join(text) + "\n\n" + END + after)


def learn(
    plan: Plan,
    results: Path,
    *,
    only: str = "",
    train_one: Callable[[Plan, Trial], dict[str, Any] | None] = run,
) -> bool:
    """Train and measure what is not in the results yet; whether all was done.

    Args:
        plan: what to run.
        results: JSON file, to which every finished run is added.
        only: beginning of the names of the runs to train.
        train_one: `run`, or what stands for it.

    Raises:
        ConfigError: see `check_record`.
    """
    record = json.loads(results.read_text()) if results.exists() else {}
    runs = record.setdefault("runs", {})
    known = record.setdefault("neighbours", {})
    sweep = record.setdefault("sweep", {})
    check_record(plan, runs)

    def keep() -> None:
        results.parent.mkdir(parents=True, exist_ok=True)
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.rename(results)

    for kind in ("moe", "dense"):
        shares = sweep.setdefault(kind, {})
        for rate in RATES:
            if f"{rate:g}" in shares:
                continue
            print(f"== rate {rate:g}, {kind}", flush=True)
            at_rate = replace(plan, rates={kind: rate}, runs=plan.runs / f"rate_{rate:g}")
            found = train_one(at_rate, Trial("union", kind, SWEEP_SEED))
            if found is None:
                return False
            shares[f"{rate:g}"] = found["right"]["no limit"]["accuracy"]
            keep()
    best = {kind: float(max(shares, key=lambda r: shares[r])) for kind, shares in sweep.items()}
    plan = replace(plan, rates=best)
    for trial in trials(plan):
        if trial.name in runs or not trial.name.startswith(only):
            continue
        print(f"== {trial.name}", flush=True)
        found = train_one(plan, trial)
        if found is None:
            return False
        runs[trial.name] = found | {"circumstances": circumstances(clock="wall")}
        if trial.data in BESIDE_NEIGHBOURS and trial.data not in known:
            known[trial.data] = neighbours(plan, trial.data)
        record["claims"] = claims(runs, known)
        keep()
    return True


def main(
    images: Path,
    runs: Path = Path("runs/vision_claims"),
    out: Path = Path("docs/results/vision.json"),
    seeds: tuple[int, ...] = (0, 1, 2),
    only: str = "",
    scale: float = 1.0,
    page: bool = False,
) -> int:
    """Train what is missing, or write the page.

    Args:
        images: folder with mnist10k, animals and glyphs.
        runs: folder of the run directories.
        out: file of the results.
        seeds: of the runs.
        only: beginning of the names of the runs to train.
        scale: the steps of all runs as a ratio of the plan's; a record of another scale is refused.
        page: only write the tables into the page beside the results.
    """
    torch.set_num_threads(1)
    plan = Plan(images, runs, seeds)
    plan = replace(plan, steps={name: round(scale * steps) for name, steps in plan.steps.items()})
    try:
        if page:
            write_page(out)
            return 0
        keep_freed_memory()
        return 0 if learn(plan, out, only=only) else 143
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
