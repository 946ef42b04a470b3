"""Experts of every kind in transformers run on ours: against the class's own forward in FP64, by the two-times rule."""

import copy
import subprocess
import sys

import pytest
import torch
from tests.oracle import numerics
from tests.support.hub_models import (
    EXPERTS,
    FUSED,
    MODELS,
    D,
    E,
    K,
    logits_and_gradients,
    tiny_experts,
    tiny_model,
)
from tests.support.patience import PATIENCE_S
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers import apply, register, weighted_gate
from expertmesh.integrations.transformers.experts_forward import fused_activation


def draw(num_tokens, dtype, *, dead=()):
    """Tokens, ids, weights, and a gradient; dead tokens are NaN and nobody's, and some slots more are nobody's."""
    x, ids = torch.randn(num_tokens, D, dtype=dtype), torch.rand(num_tokens, E).topk(K).indices
    weights, dy = torch.rand(num_tokens, K, dtype=dtype), torch.randn(num_tokens, D, dtype=dtype)
    if dead:
        ids[2, 1] = E
        ids[list(dead)] = E
        x[list(dead)] = float("nan")
    return x, ids, weights, dy


def weighted_first(experts, x, ids, weights):
    """The class's own functions in a plain loop, with the weights in front of the second product."""
    y = torch.zeros_like(x)
    gated = experts.has_gate
    w_in, gate_of = ("gate_up_proj", experts._apply_gate) if gated else ("up_proj", experts.act_fn)

    def product(rows, name, e, s):
        w = getattr(experts, name)[e]
        out = rows @ (w if experts.is_transposed else w.T)
        return out + s * getattr(experts, f"{name}_bias")[e] if experts.has_bias else out

    for e in range(E):
        t, k = (ids == e).nonzero(as_tuple=True)
        s = weights[t, k, None]
        a = gate_of(product(x[t], w_in, e, torch.ones_like(s))) * s
        y = y.index_add(0, t, product(a, "down_proj", e, s))
    return y


def run(experts, implementation, x, ids, weights, dy, *, dtype=None):
    """Output and all gradients; the class's own forward knows no sentinels and gets slots of weight zero instead."""
    dtype = dtype or x.dtype
    experts = copy.deepcopy(experts).to(dtype)
    if implementation != "first":
        experts.config._experts_implementation = implementation
    x, weights = (t.detach().to(dtype).requires_grad_() for t in (x, weights))
    given = x, ids, weights
    if implementation != "expertmesh":
        live = ids < E
        alive = live.any(1, keepdim=True)
        clean = torch.where(alive, x.nan_to_num(), 0.0)
        given = clean, torch.where(live, ids, 0), torch.where(live, weights, 0.0)
    y = weighted_first(experts, *given) if implementation == "first" else experts(*given)
    y.backward(dy.to(dtype))
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_every_kind_forward_and_backward(name, dtype):
    register()
    experts = tiny_experts(name, dtype)
    assert fused_activation(experts) == FUSED.get(name)
    compare(name, experts, dtype)


@pytest.mark.parametrize("name", sorted(set(EXPERTS) - set(FUSED)))
def test_a_gate_of_the_class_in_blocks_of_rows(name, threshold):
    register()
    threshold(weighted_gate, "SMALLEST", 1)
    threshold(weighted_gate, "BLOCK_ELEMENTS", 100)
    compare(name, tiny_experts(name), torch.float32)


