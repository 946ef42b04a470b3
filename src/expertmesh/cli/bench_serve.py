"""`expertmesh bench serve ADDRESS`: send load to a server, and measure its latencies."""

import json
from typing import Annotated, Any
from urllib.parse import urlsplit

from expertmesh.cli.parse import parsed
from expertmesh.cli.serve import keys_of
from expertmesh.config.fields import Flat, InputFile, Operation, OptionsFile, Spelling, Word
from expertmesh.config.load import LoadConfig
from expertmesh.errors import ConfigError

_PATIENCE_S = 30.0


class BenchServeVerb(Operation):
    """Benchmarks a server of `expertmesh serve` under load: throughput and latencies.

    examples:
      expertmesh bench serve http://127.0.0.1:8000
      expertmesh bench serve http://127.0.0.1:8000 --num-requests 500 --rate 20 --prefix-tokens 64 --num-prefixes 4
      expertmesh bench serve http://127.0.0.1:8000 --config evening.yaml  # the same options in a file
    """

    address: Annotated[str, Spelling("ADDRESS"), Word]
    """address of the server, http://HOST:PORT"""
    config: OptionsFile | None = None
    """YAML file with the options below"""
    api_key_file: InputFile | None = None
    """file whose first line is the API key"""
    load: Annotated[LoadConfig, Flat] = LoadConfig()


def run(argv: list[str]) -> int:
    """Print throughput and latencies; returns 0, or 1 if a request failed."""
    options = parsed(BenchServeVerb, argv)
    import asyncio

    from expertmesh.serve.load_client import bodies, drive, table

    load = options.load
    keys = keys_of(options.api_key_file)
    key = keys[0] if keys else None
    place = urlsplit(options.address)
    if place.scheme != "http" or not place.hostname:
        raise ConfigError(f"address {options.address}: must be http://HOST:PORT, as `serve` prints it")
    address = f"http://{place.netloc}"
    facts = _facts(address, key)
    requests = list(bodies(load, vocab_size=facts["vocab_size"], max_len=facts["model_max_length"]))
    outcomes, seconds = asyncio.run(drive(address, load, requests, key=key))
    print(table(outcomes, seconds))
    failed = [one for one in outcomes if not one.is_whole and one.status != 429]
    if failed:
        print(f"first failure: status {failed[0].status} {failed[0].error[:200]}")
    return 1 if failed else 0


def _facts(address: str, key: str | None) -> dict[str, Any]:
    """Tokenizer information from the server."""
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with urlopen(Request(f"{address}/tokenizer_info", headers=headers), timeout=_PATIENCE_S) as answer:
            facts: dict[str, Any] = json.loads(answer.read())
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"address {address}: gives no /tokenizer_info ({reason}); start a server with expertmesh serve"
        ) from None
    return facts
