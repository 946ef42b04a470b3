"""Rollouts: answers of the engine, which samples from the trainer's own tensors."""

from collections.abc import Sequence
from typing import Any

from expertmesh.config.engine import EngineConfig
from expertmesh.config.rl import RLConfig
from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.engine import Engine
from expertmesh.engine.output import RequestOutput
from expertmesh.engine.request import hashed_seed
from expertmesh.errors import TrainingDivergedError

_MOST_SEQUENCES = 256


def seed_of_row(seed: int, step: int, row: int) -> int:
    """Seed of the answers to the prompt in a row of a step's batch, in 0 ... 2^63 - 1: rows draw independently."""
    return hashed_seed(f"{seed}/rollout/{step}/{row}")


def roll_out(
    model: Any,  # the model in evaluation mode, in its own tensors; under autocast the engine computes as training does
    prompts: Sequence[Sequence[int]],  # token ids
    rl: RLConfig,  # options
    *,
    ends: Sequence[int],  # tokens that end an answer
    seeds: Sequence[int] | None,  # seed of each prompt, for `rl.group` sampled answers; None: one greedy answer to each
) -> list[RequestOutput]:
    """Answers to prompts; keys and values are freed on return.

    Returns:
        The answers of the first prompt, then of the next, and so on.
    """
    if not prompts:
        return []
    group = 1 if seeds is None else rl.group
    config = EngineConfig(
        deterministic=rl.exact,
        max_len=max(map(len, prompts)) + rl.max_tokens,
        max_sequences=min(_MOST_SEQUENCES, len(prompts) * group),
        compile=False,
    )
    if seeds is None:
        params = [SamplingParams(temperature=0.0, max_tokens=rl.max_tokens)] * len(prompts)
    else:
        params = [
            SamplingParams(
                n=group,
                max_tokens=rl.max_tokens,
                seed=seed,
                logprobs=0,
                return_routed_experts=not rl.exact and rl.replay_routing,
            )
            for seed in seeds
        ]
    engine = Engine(model, end_ids=ends, config=config)
    outputs = engine.generate([list(ids) for ids in prompts], params)
    for one in outputs:
        if one.error is not None:
            raise TrainingDivergedError(f"rollouts: {one.error}")
    return outputs
