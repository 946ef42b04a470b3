"""Statistics of an engine."""

from dataclasses import dataclass


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
