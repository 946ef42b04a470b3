"""The complete configuration of a training run of a GPT on text."""

from typing import Self

from pydantic import model_validator

from expertmesh.config.base import expanded
from expertmesh.config.model import ModelConfig
from expertmesh.config.run import RunConfig
from expertmesh.config.text import TextConfig
from expertmesh.errors import named

MIN_VOCAB_SIZE = 257


def begun_with(config: "GPTRunConfig", other: "GPTRunConfig") -> "GPTRunConfig":
    """The configuration with the model of the run that it begins with, and its tokenizer.

    Args:
        config: of the run.
        other: of the one that it begins with.
    """
    where = expanded(config.train.init_from or "")
    changes = {"model": other.model.model_dump(), "data.encode_with": str(where / "tokenizer.json")}
    return config.updated(changes)


class GPTRunConfig(RunConfig):
    """Everything that defines a training run of a GPT."""

    family: str = "gpt"
    """Family of the model: gpt, or module:name of your own."""
    model: ModelConfig = ModelConfig()
    data: TextConfig = TextConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            self.data.seq_len <= self.model.max_seq_len,
            "data.seq_len",
            f"must be at most {named('model.max_seq_len')}, {self.model.max_seq_len}",
            f"lower it or raise {named('model.max_seq_len')}",
        )
        self.require(
            self.model.vocab_size >= MIN_VOCAB_SIZE,
            "model.vocab_size",
            f"must be at least {MIN_VOCAB_SIZE}: the 256 bytes and the end of a document",
            "raise it",
        )
        for name in ("document_mask", "pack"):
            self.require(
                not (getattr(self.data, name) and self.model.batch_invariant),
                f"data.{name}",
                f"conflicts with {named('model.batch_invariant')}, whose positions begin with a sequence's first token",
                "leave one of the two out",
            )
        layers, given = self.model.num_moe_layers, len(self.parallel.ep_degree)
        self.require(
            given in (0, 1, layers),
            "parallel.ep_degree",
            f"must have one entry, or one per MoE layer ({layers}), has {given}",
            "give one number for all layers",
        )
        return self
