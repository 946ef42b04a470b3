"""What all configuration models share: frozen, no unknown keys, one-line errors. Never imports torch."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen, validated, torch-free group of options.

    Unknown keys are errors. The text under a field is its help on the command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
