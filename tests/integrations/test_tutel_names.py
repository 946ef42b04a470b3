"""Every name of Tutel is served under its name, or refused by it with the way out."""

import copy
import importlib
import runpy
import sys

import pytest
import torch
from torch.nn import functional as F

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import moe, net, refused, system

THERE = {
    "tutel": "moe net system system_init jit launcher checkpoint parted ops custom experts gates impls jit_kernels",
    "tutel.moe": "moe_layer fast_cumsum_sub_one fast_dispatcher extract_critical fast_encode fast_decode top_k_routing "
    "get_topk_selection get_reversed_sample_ids",
    "tutel.system": "init_affinity_at_program_beginning init_data_model_parallel cache get_local_session record_time "
    "save "
    "load perform from_url apply_rank_size_from_pattern",
    "tutel.net": "get_world_size get_world_rank create_groups_from_world create_standalone_group barrier "
    "simple_broadcast simple_all_reduce simple_all_to_all simple_split simple_reduce_scatter simple_all_gather "
    "all_to_all all_to_all_single all_gather zero_gather zero_scatter spatial_split reduce_scatter allreduce_forward "
    "allreduce_backward "
    "batch_all_to_all_v batch_all_gather_v TutelDistributedOptimizer",
    "tutel.jit": "create_cuda_kernel",
    "tutel.launcher": "run execl",
    "tutel.checkpoint": "gather scatter",
}
"""Tutel's public names by module."""
EVERY = [(module, name) for module, text in THERE.items() for name in text.split()]


@pytest.mark.parametrize(("module", "name"), EVERY)
def test_every_name_is_served_or_refused(module, name):
    door = importlib.import_module(f"expertmesh.integrations.{module}")
    full = f"{module}.{name}"
    if full in refused.REFUSED:
        with pytest.raises(ConfigError, match=f"^{full} has no counterpart here; [^\n]+$"):
            getattr(door, name)
    elif module in ("tutel.launcher", "tutel.checkpoint"):
        assert callable(importlib.import_module(f"expertmesh.integrations.{full}").main)
    else:
        assert getattr(door, name) is not None


def test_the_table_refuses_only_what_is_there():
    assert refused.REFUSED.keys() <= {f"{module}.{name}" for module, name in EVERY}
    with pytest.raises(AttributeError, match="no attribute 'all_to_one'"):
        net.all_to_one  # noqa: B018


@pytest.mark.parametrize("name", refused.ENVIRONMENT)
def test_switches_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"^{name}=1: [^\n]+; unset it"):
        layer_of()


SWITCHES = (
    "CAP_FACTOR BATCH_PRIO SKIP_MOE SKIP_EXPERT SKIP_A2A TUTEL_GLOBAL_TIMEOUT_SEC FAST_CUMSUM LOCAL_SIZE NUMA_TYPE"
)
SWITCHES += " OP_LOADER TUTEL_ALLTOALL_ALGO TUTEL_CUDA_SANDBOX LOCAL_RANK LOCAL_WORLD_SIZE"
"""Variables of the environment that Tutel reads in its layer, collectives, launcher and kernels."""


def test_every_switch_is_honoured_named_or_without_a_value_to_change():
    kinds = [*refused.HONOURED, *refused.ENVIRONMENT, *refused.SPEED]
    assert sorted(kinds) == sorted(SWITCHES.split())


def test_switches_that_are_honoured(monkeypatch):
    x = torch.randn(12, 8)
    gate = {"type": "top", "k": 1}
    plain = layer_of(gate)(x)
    monkeypatch.setenv("CAP_FACTOR", "0.5")
    short = layer_of(gate)(x)
    monkeypatch.setenv("BATCH_PRIO", "1")
    first = layer_of(gate)(x)
    rows = [int(y.any(1).sum()) for y in (plain, short, first)]
    assert rows[0] > rows[1] == rows[2] and not torch.equal(short, first)


def test_the_launcher_names_torchrun(monkeypatch):
    monkeypatch.delitem(sys.modules, "expertmesh.integrations.tutel.launcher.run", raising=False)
    with pytest.raises(SystemExit, match="^error: [^\n]*torchrun"):
        runpy.run_module("expertmesh.integrations.tutel.launcher.run", run_name="__main__")


def layer_of(gate=None, experts=None, **options):
    gate = gate or {"type": "top", "k": 2, "capacity_factor": 0}
    experts = experts or {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 6}
    return moe.moe_layer(gate, 8, experts, seeds=(1, 2, 3), **options)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0, 1.0, 0.5, -0.5])
