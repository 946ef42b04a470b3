"""langchain-openai, as it comes, against a server process."""

import pytest

langchain = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_invoke_stream_and_batch(server):
    chat = langchain.ChatOpenAI(
        base_url=f"{server.address}/v1", api_key="none", model="tiny", seed=1, max_tokens=8, max_retries=0
    )  # fmt: skip
    whole = chat.invoke("import os")
    assert whole.content == "".join(piece.content for piece in chat.stream("import os"))
    assert whole.usage_metadata["output_tokens"] <= 8
    assert [one.content for one in chat.batch(["import os"] * 2)] == [whole.content] * 2
    text = langchain.OpenAI(
        base_url=f"{server.address}/v1", api_key="none", model="tiny", seed=1, max_tokens=8, max_retries=0
    )  # fmt: skip
    assert text.invoke("import os") == "".join(text.stream("import os"))
