"""What a config.json of the hub says is done, refused or said, in both directions; what it leaves out is as
transformers has it."""

import copy
import json
import logging

import pytest
import torch
from tests.oracle import numerics
from tests.support.hub_models import tiny_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from expertmesh.checkpoints.hub.configs import left_out, model_config
from expertmesh.checkpoints.hub.find_family import FAMILIES
from expertmesh.checkpoints.hub.parts import layer_types, loss_coefficient
from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.integrations.hub.exports import export_family, hub_config
from expertmesh.integrations.hub.exports import left_out as left_out_of_ours
from expertmesh.models.gpt.config import ModelConfig

SIZES = {
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,  # which every family's own number of key heads divides
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 20,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def values_of(name, **changes):
    """What transformers writes for a small model of the family."""
    known = CONFIG_MAPPING[name]().to_dict()
    config = CONFIG_MAPPING[name](**{k: v for k, v in SIZES.items() if k in known})
    return json.loads(json.dumps(config.to_dict())) | changes


# what changes our model: another value than the one above
DONE = {
    "vocab_size": 62,
    "hidden_size": 512,
    "intermediate_size": 41,
    "moe_intermediate_size": 17,
    "shared_expert_intermediate_size": 21,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 65,
    "rms_norm_eps": 1e-4,
    "initializer_range": 0.5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    "eos_token_id": [1, 2],
    "num_experts_per_tok": 1,
    "num_experts": 9,
    "num_local_experts": 9,
    "n_routed_experts": 9,
    "router_aux_loss_coef": 0.5,
    "norm_topk_prob": None,  # set below: the other one
    "decoder_sparse_step": 2,
    "qkv_bias": False,
    "use_qk_norm": True,
    "n_group": 2,
    "topk_group": 2,  # with n_group 4
    "first_k_dense_replace": 2,
    "n_shared_experts": 3,
    "routed_scaling_factor": 2.0,
    "kv_lora_rank": 11,
    "q_lora_rank": None,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "rope_interleave": False,
    "topk_method": "group_limited_greedy",  # with n_group 4
    "sliding_window": 8,
    "use_sliding_window": True,  # with a window
}
# what our GPT does not compute
REFUSED = {
    "layer_types": ["sliding_attention"] * 4,  # without use_sliding_window
    "mlp_only_layers": [3],  # of 4: the first ones are read
    "clip_qkv": 3.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "is_causal": False,
    "mlp_bias": True,
    "swiglu_limit": 5.0,
    "swiglu_alpha": 1.5,
    "model_type": "llama",
}
# what is for training, and is said
SAID = {"attention_dropout": 0.1, "router_jitter_noise": 0.1, "router_z_loss_coef": 0.1}
# what no class of transformers computes otherwise by
SILENT = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("output_router_logits", "output_hidden_states", "output_attentions", "return_dict"),
    *("pad_token_id", "bos_token_id", "problem_type", "id2label", "label2id"),
    *("is_encoder_decoder", "chunk_size_feed_forward", "_name_or_path"),
    *("pretraining_tp", "qk_head_dim"),  # how it was trained; a sum of others
    "max_window_layers",  # counts with use_sliding_window only
    *("num_mtp_layers", "num_nextn_predict_layers"),  # layers behind the last are left out
    "partial_rotary_factor",  # GLM's is in rope_parameters; the others have none
}
ELSEWHERE = {
    "attention_bias": {
        "glm4_moe": DONE,
        "dots1": DONE,
        "qwen3_moe": REFUSED,
        "olmoe": REFUSED,
        "deepseek_v2": REFUSED,
        "deepseek_v3": REFUSED,
    }
}
ELSEWHERE["attention_bias"]["gpt_oss"] = DONE
ELSEWHERE["hidden_act"] = {"gpt_oss": REFUSED}
ELSEWHERE["layer_types"] = {"gpt_oss": DONE, "dots1": DONE}
OF_GPT_OSS = {
    "attention_bias": False,
    "layer_types": ["sliding_attention"] * 4,
    "sliding_window": 9,
}
OF_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
LATENT = ("deepseek_v2", "deepseek_v3")
# latent attention has sizes of its own; transformers' V2 divides no weights
for idle in ("head_dim", "num_key_value_heads"):
    ELSEWHERE[idle] = dict.fromkeys(LATENT, SILENT)
