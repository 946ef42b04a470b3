"""Ranks that share sequences: the trainer's steps on a GPT equal those of one process, and what users give of their
own."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, assert_two_times, relative_error
from tests.support.ranks import world_of
from tests.support.replicas import (
    assert_said,
    batches,
    build_gpt,
    dense_or_moe,
    messages_of,
    trainer_steps,
    whole,
)
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from expertmesh import MoELayer
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.parallelize import check_degrees, parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.task import GPTTask
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.apply import parallelize
from expertmesh.parallel.clip import clip_grad_norm_
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.tensor import Sliced, Whole, tensor_group
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.step import accumulate_gradients

B, S, STEPS = 8, 16, 2

# Noise and random dropping are on; a routing group is a quarter of a sequence, which one of four ranks has whole.
MODEL = {
    "model.vocab_size": 300,
    "model.max_seq_len": S,
    "model.dim": 16,
    "model.num_heads": 4,
    "model.qk_norm": True,
    "model.ffn_hidden_dim": 24,
    "model.moe_every": 2,
    "model.moe.num_experts": (8,),
    "model.moe.hidden_dim": 8,
    "model.moe.bias": True,
    "model.moe.num_shared_experts": 1,
    "model.moe.residual": True,
    "model.moe.router_noise": "gumbel",
    "model.moe.input_jitter": 0.1,
    "model.moe.capacity_factor": 1.0,
    "model.moe.min_capacity": 1,
    "model.moe.routing_group_size": 4,
    "model.moe.z_loss_weight": 0.1,
    "data.seq_len": S,
    "train.batch_size": B,
    "train.dtype": "float64",
    "train.device": "cpu",
    "optim.lr": 1e-2,
    "optim.grad_clip": 0.1,
}


@dataclass(frozen=True)
class Case:
    """Changes of the model's configuration, which one process knows too, and of the layout's."""

    layout: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)

    def config(self) -> GPTRunConfig:
        """Of all ranks."""
        layout = {f"parallel.{name}": value for name, value in self.layout.items()}
        return RECIPES["gpt-moe-test"]().updated(dense_or_moe(MODEL, self.model) | layout)


def train_steps(config, ranks):
    """What the trainer's steps give, by name; every tensor whole."""
    found = {}
    for step, (model, _, result) in enumerate(trainer_steps(config, ranks, STEPS)):
        numbers = (result.loss, result.aux_loss, result.z_loss, result.grad_norm)
        found[f"losses of step {step}"] = torch.tensor(numbers, dtype=torch.float64)
        load = result.load
        found[f"load of step {step}"] = torch.tensor((load.load_imbalance, load.dropped_fraction))
        if step == 0:
            found |= {f"gradient of {n}": whole(p.grad) for n, p in model.named_parameters()}
    found |= {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
    return found


def team_of(config):
    stage = config.parallel.zero_stage
    return Ranks(world_of(), tp_degree=config.parallel.tp_degree, reduces_once=stage == 1)


def steps_of(case):
    """This rank's steps."""
    return train_steps(case.config(), team_of(case.config()))


def assert_equal(pool, case):
    one_rank = Case({}, case.model).config()
    theirs = train_steps(one_rank, Ranks())
    dropped = theirs["load of step 0"][1]
    assert (dropped > 0) == (one_rank.model.moe.capacity_factor is not None)
    for ours in pool.run(steps_of, case):
        assert ours.keys() == theirs.keys()
        for what, value in ours.items():
            error = relative_error(value, theirs[what])
            assert error <= FP64_RELATIVE, f"{what} is off by {error:.1e}"


def exhaustive(case):
    """A case that not every run of the tests tries; smaller ones have its parts."""
    return pytest.param(case, marks=pytest.mark.exhaustive)


DROPLESS = {
    "model.moe.capacity_factor": None,
    "model.moe.min_capacity": 4,
    "model.moe.routing_group_size": None,
}
GROUPED_QUERY = {"model.num_kv_heads": 2, "model.tie_embeddings": True}
ODD = {"model.dim": 15, "model.head_dim": 6, "model.vocab_size": 301}
# Of groups that lie on several ranks
KEPT = {"model.moe.drop_policy": "priority", "model.moe.normalize_weights": "kept"}
LOAD = {"model.moe.balance_loss": "importance_load", "model.moe.router_noise": "gaussian"}
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
LATENT = {f"model.latent.{name}": size for name, size in LATENT.items()} | {"model.qk_norm": False}
OSS = {"out_bias": True, "qkv_bias": True, "sinks": True, "sliding_window": 5, "qk_norm": False}
OSS |= {"full_attention_every": 2, "activation": "clamped_swiglu", "moe.router_bias": True}
OSS = {f"model.{name}": value for name, value in OSS.items()}
TWO = [
    Case({"tp_degree": 2}, OSS),
    Case({"tp_degree": 2}, LATENT | {"model.latent.v_head_dim": 6}),
    Case({"tp_degree": 2}, GROUPED_QUERY),
    Case({"tp_degree": 2, "route_degree": 1, "zero_stage": 1}, {"train.micro_batch_size": 2}),
    Case({"tp_degree": 2, "zero_stage": 2}, DROPLESS | ODD),
    Case({"tp_degree": 2}, {"train.activation_checkpointing": True, "model.tie_embeddings": False}),
    Case({"tp_degree": 2, "offload": True}),
    Case({"tp_degree": 2}, {"model.moe.routing_group_size": None}),
    Case({"tp_degree": 2}, {"model.moe.routing_group_size": 12} | KEPT),
    Case({"tp_degree": 2}, {"model.moe.routing_group_size": 2 * S} | LOAD),
]
FOUR = [
    exhaustive(Case({"tp_degree": 2, "zero_stage": 1}, {"train.micro_batch_size": 2})),
    Case({"tp_degree": 2, "route_degree": 2, "es_degree": 2, "zero_stage": 2}, GROUPED_QUERY),
    Case({"tp_degree": 2, "dp_replicate_degree": 2}, {"model.moe.balance_loss_scope": "global"}),
    Case({"tp_degree": 2}, {"model.moe.routing_group_size": S}),
    Case({"tp_degree": 4, "expert_order": "experts_inner", "es_degree": 2}),
    Case({"tp_degree": 2, "route_degree": 1}, ODD | {"train.activation_checkpointing": True}),
]


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(two_ranks, case):
    assert_equal(two_ranks, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(four_ranks, case):
    assert_equal(four_ranks, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, {"zero_stage": 2, "route_degree": 2}], ids=str)
def test_eight_ranks(eight_ranks, changes):
    layout = {"tp_degree": 2, "dp_shard_degree": 2, "dp_replicate_degree": 2}
    assert_equal(eight_ranks, Case(layout | changes))


def moved(layout):
    """Bytes that this rank sent of its tokens, and what they should be if each token is sent by one rank alone."""
    config = Case(layout, DROPLESS).config()
    model = build_gpt(config).eval()
    parallelize_gpt(model, config.parallel, world=world_of())
    ids_BS, _ = next(batches(config, 1))
    rows = team_of(config).rows(0, B)
    with torch.no_grad(), world_of().traffic.logged() as log:
        stats = model(ids_BS[rows]).stats[0]
    ids_TK = stats.topk_expert_ids_TK
    dispatcher = model.layers[1].moe.dispatcher
    route = dispatcher.exchange().route
    mine = route.split.block(world_of().position)[0]
    copies = sum(len({e // route.num_local for e in row} - {mine}) for row in ids_TK.tolist())
    expected = 8 * copies * (config.model.dim + 2 * ids_TK.shape[1])
    sent = [t.num_bytes for t in log.transfers if t.where == "layer 1, dispatch"]
    return sum(sent), expected, ids_TK


@pytest.mark.parametrize("layout", [{"tp_degree": 2}, {"tp_degree": 4}], ids=str)
def test_each_token_is_dispatched_by_one_rank(four_ranks, layout):
    found = four_ranks.run(moved, layout)
    assert [sent for sent, _, _ in found] == [expected for _, expected, _ in found]
    config = Case({}, DROPLESS).config()
    ids_BS, _ = next(batches(config, 1))
    whole_TK = build_gpt(config).eval()(ids_BS).stats[0].topk_expert_ids_TK.view(B, S, -1)
    tp, parts = layout["tp_degree"], [ids_TK for _, _, ids_TK in found]
    own = [part.view(B * tp // 4, S // tp, -1) for part in parts]
    rows = [torch.cat(own[first : first + tp], 1) for first in range(0, 4, tp)]
    assert torch.equal(torch.cat(rows), whole_TK)


def precision_of(dtype, layout):
    """Loss and gradients of a dense model in a precision, on all ranks and on one, and in FP64."""
    dense: dict[str, Any] = {"model.moe.num_experts": ()}
    # Logits so large that the faster products of matrices are worth their way in.
    dense |= {"model.vocab_size": 8192}
    found = []
    for kind, ranks in (
        (dtype, team_of(Case(layout).config())),
        (dtype, Ranks()),
        ("float64", Ranks()),
    ):
        config = Case(layout, dense | {"train.dtype": kind}).config()
        model, precision = build_gpt(config), resolve_precision(config.train)
        if ranks.world is not None:
            parallelize_gpt(model, config.parallel, world=world_of())
        sums, *_ = accumulate_gradients(
            GPTTask(config),
            model,
            next(batches(config, 1)),
            step=0,
            micro_batch_size=B,
            scaler=precision.scaler(),
            precision=precision,
            ranks=ranks,
        )
        gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
        found.append({"loss": sums[0]} | gradients)
    return found


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float32", {}), ("float32", {"tp_degree": 2}), ("bfloat16", {"tp_degree": 4})],
    ids=str,
)
def test_other_precisions(four_ranks, dtype, layout):
    for ours, plain, oracle in four_ranks.run(precision_of, dtype, layout):
        for name, value in oracle.items():
            assert_two_times(ours[name], plain[name], value, what=name)


class Mixer(nn.Module):
    """Running sums of F channels over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 12)
        self.out = nn.Linear(12, 8)

    def forward(self, x_BSD):
        """(B, S, D) -> (B, S, D)."""
        return self.out(self.into(x_BSD).cumsum(1).tanh())


class Gain(nn.Module):
    """Reads the parameters of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        """Like x."""
        return x * self.norm.weight + self.norm.bias


def expert(index):
    """One module of a user's."""
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))


class Own(nn.Module):
    """A model that nothing here knows: parameters in many places."""

    def __init__(self, experts=None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.norm, self.gain, self.mixer = nn.LayerNorm(8), Gain(), Mixer()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.moe = MoELayer(
            dim=8,
            hidden_dim=8,
            num_experts=4,
            top_k=2,
            num_shared_experts=1,
            bias=True,
            router_noise="gumbel",
            experts=experts,
            seed=1,
        )

    def forward(self, x_BSD, index_T):
        """The model's output, and the losses of its routers."""
        h = x_BSD + self.mixer(self.norm(x_BSD) * self.scale)
        h = self.gain(h) + self.down(torch.relu(self.up(h)))
        y, stats = self.moe(h, token_index=index_T)
        return h + y, stats.aux_loss + stats.z_loss


def own_model(tp, custom):
    """Relative errors of a user's model, whose experts may be modules of their own, of which a rank keeps some."""
    n = world_of().size
    torch.set_default_dtype(torch.float64)
    try:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Own(expert if custom else None))
        x = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
    finally:
        torch.set_default_dtype(torch.float32)
    index = torch.arange(32).view(4, 8)
    one, spread = models
    for model in models:
        key_noise(model, seed=1, step=2)
    y, extra = one(x, index)
    (y.square().mean() + extra).backward()
    group = tensor_group(world_of(), tp)
    cut = {"into.weight": 0, "into.bias": 0, "out.weight": 1}
    plan = {
        "mix*": Sliced(group, cut, once=frozenset({"out.bias"}), dim=1, where="mixer"),
        "gain": Whole(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize(
        spread,
        ParallelConfig(tp_degree=tp),
        world=world_of(),
        blocks=[spread.mixer],
        tensor_plan=plan,
    )

    def own(t):
        rows = t.chunk(n // tp)[world_of().position // tp]
        return rows.chunk(tp, 1)[world_of().position % tp]

    z, extra = spread(own(x), own(index))
    (z.square().sum() / y.numel() + extra / n).backward()
    errors = {"y": relative_error(z, own(y))}
    gradients = {name: p.grad for name, p in one.named_parameters()}
    for name, parameter in spread.named_parameters():
        errors[name] = relative_error(whole(parameter.grad), gradients[name])
    norm = nn.utils.clip_grad_norm_(one.parameters(), 1.0)
    errors["norm"] = relative_error(clip_grad_norm_(spread.parameters(), 1.0), norm)
    return errors


@pytest.mark.parametrize(("tp", "custom"), [(2, False), (4, False), (2, True)])
def test_a_model_of_ones_own(four_ranks, tp, custom):
    for errors in four_ranks.run(own_model, tp, custom):
        assert max(errors.values()) <= FP64_RELATIVE, errors


def mistakes():
    group, config = tensor_group(world_of(), 2), ParallelConfig(tp_degree=2)
    apply = functools.partial(parallelize, config=config, world=world_of())
    odd, tied = Own(), Own()
    odd.mixer.into = nn.Linear(8, 5)
    tied.up.bias = tied.mixer.into.bias
    cut = Sliced(group, {"into.weight": 0}, where="mixer")
    run = Case({"tp_degree": 2}).config()
    model = build_gpt(run).eval()
    parallelize_gpt(model, run.parallel, world=world_of())
    return messages_of(
        lambda: apply(Own(), tensor_plan={"middle": Whole()}),
        lambda: apply(odd, tensor_plan={"mixer": cut}),
        lambda: apply(tied),
        lambda: tensor_group(world_of(), 3),
        lambda: model(torch.zeros(1, 15, dtype=torch.int64)),
        lambda: model(torch.zeros(1, 16, dtype=torch.int64), num_logits=1),
    )


def test_mistakes(two_ranks):
    for messages in two_ranks.run(mistakes):
        assert_said(
            messages,
            "tensor_plan: middle is no module of the model",
            r"tp_degree=2: into.weight of shape \(5, 8\) cannot be cut into 2 equal parts along axis 0",
            "mixer.into.bias and up.bias are one parameter",
            "tp_degree=3: must divide the 2 ranks",
            "sequences of 15 tokens on parallel.tp_degree=2: .* use data.seq_len=14",
            "decoding on ranks that share sequences",
        )


CHOICE = {"model.moe.min_capacity": 4, "model.moe.router": "expert_choice"}
WRONG = [
    ({"model.num_heads": 3, "model.dim": 18}, 2, "must divide model.num_heads, 3;.* model: 1$"),
    ({"model.num_kv_heads": 2}, 4, "must divide model.num_kv_heads, 2;.* model: 2$"),
    ({"model.ffn_hidden_dim": 22}, 4, "must divide model.ffn_hidden_dim, 22;.* model: 2$"),
    ({"model.moe.hidden_dim": 7}, 2, "must divide model.moe.num_shared_experts x hidden_dim, 7"),
    ({"model.moe.shared_hidden_dim": 7}, 2, "must divide model.moe.shared_hidden_dim, 7"),
    ({"data.seq_len": 14}, 4, "sequences of 14 tokens .* use data.seq_len=12"),
    (CHOICE | {"model.moe.routing_group_size": 16}, 2, "size=16.* the 8 tokens.* use 8"),
    (CHOICE | {"model.moe.routing_group_size": 6}, 4, "size=6.* the 4 tokens.* use 2"),
    ({}, 3, "tp_degree=3 does not make 4 ranks; nearest: .*tp_degree=4"),
    ({"parallel.dp_shard_degree": 4}, 2, "dp_shard_degree=4 x tp_degree=2 does not make 4 ranks"),
]


@pytest.mark.parametrize(("changes", "tp", "message"), WRONG, ids=str)
def test_what_does_not_fit(changes, tp, message):
    config = Case({"tp_degree": tp}, changes).config()
    with pytest.raises(ConfigError, match=message):
        check_degrees(config.model, config.parallel, num_ranks=4, seq_len=config.data.seq_len)
