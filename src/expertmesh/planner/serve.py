"""Plans generation with a model on a cluster: time per token by part, memory, throughput, price."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from expertmesh.config.cluster import Cluster
from expertmesh.config.values import check_choice
from expertmesh.costs.memory import GIB
from expertmesh.costs.weight_formats import Weights
from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.arguments import MOST_AT_ONCE, cluster_of, number, whole
from expertmesh.planner.dense_twin import dense_twin
from expertmesh.planner.planned_model import PlannedModel, planned_model
from expertmesh.planner.search import (
    SAFE,
    TENSOR_DEGREES,
    can_slice,
    divisors,
    powers_of_two,
    routes_over,
)
from expertmesh.planner.serving_layout import Serving, with_most_sequences

CACHES = {"bfloat16": 2.0, "fp8": 1.0, "float32": 4.0}
"""Bytes of an element of keys and values, by format."""
SERVE_BAR = (0.75, 1.35)
"""Measured over predicted time per token: 7 of the 9 rows whose batch is known, each source left out in turn."""
MOST_MS = 10**7
"""Largest time per token, in milliseconds."""


def servings(model: PlannedModel, cluster: Cluster, usual: Serving) -> Iterator[Serving]:
    """All layouts for generation that the engine accepts, whether they fit or not."""
    sizes, redundant = model.sizes, usual.redundant
    has_experts = any(block.num_experts for block in sizes.blocks)
    for tp in TENSOR_DEGREES:
        if tp > cluster.node_size or cluster.num_gpus % tp or sizes.tensor_divisor % tp:
            continue
        routes: Sequence[int] = routes_over(cluster.num_gpus) if has_experts else [tp]
        if redundant:
            routes = divisors(cluster.num_gpus)
        for route in routes:
            held = [b.num_experts + redundant for b in sizes.blocks if b.num_experts]
            whole_copies = redundant and not any(number % route for number in held)
            if route % tp == 0 and (whole_copies or (not redundant and can_slice(sizes, route))):
                yield replace(usual, tp_degree=tp, route_degree=route)


@dataclass(frozen=True)
class ServePlan:
    """Layouts for generation that fit.

    Attributes:
        twin: the best layout of a dense model of as good answers, by a rule of thumb; None: the model is dense, or it
            fits nowhere.
    """

    model: PlannedModel
    # layouts that fit, best first: fastest, or with most requests per second at a given time per token
    ways: tuple[Serving, ...]
    twin: Serving | None
    guesses: tuple[str, ...]  # guessed inputs, in words

    @property
    def best(self) -> Serving:
        """The best layout."""
        return self.ways[0]

    @property
    def safer(self) -> Serving | None:
        """The best layout that leaves memory free, with fewer sequences where none does; None: the best one does, or
        none can."""
        if self.best.filled <= SAFE:
            return None
        tried = [*self.ways]
        tried += [replace(self.best, batch=n) for n in reversed(powers_of_two(self.best.batch))]
        return next((serving for serving in tried if serving.filled <= SAFE), None)


def serve_plan(
    model: str | Path | GPTRunConfig,  # see `expertmesh.plan`
    *,
    cluster: str | Path | Cluster,  # see `expertmesh.plan`
    batch: int | None = None,  # sequences at once, on all devices; None: as many as `token_ms` allows
    context: int | None = None,  # tokens of each sequence; None: of prompt and answer together
    prompt: int | None = None,
    answer: int | None = None,  # tokens of an answer; None: the rest of the context
    token_ms: float | None = None,
    weights: str | None = None,
    cache: Literal["bfloat16", "fp8", "float32"] | None = None,
    fused: bool = False,  # whether steps are replayed from CUDA graphs, as this project's engine does on one GPU
    expert_slots: int | None = None,
    num_redundant_experts: int = 0,
) -> ServePlan:
    """Plan generation with a model on a cluster: time per token, throughput, price, memory. Imports no torch.

    Args:
        prompt: tokens of a prompt, for the time to the first token and its price; None: prompts are not counted.
        token_ms: most milliseconds per token, the prompts in between included; the plan then has most requests per
            second.
        weights: formats, as "fp8" or "experts=mxfp4,attention=bfloat16"; None: as the model's files have them, or BF16.
        cache: format of keys and values; None: BF16, on slow devices FP32.
        expert_slots: experts of a layer that a device holds, the others in the host's memory or on its disk; None: all.
        num_redundant_experts: copies of experts in each layer, so that devices may share experts that they do not
            divide.

    Example:
        >>> from expertmesh.planner.serve import serve_plan
        >>> best = serve_plan("gpt-oss-120b", cluster="h100x1", batch=1, context=1000).best
        >>> best.weights.experts, best.seconds.total_s < 0.02
        ('mxfp4', True)
    """
    found, where = planned_model(model), cluster_of(cluster)
    if found.has_lengths:
        raise ConfigError(f"plan {found.name}: generation is planned of decoders alone; leave {named('serve')} out")
    check_choice("fused", fused, (True, False))
    if cache is not None:
        check_choice("cache", cache, tuple(CACHES))
    is_slow = where.device.bf16_tflops < 0.2
    usual_format = Weights.all("float32") if is_slow else Weights()
    formats = found.files or usual_format
    if weights is not None:
        formats = Weights.of(weights, usual=formats)
    is_told = found.files is not None or weights is not None
    lengths = _lengths(batch, context, prompt, answer, token_ms)
    fix = "leave it out, or choose another"
    if expert_slots is not None:
        expert_slots = whole("expert_slots", expert_slots, most=MOST_AT_ONCE, fix=fix)
    if num_redundant_experts:
        num_redundant_experts = whole("num_redundant_experts", num_redundant_experts, most=MOST_AT_ONCE, fix=fix)
    usual = Serving(
        found.sizes,
        where,
        lengths["batch"],
        lengths["context"],
        tp_degree=1,
        route_degree=1,
        prompt=lengths["prompt"],
        answer=lengths["answer"],
        weights=formats,
        cache_bytes=CACHES[cache or ("float32" if formats == Weights.all("float32") else "bfloat16")],
        fused=fused,
        expert_slots=expert_slots,
        redundant=num_redundant_experts,
    )
    limit = None if token_ms is None else token_ms / 1e3
    ways = _ways(found, usual, limit)
    if not ways:
        raise ConfigError(_fits_nowhere(found, usual, limit))
    guesses = (
        *(guess for guess in found.unread if not is_told or "weights count as" not in guess),
        f"{formats.words()}; keys and values in {usual.cache_bytes:g} bytes",
        "even routing, and sequences of equal length",
        _overheads_text(usual),
    )
    twin = dense_twin(found.sizes)
    twins = (
        ()
        if twin is None
        else _ways(
            replace(found, sizes=twin),
            replace(ways[0], sizes=twin, expert_slots=None, redundant=0),
            None,
        )
    )
    return ServePlan(found, ways, twins[0] if twins else None, guesses)


def _overheads_text(serving: Serving) -> str:
    layer, sequence = 1e6 * serving.layer_s, 1e6 * serving.overheads.sequence_s
    return f"{layer:.0f} us per layer and step for launches, {sequence:.0f} us for each sequence of a device"


def _lengths(batch: object, context: object, prompt: object, answer: object, token_ms: object) -> dict[str, int]:
    """Sequences at once and their tokens, checked."""
    given = {"batch": batch, "context": context, "prompt": prompt, "answer": answer}
    found = {
        name: whole(name, value, most=MOST_AT_ONCE, fix="choose another")
        for name, value in given.items()
        if value is not None
    }
    if token_ms is not None:
        number("token_ms", token_ms, most=MOST_MS, fix="give milliseconds", least=1e-3)
    if (batch is None) == (token_ms is None):
        rule = "or the time per token must be given" if batch is None else "follows from the time per token"
        fix = f"give {named('batch')} or {named('token_ms')}"
        raise ConfigError("batch", batch, rule, fix)
    if context is None and (prompt is None or answer is None):
        rule = "must be given where prompt and answer are not"
        raise ConfigError("context", None, rule, f"give it, or {named('prompt')} and {named('answer')}")
    asked, told = found.get("prompt", 0), found.get("answer")
    room = found.get("context") or asked + (told or 0)
    if told is None:
        told = max(room - asked, 1)
    if asked + (told if "answer" in found else 1) > room:
        rule = f"has no room for {asked} tokens of a prompt and {told} of an answer"
        raise ConfigError("context", room, rule, f"use {asked + told}")
    return {"batch": found.get("batch", 1), "context": room, "prompt": asked, "answer": told}


def _ways(model: PlannedModel, usual: Serving, token_s: float | None) -> tuple[Serving, ...]:
    """Layouts that fit, best first."""
    every = servings(model, usual.cluster, usual)
    if token_s is None:
        fitting = [serving for serving in every if serving.fits]
        return tuple(sorted(fitting, key=lambda w: (w.token_s, w.device_bytes)))
    most = [found for serving in every if (found := with_most_sequences(serving, token_s)) is not None]
    return tuple(sorted(most, key=lambda w: (-w.requests_per_s, w.token_s)))


def _fits_nowhere(model: PlannedModel, usual: Serving, token_s: float | None) -> str:
    """Error message, in one line, with what is missing and what would help."""
    cluster, sequences = usual.cluster, f"{usual.batch} sequences of {usual.context} tokens"
    every = list(servings(model, cluster, usual))
    head = f"plan {model.name} on {cluster.name}"
    if not every:
        return (
            f"{head}: {usual.redundant} copies leave no number of experts that devices divide;"
            " choose as many as make experts and copies a multiple of the devices"
        )
    if token_s is not None and any(serving.fits for serving in every):
        fastest = min((serving for serving in every if serving.fits), key=lambda w: w.token_s)
        return (
            f"{head}: a token takes {1e3 * fastest.token_s:.1f} ms at best, not {1e3 * token_s:g};"
            " allow more, or use faster devices"
        )
    least = min(every, key=lambda w: w.device_bytes)
    said = (
        f"{head}: generating {sequences} needs {least.device_bytes / GIB:.1f} GiB of a device's"
        f" {cluster.device.memory_gib:.1f}, of them {least.cache_held_bytes / GIB:.1f} for keys and values;"
        " use more devices, fewer sequences or shorter ones"
    )
    for name in ("fp8", "int4"):
        narrow = replace(usual, weights=Weights.all(name))
        if any(serving.fits for serving in servings(model, cluster, narrow)):
            return f"{said}, or {named('weights', name)}, with which it fits"
    return said