ELSEWHERE["norm_topk_prob"] = {"deepseek_v2": REFUSED}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_option_is_done_refused_said_or_idle(name):
    """A key that a later transformers adds must be put into one of the tables."""
    values = values_of(name)
    if name == "deepseek_v3":
        values |= {"n_group": 1, "topk_group": 1}  # of eight experts
    before = model_config(values)
    keys = set(values) | {"rope_scaling", "is_causal", "router_z_loss_coef"}
    for key in sorted(keys):
        table = ELSEWHERE.get(key, {}).get(name)
        if table is SILENT:
            assert model_config(values | {key: 9}) == before, key
        elif (key in DONE and table is None) or table is DONE:
            change = {key: DONE.get(key, True)}
            if name == "gpt_oss" and key in OF_GPT_OSS:
                change = {key: OF_GPT_OSS[key]}
            if name == "gpt_oss" and key == "num_hidden_layers":
                change["layer_types"] = None
            if key == "norm_topk_prob":
                change = {key: not values[key]}
            if key in OF_WINDOWS and name.startswith("qwen"):
                assert model_config(values | change) == before  # one alone is not used
                change = OF_WINDOWS
            if key in ("sliding_window", "layer_types") and name == "dots1":
                change = {"sliding_window": 8, "layer_types": layer_types(4, 2)}
            if key in ("topk_group", "n_group", "topk_method") and name == "deepseek_v2":
                grouped = {"n_group": 4, "topk_group": 4, "topk_method": "group_limited_greedy"}
                before = model_config(values | grouped)
                less = {"topk_group": 2, "n_group": 8, "topk_method": "greedy"}
                change = grouped | {key: less[key]}
            elif key == "topk_group":
                before, change = model_config(values | {"n_group": 4}), {key: 2, "n_group": 4}
            if key == "n_group" and name == "deepseek_v3":
                change = {key: 2, "topk_group": 2}
            after = model_config(values | change)
            assert after != before, key
            before = model_config(values)
        elif key in REFUSED or table is REFUSED:
            assert table is None or table is REFUSED
            changed = values | {key: REFUSED.get(key, True)}
            with pytest.raises(ConfigError, match=f"{key}|rope_type"):
                model_config(changed)
        elif key in SAID:
            assert model_config(values | {key: SAID[key]}) == before
            (line,) = left_out(values | {key: SAID[key]})
            assert line.startswith(f"{key}=0.1: ")
        else:
            assert key in SILENT, f"{key}: new in transformers? say what becomes of it"
    assert left_out(values) == ()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", {"sliding_window": 64}),  # as long as the longest text
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
        ("olmoe", {"sliding_window": 8}),  # not read there
        ("mixtral", {"rope_scaling": {"type": "default"}}),
        ("qwen2_moe", {"layer_types": ["full_attention"] * 4}),
        ("qwen2_moe", {"layer_types": ["full_attention"] * 4} | {"use_sliding_window": True}),
    ],
)
def test_what_changes_nothing_is_no_reason_to_refuse(name, change):
    assert model_config(values_of(name, **change)) == model_config(values_of(name))


