"""Mistakes on several ranks: one rank says in one line what is wrong, and every rank stops at once."""

import functools
import io
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.support.replicas import assert_said, messages_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from expertmesh import MoELayer
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.options import flag_name
from expertmesh.cli.prog_name import Flags
from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError, PeerError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.apply import parallelize
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Fixed
from expertmesh.parallel.inference import spread_for_inference
from expertmesh.parallel.tensor import Whole
from expertmesh.training.fits_ranks import check_ranks
from expertmesh.training.loop import train

TINY = {
    "train.steps": 1,
    "optim.warmup_steps": 1,
    "train.device": "cpu",
    "data.max_bytes": 60_000,
    "train.tensorboard": False,
}


def errors_of_training(folder, changes, odd=None):
    """The error of each rank; rank 1 alone has the changes `odd`."""
    if odd and dist.get_rank() == 1:
        changes = changes | odd
    places = {"train.run_dir": str(folder / "run"), "data.cache_dir": str(folder / "cache")}
    config = RECIPES["gpt-moe-test"]().updated(TINY | places | changes)
    try:
        train(config, recipe="test", console=Console(file=io.StringIO()))
    except (ConfigError, PeerError) as error:
        return type(error), str(error)
    return None, ""


MISTAKES = [
    (
        {"parallel.dp_replicate_degree": 3},
        "dp_replicate_degree=3 .* nearest: dp_replicate_degree=2",
    ),
    ({"parallel.dp_shard_degree": 3}, "dp_shard_degree=3 .* does not make 2 ranks"),
    ({"parallel.es_degree": 3}, "es_degree=3 on 2 ranks.*use es_degree=2"),
    ({"parallel.es_degree": 2, "model.moe.hidden_dim": 63}, "es_degree=2.*use es_degree=1"),
    (
        {"model.moe.num_experts": (3,), "model.moe.hidden_dim": 63},
        "use dp_replicate_degree=2, or a hidden_dim divisible by 2",
    ),
    ({"parallel.ep_degree": 3}, "ep_degree=3: must divide the 2 parts.*nearest: 2"),
    ({"parallel.ep_degree": 4}, "ep_degree=4: must divide the 2 parts.*nearest: 2"),
    ({"parallel.ep_degree": (2, 3)}, "ep_degree=3: must divide the 2 parts.*nearest: 2"),
    ({"parallel.route_degree": 4}, "route_degree=4: must divide the 2 ranks.*nearest: 2"),
    ({"train.batch_size": 3}, "train.batch_size=3: must divide evenly over the 2 ranks"),
    ({"train.micro_batch_size": 1}, "train.micro_batch_size=1: must divide evenly"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=str)
def test_wrong_degrees_and_sizes(two_ranks, tmp_path, changes, message):
    (kind, text), (other, told) = two_ranks.run(errors_of_training, tmp_path, changes)
    assert kind is ConfigError and other is PeerError
    assert told == f"{text} (rank 0)", "who says it where rank 0 cannot"
    assert re.search(message, text), text
    assert "\n" not in text


@pytest.mark.parametrize("odd", [{"train.seed": 1}, {"optim.lr": 0.5}, {"model.dim": 128}], ids=str)
def test_ranks_with_other_configurations(two_ranks, tmp_path, odd):
    (kind, text), (other, told) = two_ranks.run(errors_of_training, tmp_path, {}, odd)
    assert (kind, other, told) == (ConfigError, PeerError, text)
    assert text.startswith("the configuration: rank 1 has another than rank 0")


def test_a_run_directory_in_use(two_ranks, tmp_path):
    assert two_ranks.run(errors_of_training, tmp_path, {}) == [(None, "")] * 2
    (kind, text), (other, _) = two_ranks.run(errors_of_training, tmp_path, {})
    assert kind is ConfigError and "already holds a run" in text and other is PeerError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dp_replicate_degree", 2),
        ("dp_shard_degree", 2),
        ("tp_degree", 2),
        ("ep_degree", 2),
        ("es_degree", 2),
        ("adaptive", True),
        ("replicated_experts", 1),
        ("all_to_all", "hierarchical"),
        ("expert_order", "experts_inner"),
    ],
)
def test_options_for_several_ranks_on_one_process(tmp_path, name, value):
    config = RECIPES["gpt-moe-test"]().updated({f"parallel.{name}": value, "train.run_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=f"parallel.{name}={value}: there is one rank; start more with torchrun"):
        train(config, recipe="test")


def test_a_file_of_several_ranks_on_one_process_names_both_ways_out(tmp_path):
    given = {"dp_shard_degree": 2, "ep_degree": (2,), "es_degree": 2, "overlap_degree": 2}
    changes = {f"parallel.{name}": value for name, value in given.items()}
    config = RECIPES["gpt-moe-test"]().updated({**changes, "train.run_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError) as caught:
        train(config, recipe="test")
    said = Flags("train").spell(caught.value)
    assert "start more with torchrun --nproc-per-node N -m expertmesh train" in said
    fix = said.partition("to go on with one, give ")[2].replace(",", "").split()
    alone = parse_run_config(["gpt-moe-test", *fix]).config
    assert alone.parallel == RECIPES["gpt-moe-test"]().parallel
    assert fix[::2] == [flag_name(name) for name in changes]


def test_one_gpu_for_all_ranks():
    config = RECIPES["gpt-moe-test"]().updated({"train.device": "cuda:1"})
    ranks = SimpleNamespace(size=2, num_row_parts=2)
    with pytest.raises(ConfigError, match="train.device=cuda:1 on 2 ranks: .* use train.device=cuda"):
        check_ranks(SimpleNamespace(config=config), ranks)


def test_two_names_for_one_thing():
    with pytest.raises(ConfigError, match="route_degree=2: conflicts with ep_degree=2"):
        RECIPES["gpt-moe-test"]().updated({"parallel.ep_degree": 2, "parallel.route_degree": 2})


def mistakes_of_a_layer():
    world = World()

    def layer(**changes):
        options = {"dim": 7, "hidden_dim": 6, "num_experts": 4, "top_k": 2}
        return MoELayer(**options | changes)

    spread, model, other = layer(), nn.Sequential(nn.Linear(7, 7)), nn.Sequential(nn.Linear(7, 7))
    scaled = nn.Sequential(nn.ParameterDict({"temperature": nn.Parameter(torch.ones(()))}))
    unlike = nn.Linear(2, 2, dtype=torch.bfloat16)
    nn.init.constant_(unlike.weight, world.position)
    spread_experts(spread, world, exchanges=partial(Fixed, bound=2))
    parallelize(other, ParallelConfig(), world=world)
    found = messages_of(
        lambda: spread_experts(layer(), world, num_replicas=3),
        lambda: spread_experts(layer(bias=True), world, es_degree=2),
        lambda: spread_experts(layer(), world, order="inner"),
        lambda: spread_experts(layer(), world, keep="always"),
        lambda: spread_experts(layer(), world, nodes=(0, 0, 1, 1)),
        lambda: spread_experts(layer(), world, overlap_degree=0),
        lambda: spread(torch.zeros(2, 7), route_degree=3),
        lambda: spread(torch.zeros(3, 7)),
        lambda: spread_experts(spread, world),
        lambda: parallelize(model, {"ep_degree": 2}, world=world),
        lambda: parallelize(DistributedDataParallel(model), ParallelConfig(), world=world),
        lambda: parallelize(other, ParallelConfig(), world=world),
        lambda: parallelize(scaled, ParallelConfig(), world=world),
        lambda: parallelize(unlike, ParallelConfig(), world=world),
    )
    world.close()
    return found


def test_a_layer(two_ranks):
    for messages in two_ranks.run(mistakes_of_a_layer):
        assert_said(
            messages,
            "num_replicas=3: must divide the 2 ranks",
            r"b_out of shape \(4, 7\) cannot be cut into 2 equal parts along axis 1",
            "order=inner: must be one of slices_inner, experts_inner; choose one",
            "keep=always: must be one of until_step, until_backward, regather; choose one",
            r"nodes=\(0, 0, 1, 1\): must name the node of each of the 2 ranks",
            "overlap_degree=0: must be a whole number of at least 1; use 1",
            "route_degree=3: must divide the 2 ranks",
            "3 tokens on this rank with bound=2; raise the bound of Fixed",
            "the experts of layer 0 are spread already; spread a layer",
            "config is a dict; it must be a ParallelConfig; give",
            "model is wrapped in DistributedDataParallel, which would average",
            "model is a FSDPSequential, spread already; call parallelize once",
            "model: 0.temperature is a parameter without an axis, which cannot be cut",
            "model: its parameters on rank 1 are not those on rank 0; call torch.manual_seed",
        )


def left_by_refusals():
    """What a model of two layers is like after each refusal, of which only the second layer is the reason."""
    world = World()

    def layers(**second):
        options = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2, "seed": 0}
        return nn.ModuleList([MoELayer(**options), MoELayer(**options | second, layer_index=1)])

    def gpt(**changes):
        values = {"model.num_heads": 2, "model.dim": 16, "model.moe.hidden_dim": 8} | changes
        return GPT(RECIPES["gpt-moe-test"]().updated(values).model, seed=0)

    def shared():
        model = gpt()
        model.layers[1].attention_norm.weight = model.layers[0].attention_norm.weight
        return model

    sliced = ParallelConfig(tp_degree=2)
    cases = [
        (layers(num_experts=3), lambda m: parallelize(m, ParallelConfig(es_degree=1), world=world)),
        (layers(hidden_dim=7), lambda m: parallelize(m, ParallelConfig(es_degree=2), world=world)),
        (layers(), lambda m: parallelize(m, ParallelConfig(replicated_experts=5), world=world)),
        (layers(num_experts=2), lambda m: parallelize(m, ParallelConfig(replicated_experts=4), world=world)),
        (layers(experts=lambda _: nn.Linear(8, 8)), lambda m: parallelize(m, ParallelConfig(es_degree=2), world=world)),
        (layers(), lambda m: parallelize(m, sliced, world=world, tensor_plan={"no.such": Whole()})),
        (layers(num_shared_experts=1, shared_hidden_dim=3), lambda m: parallelize(m, sliced, world=world)),
        (layers(), lambda m: parallelize(m, ParallelConfig(), world=world, blocks=[nn.Linear(2, 2)])),
        (layers(num_experts=3, hidden_dim=7), lambda m: spread_for_inference(m, world)),
        (layers(hidden_dim=7), lambda m: spread_for_inference(m, world, es_degree=2)),
        (shared(), lambda m: parallelize_gpt(m, sliced, world=world)),
        (gpt(), lambda m: parallelize_gpt(m, ParallelConfig(replicated_experts=99), world=world)),
    ]  # fmt: skip
    found = []
    for model, call in cases:
        before = state_of(model)
        messages = messages_of(functools.partial(call, model))
        after = state_of(model)
        same = before[1:] == after[1:] and all(map(torch.equal, before[0], after[0]))
        found.append((messages, same))
    world.close()
    return found


def state_of(model):
    attentions = [m for m in model.modules() if hasattr(m, "num_kv_heads")]
    return (
        [tensor.clone() for tensor in model.state_dict().values()],
        [(type(p), p.shape) for p in model.parameters()],
        [(name, type(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()],
        [type(m.dispatcher) for m in model.modules() if isinstance(m, MoELayer)],
        [(m.num_heads, m.num_kv_heads) for m in attentions],
        getattr(model, "shared", None),
    )


def test_a_refusal_leaves_nothing_spread(two_ranks):
    for found in two_ranks.run(left_by_refusals):
        for number, (messages, same) in enumerate(found):
            assert same, (number, messages)
