"""What comes after `em.upcycle` of a model of transformers: it is saved as one with experts, read back, trained on, or
told what helps."""

import copy
import logging
import pickle

import pytest
import torch
import transformers
from tests.oracle import numerics

import expertmesh as em
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import load_pretrained
from expertmesh.integrations.transformers import as_moe_model
from expertmesh.models.upcycle import collect_stats

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def dense(name, **changes):
    torch.manual_seed(2)
    if name == "Qwen3":
        changes = {"head_dim": 8} | changes
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("name", "changes", "options", "made"),
    [
        ("Llama", {}, {"every": 1}, "Mixtral"),
        ("Llama", {"tie_word_embeddings": True}, {"every": 1, "granularity": 2}, "Mixtral"),
        ("Llama", {"rope_scaling": LLAMA3}, {"every": 1, "top_k": 1}, "Mixtral"),
        ("Mistral", {"sliding_window": 6}, {"every": 1}, "Mixtral"),
        ("Qwen3", {}, {"every": 1}, "Qwen3Moe"),
        ("Qwen3", {"attention_bias": True}, {"every": 2, "redraw": 0.5}, "Qwen3Moe"),
        ("Llama", {}, {"every": 1, "score_function": "softmax_after_topk"}, "Mixtral"),
    ],
)
def test_an_upcycled_model_is_saved_and_read_back(tmp_path, name, changes, options, made):
    model = dense(name, **changes)
    em.upcycle(model, **{"num_experts": 4, "noise_std": 0.5, "aux_loss_weight": 0.25} | options)
    sparse = as_moe_model(model)
    sparse.save_pretrained(tmp_path)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again).__name__ == f"{made}ForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(61, (4, 40))
    wide = copy.deepcopy(again).double()
    wide.set_experts_implementation("eager")
    again.set_experts_implementation("eager")
    oracle, reference = logits_of(wide, ids), logits_of(again, ids)
    for one in (model, sparse):
        numerics.assert_two_times(logits_of(one, ids), reference, oracle, what="logits")
    experts = model.model.layers[-1].mlp.layer.experts
    theirs = sparse.model.layers[-1].mlp.experts
    assert theirs.gate_up_proj.data_ptr() == experts.w_in.data_ptr()  # no second copy
    k, layers = sparse.config.num_experts_per_tok, 4 // options["every"]
    assert sparse.config.router_aux_loss_coef == 0.25 * layers / k
    if not changes.get("sliding_window") and "rope_scaling" not in changes and not changes.get("attention_bias"):
        ours = load_pretrained(tmp_path).eval()
        assert ours.config.moe.aux_loss_weight == 0.25
        numerics.assert_two_times(ours(ids).logits_BSV, reference, oracle, what="as a GPT")


@pytest.mark.parametrize(
    ("name", "changes", "options", "words"),
    [
        ("Llama", {}, {"every": 2}, "2 of its 4 blocks are dense, and a Mixtral"),
        ("Qwen2", {}, {"every": 1}, "Qwen2ForCausalLM: transformers has no class"),
        ("Llama", {"attention_bias": True}, {"every": 1}, "attention_bias=True: Mixtral"),
        ("Llama", {}, {"every": 1, "num_shared_experts": 1}, "num_shared_experts=1: Mixtral"),
        ("Llama", {}, {"every": 1, "eval_capacity_factor": 1.0}, "eval_capacity_factor=1.0"),
        ("Llama", {}, {"every": 1, "bias_update_rate": 0.1}, "bias_update_rate=0.1"),
        ("Llama", {}, {"every": 1, "router": "cosine"}, "router=cosine"),
        ("Llama", {}, None, "has no block that em.upcycle replaced"),
    ],
)
def test_what_no_class_computes_is_refused_and_the_other_way_said(name, changes, options, words):
    model = dense(name, **changes)
    if options is not None:
        em.upcycle(model, num_experts=4, **options)
    with pytest.raises(ConfigError, match=words):
        as_moe_model(model)


@pytest.mark.parametrize(
    ("options", "coef", "said"),
    [
        ({}, 0.01 * 4 / 2, None),
        ({"balance_loss": "none"}, 0.0, None),
        ({"balance_loss": "importance_load"}, 0.0, "balance_loss=importance_load"),
        ({"balance_loss": "gshard"}, 0.01 * 4 / 2, "balance_loss=gshard"),
        (
            {"z_loss_weight": 0.5, "input_jitter": 0.25, "capacity_factor": 2.0},
            0.01 * 4 / 2,
            "z_loss_weight=0.5, input_jitter=0.25, capacity_factor=2.0",
        ),
        ({"router_noise": "gumbel"}, 0.01 * 4 / 2, "router_noise=gumbel"),
    ],
)
def test_what_counts_in_training_only_is_said_or_has_its_weight(caplog, options, coef, said):
    model = dense("Llama")
    em.upcycle(model, every=1, num_experts=4, **options)
    with caplog.at_level(logging.WARNING, "expertmesh.integrations"):
        assert as_moe_model(model).config.router_aux_loss_coef == coef
    line = f"MixtralForCausalLM has no place for {said}: counts in training only, and is left out"
    assert caplog.messages == ([] if said is None else [line])


def test_no_model_of_transformers_is_refused():
    with pytest.raises(ConfigError, match="Linear: transformers has no class with experts"):
        as_moe_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_its_own_save_says_once_what_nobody_reads_and_the_other_way_works(tmp_path, caplog, copied):
    model = dense("Llama")
    em.upcycle(model, every=2, num_experts=4, noise_std=0.5)
    model = copied(model)
    caplog.set_level(logging.WARNING, "expertmesh.models")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    (message,) = caplog.messages
    assert "as_moe_model(model) instead, or read these weights by load_state_dict" in message
    again = dense("Llama")
    em.upcycle(again, every=2, num_experts=4)
    again.load_state_dict(model.state_dict())
    ids = torch.randint(61, (2, 9))
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))


def test_training_goes_on_with_what_was_read(tmp_path):
    """The balance loss of transformers' class is that of the upcycled model, at balance."""
    model = dense("Llama")
    em.upcycle(model, every=1, num_experts=4, top_k=2, aux_loss_weight=0.5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.layer.router.proj.weight.zero_()
    sparse, ids = as_moe_model(model), torch.randint(61, (2, 9))
    with collect_stats() as stats:
        model(ids)
    theirs = sparse(ids, labels=ids, output_router_logits=True)
    ours = stats.loss().detach()
    oracle = torch.full((), 4 * 0.5, dtype=torch.float64)
    share = (sparse.config.router_aux_loss_coef * theirs.aux_loss).detach()
    numerics.assert_two_times(ours, share, oracle, what="balance loss")
    theirs.loss.backward()
    assert all(p.grad is not None for p in sparse.parameters())
