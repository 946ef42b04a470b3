"""The engine of a folder: opened once, prompts and answers as `em.generate` has them."""

import pytest
import torch

import expertmesh as em
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.tokenizer import train_tokenizer

PROMPTS = ["def main(", "import", "é"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    config = RECIPES["gpt-moe-test"]().updated({"train.dtype": "float32", "model.init_std": 0.3})
    texts = ["def main():\n    return 'é'\n", "import os\n"] * 30
    train_tokenizer(texts, vocab_size=config.model.vocab_size).save(str(place / "trained.json"))
    files = {"tokenizer.json": place / "trained.json"}
    RunDir(place).write_description(config, recipe="gpt-moe-test", files=files)
    store = CheckpointStore(RunDir(place).checkpoints, keep_last=1)
    state = GPT(config.model, dtype=torch.float32, seed=1).state_dict()
    store.save(5, {f"model.{name}": one for name, one in state.items()}, {}, eval_loss=None)
    store.wait()
    store.close()
    return place


def test_texts_are_those_of_generate(folder):
    model, tokenizer = em.load(folder)
    params = em.SamplingParams(temperature=0, max_tokens=12)
    for engine in (em.Engine(folder), em.Engine(model, tokenizer)):
        outputs = engine.generate(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = em.generate(model, tokenizer, prompt, max_tokens=12, temperature=0)
            assert output.text == expected and output.prompt_ids


def test_a_folder_can_be_served_deterministically(folder):
    engine = em.Engine(folder, deterministic=True)
    assert engine.model.config.batch_invariant
    params = em.SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=0)
    together = engine.generate(PROMPTS, [params] * len(PROMPTS))  # each with the seed of one alone
    alone = [em.Engine(folder, deterministic=True).generate(p, params)[0] for p in PROMPTS]
    assert [(o.token_ids, o.logprobs) for o in together] == [(o.token_ids, o.logprobs) for o in alone]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_type_is_chosen_where_a_folder_is_opened(folder, dtype):
    assert em.Engine(folder, dtype=dtype).model.embedding.weight.dtype == getattr(torch, dtype)


def test_wrong_folders_and_options_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        em.Engine(tmp_path)
    model, tokenizer = em.load(folder)
    with pytest.raises(ConfigError, match="tokenizer: the folder has its own"):
        em.Engine(folder, tokenizer)
    with pytest.raises(ConfigError, match=r"dtype='?float64'?: is for a folder"):
        em.Engine(model, tokenizer, dtype="float64")
    with pytest.raises(ConfigError, match="dtype"):
        em.Engine(folder, dtype="float7")
    with pytest.raises(ConfigError, match="device"):
        em.Engine(folder, device="tpu")