def weighted_gate_and_kept(function, h_RH, s_R):
    """The result, and how many tensors of as many rows wait for the backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        a_RF = weighted_gate.weighted_gate(function, h_RH, s_R)
    return a_RF, sum(len(t) == len(h_RH) for t in saved if t.dim())


def test_a_gate_in_blocks_keeps_the_rows_alone(threshold):
    """Many rows cost no intermediate results; a gate with a parameter of its own runs whole, for the parameter's
    gradient."""
    threshold(weighted_gate, "SMALLEST", 1)
    scale = torch.nn.Parameter(torch.full((4,), 2.0))
    for function, is_whole in ((torch.sigmoid, False), (lambda h: torch.sigmoid(h) * scale, True)):
        h_RH, s_R = torch.randn(9, 4, requires_grad=True), torch.rand(9, requires_grad=True)
        a_RF, kept = weighted_gate_and_kept(function, h_RH, s_R)
        assert torch.equal(a_RF, function(h_RH) * s_R[:, None])
        assert (kept > 2) == is_whole
        grads = torch.autograd.grad(a_RF.square().sum(), (h_RH, s_R))
        plain = (function(h_RH) * s_R[:, None]).square().sum()
        for found, expected in zip(grads, torch.autograd.grad(plain, (h_RH, s_R)), strict=True):
            assert torch.equal(found, expected)
    weighted_gate.weighted_gate(lambda h: torch.sigmoid(h) * scale, h_RH, s_R).sum().backward()
    assert scale.grad.all()


def compare(name, experts, dtype):
    """Ours and the class's own against its own in FP64; some tokens nobody's."""
    for num_tokens, dead in ((13, (0, 5, 12)), (1, ())):
        case = draw(num_tokens, dtype, dead=dead)
        ours, plain = run(experts, "expertmesh", *case), [run(experts, "eager", *case)]
        if not experts.has_post_expert_norm:
            plain.append(run(experts, "first", *case))
        oracle = run(experts, "eager", *case, dtype=torch.float64)
        for what in oracle:
            same = [found[what] for found in plain]
            numerics.assert_two_times(ours[what], same, oracle[what], what=f"{name} {what}")
        if dead:
            rows = list(dead)
            assert not ours["y"][rows].any() and not ours["x"][rows].any()
            assert not ours["weights"][case[1] == E].any()


class Seen(TorchDispatchMode):
    """Notes what weights the experts' operators are given."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "expertmesh":
            tensors = torch.utils._pytree.tree_leaves(args)
            self.addresses |= {t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mixtral", "nemotron_h", "gpt_oss"])
def test_weights_are_used_where_they_lie(name):
    experts = tiny_experts(name)
    experts.config._experts_implementation = register()
    x, ids, weights, _ = draw(4, torch.float32)
    with Seen() as seen:
        experts(x, ids, weights)
    assert {p.data_ptr() for p in experts.parameters() if p.dim() == 3} <= seen.addresses


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_frozen_experts_get_no_gradient(name):
    register()
    experts = tiny_experts(name).requires_grad_(False)
    experts.config._experts_implementation = "expertmesh"
    x, ids, weights, dy = draw(6, torch.float32)
    y = experts(x.requires_grad_(), ids, weights)
    y.backward(dy)
    assert x.grad.any() and all(p.grad is None for p in experts.parameters())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_autocast_computes_in_its_type_and_returns_the_input_s(name):
    register()
    experts = tiny_experts(name)
    x, ids, weights, dy = draw(9, torch.float32)
    oracle = run(experts, "eager", x, ids, weights, dy, dtype=torch.float64)
    found = {}
    for implementation in ("eager", "expertmesh"):
        with torch.autocast("cpu", torch.bfloat16):
            found[implementation] = run(experts, implementation, x, ids, weights, dy)
    for what in oracle:
        numerics.assert_two_times(
            found["expertmesh"][what],
            found["eager"][what],
            oracle[what],
            what=what,
            dtype=torch.bfloat16,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_logits_and_gradients(name, dtype):
    # In BF16 every token takes all experts: a choice that rounding turns says nothing of the experts.
    top_k = K if dtype == torch.float32 else E
    model = tiny_model(name, top_k=top_k, dtype=dtype)
    ids = torch.randint(61, (2, 7))
    ours = logits_and_gradients(model, ids)
    oracle = logits_and_gradients(model, ids, dtype=torch.float64, implementation="eager")
    others = [logits_and_gradients(model, ids, implementation=other) for other in ("eager", "grouped_mm")]
    assert ours.keys() == oracle.keys()
    for what in ("logits", *(n for n in oracle if ".experts." in n)):
        references = [other[what] for other in others]
        numerics.assert_two_times(ours[what], references, oracle[what], what=f"{name} {what}")
    rest = [n for n in oracle if n != "logits" and ".experts." not in n]

    def pooled(found):
        """All other gradients, each relative to its largest value: some have too few numbers to be judged alone."""
        parts = [(found[n] / numerics.magnitude(oracle[n])).flatten() for n in rest]
        return torch.cat(parts)

    numerics.assert_two_times(pooled(ours), [pooled(other) for other in others], pooled(oracle), what=f"{name} others")


def test_apply_says_how_many_modules_it_reached():
    model = tiny_model("glm4_moe")
    assert apply(model) == 1
    assert model.get_experts_implementation()[""] == "expertmesh"


def test_a_dense_model_is_refused_in_one_line():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no module of experts"):
        apply(LlamaForCausalLM(config))
    with pytest.raises(ConfigError, match="model is a str; it must be a"):
        apply("meta-llama/Llama-3.1-8B")


def test_fp8_experts_are_refused_by_name():
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8ExpertsInterface

    config = tiny_experts("mixtral").config
    config._experts_implementation = register()
    experts = FP8Experts(config, block_size=(8, 8))
    with pytest.raises(ConfigError, match="FP8Experts"):
        apply(torch.nn.Sequential(experts))
    with pytest.raises(ConfigError, match="FP8 weights"):
        FP8ExpertsInterface()["expertmesh"](experts, *draw(2, torch.float32)[:3])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_fullgraph_and_no_recompilation_while_decoding(name):
    from torch._dynamo.utils import counters

    model = tiny_model(name, num_hidden_layers=1).eval()
    apply(model)
    torch._dynamo.reset()
    step = torch.compile(model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 1, D)
            found, plain = step(x), model.model.layers[0].mlp(x)
        compiled = counters["stats"]["unique_graphs"]
        for _ in range(32):
            step(torch.randn(1, 1, D))
    assert compiled == counters["stats"]["unique_graphs"] >= 1
    first = [t[0] if isinstance(t, tuple) else t for t in (found, plain)]
    assert torch.equal(*first)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_training_has_the_same_gradients(name):
    torch._dynamo.reset()
    experts = tiny_experts(name)
    experts.config._experts_implementation = register()
    compiled = torch.compile(copy.deepcopy(experts), backend="aot_eager", fullgraph=True)
    x, ids, weights, dy = draw(6, torch.float32)
    for module in (experts, compiled):
        module(x, ids, weights).backward(dy)
    for (what, p), q in zip(experts.named_parameters(), compiled.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), what


def test_activation_checkpointing_gives_the_same_gradients():
    model = tiny_model("qwen3_moe").train()
    # checkpointing switches the cache off, and keys from a cache are laid out otherwise, for which some processors sum
    # in another order
    model.config.use_cache = False
    ids = torch.randint(61, (2, 7))
    plain = logits_and_gradients(model, ids)
    newer = "activation_checkpointing_enable"  # its name from transformers 5.23 on
    getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_enable")()
    again = logits_and_gradients(model, ids)
    for what, found in plain.items():
        assert torch.equal(found, again[what]), what


def test_generation_gives_the_tokens_of_the_plain_experts():
    model = tiny_model("qwen3_moe").eval()
    ids = torch.randint(61, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    apply(model)
    assert torch.equal(model.generate(ids, **options), plain)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_slice_of_the_hidden_size_gives_its_part_of_the_sum(name):
    register()
    whole = tiny_experts(name, torch.float64)
    x, ids, weights, _ = draw(7, torch.float64)
    whole.config._experts_implementation = "expertmesh"
    biases = dict.fromkeys([n for n, _ in whole.named_parameters() if n == "down_proj_bias"])
    total = torch.zeros_like(x)
    for part in range(2):
        piece = copy.deepcopy(whole)
        for n, p in whole.named_parameters():
            if n in biases:
                setattr(piece, n, torch.nn.Parameter(p * (part == 0)))
                continue
            dim = (2 if "gate_up" in n else 1) if whole.is_transposed else (1 if "gate_up" in n else 2)
            dim = 1 if n == "gate_up_proj_bias" else dim
            if "gate_up" in n and whole.is_concatenated:
                cut = torch.cat([half.chunk(2, dim)[part] for half in p.chunk(2, dim)], dim)
            else:
                cut = p.chunk(2, dim)[part]
            setattr(piece, n, torch.nn.Parameter(cut.clone()))
        total += piece(x, ids, weights)
    numerics.assert_close_fp64(total, whole(x, ids, weights), what="sum of the slices")


OLDER = """
import sys
import transformers.integrations.finegrained_fp8, transformers.integrations.moe, transformers.modeling_utils
import transformers.models.mixtral.modeling_mixtral as mixtral
sys.modules["transformers.distributed.expert_parallel"] = None
from expertmesh.integrations.transformers import register
from expertmesh.integrations.transformers.experts_forward import fused_activation
config = mixtral.MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2, experts_implementation=register())
experts = mixtral.MixtralExperts(config)
vars(experts).pop("has_post_expert_norm", None)
print(fused_activation(experts))
"""  # noqa: E501


def test_a_transformers_without_the_newest_of_its_experts_is_served():
    """One of before implementations of expert parallelism, and norms behind the experts."""
    ended = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout.strip() == "swiglu", ended.stderr
