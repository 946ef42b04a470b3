"""Mixtures of transformers in the engine: tokens of its own `generate` behind windows and chunks, and what is refused
by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers.decoder import TransformersDecoder
from expertmesh.text.tokenizer import train_tokenizer

_COMMON = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "granitemoe": {"attention_multiplier": 0.4},
    "phimoe": {"sliding_window": 8},
    "llama4_text": {
        "attention_chunk_size": 16,
        "intermediate_size_mlp": 32,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 8,  # scales queries from token 8 on, by the length of the cache
        "attn_scale": 0.5,
    },
    "afmoe": {"sliding_window": 8, "num_shared_experts": 1, "num_dense_layers": 1},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 4},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},  # counts positions from its mask
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "ernie4_5_moe": {
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {},
    "dots1": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "minimax_m2": {"rotary_dim": 4},
    "gpt_oss": {
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"sliding_window": 8},
    "qwen3_moe": {},
}
"""Model types that keep to the attention interface, each with options that make its windows and chunks short."""
PROMPTS = [list(range(3, 43)), [7, 8, 9], [50] * 21]


def tiny(model_type, *, seed=1, **options):
    known = AutoConfig.for_model(model_type)
    given = {k: v for k, v in _COMMON.items() if hasattr(known, k)}
    config = AutoConfig.for_model(model_type, **given | options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=1.0 if "sinks" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def own_tokens(model, prompt, count):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_engine_writes_what_transformers_does(model_type):
    """Alone, together, in small chunks of tokens, and with prefixes kept."""
    model = tiny(model_type, **FAMILIES[model_type])
    expected = [own_tokens(model, prompt, 12) for prompt in PROMPTS]
    assert len(set(expected[0])) > 3, "the model repeats itself too much to show anything"
    decoder = TransformersDecoder(model)
    params = SamplingParams(temperature=0, max_tokens=12, return_routed_experts=True)
    for options in ({}, {"token_budget": 7, "block_size": 4}):
        engine = Engine(decoder, **options)
        for _ in range(2):
            found = engine.generate(PROMPTS, params)
            assert [one.token_ids for one in found] == expected
    if engine.model.config.experts:  # llama4_text computes all tokens in all of them, opt has none
        assert found[0].routed_experts.shape[0] == len(PROMPTS[0]) + 11
        assert sum(map(sum, engine.expert_load())) > 0


_BART = {"d_model": 32, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}


@pytest.mark.parametrize("model_type", ["bart", "pegasus", "gpt2"])
def test_positions_of_embeddings_are_those_of_the_tokens(model_type):
    """BART's decoders count them from the length of the cache; `generate` forces a last token, so that logits
    decide."""
    model = tiny(model_type, **(_BART if model_type != "gpt2" else {"n_positions": 64}))
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tuple(ids[len(prompt) :]))
    engine = Engine(TransformersDecoder(model), token_budget=7, block_size=4)
    found = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert [one.token_ids for one in found] == expected


def _places(ids_BS, x_BSD):
    return x_BSD * (1 + torch.arange(x_BSD.shape[1])[:, None] / 4).to(x_BSD.dtype)


def _previous(ids_BS, x_BSD):
    return x_BSD + torch.nn.functional.pad(x_BSD, (0, 0, 1, -1))


def _neighbours(ids_BS, x_BSD):
    return x_BSD + x_BSD.cumsum(1)


def _length(ids_BS, x_BSD):
    return x_BSD * ids_BS.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [_places, _previous, _neighbours, _length])
def test_what_depends_on_more_than_a_sequence_and_its_positions_is_refused(change, dtype):
    model = tiny("qwen3").to(dtype)
    TransformersDecoder(model)
    model.set_attn_implementation("eager")
    model.model.embed_tokens.register_forward_hook(lambda module, args, x_BSD: change(args[0], x_BSD))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM: its logits from position") as caught:
        TransformersDecoder(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_no_difference(seed):
    """In BF16 a token may get other experts in one of two passes, and all tokens behind it feel that."""
    for model_type in ("mixtral", "olmoe", "dots1"):
        model = tiny(model_type, **FAMILIES.get(model_type, {}), seed=seed)
        assert TransformersDecoder(model.bfloat16()).max_seq_len == 256


LENGTHS = {
    "no model": (lambda: torch.nn.Linear(2, 2), None, "Linear: is no model of transformers"),
    "bloom": (lambda: tiny("bloom"), None, "BloomForCausalLM: cannot be run over pages"),
    "mpt": (lambda: tiny("mpt", d_model=32), 32, "MptForCausalLM: cannot be run over pages"),
    "a word": (lambda: tiny("qwen3"), "9", "max_len='9': must be a whole number"),
    "nothing": (lambda: tiny("qwen3"), 0, "max_len=0: must be a whole number of at least 1"),
    "too much": (lambda: tiny("gpt2"), 257, "max_len=257: must be at most"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_other_configurations(name):
    make, max_len, words = LENGTHS[name]
    with pytest.raises(ConfigError, match=words) as caught:
        TransformersDecoder(make(), max_len=max_len)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_maximum_needs_one():
    model = tiny("qwen3")
    model.config.max_position_embeddings = 0
    with pytest.raises(ConfigError, match="give max_len"):
        TransformersDecoder(model)
    model.set_attn_implementation("eager")
    assert TransformersDecoder(model, max_len=40).max_seq_len == 40


@pytest.mark.parametrize("size", [13, 16, 20])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_chunk_may_end_within_the_check(size, attention):
    model = tiny("llama4_text", **FAMILIES["llama4_text"] | {"attention_chunk_size": size})
    model.set_attn_implementation(attention)
    assert {rule.chunk for rule in TransformersDecoder(model).rules} == {size, None}


def test_windows_and_chunks_are_read_off_the_model():
    rules = {
        name: TransformersDecoder(tiny(name, **FAMILIES[name])).rules
        for name in ("phimoe", "llama4_text", "gpt_oss", "qwen3_moe")
    }
    assert {rule.window for rule in rules["phimoe"]} == {8}
    assert {rule.chunk for rule in rules["llama4_text"]} == {16, None}
    assert [rule.window for rule in rules["gpt_oss"]] == [8, None, 8, None]
    assert {(rule.window, rule.chunk) for rule in rules["qwen3_moe"]} == {(None, None)}


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "granitemoehybrid"])
def test_other_state_is_refused_by_name(model_type):
    with pytest.raises(ConfigError, match="state") as caught:
        TransformersDecoder(tiny_of_defaults(model_type))
    assert "\n" not in str(caught.value)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "short_mscale": 1.0,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}


def test_long_rope_is_served_up_to_its_original_length_only(tmp_path):
    """Beyond it an answer would depend on the longest neighbour of its step."""
    model = tiny("phimoe", rope_parameters=LONG)
    expected = own_tokens(model, PROMPTS[0], 12)
    model.save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["some words of a text"] * 9, vocab_size=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for call in (
        lambda: TransformersDecoder(model),
        lambda: Engine(tmp_path, implementation="transformers", max_len=65),
    ):
        with pytest.raises(ConfigError, match="rope_type=longrope.*give max_len=64") as caught:
            call()
        assert "\n" not in str(caught.value)
    for longer in (
        lambda: TransformersDecoder(model, max_len=10**6),
        lambda: Engine(tmp_path, implementation="transformers", max_len=10**6),
    ):
        with pytest.raises(ConfigError, match="max_len=1000000"):
            longer()
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = Engine(tmp_path, implementation="transformers", max_len=64, token_budget=9)
    assert engine.max_len == 64
    assert engine.generate(PROMPTS, params)[0].token_ids == expected
    model.config.rope_parameters = {"full_attention": LONG}
    with pytest.raises(ConfigError, match="longrope"):
        TransformersDecoder(model)


def tiny_of_defaults(model_type):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))


def test_a_folder_opens_with_its_tokenizer(tmp_path):
    model = tiny("granitemoe", **FAMILIES["granitemoe"], eos_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["some words of a text"] * 9, vocab_size=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="token id"):  # a vocabulary of 120 tokens only
        Engine(tmp_path, implementation="transformers").generate("\u00ff")
    engine = Engine(tmp_path, implementation="transformers")
    (answer,) = engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=5))
    assert answer.token_ids == own_tokens(model, PROMPTS[1], 5)[: len(answer.token_ids)]
    assert engine.text is not None and 0 in engine.text.end_ids


def test_a_dense_model_is_served_too():
    model = tiny("qwen3")
    (answer,) = Engine(TransformersDecoder(model)).generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=5))
    assert answer.token_ids == own_tokens(tiny("qwen3"), PROMPTS[0], 5)


def test_folders_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="deterministic"):
        Engine(tmp_path, implementation="transformers", deterministic=True)
    with pytest.raises(ConfigError, match="has no config.json"):
        Engine(tmp_path, implementation="transformers")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="transformers cannot open it"):
        Engine(tmp_path, implementation="transformers")
