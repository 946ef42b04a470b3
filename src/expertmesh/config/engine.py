"""Options of the inference engine."""

from typing import Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.errors import named

_THEIRS = named("implementation", "transformers")


class DecodingConfig(Config):
    """Drafts and placement of experts, which `expertmesh generate` has as well."""

    num_draft_tokens: int = Field(default=0, ge=0, le=64)
    """Draft tokens per step, from earlier text of the same sequence (n-gram speculative decoding): the same answers, sooner where they
    repeat something; 0: none."""
    expert_slots: int | None = Field(default=None, gt=0)
    """Experts of each layer on the device at a time, for a model opened from a folder; the others stay in the files; none: all experts."""
    enable_eplb: bool = False
    """Whether experts move between ranks while serving, as their counted load asks (DeepSeek's EPLB)."""
    num_redundant_experts: int = Field(default=0, ge=0)
    """Extra copies of hot experts in each layer, beside one of each expert, with enable_eplb."""
    eplb_step_interval: int = Field(default=3000, gt=0)
    """Steps between two placements of the experts, with enable_eplb."""

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

    device: str | None = None
    """Device of a model that the engine opens: auto, cpu, cuda or cuda:N; none: the device of its training."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and products of a model that the engine opens; none: the type of its files."""
    implementation: Literal["expertmesh", "transformers"] = "expertmesh"
    """Class of a model that the engine opens: our GPT, or transformers' own, with paged attention and experts of ours."""
    max_len: int | None = Field(default=None, gt=0)
    """Tokens of a sequence, prompt and answer together, at most; none: as many as the model has places for."""
    block_size: int = Field(default=32, gt=0)
    """Tokens of a block of the key-value cache; the prefix cache shares whole blocks."""
    num_blocks: int | None = Field(default=None, gt=0)
    """Blocks of the key-value cache; none: enough for max_sequences of max_len, within cache_bytes."""
    cache_bytes: int = Field(default=2**30, gt=0)
    """Bytes of the key-value cache, at most, where num_blocks is not given."""
    token_budget: int = Field(default=2048, gt=0)
    """Tokens of a step, at most; longer prompts are cut into several steps."""
    max_sequences: int = Field(default=64, gt=0)
    """Sequences that are computed in one step, at most."""
    prefix_caching: bool = True
    """Whether requests reuse cache blocks of earlier requests that begin with the same tokens."""
    deterministic: bool = False
    """Whether tokens and logprobs have the same bits alone and in any batch; a model that is given must have batch_invariant in its config."""
    compile: bool | None = None
    """Whether steps on a CPU are compiled, in the background; none: for a large model, with a C++ compiler, not in deterministic mode."""
    expert_fetch_ahead: bool | None = None
    """Whether the experts that the next layer may choose are copied while this layer computes, with expert_slots; none: not on a CPU."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            not (self.deterministic and self.compile),
            "compile",
            f"changes bits, which {named('deterministic', True)} promises",
            "leave one of them out",
        )
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
