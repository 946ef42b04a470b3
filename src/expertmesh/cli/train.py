"""`expertmesh train RECIPE`: parse, train, print what came out."""

import json
from typing import TYPE_CHECKING

from expertmesh.cli.flags import parse_run_config
from expertmesh.config.run import RunConfig

if TYPE_CHECKING:
    from expertmesh.train.loop import TrainResult


def run(argv: list[str]) -> int:
    """Runs the verb.

    Args:
        argv: words after `train`.

    Returns:
        0, or 143 or 130 when a signal stopped the run after a clean save.

    Raises:
        ConfigError: the words, or what they ask for, break a rule.
    """
    parsed = parse_run_config(argv)
    if parsed.dry_run:
        print(describe(parsed.config, recipe=parsed.recipe))
        return 0
    from expertmesh.train.loop import train

    result = train(parsed.config, recipe=parsed.recipe)
    if result.is_leader:
        print(summary(result))
    return 0 if result.stopped_by is None else 128 + int(result.stopped_by)


def describe(config: RunConfig, *, recipe: str) -> str:
    """What a run would be: resolved configuration, parameters, operations and memory."""
    from expertmesh.costs.flops import forward_flops
    from expertmesh.costs.memory import estimate_memory
    from expertmesh.costs.parameters import count_parameters
    from expertmesh.train.precision import resolve_precision

    precision = resolve_precision(config.train)
    dtype = str(precision.compute_dtype).removeprefix("torch.")
    parameters = count_parameters(config.model)
    micro_batch_size = config.train.micro_batch_size or config.train.batch_size
    memory = estimate_memory(
        config.model,
        micro_batch_size=micro_batch_size,
        seq_len=config.data.seq_len,
        dtype=dtype,
        activation_checkpointing=config.train.activation_checkpointing,
    )
    tokens = config.train.steps * config.train.batch_size * config.data.seq_len
    flops = forward_flops(config.model, seq_len=config.data.seq_len).training_flops(
        activation_checkpointing=config.train.activation_checkpointing
    )
    lines = [
        f"recipe      {recipe}",
        f"device      {precision.device}, computing in {dtype}",
        f"parameters  {parameters.total:,} in all, {parameters.active:,} active per token",
        f"training    {tokens:,} tokens, {flops / 1e9:,.3f} GFLOP per token",
        (
            f"memory      {_bytes(memory.total_bytes)}: weights {_bytes(memory.weights_bytes)}, "
            f"compute copies {_bytes(memory.compute_copy_bytes)}, gradients {_bytes(memory.gradients_bytes)}, "
            f"optimiser {_bytes(memory.optimizer_bytes)}, activations {_bytes(memory.activations_bytes)} (estimate)"
        ),
        "configuration",
        json.dumps(config.model_dump(mode="json"), indent=2),
    ]
    return "\n".join(lines)


def summary(result: "TrainResult") -> str:
    """How a run ended, in a few lines."""
    rate = result.tokens / result.seconds if result.seconds else 0.0
    done = (
        f"{result.step:,} steps, {result.tokens:,} tokens in {result.seconds:,.1f} s of training"
        f" ({rate:,.0f} tokens/s)"
    )
    lines = [done + ("; nothing was left to do" if result.resumed_from == result.step else "")]
    if result.bits_per_byte is not None:
        before = result.initial_bits_per_byte
        lines.append(
            f"validation: {result.bits_per_byte:.4f} bits per byte"
            + ("" if before is None else f", {before:.4f} before training")
        )
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} steps were skipped (not finite)")
    if result.checkpoint is not None:
        lines.append(f"checkpoint: {result.checkpoint}")
    lines.append(f"try: expertmesh report --run {result.run_dir}")
    return "\n".join(lines)


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
