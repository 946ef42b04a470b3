"""`deepspeed.initialize` over the DeepSpeed door on two ranks against one process; by name, what it cannot train."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest
import torch
from tests.oracle.numerics import assert_differs, assert_two_times_rms
from tests.support.ranks import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import expertmesh as em
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.integrations import fairseq, tutel
from expertmesh.integrations.deepspeed import MoE, load_expert_files, save_expert_files
from expertmesh.parallel.experts.dispatcher import spread_experts

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed not installed")
RANKS, D, E, ROWS, STEPS, MICRO, RATE = 2, 8, 4, 16, 3, 2, 0.5
PREFIX = "moe.deepspeed_moe.experts.deepspeed_experts."
CASES = {
    f"ZeRO {zero}, ep {ep}, {dtype}, {kind}, clip {clip}": (zero, ep, dtype, kind, clip)
    for zero in (0, 1, 2)
    for ep in (1, 2)
    for dtype in ("float32", "bfloat16")
    for kind in ("grouped", "modules")
    # with ZeRO 0 the engine clips by the mean of the ranks' norms, which is the norm where they are equal
    for clip in ((0.0,) if zero == 0 and ep == 2 else (0.0, 0.2))
}


class Modules(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def grouped():
    return nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))


class Net(nn.Module):
    """A layer with experts between two others; all experts are chosen, so that rounding chooses none."""

    def __init__(self, ep_size, kind):
        super().__init__()
        torch.manual_seed(0)
        make = Modules if kind == "modules" else grouped
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, 1)
        self.moe = MoE(D, make(), num_experts=E, ep_size=ep_size, k=E, drop_tokens=False)
        with torch.no_grad():  # experts begin equal
            for parameter in self.moe._layer.experts.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    def forward(self, x, y):
        hidden = self.before(x)
        routed, aux_loss, _ = self.moe(hidden)
        return (self.after(hidden + routed).squeeze(-1) - y).square().mean() + 0.1 * aux_loss


def batches(dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS * MICRO):
        x = torch.randn(RANKS, ROWS, D, generator=generator, dtype=torch.float64)
        y = torch.randn(RANKS, ROWS, generator=generator, dtype=torch.float64)
        yield x.to(torch.bfloat16).to(dtype), y.to(torch.bfloat16).to(dtype)


def trained_alone(kind, clip, dtype):
    """Weights of one process that has all tokens; main weights are FP32 or wider."""
    net = Net(1, kind)
    main = [p.detach().to(max(dtype, torch.float32, key=lambda d: d.itemsize)) for p in net.parameters()]  # fmt: skip
    net.to(dtype)
    each = iter(batches(dtype))
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(MICRO):
            x, y = next(each)
            (net(x.flatten(0, 1), y.flatten()) / MICRO).backward()
        grads = [p.grad.to(m.dtype) for p, m in zip(net.parameters(), main, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0
        with torch.no_grad():
            for p, m, g in zip(net.parameters(), main, grads, strict=True):
                p.copy_(m.sub_(RATE * factor * g))
    return {name: value.float() if dtype != torch.float64 else value for name, value in net.state_dict().items()}


def deepspeed_itself():
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(torch.distributed.get_rank())}
    for category in (DeprecationWarning, FutureWarning, UserWarning):  # of its own calls of torch
        warnings.simplefilter("ignore", category)
    import deepspeed

    # not compiled: its lock, left by a rank that was stopped, would stop every later run for good
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_of(model, zero, dtype, clip=0.0):
    deepspeed = deepspeed_itself()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    groups = split({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.SGD(groups, lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def trained_by_the_engine(folder):
    """For each case this rank's state dict, or the error; and whether a checkpoint gave it back."""
    deepspeed_itself()  # before the layers are built
    found, rank = {}, torch.distributed.get_rank()
    for name, (zero, ep, dtype, kind, clip) in CASES.items():
        engine = engine_of(Net(ep, kind), zero, dtype, clip)
        for x, y in batches(getattr(torch, dtype)):
            engine.backward(engine(x[rank], y[rank]))
            engine.step()
        state = {key: value.clone() for key, value in engine.module.state_dict().items()}
        engine.save_checkpoint(folder, tag=name)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        engine.load_checkpoint(folder, tag=name)
        again = engine.module.state_dict()
        same = all(torch.equal(again[key], value) for key, value in state.items())
        found[name] = {key: value.float() for key, value in state.items()}, same
    return found


