"""Options of the server."""

import ipaddress
import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from expertmesh.config.base import KEY_VARIABLE, Config, key_of_environment
from expertmesh.config.fields import Spelling
from expertmesh.errors import named

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]")


class ServerConfig(Config):
    """Address, keys and limits of the server; every field is an option of `expertmesh serve`."""

    host: Annotated[str, Spelling("HOST")] = "127.0.0.1"
    """Address to listen on; addresses that other machines reach need an API key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free port, which is printed."""
    model_name: Annotated[str | None, Spelling("NAME")] = None
    """Model name in requests and responses; none: the folder's name."""
    adapter: Annotated[tuple[str, ...], Spelling("NAME=DIR")] = ()
    """Low-rank adapters in peft's format, each as NAME=DIR; the field `model` of a request selects one; none: no
    adapter."""
    adapter_root: Annotated[str | None, Spelling("DIR")] = None
    """Folder below which `/v1/load_lora_adapter` may read adapters; none: no adapters are loaded at run time."""
    api_key_file: Annotated[str | None, Spelling("FILE")] = None
    """File with an API key on each line; clients send `Authorization: Bearer KEY`; none: the key in the variable
    EXPERTMESH_API_KEY; without it, no key is needed."""
    without_key: bool = False
    """Let other machines connect without an API key."""
    allow_host: Annotated[tuple[str, ...], Spelling("NAME")] = ()
    """Host names that clients may use besides localhost, if the server has no API key, for example
    host.docker.internal."""
    allow_origin: Annotated[tuple[str, ...], Spelling("ORIGIN")] = ()
    """Origins of web pages that may use the server (CORS), for example https://chat.example.org; none: only the
    server's own page."""
    tool_call_parser: Annotated[str | None, Spelling("NAME")] = None
    """Tool-call parser by vLLM's name (hermes, qwen3_coder, openai, ...); "none": tool calls stay in the text; none:
    detected from the chat template."""
    reasoning_parser: Annotated[str | None, Spelling("NAME")] = None
    """Reasoning parser by vLLM's name (deepseek_r1, openai_gptoss, ...); "none": reasoning stays in the text; none:
    detected from the chat template."""
    max_waiting: int = Field(default=256, ge=0)
    """Maximum number of queued answers (a request with n counts n times); further requests get status 429 with
    Retry-After."""
    max_body_bytes: int = Field(default=2**23, ge=1024)
    """Maximum size of a request in bytes."""
    max_answer: int | None = Field(default=None, ge=1)
    """Maximum number of tokens to generate per answer; requests for more are limited to it; none: up to the model's
    maximum length."""
    max_n: int = Field(default=128, ge=1, le=128)
    """Maximum number of answers per prompt (n of a request)."""
    max_logprobs: int = Field(default=20, ge=0, le=20)
    """Maximum number of top logprobs that a request may ask for."""
    idle_s: float = Field(default=30.0, gt=0)
    """Timeout in seconds for receiving a request, and for idle keep-alive connections."""
    drain_s: float = Field(default=300.0, ge=0)
    """Time in seconds that running answers have to finish after SIGTERM."""
    access_log: bool = False
    """Whether each request is logged on standard error."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_guarded = self.is_guarded
        self.require(
            is_guarded or self.without_key or self.is_local,
            "host",
            "is reached by other machines, and there is no key",
            f"give {named('api_key_file')} or set {KEY_VARIABLE}, or {named('without_key')} if that is meant, or "
            "listen on 127.0.0.1",
        )
        self.require(
            not (is_guarded and self.without_key),
            "without_key",
            f"has no effect beside {named('api_key_file')} or {KEY_VARIABLE}",
            "leave one of them out",
        )
        self.require(
            not self.allow_host or (self.is_local and not is_guarded),
            "allow_host",
            "has no effect where any name is allowed: with a key, or on an address that other machines reach",
            "leave it out",
        )
        for one in self.allow_host:
            self.require(
                _HOST.fullmatch(one) is not None,
                "allow_host",
                "each must be a name without scheme and port",
                "for example host.docker.internal",
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
    def is_guarded(self) -> bool:
        """Whether requests need a key."""
        return self.api_key_file is not None or key_of_environment() is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
