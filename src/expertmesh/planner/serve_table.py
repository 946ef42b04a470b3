"""The plan of generation as plain text, and as values for JSON."""

from dataclasses import asdict, fields
from typing import Any

from expertmesh.costs.memory import GIB
from expertmesh.planner.search import SAFE
from expertmesh.planner.serve import SERVE_BAR, ServePlan
from expertmesh.planner.serving_layout import Serving
from expertmesh.planner.table import SHOWN, columns, seconds_text, side_by_side

_WORDS = {
    "weights_s": "weights",
    "fetches_s": "experts without a slot",
    "cache_s": "keys and values",
    "products_s": "products",
    "exchange_s": "exchange",
    "tensor_s": "tensor parallelism",
    "host_s": "launches",
    "sequences_s": "sequences",
}


def serve_text(plan: ServePlan) -> str:
    """The best layout for generation by part, and the next ones."""
    best, model = plan.best, plan.model
    cluster = best.cluster
    lines = [
        (
            f"{model.name}: {best.sizes.num_parameters:,} parameters, {best.sizes.active_parameters / 1e9:,.2f} "
            "billion for a token"
        ),
        (
            f"{cluster.name}: {cluster.num_gpus} devices, {cluster.node_size} to a node, {cluster.device.memory_gib:g} "
            "GiB each"
        ),
        f"{best.batch:,} sequences at once, {_lengths(best)}",
        "",
        f"best: {serving_text(best)}",
        *(f"  {line}" for line in _totals(plan)),
        "",
        *side_by_side(_memory_lines(best), _time_lines(best)),
    ]
    rows: list[tuple[str, ...]] = [("way", "GiB", "per token", "tokens/s")]
    rows += [
        (
            serving_text(serving),
            f"{serving.device_bytes / GIB:,.1f}",
            seconds_text(serving.token_s),
            f"{serving.tokens_per_s:,.0f}",
        )
        for serving in plan.ways[:SHOWN]
    ]
    lines += ["", "ways:", *("  " + line for line in columns(rows, right="lrrr"))]
    return "\n".join([*lines, "", "guessed:", *(f"  {guess}" for guess in plan.guesses)])


def _lengths(serving: Serving) -> str:
    if not serving.prompt:
        return f"{serving.context:,} tokens each"
    return f"prompts of {serving.prompt:,} and answers of {serving.answer:,} tokens"


def _totals(plan: ServePlan) -> list[str]:
    best, (fast, slow) = plan.best, SERVE_BAR
    token = best.token_s
    bar = f"({seconds_text(fast * token)} to {seconds_text(slow * token)})"
    of_device = best.tokens_per_s / best.cluster.num_gpus
    lines = [
        f"per token    {seconds_text(token)} {bar}, {1 / token:,.0f} tokens/s for a sequence",
        f"throughput   {best.tokens_per_s:,.0f} tokens/s, {of_device:,.0f} per device",
    ]
    if best.prompt:
        lines += [
            f"first token  {seconds_text(best.first_token_s)} for a prompt that need not wait",
            f"requests     {best.requests_per_s:,.2f} per second",
        ]
    for of, each in (
        ("answers", best.usd_per_million),
        ("prompts", best.usd_per_million_of_prompts),
    ):
        if each:
            low, high = fast * each[0], slow * each[-1]
            lines.append(f"price        {low:,.3g} to {high:,.3g} USD per million tokens of {of}, at prices of 2026")
    if best.filled > SAFE:
        lines.append(f"memory       {100 * best.filled:.0f} % of the device, above {100 * SAFE:.0f} %: {_safer(plan)}")
    touched = ", ".join(
        f"{best.experts_touched(block):.1f} of {best.experts_here(block):g}"
        for block in best.sizes.blocks
        if block.num_experts
    )
    if touched:
        lines.append(f"experts      {touched} of a device are read in a layer's step")
    if best.away_bytes:
        place = "on its disk" if best.is_on_disk else "in the host's memory"
        lines.append(
            f"slots        {best.expert_slots} experts of a layer; {best.away_bytes / GIB:,.1f} GiB lie {place}"
        )
    if plan.twin is not None:
        ratio = plan.twin.token_s / token
        billions = plan.twin.sizes.num_parameters / 1e9
        lines.append(
            f"dense twin   {billions:,.0f} billion parameters (sqrt of all x active):"
            f" {seconds_text(plan.twin.token_s)} per token, {ratio:,.2f} times as long"
        )
    return lines


