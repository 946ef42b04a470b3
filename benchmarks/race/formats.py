"""Experts in narrow formats beside BF16, and a layer in deterministic mode beside the default, without gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.clock import Entry, Stopwatch, interleaved
from benchmarks.race.contenders import Inputs, WeightSet, ours
from benchmarks.race.layers import release
from benchmarks.race.measures import copy_bytes_per_s, graphed
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import DECODE_TOKENS, RaceShape, chosen
from torch import Tensor

from expertmesh.functional import route_metadata
from expertmesh.moe.experts import GroupedExperts
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.checked_arguments import checked
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights

TOKENS = (*DECODE_TOKENS, 8192)
FAR_OFF = 0.02
"""A format whose result is further from the product of its widened matrices, relatively, is wrong."""
Step = Callable[[], Tensor]


def _shapes(tiny: bool) -> list[RaceShape]:
    (shape,) = chosen(("qwen3-8k",))
    if tiny:
        shape = replace(shape, dim=128, hidden_dim=64, num_experts=8, top_k=2)
    return [replace(shape, num_tokens=tokens) for tokens in TOKENS[: 2 if tiny else None]]


def quantized(keep: Keep, *, device: str, format: str, tiny: bool = False, rounds: int = 15) -> list[dict[str, Any]]:
    """A part: experts in a format, checked against their widened matrices, then timed beside BF16 by turns.

    Raises:
        AssertionError: a row failed; the other rows are kept.
    """
    stopwatch, generator, shapes = Stopwatch(device), torch.Generator(device).manual_seed(0), _shapes(tiny)
    rate, shape = copy_bytes_per_s(stopwatch, device, tiny=tiny), shapes[0]
    drawn = WeightSet.draw(shape, device, generator)
    sizes = {"num_experts": shape.num_experts, "dim": shape.dim, "hidden_dim": shape.hidden_dim}
    made = GroupedExperts(**sizes, activation="swiglu", bias=False, device="meta", dtype=torch.bfloat16)
    made.hold("dense", {"w_in": drawn.w_in_EGFD, "w_out": drawn.w_out_EDF})
    with torch.no_grad():
        made.convert(format, group_size=64)
        wide = made.weights().slices()[0].unpacked(torch.bfloat16)
    ways = {
        format: made.weights(),
        "widened": ExpertWeights.of(wide.w_in_EGFD, wide.w_out_EDF, "swiglu"),
        "BF16": ExpertWeights.of(drawn.w_in_EGFD, drawn.w_out_EDF, "swiglu"),
    }
    rows: list[dict[str, Any]] = []

    @torch.no_grad()
    def row(T: int) -> dict[str, Any]:
        x_TD = torch.empty(T, shape.dim, device=device, dtype=torch.bfloat16).normal_(generator=generator)
        scores_TE = torch.rand(T, shape.num_experts, device=device, generator=generator)
        weights_TK, ids_TK = scores_TE.topk(shape.top_k)
        calls = {name: ExpertsCall(x_TD, weights_TK, one, "auto", ids_TK) for name, one in ways.items()}
        found, expected = compute(calls[format]).float(), compute(calls["widened"]).float()
        distance = float((found - expected).norm() / expected.norm())
        assert distance < FAR_OFF, f"{distance:.3f} from the product of the widened matrices"
        live = int(ids_TK.unique().numel())
        num_bytes = made.weights().num_bytes * live // shape.num_experts
        us, how = _timed({name: partial(compute, calls[name]) for name in (format, "BF16")}, stopwatch, T, rounds)
        return {
            "us": us[format],
            "BF16 us": us["BF16"],
            "speed of BF16": us["BF16"] / us[format],
            "live experts": live,
            "MB of them": num_bytes / 1e6,
            "of the bandwidth floor": num_bytes / rate * 1e6 / us[format],
            "backend": _served(calls[format]),
            "run as": how[format],
            "off by": distance,
        }

    for one in shapes:
        rows.append({"format": format, "T": one.num_tokens} | tried(partial(row, one.num_tokens)))
        keep(rows)
        release(device)
    assert_all(rows)
    return rows


def deterministic(keep: Keep, *, device: str, tiny: bool = False, rounds: int = 15) -> list[dict[str, Any]]:
    """A part: the layer with its router in BF16, with `batch_invariant` beside the default.

    Raises:
        AssertionError: a row failed, or a token had other bits alone than in its batch.
    """
    stopwatch, rows = Stopwatch(device), list[dict[str, Any]]()
    for shape in _shapes(tiny):
        rows.append({"T": shape.num_tokens} | tried(partial(_price, shape, stopwatch, device, rounds)))
        keep(rows)
        release(device)
    assert_all(rows)
    return rows


@torch.no_grad()
def _price(shape: RaceShape, stopwatch: Stopwatch, device: str, rounds: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    weights, (x_TD,) = (
        WeightSet.draw(shape, device, generator),
        Inputs.draw(shape, device, generator, 1).batches,
    )
    racers = {
        name: ours(shape, device=device, batch_invariant=exact)
        for name, exact in (("default", False), ("deterministic", True))
    }
    for racer in racers.values():
        racer.module.eval()
        racer.take(weights)
    exact = racers["deterministic"]
    assert torch.equal(exact(x_TD[:1]), exact(x_TD)[:1]), "a token has other bits alone than in its batch"
    us, how = _timed({name: partial(racer, x_TD) for name, racer in racers.items()}, stopwatch, len(x_TD), rounds)
    return {f"{name} us": time for name, time in us.items()} | {
        "price": us["deterministic"] / us["default"],
        "run as": " and ".join(dict.fromkeys(how.values())),
    }


def _served(call: ExpertsCall) -> str:
    """The backend that computes a call, asked as `compute` asks."""
    of_ids = [name for name, backend in BACKENDS.items() if backend.serves(call)]
    if of_ids:
        return of_ids[0]
    assert call.ids_TK is not None
    call = checked(call, route_metadata(call.ids_TK, call.experts.num_slots))
    return next(name for name, backend in BACKENDS.items() if backend.serves(call))


def _timed(
    steps: dict[str, Step], stopwatch: Stopwatch, num_tokens: int, rounds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds by name, and whether the step is a graph; large steps and those that wait for the device are
    eager."""
    entries, how = [], {}
    for name, step in steps.items():
        expected, run, how[name] = step(), step, "eager"
        if stopwatch.is_cuda and num_tokens <= DECODE_TOKENS[-1]:
            how[name] = "eager: it waits for the device"
            if not _waits(step):
                run, how[name] = graphed(step, expected), "graph"
        entries.append(Entry(name, id, {"run": run}))
    found = interleaved(entries, stopwatch, rounds=rounds, warmup=2)
    return {name: one["run"].median_s * 1e6 for name, one in found.items()}, how


def _waits(step: Step) -> bool:
    """Whether a step that has run before waits for the device: such a step must not even be tried in a capture."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Rest of a row, or why there is none: one row hides no other."""
    try:
        return run()
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {error}", flush=True)
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def assert_all(rows: list[dict[str, Any]]) -> None:
    """Say loudly what failed, once all rows are there.

    Raises:
        AssertionError: a row failed.
    """
    failed = [row["failed"] for row in rows if "failed" in row]
    assert not failed, f"{len(failed)} of {len(rows)} rows failed: {failed[0]}"