@pytest.mark.parametrize(
    ("name", "change", "windows"),
    [
        ("mixtral", {}, [8, 8, 8, 8]),
        ("qwen3_moe", {}, [8, 8, 8, 8]),
        ("qwen2_moe", {"max_window_layers": 28}, [8, None, 8, None]),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, [8, 8, 8, 8]),
        ("qwen2_moe", {"layer_types": layer_types(4, 3)}, [8, 8, None, 8]),
        ("qwen2_moe", {"max_window_layers": 1}, None),
        ("dots1", {"max_window_layers": 62}, [None] * 4),
        ("dots1", {"max_window_layers": 3}, None),
        ("dots1", {"max_window_layers": 0}, [8] * 4),
    ],
)
def test_windows_are_read_layer_by_layer_and_written(name, change, windows):
    """As transformers' own configuration and modules say; what no n-th layer makes is refused."""
    values = values_of(name) | OF_WINDOWS | change
    if windows is None:
        with pytest.raises(ConfigError, match="layer_types=.*all but every n-th of 4"):
            model_config(values)
        return
    ours = model_config(values)
    assert [ours.window_of(i) for i in range(4)] == windows
    origin = FAMILIES[name] if name == "dots1" else None  # one without windows would be GLM-4-MoE
    out = hub_config(ours, export_family(ours, origin), dtype="float32")
    assert out["model_type"] == name
    assert [model_config(out).window_of(i) for i in range(4)] == windows
    for one in (values, out):
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**one))
        kinds = getattr(theirs.config, "layer_types", None) or ["sliding_attention"] * 4
        window = theirs.config.sliding_window
        used = [window if kind == "sliding_attention" else None for kind in kinds]
        assert used == windows


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("null", [False, True])
def test_what_a_file_leaves_out_is_as_transformers_has_it(name, null):
    """Key by key, and what transformers' own configuration then says."""
    full, family = values_of(name), FAMILIES[name]
    full |= {"n_routed_experts": 64} if name == "deepseek_v3" else {}  # for its groups
    theirs = CONFIG_MAPPING[name]()
    for key, value in family.defaults.items():
        if key in ("rope_theta", "partial_rotary_factor"):
            assert value == theirs.rope_parameters[key]
        elif key == "rope_parameters":
            assert value.items() <= theirs.rope_parameters.items()
        else:
            assert value == getattr(type(theirs), key), key
        if null and key in (
            "num_key_value_heads",
            "rope_theta",
            "partial_rotary_factor",
            *family.nulls,
        ):
            continue
        left = full | {key: None} if null else {k: v for k, v in full.items() if k != key}
        if key in ("rope_theta", "partial_rotary_factor"):
            left["rope_parameters"] = {"rope_type": "default"}
        said = {k: v for k, v in full.items() if k != "rope_parameters"} if "rope" in key else full
        if name == "gpt_oss" and key == "rope_theta":
            said = said | {"rope_parameters": {"rope_type": "default"}}
        assert model_config(left) == model_config(said | {key: value}), key


