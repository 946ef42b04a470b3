"""Options of tokens that a fine-tune adds to its tokenizer."""

from typing import Annotated, Self

from pydantic import model_validator

from expertmesh.config.base import Config
from expertmesh.config.fields import Each, Spelling
from expertmesh.errors import named


class TokensConfig(Config):
    """Tokens that a run adds to the vocabulary of the model it begins with."""

    add: Annotated[tuple[str, ...], Spelling("TOKEN"), Each] = ()
    """Tokens added to the tokenizer, embedding and head, each after an option of its own; new rows begin as the mean of
    those with a token. Under adapters only the rows of these tokens are trained (trainable_token_indices in peft)."""
    special: bool = False
    """Whether added tokens are special: only the chat template writes them, and decoding leaves them out; else any text
    that contains one is encoded with it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require_once("add")
        self.require(all(one.strip() for one in self.add), "add", "has a token that is blank", "leave it out")
        if not self.add:
            fix = f"leave it out, or name tokens in {named('tokens.add')}"
            self.refuse_idle("special", "has no effect without added tokens", fix)
        return self
