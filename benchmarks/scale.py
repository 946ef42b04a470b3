"""Writes docs/results/scale.md: what the planner says of the seeds' largest claims. `python -m benchmarks.scale` prints
it."""

from benchmarks.markdown import markdown_table
from benchmarks.planner.claims import claims

import expertmesh as em
from expertmesh.config.cluster import Cluster
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.memory import GIB
from expertmesh.errors import ConfigError
from expertmesh.planner.table import layout_text

HEAD = """\
# What the largest models need

Written by `python -m benchmarks.scale` from the planner ([planner.md](../planner.md)); nothing here was run on a cluster. Measured times lie
between 0.74 and 1.35 times the predicted ones in three of four published rows of sources that nothing was fitted on, peaks of memory
between 0.95 and 1.10 times in four of five.
Prices are those of `costs/hardware.toml`.
"""  # noqa: E501
ON_THE_CARDS = """\
## 1.1 trillion parameters on 512 A100

`gpt-1.1t`, an expert per layer and GPU, 6,144 sequences of 1,024 tokens per step, BF16. On the cards alone:"""
ONLY_OURS = """\
The first three are options of ours (`--optim.state-dtype`); fairseq's is what its optimizer would need. What fits 40 GB with FP32 states does so by less than one
percent, below the error of the model: take 80 GB."""  # noqa: E501
WITH_OFFLOAD = """\
## 3.5 trillion on 512, 400 billion on 64

The best layout of a recipe's batch, with offload where nothing fits without. The host updates 1.28 billion parameters per second and node,
as people measure; that is most of a step."""  # noqa: E501
LARGE_STEPS = """\
At which batch "over 100 TFLOPS per GPU" is true: the update is paid once per step, so large steps reach it. (At memory speed: a host of
300 GB/s that does nothing else.)"""  # noqa: E501
BASES = """\
## Bases of 15 and 100 billion

Dense, as the search finds best: neither needs tensor parallelism, since ZeRO-3 gathers two layers at a time."""
SCALING = """\
## Near-linear scaling

The base of `gpt-1.3b-moe128` with as many experts per layer as GPUs (A100-80), 8 sequences of 2,048 tokens per GPU and step."""  # noqa: E501
UPDATES = """\
## 200 billion on 256 A100, 20,000 updates in less than two days

`gpt-400b` with 64 experts: {:.0f} billion. Two days are 8.64 s per update; the claim names no batch."""
SPEED_UPS = """\
## Speed-ups

As `python -m benchmarks.planner --claims` prints them: one-hot dispatch of 2021 over sparse dispatch, both by the model."""  # noqa: E501
ADAM_AT_MEMORY_SPEED = 300e9 / 28 / 8
"""Parameters per second and rank that a host of 300 GB/s updates for 8 ranks, if memory were all that limits it."""


def gib(number):
    return f"{number / GIB:,.1f}"


def line(found):
    best, cluster = found.best, found.problem.cluster
    return {
        "layout": layout_text(best),
        "device GiB": f"{gib(best.memory.device_bytes)} of {cluster.device.memory_gib:g}",
        "host GiB": gib(best.memory.host_bytes) if best.memory.host_bytes else "",
        "step s": f"{best.seconds.total_s:,.2f}",
        "tokens/s": f"{best.tokens_per_s:,.0f}",
        "TFLOPS/GPU": f"{best.utilisation * cluster.device.bf16_tflops:.0f}",
    }


def tried(name, cluster, **options):
    try:
        return line(em.plan(name, cluster=cluster, **options))
    except ConfigError as error:
        return {
            "layout": str(error).split("; ")[0].rpartition(": ")[2],
            **dict.fromkeys(("device GiB", "host GiB", "step s", "tokens/s", "TFLOPS/GPU"), ""),
        }


def states():
    rows = []
    for kind, words in (
        ("ours", "FP32 (ours): 16 B per parameter"),
        ("bf16_moments", "BF16 moments: 12 B"),
        ("int8_moments", "8-bit moments: 10 B"),
        ("fairseq", "fairseq's, no master weights: 8 B"),
    ):
        for device in ("a100-40", "a100-80"):
            # An A100 without its host: whether it fits the cards alone.
            cluster = find_cluster(f"{device}x512")
            alone = cluster.host.model_copy(update={"memory_gib": 0.0})
            row = tried("gpt-1.1t", cluster.model_copy(update={"host": alone}), states=kind)
            row.pop("host GiB")
            rows.append({"states": words, "cards": device, **row})
    return rows


