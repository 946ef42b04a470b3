"""Statistics of an engine."""

from dataclasses import dataclass

from expertmesh.engine.groups import GroupScheduler
from expertmesh.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Current state of the engine, and counters.

    Attributes:
        num_running: sequences that hold blocks.
        num_waiting: waiting sequences.
        num_blocks: blocks of the cache.
        num_used_blocks: blocks held by sequences.
        num_cached_blocks: unused blocks with a known prefix.
        num_steps: steps so far.
        num_prompt_tokens: prompt tokens that were computed.
        num_generated_tokens: generated tokens.
        num_preemptions: preempted sequences.
        prefix_queries: tokens looked up in the prefix cache.
        prefix_hits: tokens found in the prefix cache.
        num_draft_tokens: draft tokens.
        num_accepted_tokens: accepted draft tokens.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def stats_of(
    scheduler: Scheduler | GroupScheduler, *, steps: int, prompt_tokens: int, new_tokens: int
) -> EngineStats:
    """Statistics of an engine with this scheduler, which counts steps, prompt tokens and generated tokens itself."""
    pools, counters = scheduler.pools, scheduler.counters
    return EngineStats(
        len(scheduler.running),
        len(scheduler.waiting),
        sum(pool.num_blocks for pool in pools),
        sum(pool.num_used for pool in pools),
        sum(pool.num_cached for pool in pools),
        steps,
        prompt_tokens,
        new_tokens,
        counters.preemptions,
        counters.prefix_queries,
        counters.prefix_hits,
        counters.guessed,
        counters.accepted,
    )