def test_yarn_without_a_length_has_the_models_own_and_a_null_switch_of_deepseek_is_off():
    values = values_of("qwen3_moe", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    theirs = AutoConfig.for_model(**values).rope_parameters["original_max_position_embeddings"]
    assert model_config(values).rope_scaling.original_max_seq_len == theirs == 64
    values = values_of("deepseek_v3", rope_interleave=None, norm_topk_prob=None, n_routed_experts=64)
    ours, theirs = model_config(values), AutoConfig.for_model(**values)
    assert (theirs.rope_interleave, theirs.norm_topk_prob) == (None, None)  # each is asked for by an `if`
    assert (ours.latent.interleaved, ours.moe.normalize_weights) == (False, "none")


@pytest.mark.parametrize("name", FAMILIES)
def test_our_defaults_make_transformers_model(name):
    gone = ("rope_parameters", "norm_topk_prob", "tie_word_embeddings", "hidden_act")
    values = {k: v for k, v in values_of(name).items() if k not in gone}
    theirs, ours = AutoConfig.for_model(**values), model_config(values)
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert ours.rope_fraction == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    normalizes = getattr(theirs, "norm_topk_prob", True)
    assert ours.moe.normalize_weights == ("topk" if normalizes else "none")


@pytest.mark.parametrize("coef", ["much", -0.1, float("nan"), True])
def test_a_coefficient_that_is_none_is_refused_by_its_own_name(coef):
    with pytest.raises(ConfigError, match="router_aux_loss_coef=.*: must be a finite number"):
        model_config(values_of("mixtral", router_aux_loss_coef=coef))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize(("layers", "k"), [(1, 1), (1, 3), (4, 2), (4, 1)])
def test_the_balance_loss_of_a_converted_model_is_that_of_transformers(tmp_path, name, layers, k):
    """For one layer whatever is chosen, for several at balance."""
    changes = {"num_hidden_layers": layers, "router_aux_loss_coef": 0.02, "decoder_sparse_step": 1}
    if name == "qwen3_moe" and layers > 1:
        changes["decoder_sparse_step"] = 2
    theirs = tiny_model(name, num_experts=5, top_k=k, **changes).eval()
    if layers > 1:
        with torch.no_grad():
            for key, tensor in theirs.state_dict().items():
                if key.endswith("gate.weight") and "shared" not in key:
                    tensor.zero_()
    theirs.save_pretrained(tmp_path / "hub")
    ours = load_pretrained(tmp_path / "hub").eval()
    wide = copy.deepcopy(theirs).double()
    wide.set_experts_implementation("eager")
    ids = torch.randint(61, (2, 32))
    with torch.no_grad():
        stats = ours(ids).stats
        found = torch.stack([s.aux_loss for s in stats]).sum()
        given, exact = (0.02 * model(ids, output_router_logits=True).aux_loss for model in (theirs, wide))
    sums = numerics.sums_of_terms(torch.full((64 + 5,), found.item() / 64), 0)
    numerics.assert_two_times(found, given.float(), exact.double(), what="balance loss", sums=sums)
    assert len(stats) == layers // changes["decoder_sparse_step"]


@pytest.mark.parametrize("coef", [0.0, 0.001, 0.02, 1.0])
@pytest.mark.parametrize(("layers", "k"), [(48, 8), (32, 2), (3, 7)])
def test_the_coefficient_comes_back(layers, k, coef):
    values = values_of("qwen3_moe", num_hidden_layers=layers, num_experts_per_tok=k)
    config = model_config(values | {"router_aux_loss_coef": coef})
    assert config.moe.aux_loss_weight == coef * k / layers
    again = hub_config(config, export_family(config), dtype="float32")
    assert again["router_aux_loss_coef"] == coef
    for kind, expected in (("none", 0), ("importance_load", 0), ("gshard", coef)):
        moe = config.moe.model_copy(update={"balance_loss": kind})
        assert loss_coefficient(moe, layers) == expected


GLM = {"score_function": "sigmoid", "bias_update_rate": 1e-3, "num_shared_experts": 1}
IDLE_ON_THE_WAY_OUT = {
    "z_loss_weight": 0.1,
    "input_jitter": 0.1,
    "input_dropout": 0.1,
    "expert_output_masking": 0.1,
    "router_noise": "gumbel",
    "capacity_factor": 2.0,
    "routing_group_size": 8,
    "balance_loss_scope": "global",
    "balance_loss": "gshard",
}
NOT_OF_A_MODEL = {
    *("num_experts", "top_k", "hidden_dim", "aux_loss_weight", "backend", "recompute_h"),
    "batch_invariant",
    *("router_noise_std", "min_capacity", "drop_policy"),  # of options that are said
    "cosine_dim",  # of a router that is refused
    "num_limited_groups",  # of groups that are refused, or GLM's
}
CHANGED = {
    "router": "cosine",
    "score_function": "sigmoid",
    "normalize_weights": "none",
    "weight_scale": 2.0,
    "logit_temperature": 2.0,
    "num_expert_groups": 2,
    "bias_update_rate": 0.1,
    "eval_capacity_factor": 2.0,
    "max_capacity_factor": 2.0,
    "num_shared_experts": 1,
    "shared_hidden_dim": 24,
    "shared_gate": True,
    "group_score": "max",
    "residual": True,
    "bias": True,
    "router_bias": True,
}


@pytest.mark.parametrize("name", MoEConfig.model_fields)
def test_every_option_of_ours_goes_out_or_is_refused_or_said(name):
    if name in NOT_OF_A_MODEL:
        return
    before = ModelConfig()
    if name in IDLE_ON_THE_WAY_OUT:
        config = before.updated({f"moe.{name}": IDLE_ON_THE_WAY_OUT[name]})
        assert left_out_of_ours(config, export_family(config)) == [f"moe.{name}={IDLE_ON_THE_WAY_OUT[name]}"]
        return
    changes = {f"moe.{name}": CHANGED[name]}
    if name == "shared_gate":
        changes |= {"moe.score_function": "sigmoid", "moe.shared_hidden_dim": 24}
    if name == "group_score":
        changes["moe.num_expert_groups"] = 2
    with pytest.raises(ConfigError, match=r"model\.moe\.\w+=.*keep the model in expertmesh"):
        export_family(before.updated(changes))


OUT = {
    "olmoe": {"qk_norm": True, "qk_norm_scope": "projection"},
    "qwen2_moe": {"moe.shared_gate": True, "moe.num_shared_experts": 1},
}
WITH_OTHERS = ("shared_gate", "group_score")  # which have no effect alone
OF_MODELS = {
    "qkv_bias": True,
    "qk_norm": True,
    "rope_fraction": 0.5,
    "moe_every": 2,
    "first_dense_layers": 1,
    "head_dim": 16,
    "tie_embeddings": False,
    "num_kv_heads": 2,
}


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize("option", [*OF_MODELS, *(f"moe.{one}" for one in CHANGED if one not in WITH_OTHERS)])
def test_what_goes_out_as_olmoe_and_qwen2_moe_comes_back_as_it_was(name, option):
    """Or is refused by its name."""
    changed = OF_MODELS | {f"moe.{one}": value for one, value in CHANGED.items()}
    before = ModelConfig().updated(OUT[name] | {option: changed[option]})
    try:
        family = export_family(before)
    except ConfigError as error:
        assert f"model.{option}=" in str(error)
        return
    if family.model_type != name:
        assert (option, family.model_type) == ("moe.score_function", "glm4_moe")
        return
    after = model_config(hub_config(before, family, dtype="float32"))
    ours, theirs = before.model_dump(), after.model_dump()
    F = before.moe.shared_hidden_dim or before.moe.num_shared_experts * before.moe.hidden_dim
    for one in (
        "num_heads",
        "num_kv_heads",
        "moe_every",
        "first_dense_layers",
        "qkv_bias",
        "qk_norm",
    ):
        assert ours[one] == theirs[one] or (one == "num_kv_heads" and ours[one] is None), one
    assert after.head_size == before.head_size and after.tie_embeddings == before.tie_embeddings
    assert after.moe.shared_hidden_dim == (F or None)
    ours["moe"]["normalize_weights"] = "none" if before.moe.normalize_weights == "none" else "topk"
    for one in ("num_experts", "top_k", "hidden_dim", "shared_gate", "normalize_weights"):
        assert ours["moe"][one] == theirs["moe"][one], one


def test_a_model_of_glm_says_what_becomes_of_its_balance_loss():
    config = ModelConfig(moe=MoEConfig(num_experts=(4,), **GLM))
    assert left_out_of_ours(config, export_family(config)) == ["moe.aux_loss_weight=0.01"]
    quiet = config.updated({"moe.aux_loss_weight": 0.0})
    assert left_out_of_ours(quiet, export_family(quiet)) == []


def test_what_is_left_out_is_said_once_per_reading(tmp_path, caplog):
    model = tiny_model("mixtral", attention_dropout=0.25, router_jitter_noise=0.5)
    model.save_pretrained(tmp_path / "hub")
    with caplog.at_level(logging.WARNING, "expertmesh.integrations"):
        load_pretrained(tmp_path / "hub")
    assert [m.split(":")[1] for m in caplog.messages] == [
        " attention_dropout=0.25",
        " router_jitter_noise=0.5",
    ]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv=3.0"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor=None"),
        (
            "qwen3_moe",
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters.full_attention",
        ),
        ("qwen3_moe", {"rope_scaling": [2]}, r"rope_scaling=\[2\]: is no JSON object"),
        ("qwen3_moe", {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'"),
        ("qwen3_moe", {"hidden_act": ["silu"]}, "hidden_act="),
        ("qwen3_moe", {"model_type": "llama"}, "model_type='llama': .*upcycle"),
        ("qwen3_moe", {"hidden_size": "64"}, "has hidden_size='64': must be a whole number"),
        ("qwen3_moe", {"num_experts": -4}, "has num_experts=-4: must be a whole number"),
        ("glm4_moe", {"num_nextn_predict_layers": 0.5}, "has num_nextn_predict_layers=0.5: must be a whole number"),
        ("qwen3_moe", {"num_attention_heads": 5}, "config.json of a qwen3_moe, in the words of"),
    ],
)
def test_what_our_gpt_cannot_compute_is_refused_by_name(name, change, words):
    with pytest.raises(ConfigError, match=words):
        model_config(values_of(name, **change))


