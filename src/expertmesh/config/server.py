"""Options of the server."""

import ipaddress
from typing import Annotated, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.config.fields import Spelling
from expertmesh.errors import named


class ServerConfig(Config):
    """Address, keys and limits of the server; every field is an option of `expertmesh serve`."""

    host: Annotated[str, Spelling("HOST")] = "127.0.0.1"
    """Address to listen on; addresses that other machines reach need an API key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free port, which is printed."""
    model_name: Annotated[str | None, Spelling("NAME")] = None
    """Model name in requests and responses; none: the folder's name."""
    adapter: Annotated[tuple[str, ...], Spelling("NAME=DIR")] = ()
    """Low-rank adapters in peft's format, each as NAME=DIR; the field `model` of a request selects one; none: no adapter."""
    api_key_file: Annotated[str | None, Spelling("FILE")] = None
    """File with an API key on each line; clients send `Authorization: Bearer KEY`; none: no key is needed."""
    without_key: bool = False
    """Let other machines connect without an API key."""
    allow_origin: Annotated[tuple[str, ...], Spelling("ORIGIN")] = ()
    """Origins of web pages that may use the server (CORS), for example https://chat.example.org; none: only the server's own page."""
    tool_call_parser: Annotated[str | None, Spelling("NAME")] = None
    """Format of calls of tools in answers, as vLLM names them (hermes, qwen3_coder, openai, ...; "none": calls stay text); none: the one that the chat template shows."""
    reasoning_parser: Annotated[str | None, Spelling("NAME")] = None
    """Format of thoughts in answers, likewise (deepseek_r1, openai_gptoss, ...; "none": thoughts stay text); none: the one that the chat template shows."""
    max_waiting: int = Field(default=256, ge=0)
    """Maximum number of waiting answers (n per request), besides running ones; beyond it requests get status 429 with Retry-After."""
    max_body_bytes: int = Field(default=2**23, ge=1024)
    """Maximum size of a request in bytes."""
    max_answer: int | None = Field(default=None, ge=1)
    """Maximum number of tokens to generate per answer; requests for more are limited to it; none: up to the model's maximum length."""
    max_n: int = Field(default=128, ge=1, le=128)
    """Maximum number of answers per prompt (n of a request)."""
    max_logprobs: int = Field(default=20, ge=0, le=20)
    """Maximum number of most likely tokens whose logprobs a request may ask for."""
    idle_s: float = Field(default=30.0, gt=0)
    """Timeout in seconds for receiving a request, and for the next request on an open connection."""
    drain_s: float = Field(default=300.0, ge=0)
    """Time limit in seconds for running answers after SIGTERM."""
    access_log: bool = False
    """Whether each request is logged on standard error."""

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
                "each must be NAME=DIR",
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