@pytest.fixture(scope="module")
def ranks():
    """Ranks that nobody else has: DeepSpeed stays initialized in them."""
    pool = RankPool(RANKS)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    found = ranks.run(trained_by_the_engine, str(folder))
    ranks.stop()  # between two functions a pool closes its groups, and DeepSpeed keeps them
    return found, folder


def whole_state(states, ep):
    """One state dict of all experts; each rank's count from 0."""
    whole = {}
    for rank, state in enumerate(states):
        for name, value in state.items():
            if name.startswith(PREFIX):
                index, _, rest = name.removeprefix(PREFIX).partition(".")
                name = f"{PREFIX}{int(index) + rank % ep * (E // ep)}.{rest}"
            assert name not in whole or torch.equal(whole[name], value), name
            whole[name] = value
    return whole


@needs_deepspeed
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(name, trained):
    (results, folder), (_, ep, dtype, kind, clip) = trained, CASES[name]
    ours = whole_state([result[name][0] for result in results], ep)
    oracle = trained_alone(kind, clip, torch.float64)
    same_precision = trained_alone(kind, clip, getattr(torch, dtype))
    first = Net(1, kind).state_dict()
    assert ours.keys() == oracle.keys()
    for key in ours:
        assert_differs(oracle[key], first[key], what=f"{key}, trained")
    of_experts = [key for key in ours if key.startswith(PREFIX)]
    for what, keys in {"experts": of_experts, "others": ours.keys() - set(of_experts)}.items():
        states = ([state[key] for key in sorted(keys)] for state in (ours, same_precision, oracle))
        assert_two_times_rms(*states, what=what, dtype=getattr(torch, dtype))
    assert all(result[name][1] for result in results), "a checkpoint gives other weights back"
    saved = {path.name for path in (Path(folder) / name).glob("layer_0_expert_*")}
    assert saved == {f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in range(E)}
    whole = load_expert_files(folder, name)
    assert whole.keys() == ours.keys()
    assert all(torch.equal(whole[key].float(), values) for key, values in ours.items())
    Net(1, kind).load_state_dict(whole)


def opened_by_the_engine(folder):
    """This rank's state dict after its engine has loaded what one process wrote."""
    deepspeed_itself()
    engine = engine_of(Net(2, "grouped"), 0, "float32")
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder, tag="alone", load_module_only=True)
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@needs_deepspeed
def test_the_engine_opens_what_one_process_wrote(ranks, tmp_path):
    net = Net(1, "grouped")
    save_expert_files(net, tmp_path, "alone")
    found = whole_state(ranks.run(opened_by_the_engine, str(tmp_path)), 2)
    expected = net.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def in_net(layer):
    net = nn.Module()
    net.add_module("layer", layer)
    return net


def parallelized():
    layer = em.MoELayer(dim=D, hidden_dim=16, num_experts=E, top_k=2)
    em.parallelize(layer, em.RunConfig().parallel)
    return in_net(layer)


def spread():
    layer = em.MoELayer(dim=D, hidden_dim=16, num_experts=E, top_k=2, experts=lambda _: Modules())
    spread_experts(layer, World())
    return in_net(layer)


def of_tutel():
    experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 16}
    return in_net(tutel.moe_layer({"type": "top", "k": 2}, D, experts))