def _safer(plan: ServePlan) -> str:
    other = plan.safer
    if other is None:
        return "the weights alone fill it; use more devices or a narrower format"
    full = f"{100 * other.filled:.0f} %, {seconds_text(other.token_s)} per token"
    return f"safer is {serving_text(other)} with {other.batch:,} sequences: {full}"


def _memory_lines(best: Serving) -> list[tuple[str, str]]:
    return [
        ("memory, GiB", ""),
        ("weights", f"{best.weights_held_bytes / GIB:,.2f}"),
        ("keys and values", f"{best.cache_held_bytes / GIB:,.2f}"),
        *[("captured steps", f"{best.captured_bytes / GIB:,.2f}")] * best.fused,
        ("in all", f"{best.device_bytes / GIB:,.2f}"),
    ]


def _parts(best: Serving) -> dict[str, float]:
    """Seconds of a step by part, in words, without zeros."""
    found = {_WORDS[f.name]: getattr(best.seconds, f.name) for f in fields(best.seconds)}
    if best.prompt:
        found["prompts in between"] = best.token_s - best.seconds.total_s
    return {words: value for words, value in found.items() if value}


def _time_lines(best: Serving) -> list[tuple[str, str]]:
    rows = [(words, f"{1e3 * value:,.2f}") for words, value in _parts(best).items()]
    return [("time, ms", ""), *rows, ("in all", f"{1e3 * best.token_s:,.2f}")]


def serving_text(serving: Serving) -> str:
    """A layout for generation in a few words."""
    copies = serving.cluster.num_gpus // serving.route_degree
    words = [f"tp {serving.tp_degree}", f"experts over {serving.route_degree}"]
    return ", ".join([*words, f"{copies} copies"] if copies > 1 else words)


def serve_json(plan: ServePlan) -> dict[str, Any]:
    """Values of a plan of generation, named as in `plan_json.as_json`."""
    best = plan.best
    return {
        "model": plan.model.name,
        "parameters": best.sizes.num_parameters,
        "active_parameters": best.sizes.active_parameters,
        "cluster": best.cluster.model_dump(mode="json"),
        "weights": asdict(best.weights),
        "time_error_bar": list(SERVE_BAR),
        "best": _values(best),
        "safer": None if plan.safer is None else _values(plan.safer),
        "ways": [_values(serving) for serving in plan.ways],
        "dense_twin": None
        if plan.twin is None
        else {"parameters": plan.twin.sizes.num_parameters, **_values(plan.twin)},
        "guesses": list(plan.guesses),
    }


def _values(serving: Serving) -> dict[str, Any]:
    return {
        "words": serving_text(serving),
        "tp_degree": serving.tp_degree,
        "route_degree": serving.route_degree,
        "sequences": serving.batch,
        "context": serving.context,
        "prompt": serving.prompt,
        "answer": serving.answer,
        "device_bytes": serving.device_bytes,
        "token_s": serving.token_s,
        "time_s": _parts(serving),
        "first_token_s": serving.first_token_s if serving.prompt else None,
        "tokens_per_s": serving.tokens_per_s,
        "requests_per_s": serving.requests_per_s if serving.prompt else None,
        "usd_per_million_of_answers": list(serving.usd_per_million),
        "usd_per_million_of_prompts": list(serving.usd_per_million_of_prompts),
    }
