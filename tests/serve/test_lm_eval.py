"""lm-evaluation-harness asks the server what it asks transformers, and gets the same numbers."""

import pytest
from tests.support.hub_text import hub_folder
from tests.support.real_text import DOCS
from tests.support.serving import served

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytest.importorskip("aiohttp")
pytestmark = [
    # what lm-evaluation-harness and its own libraries do is theirs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning"),
]
NATS = 1e-4


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_local_completions_equals_the_hf_backend(tmp_path, monkeypatch, backend):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = hub_folder(tmp_path / "hub")  # 64 places
    text = (DOCS / "glossary.md").read_text()[:400]
    pairs = [(text[:n], text[n : n + 9]) for n in (1, 5, 30, 45)] + [("a word ", "b")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    rolled = [Instance("loglikelihood_rolling", {}, (text[i : i + 50],), i) for i in (0, 100)]
    until = {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False}
    written = [Instance("generate_until", {}, (text[:n], dict(until)), n) for n in (7, 30)]
    theirs = HFLM(str(folder), device="cpu", batch_size=2, dtype="float32", max_length=60)
    with served(folder) as server:
        ours = LocalCompletionsAPI(
            base_url=f"{server.address}/v1/completions",
            model="hub",
            tokenizer=str(folder) if backend == "huggingface" else None,
            tokenizer_backend=backend,
            batch_size=3 if backend == "huggingface" else 1,
            max_length=60,
            num_concurrent=1,
        )
        for a, b in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
            assert abs(a[0] - b[0]) <= NATS and a[1] == b[1]
        found = ours.loglikelihood_rolling(rolled)
        for a, b in zip(found, theirs.loglikelihood_rolling(rolled), strict=True):
            assert abs(a - b) <= NATS
        assert ours.generate_until(written) == theirs.generate_until(written)
