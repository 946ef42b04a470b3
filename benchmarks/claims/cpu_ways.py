"""What two special ways on CPUs are worth in a training step: attention in blocks, and FP32 products by oneDNN.

    python -m benchmarks.claims.cpu_ways                                # the demo, BF16 and FP32, attention
    python -m benchmarks.claims.cpu_ways --recipe translate-multi30k    # with masks; needs the recipe's data
    python -m benchmarks.claims.cpu_ways --way library                  # FP32: the chosen library against the other one

CPU time of one thread, steps in turn on the same batch; first losses are compared.
"""

import argparse
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from benchmarks.clock import Entry, Stopwatch, interleaved
from benchmarks.harness import circumstances

from expertmesh.models.registry import find_family
from expertmesh.ops.attention import dense
from expertmesh.ops.cpu.products import multiplying_by, usual_library
from expertmesh.models.gpt.recipes import RECIPES as GPTS
from expertmesh_families.seq2seq.recipes import RECIPES as TRANSLATIONS
from expertmesh.training.optim import build_optimizer
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.step import training_step

RECIPES = {**GPTS, **TRANSLATIONS}


@contextmanager
def fused_attention():
    chooses = dense.is_faster_in_blocks
    dense.is_faster_in_blocks = lambda *_: False
    try:
        yield
    finally:
        dense.is_faster_in_blocks = chooses


def other_library() -> AbstractContextManager[None]:
    return multiplying_by("blas" if usual_library() == "onednn" else "onednn")


WAYS = {"attention": fused_attention, "library": other_library}
"""What takes the place of the usual way, as a context."""


def seconds_of_steps(recipe: str, dtype: str, rounds: int, way: str) -> dict[str, float]:
    """Median CPU seconds of a training step by way."""
    config = RECIPES[recipe]().updated({"train.dtype": dtype, "train.device": "cpu"})
    steps, losses, numbers = {}, {}, {}
    task = find_family(config.family).open_task(config)
    batch = None
    data = task.prepare()
    for own in (True, False):
        precision = resolve_precision(config.train)
        model = task.builder.build(device="cpu", dtype=precision.master_dtype)
        optimizer = build_optimizer(model, config.optim, compute_dtype=precision.compute_dtype)
        batch = batch or data.batch(0, config.train.batch_size)
        steps[own] = partial(
            training_step, task, model, optimizer, precision.scaler(), batch, precision=precision
        )
    entries = []
    for own in (True, False):
        place = ExitStack()

        def begin(number: int, own: bool = own, place: ExitStack = place) -> None:
            place.enter_context(nullcontext() if own else WAYS[way]())
            numbers[own] = number

        def run(own: bool = own) -> None:
            losses.setdefault(own, float(steps[own](step=numbers[own]).loss))

        name = "usual" if own else "other"
        entries.append(Entry(name, begin, {"step": run}, finish=place.close))
    found = interleaved(entries, Stopwatch(clock="cpu"), rounds=rounds)
    assert abs(losses[True] - losses[False]) < 0.02, losses
    return {name: parts["step"].median_s for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims.cpu_ways",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="gpt-moe-demo", choices=sorted(RECIPES))
    parser.add_argument("--way", default="attention", choices=sorted(WAYS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(circumstances(clock="cpu")["cpu"], torch.__version__)
    for dtype in ("bfloat16", "float32") if options.way == "attention" else ("float32",):
        found = seconds_of_steps(options.recipe, dtype, options.rounds, options.way)
        usual, other = found["usual"], found["other"]
        print(
            f"{options.recipe} {dtype}, {options.way}: usual {usual:.3f} s, other {other:.3f} s, "
            f"other / usual {other / usual:.2f}"
        )


if __name__ == "__main__":
    main()
