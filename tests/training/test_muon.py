"""Muon: each expert's matrices by their singular values, a run that goes on to the bit; on ranks in
test_train_layouts.py."""

import copy
import inspect

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs
from tests.support.runs import losses_of
from torch import nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeConfig, JetMoeMoE
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.training import muon
from expertmesh.training.fused import fused_halves
from expertmesh.training.optim import build_optimizer
from expertmesh.training.param_groups import parameter_roles

CONFIG = OptimConfig(name="muon", lr=0.02, momentum=0.9, weight_decay=0.3)


def orthogonalized_by_singular_values(matrix):
    """U p(...p(S / |S|)...) V^T, the polynomial applied to single numbers."""
    a, b, c = muon.COEFFICIENTS
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / max(float(s.square().sum().sqrt()), muon.EPS)
    for _ in range(muon.STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


@pytest.mark.parametrize("shape", [(24, 24), (24, 35), (24, 36), (36, 24), (24, 200), (200, 24), (1, 9)])
@pytest.mark.parametrize("last", [0, -3, -6])
def test_singular_values_of_every_size_end_near_one(shape, last):
    """Of FP32 matrices, wide ones by way of their Gram matrices, whose least eigenvalue is 1e-12 of the largest."""
    draws = torch.Generator().manual_seed(len(shape) + shape[0])
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=draws, dtype=torch.float64), full_matrices=False)
    x = u @ torch.diag(torch.logspace(0, last, len(vt), dtype=torch.float64)) @ vt
    matrices = torch.stack([x, torch.zeros_like(x), 1e-5 * x, x[:, :1] @ x[:1]])  # the last of rank 1
    found = muon.orthogonalized(matrices.float()).double()
    assert not found[1].any()
    for one, matrix in zip(found, matrices, strict=True):
        expected = orthogonalized_by_singular_values(matrix.float().double())
        assert torch.linalg.matrix_norm(one - expected, 2) < 0.01