def offloaded(name, gpus):
    rows = []
    for device in ("a100-40", "a100-80", "h100"):
        cluster = find_cluster(f"{device}x{gpus}")
        row = tried(name, cluster)
        rows.append({"cluster": f"{gpus} x {device}", **row, "host has": f"{cluster.host.memory_gib:g}"})
    return rows


def batch_for(name, cluster: Cluster, tflops):
    """The first batch of doubled ones at which a rate is reached, in tokens per GPU and step; None: none up to 2^30."""
    seq_len = em.recipe(name).data.seq_len
    batch = cluster.num_gpus * seq_len
    while batch <= 2**30:
        try:
            found = em.plan(name, cluster=cluster, tokens_per_batch=batch)
        except ConfigError:
            return None
        if found.best.utilisation * cluster.device.bf16_tflops >= tflops:
            return batch // cluster.num_gpus
        batch *= 2
    return None


def rates(name, gpus):
    rows = []
    for device in ("a100-40", "a100-80"):
        for words, rate in (("as people measure", None), ("at memory speed", ADAM_AT_MEMORY_SPEED)):
            cluster = find_cluster(f"{device}x{gpus}")
            if rate is not None:
                host = cluster.host.model_copy(update={"adam_parameters_per_s": rate})
                cluster = cluster.model_copy(update={"host": host})
            found = batch_for(name, cluster, 100)
            said = "none up to 2^30 tokens per step" if found is None else f"{found:,}"
            rows.append(
                {
                    "cluster": f"{gpus} x {device}",
                    "update on the host": words,
                    "tokens per GPU and step for 100 TFLOPS": said,
                }
            )
    return rows


def bases():
    rows = []
    for name, clusters in (
        ("gpt-15b", ("a100-40x64", "a100-80x64", "h100x64")),
        ("gpt-100b", ("a100-80x512", "h100x512")),
    ):
        for cluster in clusters:
            rows.append({"base": name, "cluster": cluster, **tried(name, cluster)})
    return rows


def scaling():
    rows, first = [], None
    for gpus in (8, 16, 32, 64, 128, 256, 512):
        config = em.recipe("gpt-1.3b-moe128", {"model.moe.num_experts": gpus})
        found = em.plan(config, cluster=f"a100-80x{gpus}", tokens_per_batch=gpus * 8 * 2048)
        each = found.best.tokens_per_s / gpus
        first = first or each
        rows.append(
            {
                "GPUs": gpus,
                "layout": layout_text(found.best),
                "tokens/s per GPU": f"{each:,.0f}",
                "of 8 GPUs": f"{100 * each / first:.0f} %",
            }
        )
    return rows


def two_hundred_billion():
    """E = 64 of gpt-400b's shape."""
    config = em.recipe("gpt-400b", {"model.moe.num_experts": 64})
    rows = []
    for tokens in (2**19, 2**20, 2**21, 2**22, 2**23):
        found = em.plan(config, cluster="a100-80x256", tokens_per_batch=tokens)
        seconds = found.best.seconds.total_s
        rows.append(
            {
                "tokens per update": f"{tokens:,}",
                "layout": layout_text(found.best),
                "s per update": f"{seconds:.2f}",
                "20,000 updates, days": f"{20000 * seconds / 86400:.2f}",
            }
        )
    return rows


def of_claims():
    return [
        {
            "claim": claim.name,
            "claimed": f"{claim.claimed:g} x",
            "model": "" if claim.found is None else f"{claim.found:.2f} x",
            "assumed, or what makes it true": claim.assumed,
        }
        for claim in claims()
    ]


def page():
    """The whole page."""
    large = em.recipe("gpt-400b", {"model.moe.num_experts": 64})
    billions = em.plan(large, cluster="a100-80x256").problem.sizes.num_parameters / 1e9
    parts = [HEAD.strip()]
    parts += [ON_THE_CARDS, markdown_table(states()), ONLY_OURS, WITH_OFFLOAD]
    for name, gpus in (("gpt-3.5t", 512), ("gpt-400b", 64)):
        parts += [f"`{name}`:", markdown_table(offloaded(name, gpus))]
    parts.append(LARGE_STEPS)
    for name, gpus in (("gpt-3.5t", 512), ("gpt-400b", 64)):
        parts += [f"`{name}`:", markdown_table(rates(name, gpus))]
    parts += [BASES, markdown_table(bases()), SCALING, markdown_table(scaling())]
    parts += [UPDATES.format(billions), markdown_table(two_hundred_billion())]
    parts += [SPEED_UPS, markdown_table(of_claims())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
