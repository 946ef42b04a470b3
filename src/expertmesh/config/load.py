"""Options of the load that `expertmesh bench serve` puts on a server."""

from typing import Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config


class LoadConfig(Config):
    """Number, arrival times and lengths of requests; every field is an option of `expertmesh bench serve`."""

    num_requests: int = Field(default=100, ge=1)
    """Number of requests."""
    rate: float | None = Field(default=None, gt=0)
    """Request rate in requests per second (Poisson arrivals); none: as fast as concurrency allows."""
    concurrency: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests."""
    prompt_tokens: tuple[int, int] = (16, 128)
    """Minimum and maximum prompt length in tokens, without the prefix; lengths are uniformly distributed."""
    answer_tokens: tuple[int, int] = (16, 96)
    """Minimum and maximum answer length in tokens; lengths are uniformly distributed."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Length in tokens of the shared prefix of prompts."""
    num_prefixes: int = Field(default=1, ge=1)
    """Number of different shared prefixes."""
    seed: int = Field(default=0, ge=0)
    """Random seed of prompts, lengths and arrival times."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("prompt_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            self.require(1 <= low <= high, name, "must be two numbers, from and to", "write 16 128")
        return self
