"""Adapters of peft in our engine, several in one batch, against peft's own models on transformers."""

import copy

import pytest
import torch
from tests.oracle import numerics
from tests.support.hub_models import tiny_model

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.integrations.hub import load_pretrained
from expertmesh.integrations.transformers import ExpertMeshConfig, ExpertMeshForCausalLM
from expertmesh.models.gpt.config import ModelConfig

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.23 for an attribute by its old name
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    # and warns of patterns for parameters, which it goes by all the same
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
FAMILIES = {
    "qwen3_moe": ATTENTION,
    "qwen2_moe": [*ATTENTION, *DENSE, "shared_expert_gate"],
    "deepseek_v3": [*LATENT, *DENSE],
    "glm4_moe": [*ATTENTION, *DENSE],
    "gpt_oss": ATTENTION,
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [9] * 6, [3, 4, 5, 6, 7, 8, 9], [2, 1], [5, 6, 7]]
WHO = ["all", None, "some", "experts", "all"]


def adapted(model, place, *, seed, **options):
    """A model of peft's with drawn factors, which are saved in a folder, too."""
    found = peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.3)
    found.save_pretrained(place)
    return found.eval()


ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
CHANGES = {"gpt_oss": {"rope_parameters": ROPE}}


def hub_model(name, dtype):
    torch.manual_seed(0)  # of sinks, which are drawn by the class
    return tiny_model(name, dtype=dtype, **CHANGES.get(name, {})).eval()


def models_of(name, place, dtype):
    """The model alone and with each of three adapters, by transformers and peft."""

    def fresh():
        model = hub_model(name, dtype)
        model.set_experts_implementation("eager")
        return model

    kinds = {
        "all": {"r": 2, "lora_alpha": 4, "target_modules": FAMILIES[name]},
        "some": {"r": 3, "lora_alpha": 2, "target_modules": ["o_proj"], "use_rslora": True},
        "experts": {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": [],
            "target_parameters": EXPERTS[1:],
        },
    }
    # peft makes parameters of experts of these names, where a model of theirs has some
    if name not in ("glm4_moe", "deepseek_v3"):
        kinds["all"]["target_parameters"] = EXPERTS
    each = {
        who: adapted(fresh(), place / who, seed=seed, **options) for seed, (who, options) in enumerate(kinds.items())
    }
    return {None: fresh()} | each


@torch.no_grad()
def greedy(model, prompt, count):
    ids, scores = list(prompt), []
    for _ in range(count):
        row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        scores.append(float(row.max()))
        ids.append(int(row.argmax()))
    return tuple(ids[len(prompt) :]), scores


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_requests_have_the_tokens_of_peft_s_models(name, tmp_path):
    theirs = models_of(name, tmp_path, torch.float64)
    hub_model(name, torch.float64).save_pretrained(tmp_path / "hub")
    ours = load_pretrained(tmp_path / "hub", dtype=torch.float64).eval()
    folders = {who: tmp_path / who for who in theirs if who is not None}
    engine = Engine(ours, adapters=folders, token_budget=16, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    found = engine.generate(PROMPTS, params, adapter=WHO)
    for prompt, who, answer in zip(PROMPTS, WHO, found, strict=True):
        tokens, scores = greedy(theirs[who], prompt, 12)
        assert answer.token_ids == tokens
        own = torch.tensor([one.logprob for one in answer.logprobs])
        # transformers takes norms, angles and softmax in FP32 in any case
        torch.testing.assert_close(own, torch.tensor(scores), rtol=0, atol=1e-4)
    assert found[0].token_ids != found[2].token_ids  # of one prompt


def test_fp32_is_as_exact_as_peft_s(tmp_path):
    theirs = models_of("qwen3_moe", tmp_path, torch.float32)
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "hub")
    folders = {who: tmp_path / who for who in theirs if who is not None}
    engine = Engine(load_pretrained(tmp_path / "hub").eval(), adapters=folders)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(61, (40,), generator=generator).tolist() for _ in WHO]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = engine.generate(prompts, params, adapter=WHO)
    for prompt, who, answer in zip(prompts, WHO, found, strict=True):
        ids = torch.tensor([prompt])

        def scored(model, ids=ids):
            with torch.no_grad():
                rows = model(ids).logits[0, :-1].log_softmax(-1)
            return rows.gather(1, ids[0, 1:, None])[:, 0]

        base = theirs[who] if who is None else theirs[who].base_model.model
        plain = [scored(theirs[who])]
        base.set_experts_implementation("grouped_mm")
        plain.append(scored(theirs[who]))
        base.set_experts_implementation("eager")
        oracle = scored(copy.deepcopy(theirs[who]).to(torch.float64))
        own = torch.tensor([one.logprob for one in answer.prompt_logprobs[1:]])
        numerics.assert_two_times(own, plain, oracle, what=f"logprobs of {who}")


def test_peft_on_our_own_model(tmp_path):
    options = {"vocab_size": 64, "max_seq_len": 48, "dim": 16, "num_layers": 2, "num_heads": 2}
    moe = {"num_experts": (4,), "hidden_dim": 16, "num_shared_experts": 1, "shared_gate": True}
    config = ModelConfig(**options, tie_embeddings=False, init_std=0.3, moe=moe)
    model = ExpertMeshForCausalLM(ExpertMeshConfig(gpt=config, eos_token_id=0, pad_token_id=0))
    model = model.to(torch.float64).eval()
    engine = Engine(model.gpt)
    plain = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    targets = ["qkv", "attention.out", "shared_gate"]
    found = adapted(model, tmp_path / "a", seed=1, r=2, target_modules=targets)
    with torch.no_grad():
        expected = [greedy(found, prompt, 8)[0] for prompt in PROMPTS]
    again = ExpertMeshForCausalLM(found.config).to(torch.float64).eval()
    again.gpt.load_state_dict(
        {key.replace("base_layer.", ""): one for key, one in model.gpt.state_dict().items() if "lora_" not in key}
    )
    engine = Engine(again.gpt, adapters={"a": tmp_path / "a"})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    mixed = engine.generate([*PROMPTS, *PROMPTS], params, adapter=["a", None] * len(PROMPTS))
    order = [*PROMPTS, *PROMPTS]
    for prompt, who, answer in zip(order, ["a", None] * len(PROMPTS), mixed, strict=True):
        place = PROMPTS.index(prompt)
        wanted = expected[place] if who else plain[place].token_ids
        assert answer.token_ids == wanted