@pytest.mark.parametrize("after", [True, False])
def test_the_parts_compute_what_a_loop_computes(k, factor, after):
    torch.manual_seed(0)
    scores = F.softmax(torch.randn(12, 4, dtype=torch.float64), 1).requires_grad_()
    x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    routed, loss = moe.top_k_routing(scores, k, capacity_factor=factor)
    rows = moe.fast_encode(x, routed, after)
    y = moe.fast_decode(torch.tanh(rows), routed, after)
    weights, ids = scores.topk(k, 1)
    weights = weights / weights.sum(1, keepdim=True) if k > 1 else weights
    fullest = int(torch.bincount(ids.reshape(-1)).max())
    bound = k * int(abs(factor) * 3)
    capacity = fullest if factor == 0 else bound if factor > 0 else min(bound, fullest)
    expected, used = [torch.zeros(8, dtype=torch.float64) for _ in range(12)], [0] * 4
    for j in range(k):
        for t in range(12):
            e, w = int(ids[t, j]), weights[t, j]
            if used[e] < capacity:
                out = w * torch.tanh(x[t]) if after else torch.tanh(w * x[t])
                expected[t] = expected[t] + out
            used[e] += 1
    expected = torch.stack(expected)
    share = torch.bincount(ids[:, 0], minlength=4) / 12
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(loss, 4 * (scores.mean(0) * share).sum())
    assert rows.shape == (4, capacity, 8) and routed[-1].tolist() == used
    ours = torch.autograd.grad(y.square().sum(), (x, scores), retain_graph=True)
    theirs = torch.autograd.grad(expected.square().sum(), (x, scores))
    torch.testing.assert_close(ours, theirs)


def test_important_tokens_come_first():
    scores = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.8, 0.2]])
    routed, _ = moe.extract_critical(scores, 1, batch_prioritized_routing=True)
    assert routed[2][0].tolist() == [2, 0, 1]


def test_weights_are_those_of_the_seeds():
    state = layer_of().state_dict()
    torch.manual_seed(2)
    for e in range(4):
        for name, inputs in (("fc1", 8), ("fc2", 6)):
            most = inputs**-0.5
            drawn = torch.rand(6, 8) * (most + most) - most
            assert torch.equal(state[f"experts.batched_{name}_w"][e], drawn)
            assert not state[f"experts.batched_{name}_bias"][e].any()
    torch.manual_seed(1)
    assert torch.equal(state["gates.0.wg.weight"], torch.nn.Linear(8, 4, bias=False).weight)
    layer_of()
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(3)))


