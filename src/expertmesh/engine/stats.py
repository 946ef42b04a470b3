"""Statistics of an engine."""

from dataclasses import dataclass

from expertmesh.engine.groups import GroupScheduler
from expertmesh.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Current state of the engine, and counters.

    Attributes:
        num_prompt_tokens: prompt tokens that were computed, each once: not when they are computed again after a
            preemption or a change of weights.
    """

    num_running: int  # sequences that hold blocks
    num_waiting: int  # waiting sequences
    num_blocks: int  # blocks of the cache
    num_used_blocks: int  # blocks held by sequences
    num_cached_blocks: int  # unused blocks with a known prefix
    num_steps: int  # steps so far
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int  # preempted sequences
    prefix_queries: int  # prompt tokens looked up in the prefix cache, once for a request
    prefix_hits: int  # of those, tokens found
    # prompt tokens that answers did not compute: found, or computed by another answer to the prompt
    num_cached_prompt_tokens: int = 0
    num_draft_tokens: int = 0  # draft tokens that were compared with sampled ones
    num_accepted_tokens: int = 0  # accepted draft tokens


def stats_of(scheduler: Scheduler | GroupScheduler, *, steps: int, new_tokens: int) -> EngineStats:
    """Statistics of an engine with this scheduler, which counts steps and generated tokens itself."""
    pools, counters = scheduler.pools, scheduler.counters
    return EngineStats(
        len(scheduler.running),
        len(scheduler.waiting),
        sum(pool.num_blocks for pool in pools),
        sum(pool.num_used for pool in pools),
        sum(pool.num_cached for pool in pools),
        steps,
        counters.prompt_tokens,
        new_tokens,
        counters.preemptions,
        counters.prefix_queries,
        counters.prefix_hits,
        counters.cached_prompt_tokens,
        counters.guessed,
        counters.accepted,
    )
