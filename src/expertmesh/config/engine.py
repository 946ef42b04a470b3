"""Options of the inference engine."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.config.fields import Spelling
from expertmesh.errors import named

_THEIRS = named("implementation", "transformers")


class DecodingConfig(Config):
    """Speculative decoding and placement of experts: options of `serve` and of `generate`."""

    num_draft_tokens: int = Field(default=0, ge=0, le=64)
    """Number of draft tokens per step for n-gram speculative decoding, which does not change the output; 0: off."""
    expert_slots: int | None = Field(default=None, gt=0)
    """Number of experts per layer kept on the device; others are loaded from disk on demand; none: all experts.

    Experts are loaded for a model opened from a folder.
    """
    enable_eplb: bool = False
    """Whether experts are rebalanced across ranks by measured load (DeepSeek's EPLB)."""
    num_redundant_experts: int = Field(default=0, ge=0)
    """Number of extra copies of hot experts per layer, with enable_eplb."""
    eplb_step_interval: int = Field(default=3000, gt=0)
    """Number of steps between rebalancings, with enable_eplb."""

    @model_validator(mode="after")
    def _check_eplb(self) -> Self:
        if not self.enable_eplb:
            for name in ("num_redundant_experts", "eplb_step_interval"):
                self.refuse_idle(
                    name,
                    f"has no effect without {named('enable_eplb')}",
                    f"leave it out, or add {named('enable_eplb', True)}",
                )
        return self


class EngineConfig(DecodingConfig):
    """Device, cache, batch and expert options of the engine; every field is a keyword of `Engine`."""

    device: Annotated[str | None, Spelling("NAME")] = None
    """Device: auto, cpu, cuda or cuda:N; none: as in training.

    A model given as a module stays on its own.
    """
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Dtype of weights and computation; none: as in the files.

    A model given as a module keeps its own.
    """
    implementation: Literal["expertmesh", "transformers"] = "expertmesh"
    """Implementation: ExpertMesh's GPT, or the class of transformers with ExpertMesh's paged attention and experts."""
    max_len: int | None = Field(default=None, gt=0)
    """Maximum sequence length in tokens, prompt and answer together; none: the model's maximum length."""
    block_size: int = Field(default=32, gt=0)
    """Block size of the key-value cache in tokens; the prefix cache shares whole blocks."""
    num_blocks: int | None = Field(default=None, gt=0)
    """Number of blocks of the key-value cache; none: enough for max_sequences of max_len, within cache_bytes."""
    cache_bytes: int = Field(default=2**30, gt=0)
    """Maximum size of the key-value cache in bytes, if num_blocks is not given."""
    token_budget: int = Field(default=2048, gt=0)
    """Maximum number of tokens per step; longer prompts are split over several steps (chunked prefill)."""
    max_sequences: int = Field(default=64, gt=0)
    """Maximum number of sequences per step."""
    prefix_caching: bool = True
    """Whether requests reuse cache blocks of earlier requests with the same prefix."""
    deterministic: bool = False
    """Batch-invariant: tokens and logprobs are bitwise the same whatever else is in the batch.

    A model given as a module needs batch_invariant in its config.
    """
    compile: bool | None = None
    """Whether decoding steps are captured as CUDA graphs (GPU), or recorded and replayed with bitwise equal results
    (CPU); none: where supported."""
    expert_fetch_ahead: bool | None = None
    """Whether likely experts of the next layer are loaded while a layer computes, with expert_slots; none: yes, except
    on a CPU."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            not (self.deterministic and self.implementation == "transformers"),
            "deterministic",
            f"needs linears and norms of ours, and {_THEIRS} has its own",
            "leave one of them out",
        )
        self.require(
            self.expert_slots is None or self.implementation == "expertmesh",
            "expert_slots",
            f"are for models that run as our GPT, and {_THEIRS} keeps all experts",
            "leave one of them out",
        )
        self.require(
            self.block_size <= 4096,
            "block_size",
            "must be at most 4096",
            "use 16, 32 or 64",
        )
        return self