@pytest.mark.parametrize("shape", [(3, 24, 24), (3, 24, 100), (3, 100, 24)])
def test_in_a_run_of_bf16_it_is_computed_in_bf16(shape):
    """Off by what BF16 rounds; FP64 stays FP64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = muon.orthogonalized(x, dtype=torch.bfloat16)
    for one, matrix in zip(found.double(), x.double(), strict=True):
        expected = orthogonalized_by_singular_values(matrix)
        assert 1e-3 < torch.linalg.matrix_norm(one - expected, 2) < 0.1
    exact = muon.orthogonalized(x.double())
    assert torch.equal(muon.orthogonalized(x.double(), dtype=torch.bfloat16), exact)


def test_the_optimizer_of_a_run_of_bf16_and_its_copy():
    updates = []
    for compute_dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
        layer = nn.Linear(24, 40, bias=False)
        nn.init.zeros_(layer.weight)
        pair = layer, build_optimizer(layer, CONFIG, compute_dtype=compute_dtype)
        layer, optimizer = copy.deepcopy(pair) if len(updates) == 2 else pair
        layer.weight.grad = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        updates.append(layer.weight.detach() / CONFIG.lr)
    assert 1e-4 < (updates[0] - updates[1]).abs().max() < 0.1
    assert torch.equal(updates[1], updates[2])


def update_of_one(matrix, gradients):
    """Where plain Muon leads a single matrix."""
    w, moment = matrix.clone(), torch.zeros_like(matrix)
    for g in gradients:
        moment = 0.9 * moment + 0.1 * g
        update = orthogonalized_by_singular_values(0.1 * g + 0.9 * moment)
        w = w - CONFIG.lr * 0.3 * w - 0.2 * CONFIG.lr * max(w.shape) ** 0.5 * update
    return w


def gpt():
    sizes = {"vocab_size": 300, "dim": 12, "num_layers": 2, "num_heads": 2, "ffn_hidden_dim": 16}
    moe = {"num_experts": (3,), "hidden_dim": 7, "shared_hidden_dim": 5, "shared_gate": True}
    config = ModelConfig(**sizes, tie_embeddings=False, moe_every=2, moe=MoEConfig(**moe, residual=True, bias=True))
    return GPT(config, seed=0, dtype=torch.float64)


def test_every_matrix_of_every_expert_is_updated_by_itself():
    model = gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: torch.randn(2, *p.shape, dtype=p.dtype) for name, p in before.items()}
    gradients["layers.1.moe.experts.w_in"][:, 1] = 0  # an expert without a token
    optimizer = build_optimizer(model, CONFIG)
    twin = gpt()
    adamw = build_optimizer(twin, CONFIG.model_copy(update={"name": "adamw"}))
    for step in range(2):
        for net, optim in ((model, optimizer), (twin, adamw)):
            for name, p in net.named_parameters():
                p.grad = gradients[name][step].clone()
            optim.step()
    matrices = {n for n, role in parameter_roles(model).items() if role == "matrix"}
    assert matrices == {
        *(f"layers.{i}.attention.{name}.weight" for i in range(2) for name in ("qkv", "out")),
        *(f"layers.0.ffn.{name}" for name in ("w_in", "w_out")),
        *(
            f"layers.1.moe.{part}.{name}"
            for part in ("experts", "shared_experts", "residual_mlp")
            for name in ("w_in", "w_out")
        ),
    }
    others = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        if name not in matrices:
            assert torch.equal(p, others[name]), name
            continue
        assert set(optimizer.state[p]) == {"momentum_buffer"}
        stack = before[name].reshape(-1, *p.shape[-2:])
        given = gradients[name].reshape(2, *stack.shape)
        expected = torch.stack([update_of_one(w, given[:, i]) for i, w in enumerate(stack)])
        expected = expected.view(p.shape)
        assert_close_fp64(p, expected, what=name)
    nobody = model.get_parameter("layers.1.moe.experts.w_in")[1]
    decayed = before["layers.1.moe.experts.w_in"][1] * (1 - CONFIG.lr * 0.3) ** 2
    assert_close_fp64(nobody, decayed, what="the expert without a token")


class Stacks(nn.Module):
    """Experts as transformers keep them: gate and up in one, the down projection beside them."""

    def __init__(self, gate_up, down, *, is_concatenated=True):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.is_concatenated = is_concatenated


@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_gate_and_up_in_one_are_updated_as_two(is_transposed, is_concatenated):
    """As the same two are that are kept apart: rows or columns, one behind the other or in turn."""
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(3, *shape, generator=draws, dtype=torch.float64)

    (gate, up, down), grads = ((drawn(7, 12), drawn(7, 12), drawn(12, 7)) for _ in range(2))

    def fused(a, b):
        found = torch.cat((a, b), 1) if is_concatenated else torch.stack((a, b), 2).flatten(1, 2)
        return found.mT.clone() if is_transposed else found

    def turned(x):
        return x.mT.clone() if is_transposed else x.clone()

    model = Stacks(fused(gate, up), turned(down), is_concatenated=is_concatenated)
    optimizer = build_optimizer(model, CONFIG)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        model.gate_up_proj.grad, model.down_proj.grad = fused(*grads[:2]), turned(grads[2])
        optimizer.step()

    def led(w, g):
        return torch.stack([update_of_one(*pair) for pair in zip(w, zip(g, g, strict=True), strict=True)])

    expected = [led(*pair) for pair in zip((gate, up, down), grads, strict=True)]
    assert_close_fp64(model.gate_up_proj, fused(*expected[:2]), what="gate and up")
    assert_close_fp64(model.down_proj, turned(expected[2]), what="down")


class Gated(nn.Module):
    """A dense MLP as hubs keep them: one map gives gate and up."""

    def __init__(self, dim, hidden, *, act=None):
        super().__init__()
        self.one = nn.Linear(dim, 2 * hidden, bias=False, dtype=torch.float64)
        self.other = nn.Linear(hidden, dim, bias=False, dtype=torch.float64)
        if act is not None:
            self.act = act


def phi3_mlp():
    config = Phi3Config(hidden_size=12, intermediate_size=7, pad_token_id=0)
    return Phi3MLP(config).double()


@pytest.mark.parametrize(
    "module",
    [
        Gated(12, 7),
        Gated(12, 12, act=nn.SiLU()),
        nn.Sequential(*Gated(12, 7, act=nn.GLU()).children()),
        phi3_mlp(),
    ],
    ids=["no activation", "square", "sequence", "phi3"],
)
def test_gate_and_up_in_one_linear_map_are_updated_as_two(module):
    weights = [p.detach().clone() for p in module.parameters()]
    grads = [torch.randn_like(w) for w in weights]
    # the last map of a model is its head
    optimizer = build_optimizer(nn.ModuleList([module, nn.Linear(3, 3)]), CONFIG)
    for _ in range(2):
        for p, g in zip(module.parameters(), grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    fused, taker = module.parameters()
    halves = zip(weights[0].chunk(2), grads[0].chunk(2), strict=True)
    expected = torch.cat([update_of_one(w, (g, g)) for w, g in halves])
    assert_close_fp64(fused, expected, what="gate and up")
    assert_close_fp64(taker, update_of_one(weights[1], (grads[1],) * 2), what="down")


class Attention(nn.Module):
    """Half as many heads of keys and values as of queries: the shapes of a gated MLP."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(12, 16), nn.Linear(8, 12)