def of_fairseq():
    return in_net(fairseq.MOELayer(fairseq.Top2Gate(D, E), nn.ModuleList(grouped() for _ in range(E // RANKS))))


def spread_before(kind="grouped"):
    expert = Modules() if kind == "modules" else grouped()
    layer = MoE(D, expert, num_experts=E, ep_size=2, drop_tokens=False)
    layer.set_deepspeed_parallelism()
    return in_net(layer)


def built_before():
    return in_net(MoE(D, grouped(), num_experts=E, ep_size=2))


SPREAD, CUT = (
    "spread already",
    "Couldn't swap",
)  # torch's, of any module with DTensors that is moved
REFUSED = {
    "parallelize": (parallelized, CUT),
    "spread_experts": (spread, SPREAD),
    "Tutel's door": (of_tutel, SPREAD),
    "fairseq's door": (of_fairseq, SPREAD),
    "DeepSpeed's door, spread by hand": (spread_before, CUT),
    "DeepSpeed's door, modules spread by hand": (lambda: spread_before("modules"), SPREAD),
    "DeepSpeed's door, built before": (built_before, "import deepspeed before"),
}


def in_zero_init():
    deepspeed = deepspeed_itself()
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": RANKS, "zero_optimization": {"stage": 3}}):
        return in_net(MoE(D, grouped(), num_experts=E, ep_size=2))


def stage_3():
    """What this rank's engine says to ZeRO 3, and the door to a context that parts parameters as they are made."""
    deepspeed_itself()
    found = {}
    for name, make in {
        "engine": lambda: engine_of(Net(2, "grouped"), 3, "float32"),
        "Init": in_zero_init,
    }.items():
        try:
            make()
        except (AssertionError, ConfigError) as error:
            found[name] = str(error)
    return found


@needs_deepspeed
def test_zero_3_is_refused_with_the_way_out():
    pool = RankPool(RANKS)
    try:
        for found in pool.run(stage_3):
            assert "choose ZeRO stage 1/2" in found.get("engine", "")
            assert found.get("Init", "").startswith("deepspeed.zero.Init: parts "), found
    finally:
        pool.stop()


def refusals():
    """What the engine says to each model. The first import of DeepSpeed comes after all are built."""
    models = {name: make() for name, (make, _) in REFUSED.items()}
    found = {}
    for name, model in models.items():
        try:
            engine_of(model, 0, "float32")
        except (ConfigError, RuntimeError) as error:
            found[name] = str(error)
    return found


@needs_deepspeed
def test_what_the_engine_would_train_wrongly_is_refused():
    pool = RankPool(RANKS)
    try:
        for found in pool.run(refusals):
            for name, (_, words) in REFUSED.items():
                assert words in found.get(name, ""), name
    finally:
        pool.stop()


def wrapped_experts(wrapper, kind, is_ignored):
    """Error of a wrapper over experts that differ between ranks, or whether it leaves their gradients."""
    torch.manual_seed(0)
    net = spread_before(kind)
    x, own = torch.randn(ROWS, D), list(net.layer._layer.experts.parameters())
    net.forward = lambda x: net.layer(x)[0]
    net(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in own]
    net.zero_grad()
    if is_ignored:
        net._ddp_params_and_buffers_to_ignore = [name for name, _ in net.named_parameters() if "experts" in name]
    try:
        wrapped = DistributedDataParallel(net) if wrapper == "ddp" else torch.distributed.fsdp.fully_shard(net)
        wrapped(x).square().mean().backward()
    except ConfigError as error:
        return str(error)
    return all(torch.equal(p.grad, e) for p, e in zip(own, expected, strict=True))


@pytest.mark.parametrize(
    ("wrapper", "is_ignored", "words"),
    [
        ("ddp", False, "_ddp_params_and_buffers_to_ignore"),
        ("fsdp", False, "ignored_params"),
        ("ddp", True, None),
    ],
)
def test_wrappers_leave_experts_that_differ_alone(wrapper, is_ignored, words, two_ranks):
    for found in two_ranks.run(wrapped_experts, wrapper, "modules", is_ignored):
        assert found is True if words is None else words in str(found), found
