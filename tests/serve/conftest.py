"""One tiny model that chats, in a server process of its own; what clients say to it goes over loopback."""

import pytest
from tests.support.serving import make_run, served


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model's folder."""
    return make_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(folder):
    """A server that all tests of the session share."""
    with served(folder) as found:
        yield found


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's client of it."""
    import openai  # here, because only some tests pay for it

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as one:
        yield one
