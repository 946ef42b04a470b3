"""Experts in host memory: equal to one process, and never touched by the computation."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import world_of
from tests.support.runs import assert_same_lines, lines_of, train_quietly
from tests.support.spread_case import D, SpreadCase, build, compare_all
from tests.support.two_devices import two_devices
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from expertmesh.comm.group import Pending, RankGroup, Traffic
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import CollectiveError, ConfigError
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.clip import clip_grad_norm_
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.gather import Gather, Layout
from expertmesh.parallel.offload import HostMemory

KEEPS = ("until_step", "until_backward", "regather")


def test_a_layer_equals_one_process(four_ranks):
    plans = [(4, 1, "regather"), (1, 2, "regather"), (2, 2, "until_backward"), (1, 1, "until_step")]
    spreads = [{"route_degree": r, "es_degree": f, "keep": keep, "offload": True} for r, f, keep in plans]
    spreads.append({"num_replicas": 2, "route_degree": 1, "offload": True})
    layer = {"bias": True, "activation": "gelu"}
    four_ranks.run(compare_all, [SpreadCase(layer, spread) for spread in spreads])


def watched(keep, dtype, main, forgetful):
    """Operators that mixed host and device; and whether all that rests is the host's after a step."""

    def forgets(self, tensor, dtype):
        return tensor.detach().to(dtype)

    to_device = forgets if forgetful else HostMemory.to_device
    with patch.object(HostMemory, "to_device", to_device), two_devices() as watch:
        layer = build(SpreadCase(), torch.float32)
        spread_experts(layer, world_of(), route_degree=1, keep=keep, offload=True)
        if main:
            layer.experts.accumulate_main_grads()
        optimizer = torch.optim.AdamW(layer.experts.parameters(), foreach=False)
        for _ in range(2):  # two micro-batches
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                y = layer(torch.ones(3, D))[0]
            y.sum().backward()
        names = ("w_in", "w_out")
        if main:
            for name in names:
                getattr(layer.experts, name).grad = getattr(layer.experts.main_grads, name)
        rests = [getattr(layer.experts, n) for n in names]
        rests += [p.grad for p in rests]
        optimizer.step()
        return watch.mixed, all(watch.is_host(t) for t in rests)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("main", [False, True])
def test_the_computation_touches_copies_only(two_ranks, keep, main):
    """With a stand-in for the second device: no operator, no collective mixes the two."""
    for dtype in (torch.float32, torch.bfloat16):
        for mixed, rests in two_ranks.run(watched, keep, dtype, main, False):
            assert mixed == []
            assert rests


def test_the_stand_in_notices(two_ranks):
    for mixed, _ in two_ranks.run(watched, "regather", torch.float32, False, True):
        assert "expertmesh.moe_mlp.default" in mixed


def test_a_mistake():
    with pytest.raises(ConfigError, match="offload.*conflicts with parallel.zero_stage=1.*use 2 there"):
        ParallelConfig(offload=True, zero_stage=1)


def pinned_later():
    """Memory that a model on the meta device gets later is pinned at the first gather, and then trained."""
    layer = build(SpreadCase(), torch.float64).to("meta")
    spread_experts(layer, world_of(), route_degree=1, offload=True)
    layer.to_empty(device="cpu")
    layer.reset_parameters(seed=1)
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=1.0)
    before = layer.experts.w_in.to_local().data_ptr()
    values = layer.experts.w_in.to_local().detach().clone()
    with patch.object(HostMemory, "pinned", lambda self, tensor: tensor.clone()):
        layer(torch.ones(3, D, dtype=torch.float64))[0].sum().backward()
    pinned = layer.experts.w_in.to_local()
    same = torch.equal(pinned, values) and pinned.data_ptr() != before
    optimizer.step()
    layer(torch.ones(3, D, dtype=torch.float64))
    after = layer.experts.w_in.to_local()
    changed = not torch.equal(after, values) and after.data_ptr() == pinned.data_ptr()
    return same, changed


def test_memory_given_later_is_pinned_once(two_ranks):
    assert two_ranks.run(pinned_later) == [(True, True)] * 2


class Streams(HostMemory):
    """Says which stream is the current one, and what the streams waited for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.current, self.waits = "computation", []

    @contextmanager
    def copying(self):
        self.current, before = "copies", self.current
        yield
        self.current = before

    def joined(self, tensor):
        self.waits.append((self.current, "copies"))
        return tensor

    def wait(self):
        self.waits.append((self.current, "a collective"))


class UnderWay(RankGroup):
    """Two ranks, whose collectives a stand-in for streams waits for."""

    def __init__(self, streams):
        super().__init__(None, ranks=(0, 1), rank=0, name="two", timeout_s=1.0, traffic=Traffic())
        self.streams = streams

    def start(self, *args, **kwargs):
        assert self.streams.current == "copies"
        return Pending(self.streams, CollectiveError)


def test_the_stream_of_the_copies_waits_for_what_sends_them():
    """It owns the memory that is being sent, and the next copy takes it as soon as it is free."""
    streams = Streams()
    shard = torch.ones(2, 1, 3, 4)
    source = SimpleNamespace(layer="a layer", names=["w_in"], shards=lambda: [shard], host=streams)
    Gather(source, Layout(UnderWay(streams), ((0, 1),), 0, 1), torch.float32).wait()
    assert streams.waits == [("copies", "a collective"), ("computation", "copies")]


STEPS = 4
BASE = {
    "model.dim": 16,
    "model.max_seq_len": 16,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe.bias_update_rate": 0.01,
    "data.seq_len": 16,
    "data.max_bytes": 60_000,
    "train.steps": STEPS,
    "optim.warmup_steps": 1,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.tensorboard": False,
    "train.micro_batch_size": 8,
    "train.checkpoint_every": 2,
}


def run_training(folder, name, changes):
    """The lines of metrics.jsonl on the first rank."""
    changes = changes | {
        "train.run_dir": str(folder / name),
        "data.cache_dir": str(folder / "cache"),
    }
    config = RECIPES["gpt-moe-test"]().updated(BASE | changes)
    train_quietly(config)
    leader = not dist.is_initialized() or dist.get_rank() == 0
    return lines_of(folder / name) if leader else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def plain(folder):
    return run_training(folder, "plain", {})


def assert_same(lines, expected):
    assert len(lines) == STEPS
    assert_same_lines(lines, expected, "loss", "grad_norm", "aux_loss")


def test_one_process_offloads_too(folder, plain):
    assert_same(run_training(folder, "one", {"parallel.offload": True}), plain)
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [2, 3])
def test_training_on_ranks(two_ranks, folder, plain, stage):
    """Also from a checkpoint of a run that offloads to one that does not."""
    layout = {"parallel.offload": True, "parallel.zero_stage": stage, "parallel.route_degree": 1}
    part = layout | {"train.steps": 2, "optim.schedule_steps": STEPS}
    two_ranks.run(run_training, folder, f"two-{stage}", part)
    on = {"train.resume": "required", "optim.schedule_steps": STEPS}
    assert_same(run_training(folder, f"two-{stage}", on), plain)
    lines = two_ranks.run(run_training, folder, f"whole-{stage}", layout)[0]
    assert_same(lines, plain)


def test_norms_over_host_and_device():
    """With tensors of a device that need not be there: they have no values, but mixing devices is an error."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(3, device=kind)) for kind in ("cpu", "cuda", "cpu")]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        norm = clip_grad_norm_(parameters, 1.0)
        assert norm.device.type == "cuda"
        assert clip_grad_norm_(parameters[::2], 1.0).device.type == "cpu"
