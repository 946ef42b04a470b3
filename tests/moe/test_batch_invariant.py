"""batch_invariant: in evaluation a token's result is the same to the bit whatever batch it sits in."""

import pytest
import torch
from tests.oracle import numerics
from torch import nn

from expertmesh import ConfigError, MoELayer, Routing
from expertmesh.config.moe import MoEConfig
from expertmesh.models.gpt.config import ModelConfig

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VARIANTS = {
    "plain": {},
    "sigmoid": {"score_function": "sigmoid", "bias_update_rate": 0.1, "top_k": 5},
    "after_topk": {"score_function": "softmax_after_topk", "activation": "geglu", "bias": True},
    "groups": {"num_expert_groups": 2, "activation": "relu2", "normalize_weights": "kept"},
    "cosine": {"router": "cosine", "cosine_dim": 19, "logit_temperature": 0.7},
    "hash": {"router": "hash", "activation": "gelu", "bias": True},
    "residual": {"residual": True, "num_shared_experts": 1, "activation": "silu", "bias": True},
}


def make_layer(dtype, *, dim=37, hidden_dim=53, **options):
    options = {"num_experts": 6, "top_k": 2, "seed": 0, "batch_invariant": True} | options
    layer = MoELayer(dim=dim, hidden_dim=hidden_dim, dtype=dtype, **options).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("b_in", "b_out", "bias")):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return layer


def run(layer, x, ids, **call):
    with torch.no_grad():
        y, stats = layer(x, token_ids=ids, **call)
    return y, stats.topk_expert_ids_TK, stats.topk_weights_TK


def assert_same(found, expected, where):
    for name, one, other in zip(("y", "ids", "weights"), found, expected, strict=True):
        assert torch.equal(one, other[where]), f"{name} depends on the batch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_gets_the_same_bits_in_every_batch(variant, dtype):
    layer = make_layer(dtype, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(3)
    T = 75
    x, ids = torch.randn(T, 37, generator=generator).to(dtype), torch.arange(T) % 11
    whole = run(layer, x, ids)
    for t in (0, 1, 16, 33, T - 1):
        assert_same(run(layer, x[t : t + 1], ids[t : t + 1]), whole, slice(t, t + 1))
    for sizes in ((5, 70), (1, 33, 41), (16, 59), (17, 29, 29)):
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            assert_same(run(layer, x[rows], ids[rows]), whole, rows)
            start += size
    order = torch.randperm(T, generator=generator)
    assert_same(run(layer, x[order], ids[order]), whole, order)
    crowd = torch.cat([x[7:8].expand(40, -1), x[:9]])
    crowd_ids = torch.cat([ids[7:8].expand(40), ids[:9]])
    where = torch.cat([torch.full((40,), 7), torch.arange(9)])
    assert_same(run(layer, crowd, crowd_ids), whole, where)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_neighbours_and_other_shapes_change_nothing(dtype):
    layer = make_layer(dtype, **VARIANTS["residual"])
    x, ids = torch.randn(24, 37).to(dtype), torch.arange(24)
    whole = run(layer, x, ids)[0]
    mask = torch.arange(24) % 3 != 1
    poisoned = x.masked_fill(~mask[:, None], float("nan"))
    hidden = run(layer, poisoned, ids, token_mask=mask)[0]
    assert torch.equal(hidden[mask], whole[mask])
    assert not hidden[~mask].any()
    assert torch.equal(run(layer, x.view(4, 6, 37), ids.view(4, 6))[0].view(24, 37), whole)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rows_on_several_threads(dtype, threads):
    """Wide enough that products and element-wise passes are divided among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer = make_layer(dtype, dim=144, hidden_dim=2100, num_experts=1, top_k=1)
        x, ids = torch.randn(20, 144).to(dtype), torch.arange(20)
        whole = run(layer, x, ids)
        for rows in (slice(0, 1), slice(15, 20)):
            assert_same(run(layer, x[rows], ids[rows]), whole, rows)
    finally:
        torch.set_num_threads(before)


def test_replayed_choices_and_top_k_keep_it():
    layer = make_layer(torch.float32, score_function="sigmoid")
    x, ids = torch.randn(40, 37), torch.arange(40)
    routing = torch.stack([torch.randperm(6)[:3] for _ in range(40)])
    whole = run(layer, x, ids, routing=Routing(routing))
    assert_same(run(layer, x[9:12], ids[9:12], routing=Routing(routing[9:12])), whole, slice(9, 12))
    whole = run(layer, x, ids, top_k=5)
    assert_same(run(layer, x[3:4], ids[3:4], top_k=5), whole, slice(3, 4))


def test_autocast_keeps_it():
    layer = make_layer(torch.float32, **VARIANTS["residual"])
    x, ids = torch.randn(40, 37), torch.arange(40)
    with torch.autocast("cpu", torch.bfloat16):
        whole = run(layer, x, ids)
        assert_same(run(layer, x[5:6], ids[5:6]), whole, slice(5, 6))


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_same_function_with_the_same_gradients(variant):
    """FP64: the mode and the default agree to rounding, in training to the bit because the mode is off there."""
    mine = make_layer(torch.float64, **VARIANTS[variant])
    plain = make_layer(torch.float64, **VARIANTS[variant], batch_invariant=False)
    ids = torch.arange(20)
    for training in (False, True):
        results = []
        for layer in (mine.train(training), plain.train(training)):
            x = torch.randn(20, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            y, _ = layer(x, token_ids=ids)
            parameters = [p for p in layer.parameters() if p.requires_grad]
            loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
            grads = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
            results.append([y, *(g for g in grads if g is not None)])
        assert len(results[0]) == len(results[1]) > 2
        for ours, theirs in zip(*results, strict=True):
            if training:
                assert torch.equal(ours, theirs)
            else:
                numerics.assert_close_fp64(ours, theirs.detach(), what=variant)


REFUSED = [
    {"eval_capacity_factor": 1.5},
    {"max_capacity_factor": 2.0},
    {"router": "expert_choice"},
    {"router": nn.Linear(37, 6)},
    {"experts": lambda e: nn.Linear(37, 37)},
    {"backend": "reference"},
    {"batch_invariant": "yes"},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda o: next(iter(o)))
def test_what_it_cannot_hold_for_is_refused(options):
    with pytest.raises(ConfigError, match="batch_invariant"):
        make_layer(torch.float32, **options)


def test_capacity_is_refused_where_it_would_count():
    layer = make_layer(torch.float32, capacity_factor=1.0, eval_capacity_factor=float("inf"))
    x = torch.randn(8, 37)
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.0"):
        layer(x, capacity_factor=1.0)
    layer(x, capacity_factor=float("inf"))
    layer.train()(x, capacity_factor=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eval_capacity_factor", 1.0),
        ("max_capacity_factor", 1.0),
        ("router", "expert_choice"),
        ("backend", "reference"),
    ],
)
def test_the_configuration_refuses_the_same(field, value):
    with pytest.raises(ConfigError, match=f"{field}.*batch_invariant"):
        MoEConfig(batch_invariant=True, **{field: value})
    with pytest.raises(ConfigError, match=f"{field}.*batch_invariant"):
        ModelConfig(batch_invariant=True, moe=MoEConfig(**{field: value}))


def test_it_compiles_into_one_graph():
    layer = make_layer(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 37)
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], layer(x)[0])


def test_main_gradients_are_refused_where_a_backward_could_miss_them():
    layer = make_layer(torch.float32)
    layer.experts.accumulate_main_grads()
    x = torch.randn(4, 37)
    with pytest.raises(ConfigError, match="main gradients"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.train()(x)