def test_maps_of_other_meaning_stay_one():
    """Three maps in a row, attention, a projection beside a wider one, a list of maps."""
    for module in (
        nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 6)),
        Attention(),
        Gated(12, 12),
        nn.ModuleList(Gated(12, 7).children()),
        nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)),
        gpt(),
    ):
        assert fused_halves(module) == {}, module


def test_stacks_in_modules_of_their_own_are_seen_beside_each_other():
    """As JetMoe's experts lie."""
    config = JetMoeConfig(hidden_size=12, intermediate_size=7, num_local_experts=3)
    moe = JetMoeMoE(config)
    assert fused_halves(moe) == {id(moe.input_linear.weight): "rows"}


def test_the_numbers_are_those_of_torch():
    given = inspect.signature(torch.optim.Muon).parameters
    assert given["ns_coefficients"].default == muon.COEFFICIENTS
    assert (given["ns_steps"].default, given["eps"].default) == (muon.STEPS, muon.EPS)
    assert given["momentum"].default == OptimConfig().momentum


def test_a_model_of_matrices_alone_and_one_without():
    for module, kinds in (
        (nn.Linear(3, 4, bias=False), {"momentum_buffer"}),
        (nn.LayerNorm(4), {"step", "exp_avg", "exp_avg_sq"}),
    ):
        optimizer = build_optimizer(module, CONFIG)
        module(torch.ones(2, module.weight.shape[-1])).square().sum().backward()
        assert optimizer.step(lambda: 3.0) == 3.0
        assert {key for state in optimizer.state.values() for key in state} == kinds


def test_a_state_that_is_loaded_is_that_of_all_parameters():
    """`load_state_dict` makes groups and state anew, and a copy has them only."""
    models = [gpt() for _ in range(3)]
    optimizers = [build_optimizer(model, CONFIG) for model in models]

    def step(number):
        for p in models[number].parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizers[number].step()

    for number in (0, 0, 1):
        step(number)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    models[2], optimizers[2] = copy.deepcopy((models[0], optimizers[0]))
    for number in range(3):
        for group in optimizers[number].param_groups:
            group["lr"] = 0.5
        step(number)
    for model in models[1:]:
        for (name, p), other in zip(model.named_parameters(), models[0].parameters(), strict=True):
            assert torch.equal(p, other), name


def test_a_run_goes_on_to_the_bit(tiny, run_quietly, tmp_path):
    common = {"optim.name": "muon", "optim.schedule_steps": 6, "train.checkpoint_every": 100}
    straight = tiny(**common, **{"train.steps": 6, "train.run_dir": str(tmp_path / "straight")})
    half = tiny(**common, **{"train.steps": 3, "train.run_dir": str(tmp_path / "halves")})
    rest = half.updated({"train.steps": 6, "train.resume": "required"})
    for config in (straight, half, rest):
        run_quietly(config)
    losses, halves = (losses_of(config) for config in (straight, rest))
    assert len(losses) == 6 and losses == halves
    with pytest.raises(ConfigError, match="optim.name=adamw: the run in .* has muon; use that"):
        run_quietly(rest.updated({"optim.name": "adamw", "train.steps": 7}))
    plain = tiny(**{"train.steps": 6, "train.run_dir": str(tmp_path / "adamw")})
    run_quietly(plain)
    others = losses_of(plain)
    assert_differs(torch.tensor(losses[1:]), torch.tensor(others[1:]), what="losses")


def test_momentum_without_muon_is_refused():
    with pytest.raises(ConfigError, match="optim.momentum=0.5: has no effect with optim.name=adamw"):
        RECIPES["gpt-moe-test"]().updated({"optim.momentum": 0.5})
