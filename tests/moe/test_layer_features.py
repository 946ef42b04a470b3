"""What a user may do to a MoELayer: compile, autocast, copy, pickle, load, freeze, checkpoint, mask, get it wrong."""

import copy
import itertools
import pickle
import shutil

import pytest
import torch
import torch.utils._pytree as pytree
from tests.oracle.numerics import assert_close_fp64, assert_differs
from tests.support.operators import Operators
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from expertmesh import MoELayer, Routing, RoutingStats
from expertmesh.moe.dispatch import Dispatched, LocalDispatcher
from expertmesh.moe.routing_noise import key_noise

D, F, E, T = 7, 5, 6, 11

VARIANTS = {
    "plain": {},
    "one_choice": {"top_k": 1},
    "all_experts": {"top_k": E},
    "sigmoid_bias_groups": {
        "score_function": "sigmoid",
        "bias_update_rate": 0.1,
        "num_expert_groups": 3,
        "num_limited_groups": 2,
    },
    "groups_by_max": {"num_expert_groups": 3, "num_limited_groups": 2, "group_score": "max"},
    "softmax_after_topk": {"score_function": "softmax_after_topk"},
    "gumbel": {"router_noise": "gumbel"},
    "gaussian_load": {"router_noise": "gaussian", "balance_loss": "importance_load"},
    "jitter_dropout": {
        "input_jitter": 0.1,
        "input_dropout": 0.2,
        "expert_output_masking": 0.3,
    },
    "cosine": {"router": "cosine", "cosine_dim": 3},
    "expert_choice": {"router": "expert_choice", "routing_group_size": 4},
    "hash": {"router": "hash", "z_loss_weight": 0.0},
    "random_kept": {
        "capacity_factor": 0.5,
        "min_capacity": 1,
        "normalize_weights": "kept",
        "routing_group_size": 4,
    },
    "priority": {"capacity_factor": 0.5, "min_capacity": 0, "drop_policy": "priority"},
    "first": {"capacity_factor": 0.5, "min_capacity": 0, "drop_policy": "first"},
    "bounded": {"max_capacity_factor": 0.5, "min_capacity": 0},
    "dense_parts": {"residual": True, "num_shared_experts": 2, "bias": True, "activation": "gelu"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
# Each option that changes the graph is in one of them; a trace of the compiler takes two seconds.
COMPILED = [
    ("sigmoid_bias_groups", "jitter_dropout", "priority"),
    ("gaussian_load", "cosine", "random_kept"),
    ("expert_choice",),
    ("hash", "dense_parts"),
]
COMPILED += [pytest.param((v,), marks=pytest.mark.exhaustive) for v in VARIANTS]


def make(variant="plain", **kwargs):
    options = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": 2, "seed": 0}
    options |= {"z_loss_weight": 0.01, "dtype": torch.float64} | VARIANTS[variant] | kwargs
    layer = MoELayer(**options)
    key_noise(layer, seed=1, step=2)
    return layer


def tokens(num_tokens=T, dtype=torch.float64):
    return torch.randn(num_tokens, D, dtype=dtype)


def results(layer, x, run=None, **kwargs):
    """Output, losses, statistics and all gradients of one training step."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y, stats = (layer if run is None else run)(x, token_ids=torch.arange(x.shape[0]) * 7, **kwargs)
    (y.sin().sum() + stats.aux_loss + stats.z_loss).backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    told = {name: value for name, value in vars(stats).items() if value is not None}
    return {"y": y, "x": x.grad, **told, **gradients}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value.is_floating_point():
            assert_close_fp64(value, theirs[name], what=name, scale=1 + theirs[name].abs().sum().item())
        else:
            assert torch.equal(value, theirs[name]), name


# ---- torch.compile


@pytest.mark.parametrize("variants", COMPILED, ids="-".join)
def test_compiles_into_one_graph_and_equals_eager(variants):
    torch._dynamo.reset()
    layer = make(**{name: v for variant in variants for name, v in VARIANTS[variant].items()})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = tokens(), torch.rand(T) > 0.2
    assert_same(results(layer, x, compiled, token_mask=mask), results(layer, x, token_mask=mask))


@pytest.mark.slow
# Inductor's own imports use a part of torch.jit that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("noise", ["none", pytest.param("gumbel", marks=pytest.mark.exhaustive)])
def test_compiles_with_inductor(noise):
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    layer, x = make(router_noise=noise), tokens()
    compiled = torch.compile(layer, fullgraph=True)
    with fresh_cache():  # a run that was killed leaves half-written libraries in the common one
        assert_same(results(layer, x, compiled), results(layer, x))


def test_compiled_layer_takes_new_steps_and_sizes_without_recompiling():
    torch._dynamo.reset()
    layer = make(router_noise="gumbel", capacity_factor=0.5, min_capacity=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled_at_first = 0
    for step, num_tokens in enumerate((12, 20, 9)):
        key_noise(layer, seed=1, step=step)
        x = tokens(num_tokens)
        assert_same(results(layer, x, compiled), results(layer, x))
        compiled_at_first = counter.frame_count if step == 0 else compiled_at_first
    assert counter.frame_count == compiled_at_first


def test_compiled_overrides_and_evaluation():
    torch._dynamo.reset()
    layer = make("random_kept")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(tokens(T + 1))  # the number of tokens of further calls is a symbol
    x, mask = tokens(), torch.rand(T) > 0.2
    for kwargs in ({"top_k": 3}, {"capacity_factor": 0.3}, {"token_mask": mask}):
        assert_same(results(layer, x, compiled, **kwargs), results(layer, x, **kwargs))
    layer.eval()
    assert_same(results(layer, x, compiled), results(layer, x))
    routing = Routing(torch.tensor([[0, E, 2]]).expand(T, 3))
    assert_same(results(layer, x, compiled, routing=routing), results(layer, x, routing=routing))


def test_compiled_unkeyed_noise_follows_the_default_generator():
    torch._dynamo.reset()
    layer = make(router_noise="gumbel")
    layer.reset_parameters()
    assert not layer.noise_is_keyed
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens()
    torch.manual_seed(5)
    first, second = compiled(x)[0], compiled(x)[0]
    torch.manual_seed(5)
    assert torch.equal(compiled(x)[0], first)
    assert not torch.equal(first, second)


# ---- copies, storage, loading


@every_variant
def test_deepcopy_and_pickle_keep_everything(variant):
    layer, x = make(variant), tokens()
    expected = results(layer, x)
    assert_same(results(copy.deepcopy(layer), x), expected)
    assert_same(results(pickle.loads(pickle.dumps(layer)), x), expected)


@every_variant
def test_meta_construction_then_reset_equals_direct_construction(variant):
    direct, late = make(variant), make(variant, device="meta")
    assert all(t.is_meta for t in (*late.parameters(), *late.buffers()))
    late.to_empty(device="cpu")
    late.reset_parameters()
    late_state = late.state_dict()
    assert late_state.keys() == direct.state_dict().keys()
    for name, value in direct.state_dict().items():
        assert torch.equal(late_state[name], value), name
    assert not late.noise_is_keyed and late.noise_key.tolist() == [0, 0]


@every_variant
@pytest.mark.parametrize("assign", [True, False])
def test_meta_construction_then_a_state_dict_equals_direct_construction(variant, assign):
    direct, late = make(variant), make(variant, device="meta")
    given = direct.state_dict()
    if not assign:
        used = [torch.full((2,), 7) for _ in range(1000)]
        del used  # memory that `to_empty` may get again
        late.to_empty(device="cpu")
    late.load_state_dict(given, assign=assign)
    assert not any(t.is_meta for t in (*late.parameters(), *late.buffers()))
    assert late.noise_key.tolist() == late.noise_samples.tolist() == [0, 0]
    x, token_ids = tokens(), torch.arange(len(tokens()))
    for layer in (direct, late):
        key_noise(layer.double(), seed=3, step=1)
    with torch.no_grad():
        (expected, _), (found, _) = (layer(x, token_ids=token_ids) for layer in (direct, late))
    assert torch.equal(found, expected)


@every_variant
def test_shapes_can_be_followed_on_the_meta_device(variant):
    layer = make(variant, device="meta")
    y, stats = layer(tokens().to("meta"), token_ids=torch.arange(len(tokens())).to("meta"))
    assert y.is_meta and y.shape == tokens().shape and stats.topk_weights_TK.is_meta
    (y.sum() + stats.aux_loss).backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if "experts.w" in name)


@pytest.mark.parametrize("name", ["experts.w_in", "experts.w_out", "experts.b_in", "router.proj.weight"])
def test_state_dict_is_strict_and_names_the_tensor(name):
    layer = make(bias=True)
    missing = {k: v for k, v in layer.state_dict().items() if k != name}
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        make(bias=True).load_state_dict(missing)
    misshapen = dict(layer.state_dict())
    misshapen[name] = misshapen[name][:-1]
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        make(bias=True).load_state_dict(misshapen)
    with pytest.raises(RuntimeError, match="Unexpected key.*experts.extra"):
        make(bias=True).load_state_dict({**layer.state_dict(), "experts.extra": torch.zeros(1)})
    other = make(bias=True, seed=9)
    other.load_state_dict(layer.state_dict())
    x = tokens()
    assert torch.equal(other(x)[0], layer(x)[0])


def test_public_parameter_names_and_shapes():
    options = {"bias": True, "num_shared_experts": 2, "residual": True, "residual_hidden_dim": 3}
    layer = make(bias_update_rate=0.1, **options)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {
        "expert_bias_E": (E,),
        "router.proj.weight": (E, D),
        "experts.w_in": (E, 2, F, D),
        "experts.w_out": (E, D, F),
        "experts.b_in": (E, 2, F),
        "experts.b_out": (E, D),
        "shared_experts.w_in": (2, 2 * F, D),
        "shared_experts.w_out": (D, 2 * F),
        "shared_experts.b_in": (2, 2 * F),
        "shared_experts.b_out": (D,),
        "residual_mlp.w_in": (2, 3, D),
        "residual_mlp.w_out": (D, 3),
        "residual_mlp.b_in": (2, 3),
        "residual_mlp.b_out": (D,),
        "residual_coefficient.weight": (2, D),
        "residual_coefficient.bias": (2,),
    }
    assert make(activation="relu2").experts.w_in.shape == (E, 1, F, D)
    wide = make(num_shared_experts=2, shared_hidden_dim=9)
    assert wide.shared_experts.w_out.shape == (D, 9)


# ---- initialisation


def test_weights_depend_on_seed_name_layer_and_expert_only():
    layer = make(dtype=torch.float32)
    torch.manual_seed(77)
    assert torch.equal(make(dtype=torch.float32).experts.w_in, layer.experts.w_in)
    more = make(dtype=torch.float32, num_experts=E + 3, top_k=1)
    assert torch.equal(more.experts.w_in[:E], layer.experts.w_in), "an expert's weights are its own"
    assert torch.equal(make().experts.w_in.float(), layer.experts.w_in), "in any dtype"
    for change in ({"seed": 1}, {"layer_index": 1}):
        assert_differs(make(**change).experts.w_in, layer.experts.w_in, what=str(change))
    assert_differs(layer.experts.w_in[0], layer.experts.w_in[1], what="experts differ")


def test_no_seed_means_torchs_default_generator():
    torch.manual_seed(3)
    first, second = (make(seed=None).experts.w_in for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(make(seed=None).experts.w_in, first)


def test_standard_deviations():
    layer = MoELayer(dim=64, hidden_dim=256, num_experts=4, top_k=1, seed=0, bias=True)
    assert layer.experts.w_in.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert layer.experts.w_out.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert layer.router.proj.weight.std().item() == pytest.approx(64**-0.5, rel=0.2)
    layer.reset_parameters(seed=1, std=0.02, out_std=0.005)
    assert layer.experts.w_in.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.experts.w_out.std().item() == pytest.approx(0.005, rel=0.02)
    assert layer.experts.b_in.abs().sum() == layer.experts.b_out.abs().sum() == 0


# ---- training


@pytest.mark.parametrize("frozen", ["experts", "router", "x"])
def test_frozen_parts_get_no_gradient_and_do_not_change_the_others(frozen):
    layer, x = make(bias=True), tokens()
    expected = results(layer, x)
    if frozen == "x":
        layer.zero_grad()
        y, stats = layer(x)
        (y.sin().sum() + stats.aux_loss + stats.z_loss).backward()
        ours = {name: p.grad for name, p in layer.named_parameters()}
    else:
        getattr(layer, frozen).requires_grad_(False)
        for p in getattr(layer, frozen).parameters():
            p.grad = None
        ours = results(layer, x)
        assert all(p.grad is None for p in getattr(layer, frozen).parameters())
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("keyed", [True, False])
def test_activation_checkpointing_recomputes_the_same_routing(keyed):
    options = {"router_noise": "gumbel", "input_jitter": 0.2, "routing_group_size": None}
    layer, x = make("random_kept", **options), tokens(24)
    if not keyed:
        layer.reset_parameters()
    other = make(router_noise="gaussian", layer_index=1)  # draws between forward and recomputation
    choices = []
    layer.register_forward_hook(lambda _m, _i, out: choices.append(out[1]))

    def step(wrap):
        torch.manual_seed(4)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y, stats = wrap(layer, leaf)
        y = other(y)[0]
        (y.sin().sum() + stats.aux_loss).backward()
        return [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    plain = step(lambda m, v: m(v))
    with set_checkpoint_early_stop(False):  # so that the hook sees the whole recomputation
        recomputed = step(lambda m, v: checkpoint(m, v, use_reentrant=False))
    assert len(choices) == 3, "the layer ran again in the backward pass"
    assert torch.equal(choices[1].topk_expert_ids_TK, choices[2].topk_expert_ids_TK)
    assert choices[1].num_dropped == choices[2].num_dropped > 0
    for ours, theirs in zip(recomputed, plain, strict=True):
        assert torch.equal(ours, theirs)


# ---- sizes and shapes


@pytest.mark.parametrize("shape", [(D,), (3, D), (2, 3, D), (2, 0, D), (2, 1, 3, D)])
def test_any_leading_shape(shape):
    layer = make()
    x = torch.randn(shape, dtype=torch.float64)
    y, stats = layer(x, token_mask=torch.ones(shape[:-1], dtype=torch.bool))
    assert y.shape == x.shape
    assert stats.topk_expert_ids_TK.shape == (x.numel() // D, 2)
    assert torch.equal(y.reshape(-1, D), layer(x.reshape(-1, D))[0])


def test_non_contiguous_input():
    layer = make()
    x = torch.randn(D, T, dtype=torch.float64).t()
    assert_close_fp64(layer(x)[0], layer(x.contiguous())[0], what="y")


# ---- experts beside the grouped ones


def test_the_backend_is_that_of_all_that_is_around_custom_experts():
    layer = make(experts=lambda e: nn.Linear(D, D, dtype=torch.float64), backend="reference")
    with Operators() as seen:
        layer(tokens().requires_grad_())
    names = {function.name() for function in seen.ran}
    assert not {"expertmesh::tokens_to_rows", "expertmesh::sum_rows"} & names


@pytest.mark.parametrize("as_list", [True, False])
def test_custom_experts_equal_grouped_ones(as_list):
    class Mlp(nn.Module):
        def __init__(self, w_in, w_out):
            super().__init__()
            self.w_in, self.w_out = nn.Parameter(w_in.clone()), nn.Parameter(w_out.clone())

        def forward(self, x):
            gate, up = x @ self.w_in[0].t(), x @ self.w_in[1].t()
            return (nn.functional.silu(gate) * up) @ self.w_out.t()

    grouped = make("random_kept")
    w_in, w_out = grouped.experts.w_in.detach(), grouped.experts.w_out.detach()
    modules = nn.ModuleList(Mlp(w_in[e], w_out[e]) for e in range(E))
    custom = make("random_kept", experts=modules if as_list else lambda e: modules[e])
    x = tokens()
    ours, theirs = results(custom, x), results(grouped, x)
    for name in ("y", "x", "router.proj.weight", "aux_loss"):
        assert_close_fp64(ours[name], theirs[name], what=name, scale=10.0)
    for e, name in itertools.product(range(E), ("w_in", "w_out")):
        expected = theirs[f"experts.{name}"][e]
        assert_close_fp64(ours[f"experts.{e}.{name}"], expected, what=name, scale=10.0)


def test_reset_reaches_modules_of_the_user_reproducibly():
    def build():
        return make(experts=lambda e: nn.Linear(D, D, dtype=torch.float64), router=nn.Linear(D, E).double())

    a, b = build(), build()
    state = torch.random.get_rng_state()
    for layer in (a, b):
        layer.reset_parameters(seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(a.experts[0].weight, a.experts[1].weight)


# ---- the way out and back


def test_a_dispatcher_of_ones_own():
    class Backwards(Dispatched):
        def finish(self, experts):
            return super().finish(experts).flip(0)

    class Reversed(LocalDispatcher):
        def start(self, tokens, way):
            flipped = tokens.x_TD.flip(0), tokens.expert_ids_TK.flip(0), tokens.weights_TK.flip(0)
            return Backwards(*flipped, tokens.max_rows)

    x = tokens()
    assert_close_fp64(make("random_kept", dispatcher=Reversed())(x)[0], make("random_kept")(x)[0], what="y")


def test_statistics_are_a_pytree_and_detached():
    layer = make(z_loss_weight=0.1)
    stats = layer(tokens())[1]
    leaves, spec = pytree.tree_flatten(stats)
    assert len(leaves) == 7 and all(isinstance(v, torch.Tensor) for v in leaves)
    assert isinstance(pytree.tree_unflatten(leaves, spec), RoutingStats)
    doubled = pytree.tree_map(lambda v: 2 * v, stats)
    assert torch.equal(doubled.aux_loss, 2 * stats.aux_loss)
    assert stats.aux_loss.requires_grad and stats.z_loss.requires_grad
    assert not stats.topk_weights_TK.requires_grad
    with pytest.raises(AttributeError):
        stats.aux_loss = None


@pytest.mark.parametrize(
    ("options", "draws"),
    [({}, False), ({"capacity_factor": 1.0}, True), ({"router_noise": "gumbel"}, True)],
)
def test_the_global_generator_is_drawn_from_only_where_something_is_random(options, draws):
    layer = MoELayer(dim=D, hidden_dim=6, num_experts=4, top_k=2, seed=0, **options)
    state = torch.get_rng_state()
    layer(torch.zeros(3, D))
    assert torch.equal(torch.get_rng_state(), state) != draws
