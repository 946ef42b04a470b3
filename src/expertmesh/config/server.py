"""Options of the server."""

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.errors import named


class ServerConfig(Config):
    """Address, keys and limits of the server; every field is an option of `expertmesh serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than this machine's own needs a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free one, which is printed."""
    model_name: str | None = None
    """Name of the model, as clients write it; none: the folder's name."""
    adapter: tuple[str, ...] = ()
    """Low-rank adapters as peft saves them, each as NAME=FOLDER; a request chooses one by its field model. None: the model alone."""
    api_key_file: str | None = None
    """File with a key on each line; a client sends one as `Authorization: Bearer KEY`. None: whoever reaches the port is answered."""
    without_key: bool = False
    """Listen on an address that other machines reach, without a key."""
    allow_origin: tuple[str, ...] = ()
    """Web pages of these origins may use the server (CORS), for example https://chat.example.org; none: only its own page."""
    max_waiting: int = Field(default=256, ge=0)
    """Waiting answers, beside the running ones, at most; beyond, a request gets 429 and retry-after."""
    max_body_bytes: int = Field(default=2**23, ge=1024)
    """Bytes of a request, at most."""
    max_answer: int | None = Field(default=None, ge=1)
    """Tokens of an answer, at most; a request for more gets so many. None: as many as the model has room for."""
    max_n: int = Field(default=128, ge=1, le=128)
    """Answers to one prompt, at most."""
    max_logprobs: int = Field(default=20, ge=0, le=20)
    """Alternatives with logprobs per token that a request may ask for, at most."""
    idle_s: float = Field(default=30.0, gt=0)
    """Seconds in which a client has to send its request, and in which a new one follows on the same connection."""
    drain_s: float = Field(default=300.0, ge=0)
    """Seconds that answers have to end after SIGTERM."""
    access_log: bool = False
    """A line on standard error for each request."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_guarded = self.api_key_file is not None
        self.require(
            is_guarded or self.without_key or self.is_local,
            "host",
            "is reached by other machines, and there is no key",
            f"give {named('api_key_file')}, or {named('without_key')} if that is meant, or listen on 127.0.0.1",
        )
        self.require(
            not (is_guarded and self.without_key),
            "without_key",
            f"has no effect beside {named('api_key_file')}",
            "leave one of them out",
        )
        for one in self.adapter:
            name, _, folder = one.partition("=")
            self.require(
                bool(name and folder),
                "adapter",
                "each must be NAME=FOLDER",
                "write a name, = and a folder of peft's save_pretrained",
            )
        names = [one.partition("=")[0] for one in self.adapter]
        self.require(
            len(set(names)) == len(names) and self.model_name not in names,
            "adapter",
            f"names must differ from one another and from {named('model_name')}",
            "choose others",
        )
        return self

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of adapters by name."""
        parts = (one.partition("=") for one in self.adapter)
        return {name: folder for name, _, folder in parts}

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
