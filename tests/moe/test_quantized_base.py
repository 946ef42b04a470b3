"""Quantised experts as a frozen base: gradients are those of the widened weights, and adapters on them learn and
merge."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.memory import peak_bytes, saved_bytes
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import nn

import expertmesh as em
from expertmesh import lora
from expertmesh.errors import ConfigError
from expertmesh.integrations.peft import load_adapters, save_adapters
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import grouped_layers
from expertmesh.moe.warm_up import warm_up
from expertmesh.ops.quantized import mxfp4
from expertmesh.training.init_from import check_saved
from expertmesh.training.regroup import checked_layers

FORMS = ("int8", "int4", "fp8", "mxfp4", "nf4")
E, D, F = 5, 128, 64


def experts_of(form, dtype=torch.float32, **options):
    sizes = {"num_experts": E, "dim": D, "hidden_dim": F, "activation": "swiglu", "bias": True}
    made = GroupedExperts(**(sizes | options), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    made.convert(form, group_size=32)
    return made


def widened(experts, dtype=None):
    found = copy.deepcopy(experts)
    found.convert("dense", dtype=dtype)
    return found.requires_grad_(False)


def share_of_norm(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def run(module, dtype, num_tokens=9):
    """Output, gradients of tokens and routing weights."""
    generator, device = torch.Generator().manual_seed(3), module.w_in.device
    x_TD = torch.randn(num_tokens, D, generator=generator).to(device, dtype).requires_grad_()
    ids_TK = torch.randint(0, E - 1, (num_tokens, 2), generator=generator).to(device)  # the last has no row
    s_TK = torch.rand(num_tokens, 2, generator=generator).to(device).requires_grad_()
    y_TD = module(x_TD, ids_TK, s_TK, max_rows=None)
    y_TD.float().square().sum().backward()
    return {"y": y_TD.detach(), "x": x_TD.grad, "s": s_TK.grad}


@pytest.mark.parametrize("options", [{}, {"recompute_h": True}, {"activation": "relu2", "bias": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_tokens_have_the_bits_of_the_widened_weights(form, dtype, options):
    made = experts_of(form, dtype, **options)
    assert not list(made.parameters())
    found, expected = run(made, dtype), run(widened(made), dtype)
    assert {name: torch.equal(found[name], expected[name]) for name in found} == dict.fromkeys(found, True)


def layer_of(form, **options):
    sizes = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": 2, "seed": 0}
    layer = em.MoELayer(**sizes, **options)
    layer.experts.convert(form, group_size=32)
    return layer


def learned(layer, x_TD, wanted_TD, steps=12):
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        y_TD, _ = layer(x_TD)
        loss = (y_TD - wanted_TD).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adapter_grads(layer, dtype):
    layer = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(2)
    for one in lora.adapters(layer).values():
        one.b.data.copy_(torch.randn(one.b.shape, generator=generator) * 0.1)
    found = run(layer.experts, dtype, num_tokens=60)
    return found | {n: p.grad for n, p in layer.experts.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_adapters_on_a_quantised_base_are_those_on_its_widened_weights(form, dtype, shared):
    layer = layer_of(form, dtype=dtype)
    lora.add(layer, rank=4, seed=1, shared=shared, dtype=dtype)
    found = adapter_grads(layer, dtype)
    exact, plain = (copy.deepcopy(layer) for _ in range(2))
    exact.experts.convert("dense", dtype=torch.float64)
    for layer_, to in ((exact, torch.float64), (plain, dtype)):
        layer_.experts.convert("dense", dtype=to)
        layer_.experts.requires_grad_(False).adapters.requires_grad_(True).to(to)
    plain, exact = adapter_grads(plain, dtype), adapter_grads(exact, torch.float64)
    assert found.keys() == plain.keys() == exact.keys() and len(found) == 7
    for name, value in found.items():
        assert_two_times(value, plain[name], exact[name], what=f"{form} {name}")


@pytest.mark.parametrize("form", FORMS)
def test_adapters_learn_and_are_merged_with_a_said_error(form, caplog):
    layer, generator = layer_of(form), torch.Generator().manual_seed(5)
    x_TD, wanted_TD = (torch.randn(40, D, generator=generator) for _ in range(2))
    before = {n: b.clone() for n, b in layer.experts.named_buffers()}
    lora.add(layer, rank=8, alpha=16.0, seed=1)
    assert {n.rpartition(".")[2] for n, p in layer.named_parameters() if p.requires_grad} == {
        "a",
        "b",
    }
    losses = learned(layer, x_TD, wanted_TD)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(b, before[n]) for n, b in layer.experts.named_buffers())
    keys = set(layer.experts.state_dict()) - {n for n in layer.experts.state_dict() if "adapters" in n}
    summed = widened(layer.experts)
    summed.requires_grad_(False)
    for name, adapter in lora.adapters(layer).items():
        adapter.add_to(getattr(summed, name.rpartition(".")[2]))
    with caplog.at_level(logging.WARNING):
        assert lora.merge(layer) == 1
    assert layer.experts.format == form and set(layer.experts.state_dict()) == keys
    said = [r.getMessage() for r in caplog.records]
    again = widened(layer.experts)
    for name in ("w_in", "w_out"):
        own, merged = getattr(again, name), getattr(summed, name)
        error = share_of_norm(own, merged)
        (line,) = (one for one in said if f".{name}:" in one)
        assert line.endswith(f"rounding them to {form} again {error:.2g}")
        assert error < {"int8": 0.02, "fp8": 0.04}.get(form, 0.15)


def test_no_widened_weight_waits_for_the_backward():
    layer = layer_of("int4")
    lora.add(layer, rank=2, seed=1)
    x_TD = torch.randn(3, D, requires_grad=True)
    dense = layer_of("dense")
    lora.add(dense, rank=2, seed=1)
    wide = sum(p.nbytes for n, p in dense.experts.named_parameters() if "adapters" not in n)
    assert saved_bytes(lambda: layer(x_TD)[0]) < wide / 4 < wide < saved_bytes(lambda: dense(x_TD)[0])


def invariant(layer, x_TD):
    with torch.no_grad():
        return layer.eval()(x_TD)[0]


USES = {
    "a step of adapters": (True, {}, lambda layer, x_TD: layer(x_TD)[0].sum().backward()),
    "a step of what comes before": (False, {}, lambda layer, x_TD: layer(x_TD)[0].sum().backward()),
    "exact answers": (False, {"batch_invariant": True}, invariant),
    "merging": (True, {}, lambda layer, x_TD: lora.merge(layer)),
    "rounding": (False, {}, lambda layer, x_TD: layer.experts.convert("nf4")),
    "widening": (False, {}, lambda layer, x_TD: layer.experts.convert("dense")),
}


# formats whose rounding tries many scales keep the profiler of a merge busy for seconds
CASES = [(form, use) for form in FORMS for use in USES if use != "merging" or form in ("nf4", "mxfp4")]


@pytest.mark.parametrize(("form", "use"), CASES)
def test_one_expert_is_widened_at_a_time(form, use):
    """The peak of a use, but for the tensors that it leaves, is a few copies of one expert, not a layer."""
    has_adapters, options, run = USES[use]
    E, D, F = 36, 64, 64
    layer = em.MoELayer(dim=D, hidden_dim=F, num_experts=E, top_k=2, seed=0, **options)
    layer.experts.convert(form, group_size=32)
    if has_adapters:
        lora.add(layer, rank=1, seed=1)
    x_TD = torch.randn(6, D, requires_grad=use.startswith("a step"))
    expert = 3 * D * F * 4
    left = {"rounding": E * expert // 7, "widening": E * expert}.get(use, 0)
    peak = peak_bytes(lambda: run(layer, x_TD)) - left
    assert peak < 16 * expert < E * expert / 2, peak / expert


def test_numbers_in_mxfp4_keep_their_values():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (300, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (300, 2), generator=generator, dtype=torch.uint8)
    wide = mxfp4.widened(blocks, scales)
    packed, again = mxfp4.packed(wide)
    assert torch.equal(mxfp4.widened(packed.unflatten(-1, (2, 16)), again), wide)
    w = torch.randn(64, 128, generator=generator)
    packed, again = mxfp4.packed(w)
    assert share_of_norm(mxfp4.widened(packed.unflatten(-1, (4, 16)), again), w) < 0.12


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e: e.convert("int3"), "format=int3: must be dense or int8"),
        (lambda e: e.convert("int3"), "format=int3: must be"),
        (lambda e: e.convert("int4", group_size=128), "groups of 128 must divide 128 and 64"),
        (lambda e: e.accumulate_main_grads(), "main gradients of int8 experts"),
    ],
)
def test_what_a_base_cannot_do_is_one_line(change, text):
    with pytest.raises(ConfigError, match=text) as caught:
        change(experts_of("int8"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_a_warm_up_have_the_type_of_the_products(form):
    layer = layer_of(form, dtype=torch.bfloat16)
    lora.add(layer, rank=2, seed=1)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    warm_up(layer, [3])
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
def test_the_product_is_an_operator_that_compilers_know(form):
    made, rows = experts_of(form), torch.randn(6, D, requires_grad=True)
    stored = [made.w_in, made.w_out, made.w_in_scale, made.w_out_scale]
    offsets = torch.tensor([0, 2, 2, 5, 5, 6], dtype=torch.int32)
    call = (rows, stored, offsets, None, form, "torch", True, False)
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.expertmesh.frozen_linear.default, call, test_utils=checks)


def test_adapters_on_a_quantised_base_are_saved_and_read_in_pefts_format(tmp_path):
    sizes = {"vocab_size": 50, "max_seq_len": 16, "dim": 32, "num_layers": 2, "num_heads": 2}
    config = ModelConfig(**sizes, moe={"num_experts": (4,), "hidden_dim": 32})
    models = [em.GPT(config, seed=0) for _ in range(2)]
    for model in models:
        for _, _, experts in grouped_layers(model):
            experts.convert("int4", group_size=32)
    first, second = models
    lora.add(first, rank=2, seed=1)
    for one in lora.adapters(first).values():
        nn.init.normal_(one.b, std=0.1)
    save_adapters(first, tmp_path / "a")
    ids = torch.arange(12).view(1, -1)
    bare = second(ids).logits_BSV
    assert load_adapters(second, tmp_path / "a") == 2
    found, expected = second(ids).logits_BSV, first(ids).logits_BSV
    assert torch.equal(found, expected) and not torch.equal(found, bare)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda model, run: checked_layers(run, SimpleNamespace(model=model)),
            "the run they were made of",
        ),
        (lambda model, run: check_saved(model, Tokenizer(BPE()), run.config), "int8 experts"),
    ],
)
def test_what_needs_dense_experts_says_so_in_one_line(use, text):
    sizes = {"vocab_size": 50, "max_seq_len": 16, "dim": 32, "num_layers": 1, "num_heads": 2}
    config = ModelConfig(**sizes, moe={"num_experts": (4,), "hidden_dim": 32})
    model = em.GPT(config, seed=0)
    for _, _, experts in grouped_layers(model):
        experts.convert("int8")
    run = SimpleNamespace(path="run", config=SimpleNamespace(model=config))
    with pytest.raises(ConfigError, match=text) as caught:
        use(model, run)
    assert "\n" not in str(caught.value)
