"""Families of the hub in the engine: windows behind which texts go on, and Dots1, the family that docs/extending.md
adds."""

import pytest
import torch
from tests.oracle import numerics
from tests.support.bits import assert_bits_follow_no_neighbour_and_training_has_them
from tests.support.hub_models import tiny_model
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.config.run import ParallelConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.init_from import with_init_from
from expertmesh.training.loop import train

VOCAB = 300
WINDOW = {"sliding_window": 8}
QWEN = WINDOW | {"use_sliding_window": True}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
NO_BIAS = {"attention_bias": False}
KINDS = {
    "mixtral": ("mixtral", WINDOW),
    "qwen2_moe": ("qwen2_moe", QWEN | {"max_window_layers": 4}),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "dots1": ("dots1", GROUPS | {"sliding_window": None, "layer_types": None} | NO_BIAS),
    "dots1 with a window": ("dots1", GROUPS | {"layer_types": ["sliding_attention"] * 3}),
}
PUBLISHED = {
    "model_type": "dots1",
    "vocab_size": 152064,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32768,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders as transformers saves them, by kind, and the models; biases and norms are those of no beginning."""
    found = {}
    generator = torch.Generator().manual_seed(4)
    for kind, (name, changes) in KINDS.items():
        sizes = {"num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": None}
        sizes |= {"vocab_size": VOCAB, "num_attention_heads": 4} | changes
        model = tiny_model(name, num_experts=4, top_k=2, **sizes).eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.dim() == 1:
                    tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        folder = tmp_path_factory.mktemp(name) / "hub"
        model.save_pretrained(folder)
        found[kind] = folder, model
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(hub, kind):
    """In FP64, behind the window; as closely as FP32 norms, angles and softmaxes let transformers say."""
    folder, model = hub[kind]
    ids = torch.randint(VOCAB, (3, 40))
    ours = load_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        given = model(ids).logits
        exact = model.double()(ids).logits
        model.float()
        found = ours(ids).logits_BSV
    numerics.assert_two_times(found.float(), given, exact, what="logits")
    assert any(ours.config.window_of(i) == 8 for i in range(3)) == (kind != "dots1")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(hub, kind):
    """64 tokens behind the window: cold, in chunks, with the prefix kept."""
    folder, model = hub[kind]
    ours = load_pretrained(folder, dtype=torch.float64).eval()
    prompt = list(range(40, 70))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engines = [Engine(ours, block_size=8), Engine(ours, token_budget=7, block_size=4)]
    found = [e.generate([prompt], params)[0] for e in (*engines, engines[0])]
    assert found[2].num_cached_tokens > 0
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, do_sample=False, max_new_tokens=64, pad_token_id=0)
    assert {one.token_ids for one in found} == {tuple(tokens[0, len(prompt) :].tolist())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dots1", "dots1 with a window", "qwen2_moe"])
def test_bits_follow_no_neighbour_and_training_has_them(hub, kind, dtype):
    given = load_pretrained(hub[kind][0], dtype=dtype)
    model = em.GPT(given.config.model_copy(update={"batch_invariant": True}), dtype=dtype).eval()
    model.load_state_dict(given.state_dict())
    prompts = [list(range(5, 30)), [3, 1, 4], list(range(7, 20))]
    params = SamplingParams(temperature=1.1, seed=2, max_tokens=7, logprobs=0)
    cache = {"token_budget": 3, "block_size": 4}
    assert_bits_follow_no_neighbour_and_training_has_them(model, prompts, params, cache)


PROMPTS = [list(range(5, 30)), [3, 1, 4], list(range(7, 20))]
SPREAD = [{"ep_degree": 2}, {"tp_degree": 2}, {"tp_degree": 2, "ep_degree": 1, "es_degree": 2}]


def answered_over_ranks(folder):
    """Tokens of rank 0 by how experts and heads are spread."""
    params, found = SamplingParams(temperature=0, max_tokens=9), []
    for parallel in SPREAD:
        model = load_pretrained(folder, dtype=torch.float64).eval()
        engine = Engine(model, parallel=ParallelConfig(**parallel), compile=False)
        if not engine.leads:
            engine.follow()
            continue
        found.append([o.token_ids for o in engine.generate(PROMPTS, params)])
        engine.close()
    return found


def losses_over_ranks(folder):
    """Logits, with each rank's part of the weights read from the files."""
    model = load_pretrained(folder, dtype=torch.float64, parallel=ParallelConfig(ep_degree=2))
    model.eval()
    return model(torch.arange(24).view(1, 24) * 7 % VOCAB).logits_BSV.detach()


@pytest.mark.parametrize("kind", ["dots1", "dots1 with a window"])
def test_ranks_say_what_one_process_says(hub, kind, two_ranks):
    folder, _ = hub[kind]
    whole = load_pretrained(folder, dtype=torch.float64).eval()
    outputs = Engine(whole).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9))
    found, _ = two_ranks.run(answered_over_ranks, folder)
    assert found == [[o.token_ids for o in outputs]] * len(SPREAD)
    with torch.no_grad():
        logits = whole(torch.arange(24).view(1, 24) * 7 % VOCAB).logits_BSV
    for part in two_ranks.run(losses_over_ranks, folder):
        numerics.assert_close_fp64(part, logits, what="logits")


def test_dots1_is_trained_and_goes_out_as_dots1(hub, tmp_path):
    """With the trainer, from a folder of the hub; in the type of the files, under the names of the files."""
    folder, model = hub["dots1"]
    tokenizer = train_tokenizer(["a few words of some text " * 9], vocab_size=VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words of some text. " * 99)
    config = GPTRunConfig(
        data={"path": str(tmp_path / "text"), "cache_dir": str(tmp_path), "seq_len": 16},
        train={
            "init_from": str(folder),
            "run_dir": str(tmp_path / "run"),
            "steps": 12,
            "batch_size": 4,
            "eval_batches": 2,
            "dtype": "float32",
            "device": "cpu",
            "tensorboard": False,
        },
        optim={"lr": 1e-2, "warmup_steps": 2},
    )
    result = train(with_init_from(config, GPT))
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    convert(tmp_path / "run", tmp_path / "out")
    ours = em.load(tmp_path / "run").model.eval()
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert type(again) is type(model) and not info["missing_keys"] | info["unexpected_keys"]
    ids = torch.randint(VOCAB, (2, 16))
    with torch.no_grad():
        found, given = ours(ids).logits_BSV, again(ids).logits
        exact = again.double()(ids).logits
    numerics.assert_two_times(found.float(), given, exact, what="logits")
    biases = [load_pretrained(f).layers[1].moe.expert_bias_E for f in (folder, tmp_path / "out")]
    moved = (biases[0] - biases[1]).abs().max()
    assert 0 < moved < 13e-3  # of twelve steps of 1e-3


def test_dots1_has_its_published_size():
    """142 billion numbers, 14 of them used by a token (dots.llm1, arXiv 2506.05767)."""
    counts = count_parameters(model_config(PUBLISHED))
    assert (counts.total, counts.active) == (142_774_373_888, 14_016_581_120)