@pytest.mark.parametrize(
    ("options", "moe", "words"),
    [
        ({"activation": "gelu"}, {}, "model.activation=gelu"),
        ({}, {"router": "cosine"}, "model.moe.router=cosine"),
        ({}, {"residual": True}, "model.moe.residual=True"),
        ({}, {"num_shared_experts": 1}, "model.moe.num_shared_experts=1: .*GLM-4-MoE, which"),
        ({}, {"shared_hidden_dim": 24}, "model.moe.shared_hidden_dim=24"),
        ({}, {**GLM, "shared_hidden_dim": 24}, "model.moe.shared_hidden_dim=24"),
        ({}, {**GLM, "shared_gate": True}, "model.moe.shared_gate=True"),
        ({}, {"top_k": 1}, r"model.moe.top_k=1: .*model.qk_norm=True"),
        ({}, {"normalize_weights": "none"}, "normalize_weights=none: .*model.qk_norm=True"),
        ({}, {"score_function": "sigmoid"}, "score_function=sigmoid: .*bias_update_rate"),
        ({"qkv_bias": True}, {}, "model.qkv_bias=True: .*GLM-4-MoE"),
        ({"num_layers": 2}, {"num_experts": (4, 8)}, "model.moe.num_experts"),
        ({"moe_every": 2}, {}, "model.moe_every=2: .*model.qk_norm=True"),
    ],
)
def test_what_the_hub_has_not_is_refused_by_name_and_a_way_out(options, moe, words):
    config = ModelConfig(**options, moe=MoEConfig(**{"num_experts": (4,), **moe}))
    with pytest.raises(ConfigError, match=words):
        export_family(config)


