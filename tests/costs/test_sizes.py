"""Sizes of models: those of our configurations are the model's own, those of the hub reproduce published counts."""

import pytest

from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.costs.sizes import sizes_of_hub
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.gpt.spec import count_parameters, prediction_spec
from expertmesh.models.registry import recipe
from expertmesh.planner.published import published_models

RECIPES = ("gpt-moe-demo", "gpt-moe-1b", "gpt-1.3b-moe128", "gpt-350m-prmoe", "gpt-6.7b")
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 500,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_of_our_recipes_are_those_of_their_models(name):
    model = recipe(name).model
    sizes, count = sizes_of(model), count_parameters(model)
    assert sizes.num_parameters == count.total
    assert sizes.expert_parameters == count.experts
    assert sizes.active_parameters == pytest.approx(count.active, rel=1e-6)
    for seq_len in (128, 2048):
        expected = forward_flops(model, seq_len=seq_len).training_flops()
        assert sizes.training_flops(seq_len) == pytest.approx(expected, rel=1e-3)


def test_sizes_from_the_hub_are_those_of_the_model_that_we_make_of_it():
    ours, theirs = sizes_of(model_config(QWEN)), sizes_of_hub(QWEN)
    assert theirs.expert_parameters == ours.expert_parameters
    assert theirs.num_parameters == pytest.approx(ours.num_parameters, rel=2e-3)
    assert theirs.blocks[0].score_width == ours.blocks[0].score_width
    assert theirs.blocks[0].cache_width == ours.blocks[0].cache_width


@pytest.mark.parametrize(
    ("name", "billions", "gflops"),
    [
        ("qwen3-30b", 30.5, 23.0),
        ("qwen3-235b", 235.1, 148.0),
        ("gpt-oss-120b", 116.8, 32.6),
        ("deepseek-v3", 671.0, 249.8),
        ("mixtral-8x7b", 46.7, 79.7),
        ("mixtral-8x22b", 140.6, 242.0),
        ("moonlight", 16.0, 17.2),
    ],
)
def test_published_counts(name, billions, gflops):
    """Parameters, and operations per token that others print for sequences of 4096."""
    sizes = published_models()[name]
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert sizes.training_flops(4096) / 1e9 == pytest.approx(gflops, rel=2e-2)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}
KIMI = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GLM = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "attention_bias": True,
    "use_qk_norm": True,
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (DEEPSEEK, 671.0, 37.6),  # "37B": the embedding's 0.9 are in ours
        (DEEPSEEK | V2_LITE, 15.7, 2.66),  # "2.4B"
        (DEEPSEEK | KIMI, 1026.4, 32.9),  # as its files say; its report: see below
        (GLM, 352.8, 33.6),  # its report: see below
    ],
    ids=["V3", "V2-Lite", "Kimi-K2", "GLM-4.5"],
)
def test_published_models_that_are_ours(config, billions, active):
    count, sizes = count_parameters(model_config(config)), sizes_of_hub(config)
    assert count.total / 1e9 == pytest.approx(billions, rel=5e-3)
    assert count.active / 1e9 == pytest.approx(active, rel=5e-3)
    assert sizes.num_parameters == pytest.approx(count.total, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "billions", "repeated"),
    [
        (DEEPSEEK, 685.0, 2),  # all of its files, in which the layer repeats embedding and output
        (DEEPSEEK | KIMI, 1040.0, 0),  # "1.04T"
        (GLM, 355.0, -2),  # embedding and output are not counted there
    ],
    ids=["V3", "Kimi-K2", "GLM-4.5"],
)
def test_published_counts_with_the_layer_that_predicts_a_further_token(config, billions, repeated):
    """Without it they are off by more than half a per cent, which tells what they count."""
    model = model_config(config)
    count = count_parameters(model)
    whole = count.total + prediction_spec(model).num_parameters + repeated * count.embedding
    assert whole / 1e9 == pytest.approx(billions, rel=5e-3)
    assert count.total / 1e9 != pytest.approx(billions, rel=5e-3)


LLAMA4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(LLAMA4, 107.8, 17.2), (GPT_OSS, 20.9, 4.19)],  # Scout's text; "3.6B" without embedding
    ids=["Llama-4 Scout", "gpt-oss-20b"],
)
def test_published_models_of_others(config, billions, active):
    sizes = sizes_of_hub(config)
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert sizes.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_a_window_is_seen_in_part():
    wide, narrow = sorted(published_models()["gpt-oss-120b"].blocks, key=lambda b: b.window or 10**9, reverse=True)
    assert wide.keys_seen(4096) == 2048.5
    assert narrow.keys_seen(4096) == sum(min(i + 1, 128) for i in range(4096)) / 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"text_config": [1]}, "text_config=.* must be a mapping"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers='many': must be a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: .* to 100,000; correct it"),
        ({"hidden_size": -64}, "hidden_size=-64: must be a whole number from 1"),
        ({"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size='64': must be a whole number"),
        ({"hidden_size": 2**40}, "hidden_size=.* to 2,147,483,647"),
        ({"vocab_size": True}, "vocab_size=True: must be"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be"),
        ({"num_attention_heads": 7, "head_dim": None}, "num_key_value_heads=.*must divide the 7"),
        ({"num_attention_heads": 24, "head_dim": None}, "=24: must divide the .* hidden_size"),
        ({"num_experts": -8}, "num_experts=-8: must be"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be from 1 to the 8 of"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0: must be from 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0: must be above 0"),
        ({"moe_intermediate_size": [768]}, r"moe_intermediate_size=\[768\]: must be"),
        ({"text_config": QWEN | {"intermediate_size": -1}}, "intermediate_size=-1: must be"),
    ],
)
def test_a_config_without_sizes_or_with_impossible_ones_is_refused(change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sizes_of_hub(QWEN | change)
    assert "\n" not in str(caught.value)
