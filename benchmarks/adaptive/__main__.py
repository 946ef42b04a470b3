"""One command per question; each writes its results to benchmarks/results/adaptive_NAME.json.

python -m benchmarks.adaptive hierarchical [--short]   flat against hierarchical, and whether auto is right
python -m benchmarks.adaptive overlap                  parts against all at once, exchange and products alike
python -m benchmarks.adaptive hot                      hot experts with and without shadows
python -m benchmarks.adaptive tuner [--points N ...]   24 points, 12 static plans, and the tuner
python -m benchmarks.adaptive end-to-end [--tokens N]  a GPT with K = 8, flags by hand, adaptive, and DeepSpeed's MoE if
installed
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.adaptive.figures import plot, table, totals
from benchmarks.adaptive.hosts import hosts, run_ranks
from benchmarks.harness import circumstances

RESULTS = Path(__file__).resolve().parents[1] / "results"
SHAPE = {"experts": 32, "dim": 512, "hidden": 512}
STATIC = {
    **{f"r{r} n{n}": {"route_degree": r, "overlap_degree": n} for r, n in [(4, 1), (4, 2), (4, 4)]},
    "r4 hierarchical": {"route_degree": 4, "all_to_all": "hierarchical"},
    "r4 n2 hierarchical": {"route_degree": 4, "overlap_degree": 2, "all_to_all": "hierarchical"},
    "r4 n4 hierarchical": {"route_degree": 4, "overlap_degree": 4, "all_to_all": "hierarchical"},
    "r2 n1": {"route_degree": 2},
    "r2 n2": {"route_degree": 2, "overlap_degree": 2},
    "r1": {"route_degree": 1},
    "r4 shadow 1": {"route_degree": 4, "replicated_experts": 1},
    "r4 n2 shadow 1": {"route_degree": 4, "overlap_degree": 2, "replicated_experts": 1},
    "r4 hierarchical shadow 1": {
        "route_degree": 4,
        "all_to_all": "hierarchical",
        "replicated_experts": 1,
    },
}
"""Twelve plans by name, for four ranks; of eight ranks r is doubled."""


def save(name: str, found: Any) -> None:
    has_peer = importlib.util.find_spec("deepspeed") is not None
    peers = {"deepspeed": importlib.metadata.version("deepspeed")} if has_peer else {}
    about = circumstances(clock="wall", peers=peers) | {"threads": "1 per rank"}
    path = RESULTS / f"adaptive_{name}.json"
    path.write_text(json.dumps({"about": about, "found": found}, indent=1))
    print(f"kept in {path}")


def bytes_per_s(rate: str | None) -> float | None:
    return None if rate is None else float(rate.removesuffix("mbit")) * 1e6 / 8


def hierarchical(short: bool) -> None:
    points = [(2, 8, 4096)] if short else list(itertools.product((2, 4), (1, 2, 8), (512, 4096)))
    found = []
    for number, top_k, tokens in points:
        with hosts(number, "200mbit") as names:
            job = {**SHAPE, "kind": "exchange", "top_k": top_k, "tokens": tokens, "rounds": 3}
            job["bytes_per_s"] = bytes_per_s("200mbit")
            point = run_ranks(names, 2, job)
        times = {name: t["seconds"] for name, t in point["times"].items()}
        point |= {"hosts": number, "top_k": top_k, "tokens": tokens}
        point["flat / hierarchical"] = times["flat"] / times["hierarchical"]
        point["copies / hierarchical"] = times["one copy per choice"] / times["hierarchical"]
        point["auto / better"] = times[point["auto"]] / min(times["flat"], times["hierarchical"])
        found.append(point)
        print(json.dumps(point), flush=True)
    save("hierarchical_short" if short else "hierarchical", found)


def overlap() -> None:
    """The hidden size is chosen so that products take as long as the exchange."""
    job = {**SHAPE, "experts": 8, "top_k": 2, "tokens": 8192, "rounds": 2, "hidden": 2048}
    with hosts(2, "100mbit") as names:
        for _ in range(3):
            parts = run_ranks(names, 1, job | {"kind": "alone"})
            ratio = parts["exchange"]["seconds"] / parts["products"]["seconds"]
            if 0.8 <= ratio <= 1.25:
                break
            job["hidden"] = max(16, round(job["hidden"] * ratio / 16) * 16)
        ways = {f"n{n}": {"overlap_degree": n} for n in (1, 2, 4, 8)}
        job |= {"kind": "layer", "ways": ways, "rounds": 5, "in_sequence": True}
        found = run_ranks(names, 1, job)
        one_round = job | {"rounds": 1, "in_sequence": False}
        peaks = {  # in processes of their own
            name: run_ranks(names, 1, one_round | {"ways": {name: way}})["peak_kib"]["peak"]
            for name, way in ways.items()
        }
    del found["peak_kib"]
    found["peak memory of n1"] = {name: peak / peaks["n1"] for name, peak in peaks.items()}
    found["peak MiB"] = {name: peak / 1024 for name, peak in peaks.items()}
    for name in ("nothing hidden", "n1"):
        whole = found["times"][name]["seconds"]
        found[f"of {name}"] = {k: t["seconds"] / whole for k, t in found["times"].items()}
    found |= {"exchange / products": ratio, "alone": parts, "job": job}
    print(json.dumps(found))
    save("overlap", found)


def hot() -> None:
    found = {}
    for number in (2, 4):
        job = {**SHAPE, "experts": 8, "top_k": 1, "tokens": 4096, "rounds": 3, "hidden": 1024}
        ways = {"without": {}, "one shadow": {"replicated_experts": 1}}
        with hosts(1, None) as names:
            job |= {"kind": "layer", "ways": ways, "fullest": 5.5}
            times = run_ranks(names, number, job)["times"]
        for what in ("seconds", "cpu_seconds"):
            ratio = times["one shadow"][what] / times["without"][what]
            found[f"{number} ranks, {what}"] = ratio
    print(json.dumps(found))
    save("hot", found)


def points_of_tuner() -> list[dict[str, Any]]:
    """Half of 48, fixed: those whose places in the lists of values have an even sum, so that all pairs of values
    occur."""
    names = ("tokens", "ranks", "fullest", "rate", "capacity_factor")
    rates = ("50mbit", "200mbit", None)
    lists = ((256, 4096), (4, 8), (1.0, 4.0), rates, (1.0, None))
    every = itertools.product(*(list(enumerate(values)) for values in lists))
    return [
        {name: value for name, (_, value) in zip(names, values, strict=True)}
        for values in every
        if sum(place for place, _ in values) % 2 == 0
    ]


def tuner(numbers: list[int]) -> None:
    """Each point is kept when it is found; points that are there already are not timed again."""
    kept = RESULTS / "adaptive_tuner.json"
    found = json.loads(kept.read_text())["found"]["points"] if kept.exists() else []
    for number in numbers:
        if number in {point["number"] for point in found}:
            continue
        point = points_of_tuner()[number]
        scale = point["ranks"] // 4
        ways = {
            name: way | {"route_degree": way["route_degree"] * scale if way["route_degree"] > 1 else 1}
            for name, way in STATIC.items()
        }
        job = {**SHAPE, "kind": "layer", "rounds": 3, "ways": ways, "adaptive": True, "top_k": 2}
        job |= {name: point[name] for name in ("tokens", "fullest", "capacity_factor")}
        job["bytes_per_s"] = bytes_per_s(point["rate"])
        with hosts(2, point["rate"]) as names:
            result = run_ranks(names, point["ranks"] // 2, job, limit_s=9000)
        seconds = {n: t["seconds"] for n, t in (result["times"] | result["finals"]).items()}
        finals = [seconds[n] for n in result["finals"] if n != "adaptive"]
        found.append({"number": number, **point, "seconds": seconds, "settled": result["settled"]})
        found[-1]["hopeless"] = [n for n, t in result["times"].items() if t["is_first_round"]]
        found[-1]["about"] = circumstances(clock="wall")
        found[-1]["adaptive / best"] = seconds["adaptive"] / min(finals)
        print(json.dumps(found[-1]), flush=True)
        found.sort(key=lambda point: point["number"])
        save("tuner", {"points": found, "static / adaptive, in total": totals(found)})
        (RESULTS / "adaptive_tuner.md").write_text(table(found))
        (RESULTS / "adaptive_tuner.svg").write_text(plot(found))


END_TO_END: dict[str, dict[str, Any]] = {
    "defaults": {},
    "overlap 4": {"overlap_degree": 4},
    "hierarchical": {"all_to_all": "hierarchical"},
    "hierarchical, overlap 4": {"all_to_all": "hierarchical", "overlap_degree": 4},
    "route 2": {"route_degree": 2},
    "route 2, overlap 2": {"route_degree": 2, "overlap_degree": 2},
    "route 1": {"route_degree": 1},
    "adaptive": {"adaptive": True},
}
"""What `--parallel.*` say of how tokens travel."""


def end_to_end(tokens: int) -> None:
    """Seconds of a training step of so many tokens per rank, and of defaults and adaptive over others."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    job = {"kind": "models", "tokens": tokens, "ways": END_TO_END, "deepspeed": has_deepspeed}
    with hosts(2, "200mbit") as names:
        found = run_ranks(names, 2, job | {"settle": 60, "rounds": 7}, limit_s=5400)
    seconds = {name: t["seconds"] for name, t in found["times"].items()}
    best = min(s for name, s in seconds.items() if name in END_TO_END and name != "adaptive")
    found["job"] = job
    found["adaptive / best by hand"] = seconds["adaptive"] / best
    found["times as fast as"] = {name: s / seconds["adaptive"] for name, s in seconds.items() if name != "adaptive"}
    print(json.dumps(found))
    save(f"end_to_end_{tokens}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hierarchical", "overlap", "hot", "tuner", "end-to-end"])
    parser.add_argument("--short", action="store_true", help="one point")
    parser.add_argument("--points", type=int, nargs="+", help="numbers of some of the tuner's points")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank, end to end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # hosts go in any case
    if options.what == "hierarchical":
        hierarchical(options.short)
    elif options.what == "tuner":
        tuner(options.points or list(range(len(points_of_tuner()))))
    elif options.what == "end-to-end":
        end_to_end(options.tokens)
    else:
        {"overlap": overlap, "hot": hot}[options.what]()


if __name__ == "__main__":
    main()
