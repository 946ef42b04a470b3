"""Numbers of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing, and has done.

    Attributes:
        num_running: sequences that hold blocks.
        num_waiting: sequences that wait.
        num_blocks: blocks of the cache.
        num_used_blocks: blocks that sequences hold.
        num_cached_blocks: blocks that nobody holds, whose prefix is known.
        num_steps: steps so far.
        num_prompt_tokens: tokens of prompts that were computed.
        num_generated_tokens: tokens that were drawn.
        num_preemptions: sequences that gave their blocks back.
        prefix_queries: tokens that were looked for in the cache.
        prefix_hits: tokens that were found.
        num_draft_tokens: tokens that were guessed.
        num_accepted_tokens: guesses that were right.
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
