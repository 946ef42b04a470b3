"""An upcycled model computes what the dense one did, learns, and refuses what it cannot do by name."""

import copy

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs
from torch import nn
from torch.utils.checkpoint import checkpoint

from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.upcycle import MoEBlock, collect_stats, moeify, upcycle


class Layer(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 12, bias=bias), nn.GELU(), nn.Linear(12, 6, bias=bias))

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.mlp(x)


def dense(num_layers=4, bias=True):
    torch.manual_seed(1)
    return nn.Sequential(*[Layer(bias) for _ in range(num_layers)]).double()


def tokens():
    return torch.randn(3, 7, 6, dtype=torch.float64)


@pytest.mark.parametrize("granularity", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_first_step_is_exact(granularity, top_k, bias):
    model, x = dense(bias=bias), tokens()
    expected = model(x).detach()
    names = upcycle(model, every=2, num_experts=4, top_k=top_k, granularity=granularity)
    assert names == ["1.mlp", "3.mlp"]
    assert_close_fp64(model(x).detach(), expected, what="upcycled model")


def test_all_blocks_of_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.arange(20).view(2, 10)
    expected = model(ids, labels=ids)
    names = upcycle(model, every=1, num_experts=3)
    assert names == [f"model.layers.{i}.mlp" for i in range(3)]
    found = model(ids, labels=ids)
    assert_close_fp64(found.logits.detach(), expected.logits.detach(), what="logits")
    with collect_stats() as stats:
        loss = model(ids, labels=ids).loss
    (loss + stats.loss()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_experts_part_ways_and_the_loss_falls():
    model, x = dense(), tokens()
    upcycle(model, every=2, num_experts=4, aux_loss_weight=0.1)
    target = torch.randn_like(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        with collect_stats() as stats:
            loss = (model(x) - target).square().mean()
        (loss + stats.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    w_in = model[1].mlp.layer.experts.w_in
    assert_differs(w_in[0].detach(), w_in[1].detach(), what="two experts")


def test_noise_tells_experts_apart_from_the_start():
    model = dense()
    upcycle(model, every=2, num_experts=2, noise_std=0.5)
    w_in = model[1].mlp.layer.experts.w_in.detach()
    assert_differs(w_in[0], w_in[1], what="two experts")
    again = dense()
    upcycle(again, every=2, num_experts=2, noise_std=0.5)
    assert torch.equal(again[1].mlp.layer.experts.w_in.detach(), w_in)


@pytest.mark.parametrize("granularity", [1, 2])
def test_a_gpt_stays_a_gpt_and_its_first_step_is_exact(granularity):
    small = ModelConfig(
        vocab_size=32,
        dim=8,
        num_layers=4,
        num_heads=2,
        ffn_hidden_dim=12,
        moe=MoEConfig(num_experts=()),
    )
    model = GPT(small, seed=0, dtype=torch.float64)
    ids = torch.arange(14).view(2, 7)
    expected = model(ids).logits_BSV.detach()
    before = copy.deepcopy(model)
    names = upcycle(model, every=2, num_experts=4, granularity=granularity, capacity_factor=2.0)
    assert names == ["layers.1.ffn", "layers.3.ffn"]
    output = model.eval()(ids)
    assert_close_fp64(output.logits_BSV.detach(), expected, what="logits")
    assert len(output.stats) == 2 and model.config.moe.capacity_factor == 2.0
    twin = GPT(model.config, seed=1, dtype=torch.float64).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(ids).logits_BSV, output.logits_BSV)
    with pytest.raises(ConfigError, match="has 2 layers with experts already"):
        upcycle(model)
    cut = {"granularity": 2, "router": "hash"}
    for change in ({"top_k": 9}, {"granularity": 5}, {"hidden_dim": 3}, cut):
        with pytest.raises(ConfigError, match=next(iter(change))):
            upcycle(before, **change)
    assert before.config == small
    with pytest.raises(ConfigError, match="has no memory yet; upcycle a model that is whole"):
        upcycle(GPT(small, device="meta"))


def test_redrawn_units_are_others_in_each_expert_and_alike_in_size():
    model = dense()
    block = copy.deepcopy(model[1].mlp)
    upcycle(model, every=2, num_experts=3, redraw=0.5)
    experts = model[1].mlp.layer.experts
    kept = []
    for e in range(3):
        same_in = (experts.w_in[e, 0] == block[0].weight).all(1)
        same_out = (experts.w_out[e] == block[2].weight).all(0)
        assert torch.equal(same_in, same_out) and same_in.sum() == 6
        kept.append(same_in)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    again = dense()
    upcycle(again, every=2, num_experts=3, redraw=0.5)
    assert torch.equal(again[1].mlp.layer.experts.w_in, experts.w_in)


def test_statistics_are_collected_once_and_only_inside():
    model, x = dense(2), tokens()
    upcycle(model, every=2, num_experts=2)
    model(x)
    with collect_stats() as stats:
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    assert len(stats.layers) == 1
    assert stats.layers[0].num_tokens_per_expert_E.sum() == 2 * 21
    with collect_stats() as nothing:
        pass
    with pytest.raises(ConfigError, match="collect_stats"):
        nothing.loss()


def test_moeify_by_name_keeps_mode_and_type():
    model = dense().to(torch.float32).eval()
    assert moeify(model, names=["0.mlp"], num_experts=2, capacity_factor=2.0) == ["0.mlp"]
    block = model[0].mlp
    assert isinstance(block, MoEBlock)
    assert not block.training
    assert block.layer.experts.w_in.dtype == torch.float32
    assert block.layer.options.capacity_factor == 2.0
    assert isinstance(model[1].mlp, nn.Sequential)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 5}, "every=5"),
        ({"granularity": 5}, "granularity=5.*12"),
        ({"granularity": 0}, "granularity=0"),
        ({"noise_std": -1.0}, "noise_std=-1.0"),
        ({"redraw": 1.5}, "redraw=1.5"),
        ({"redraw": "half"}, "redraw='half': must be a number from 0 to 1"),
        ({"noise_std": float("nan")}, "noise_std=nan: must be a finite number"),
        ({"noise_std": float("inf")}, "noise_std=inf: must be a finite number"),
        ({"granularity": 1.5}, "granularity=1.5: must be a whole number"),
        ({"every": 2.0}, "every=2.0: must be a whole number"),
        ({"num_experts": 4.5}, "num_experts=4.5: must be a whole number"),
        ({"seed": "0"}, "seed='0': must be a whole number"),
        ({"redraw": 0.04}, "redraw=0.04: is none of the 12 hidden units.*0.0833"),
        ({"granularity": 2, "router": "cosine"}, "granularity=2: needs the linear router"),
        ({"granularity": 2, "router": "hash"}, "granularity=2: needs the linear router"),
        ({"hidden_dim": 8}, "hidden_dim=8"),
        ({"activation": "relu"}, "activation"),
        ({"experts": nn.Identity}, "experts=.*leave it out"),
        ({"dtype": torch.float32}, "dtype=torch.float32"),
        ({"top_k": 9}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"every": 99}, "every=99: .* has [0-9]+ feed-forward blocks; lower it"),
        ({"drop_policy": "never"}, "drop_policy"),
    ],
)
def test_mistakes(change, words):
    model = dense()
    before = copy.deepcopy(model).state_dict()
    with pytest.raises(ConfigError, match=words):
        upcycle(model, **change)
    assert list(model.state_dict()) == list(before)


def test_a_model_without_a_block_is_told_what_helps():
    """Naming its blocks would not: they are looked at in the same way."""
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))})
    with pytest.raises(ConfigError, match=r"is recognised: .* put MoELayer\(experts=\.\.\.\)"):
        upcycle(model)
    with pytest.raises(ConfigError, match="is not recognised"):
        moeify(model, names=["mlp"])


@pytest.mark.parametrize("names", [["9.mlp"], ["0.mix"], [""], ["0.mlp", "1.mix"]])
def test_names_that_are_no_blocks(names):
    model = dense()
    before = list(model.state_dict())
    with pytest.raises(ConfigError, match="names"):
        moeify(model, names=names)
    assert list(model.state_dict()) == before
