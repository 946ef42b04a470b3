"""A second opinion: with the same weights the layer equals the blocks of transformers, forwards and backwards."""

import pytest
import torch
from tests.oracle import numerics

from expertmesh import MoELayer

transformers = pytest.importorskip("transformers", minversion="5.0")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

D, F, E, B, S = 24, 40, 8, 3, 13


def mixtral_block(top_k):
    """A Mixtral block, plain implementation, random weights."""
    config = mixtral.MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=top_k)
    config._experts_implementation = "eager"
    return mixtral.MixtralSparseMoeBlock(config)


def qwen_block(top_k, *, norm_topk_prob):
    """A Qwen3 block, plain implementation, random weights."""
    config = qwen.Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk_prob,
    )
    config._experts_implementation = "eager"
    return qwen.Qwen3MoeSparseMoeBlock(config)


BLOCKS = {
    "mixtral": (mixtral_block, "topk"),
    "qwen3_normalised": (lambda k: qwen_block(k, norm_topk_prob=True), "topk"),
    "qwen3_plain": (lambda k: qwen_block(k, norm_topk_prob=False), "none"),
}


def draw(block, dtype):
    """Fill the block's parameters with values that make well-separated choices."""
    generator = torch.Generator().manual_seed(3)
    block = block.to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return block


def layer_sharing(block, top_k, normalize, dtype):
    """A layer whose experts are views of the block's tensors: nothing is copied."""
    layer = MoELayer(
        dim=D,
        hidden_dim=F,
        num_experts=E,
        top_k=top_k,
        normalize_weights=normalize,
        dtype=dtype,
        aux_loss_weight=0.0,
    )
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    layer.experts.w_in = torch.nn.Parameter(gate_up.detach().view(E, 2, F, D))
    layer.experts.w_out = torch.nn.Parameter(down.detach())
    layer.router.proj.weight = torch.nn.Parameter(block.gate.weight.detach())
    assert layer.experts.w_in.data_ptr() == gate_up.data_ptr()
    assert layer.experts.w_out.data_ptr() == down.data_ptr()
    return layer


def run_block(block, x, dy):
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "x": x.grad,
        "router": block.gate.weight.grad,
        "w_in": block.experts.gate_up_proj.grad.view(E, 2, F, D),
        "w_out": block.experts.down_proj.grad,
    }


def run_layer(layer, x, dy):
    x = x.clone().requires_grad_()
    y, stats = layer(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "x": x.grad,
        "router": layer.router.proj.weight.grad,
        "w_in": layer.experts.w_in.grad,
        "w_out": layer.experts.w_out.grad,
    }, stats


def in_full_fp64(monkeypatch):
    """The blocks compute the softmax in FP32 even when everything else is FP64; let them stay in FP64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)


@pytest.mark.parametrize("top_k", [1, 2, 5, E])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("training", [True, False])
def test_fp64_parity(monkeypatch, name, top_k, training):
    make, normalize = BLOCKS[name]
    block = draw(make(top_k), torch.float64).train(training)
    layer = layer_sharing(block, top_k, normalize, torch.float64).train(training)
    x, dy = torch.randn(2, B, S, D, dtype=torch.float64).unbind(0)
    with monkeypatch.context() as patch:
        in_full_fp64(patch)
        theirs = run_block(block, x, dy)
    ours, stats = run_layer(layer, x, dy)
    # Normalised weights of one choice are 1: the router's gradient is zero up to the size of what cancels.
    scale = numerics.magnitude(theirs["w_out"])
    for key, value in theirs.items():
        numerics.assert_close_fp64(ours[key], value, what=key, scale=max(scale, numerics.magnitude(value)))
    with monkeypatch.context() as patch:
        in_full_fp64(patch)
        ids = block.gate(x.view(-1, D))[2]
    assert torch.equal(stats.topk_expert_ids_TK, ids)


@pytest.mark.parametrize("top_k", [1, 2, 5, E])
@pytest.mark.parametrize("name", BLOCKS)
def test_fp32_is_as_exact_as_the_block(monkeypatch, name, top_k):
    make, normalize = BLOCKS[name]
    block = draw(make(top_k), torch.float32)
    exact = draw(make(top_k), torch.float64)
    exact.load_state_dict(block.state_dict())
    layer = layer_sharing(block, top_k, normalize, torch.float32)
    x, dy = torch.randn(2, B, S, D).unbind(0)
    with monkeypatch.context() as patch:
        in_full_fp64(patch)
        oracle = run_block(exact, x.double(), dy.double())
    theirs = run_block(block, x, dy)
    ours, _ = run_layer(layer, x, dy)
    for key, value in theirs.items():
        numerics.assert_two_times(ours[key], value, oracle[key], what=key, scale=numerics.magnitude(oracle["w_out"]))