def test_a_configuration_survives_the_way_out_and_in():
    config = ModelConfig(qk_norm=True, moe_every=2, rope_base=5e5, moe=MoEConfig(num_experts=(6,)))
    family = export_family(config)
    assert family.architecture == "Qwen3MoeForCausalLM"
    back = model_config(hub_config(config, family, dtype="float32"))
    normalized = config.moe.model_copy(update={"normalize_weights": "topk"})
    assert back == config.model_copy(
        update={"moe": normalized, "head_dim": 64, "num_kv_heads": 4, "activation": "swiglu"}
    )


@pytest.mark.parametrize(
    ("options", "moe", "words"),
    [
        ({"qk_norm": True}, {}, False),
        ({}, GLM, False),
        ({"qk_norm": True}, {"score_function": "softmax_after_topk"}, True),
    ],
    ids=["qwen3_moe", "glm4_moe", "after_topk"],
)
def test_the_only_choice_of_a_token_keeps_its_probability_outside(options, moe, words):
    """With one expert per token `auto` divides nothing; a softmax over one logit is 1."""
    config = ModelConfig(**options, moe=MoEConfig(num_experts=(4,), top_k=1, **moe))
    values = hub_config(config, export_family(config), dtype="float32")
    assert values["norm_topk_prob"] is words


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    ("without", "step", "first"),
    [([0], 1, 1), ([1, 0], 1, 2), ([], 2, 0), ([0], 2, 0), ([1], 2, 2), ([0, 1, 2], 2, 2)],
)
def test_dense_layers_that_are_the_first_ones_are_read(name, without, step, first):
    """transformers' own modules say which layers have experts."""
    values = values_of(name, mlp_only_layers=without, decoder_sparse_step=step)
    ours = model_config(values)
    assert ours.first_dense_layers == first
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    sparse = [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    assert [bool(count) for count in ours.experts_per_layer()] == sparse
    if name == "qwen3_moe":
        out = hub_config(ours, export_family(ours), dtype="float32")
        assert out["model_type"] == name and out["mlp_only_layers"] == list(range(first))
        assert model_config(out).experts_per_layer() == ours.experts_per_layer()


def test_a_model_of_too_few_tokens_for_a_run_is_told_what_convert_can_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values_of("mixtral", vocab_size=256)))
    with pytest.raises(ConfigError, match="has 256 tokens, and a run at least 257") as caught:
        convert(tmp_path, tmp_path / "run")
    assert "vocab-size" not in str(caught.value) and "resize_token_embeddings" in str(caught.value)
    assert not (tmp_path / "run").exists()