def test_weights_of_gated_experts_and_cosine_gates_are_those_of_the_seeds():
    experts = {"type": "llama_ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 6}
    state = layer_of({"type": "cosine_top", "proj_dim": 7}, experts).state_dict()
    torch.manual_seed(2)
    for n in (1, 2, 3):
        assert torch.equal(state[f"experts.W_fc{n}"], torch.empty(4 * 6 * 8).normal_(0, 0.01))
    torch.manual_seed(1)
    projector = torch.nn.Linear(8, 7)
    for name, values in projector.state_dict().items():
        assert torch.equal(state[f"gates.0.cosine_projector.{name}"], values)


class OwnGate(torch.nn.Module):
    """A gate in Tutel's protocol."""

    def __init__(self, model_dim, num_global_experts, top_k):
        super().__init__()
        self.top_k, self.my_wg = top_k, torch.nn.Linear(model_dim, num_global_experts, bias=False)

    def forward(self, x):
        return self.my_wg(x)


class OwnExpert(torch.nn.Module):
    """Experts in Tutel's protocol; their rows keep the token's dimensions."""

    def __init__(self, model_dim, local_experts, sharded_count, factor):
        super().__init__()
        assert (model_dim, sharded_count) == (8, 1)
        self.w, self.factor = torch.nn.Parameter(torch.randn(local_experts, 1, 1)), factor

    def forward(self, x, ctx):
        assert ctx.sharded_count == 1
        return self.factor * x * self.w.view(-1, *[1] * (x.dim() - 1))


OWN = {"type": "custom", "module": OwnExpert, "num_experts_per_device": 3, "factor": 2.0}
FFN = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 6}
LLAMA = {"type": "llama_ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 6}
FORMS = {
    "gate": ({"type": "custom", "module": OwnGate, "top_k": 2}, None, {}),
    "experts": (None, OWN, {}),
    "both": ({"type": "custom", "module": OwnGate, "top_k": 1}, OWN, {}),
    "activation": (None, FFN | {"activation_fn": torch.sigmoid}, {}),
    "activation with self": (
        None,
        FFN | {"activation_fn_with_self": lambda h, me: h * me.output_dim},
        {},
    ),
    "output_dim": (None, FFN | {"output_dim": 3, "has_fc1_bias": False}, {}),
    "is_postscore": (None, FFN, {"is_postscore": False}),
    "gated experts": (None, LLAMA | {"activation_fn": torch.sigmoid}, {}),
    "gated experts, weights before": (None, LLAMA, {"is_postscore": False}),
    "two gates": ([{"type": "top", "k": 1}, {"type": "cosine_top", "k": 2}], FFN, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_ones_own(form):
    gate, experts, options = FORMS[form]
    layer, other = layer_of(gate, experts, **options), layer_of(gate, experts, **options)
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 5, layer._layer.experts.output_dim if form == "output_dim" else 8)
    (y.square().sum() + y.l_aux).backward()
    assert all(p.grad is not None for p in layer.get_parameter_iterator("local_experts") for p in p[1:])
    assert layer.dispatch_count.sum() == 10 * layer._layer.gates[0].top_k
    state = layer.state_dict()
    assert {n.split(".")[0] for n in state} == {"gates", "experts", "_num_global_experts"}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(x), y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_tokens", "factor"), [(0, 0), (0, 1.0), (2, 0.1)])
def test_experts_without_a_row(form, num_tokens, factor):
    gate, experts, options = FORMS[form]
    layer = layer_of(gate, experts, **options)
    x = torch.randn(num_tokens, 8, requires_grad=True)
    y = layer(x, capacity_factor=factor)
    assert y.shape[0] == num_tokens and not y.any() and y.l_aux.isfinite()
    (y.sum() + y.l_aux).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gshard", [True, False])
@pytest.mark.parametrize("experts", [FFN, LLAMA])
@pytest.mark.parametrize("kind", ["top", "cosine_top"])
@pytest.mark.parametrize(("factor", "overlap"), [(0, 1), (0.7, 1), (0.7, 2), (-0.6, 3)])
def test_a_form_of_ones_own_computes_what_grouped_experts_compute(gshard, experts, kind, factor, overlap):
    gate = {"type": kind, "k": 2, "gate_noise": 1.0, "capacity_factor": factor}
    options = {"is_gshard_loss": gshard, "a2a_ffn_overlap_degree": overlap}
    grouped = layer_of(gate, experts, **options).eval()
    padded = layer_of([gate, gate], experts, **options).eval()
    padded.load_state_dict(padded.state_dict() | grouped.state_dict())
    assert type(grouped._layer) is not type(padded._layer)
    x = torch.randn(11, 8)
    torch.testing.assert_close(grouped(x), padded(x))
    torch.testing.assert_close(grouped(x).l_aux, padded(x).l_aux)


def test_an_activation_may_read_what_is_defined_later():
    layer = layer_of(experts=FFN | {"activation_fn": lambda h: later(torch.relu(h))})
    dropout = torch.nn.Module()
    other = layer_of(experts=FFN | {"activation_fn": lambda h: dropout.later(torch.relu(h))})
    later = dropout.later = torch.nn.Dropout(0.5)
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    assert torch.equal(other(x), y)
    assert not torch.equal(layer.eval()(x), y)


def test_an_activation_with_self_sees_the_experts_that_it_is_called_for():
    layer = layer_of(experts=FFN | {"activation_fn_with_self": lambda h, me: h * me.scale})
    other = copy.deepcopy(layer)
    layer._layer.experts.scale, other._layer.experts.scale = 1.0, 2.0
    x = torch.randn(6, 8)
    assert not torch.equal(other(x), layer(x))


def test_gates_take_turns_and_tokens_have_dimensions():
    layer = layer_of([{"type": "top", "k": 1}, {"type": "top", "k": 2}], OWN)
    x = torch.randn(5, 2, 4)
    first, second = (layer(x, gate_index=g, reserve_dims=2) for g in (0, 1))
    assert first.shape == second.shape == x.shape and not torch.equal(first, second)
    with pytest.raises(ConfigError, match="gate_index=2"):
        layer(x, gate_index=2, reserve_dims=2)
    with pytest.raises(ConfigError, match="gate_type=None: must be a dictionary"):
        moe.moe_layer([], 8, FFN)


def test_k_above_the_number_of_experts_is_all_of_them():
    layer = layer_of({"type": "top", "k": 9})
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), layer(x, top_k=8))
    assert layer.dispatch_count.tolist() == [5] * 4
    assert moe.moe_layer.global_expert_count(2) == 2
    assert moe.moe_layer.global_expert_count(0.999) == 1


def test_sessions_and_files(tmp_path, caplog, monkeypatch):
    session = system.init_data_model_parallel(backend="gloo")
    assert (session.global_rank, session.global_size, session.local_device.type) == (0, 1, "cpu")
    assert system.get_local_session() is session and system.record_time() > 0
    name = system.apply_rank_size_from_pattern(str(tmp_path / "a/{rank}-{size}"), rank=1, size=2)
    assert name == str(tmp_path / "a/1-2") and (tmp_path / "a").is_dir()
    system.apply_rank_size_from_pattern("x", 0, 1)
    assert "no {rank}" in caplog.text
    x = torch.randn(3)
    system.save(x, str(tmp_path / "x.npy"))
    assert torch.equal(system.load(str(tmp_path / "x.npy")), x)
    with pytest.raises(ConfigError, match="backend=mpi"):
        system.init_data_model_parallel(backend="mpi")
    with pytest.raises(ConfigError, match="group_count=2: must part 1 ranks"):
        net.create_groups_from_world(2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2: [^\n]+torchrun"):
        system.init_data_model_parallel(backend="gloo")
