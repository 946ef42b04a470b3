"""The encoder-decoder: equal to a plain-PyTorch one, sizes as published, cached decoding, dropout, smoothing."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from tests.support.memory import saved_bytes
from tests.support.waits import waits

from expertmesh.config.moe import MoEConfig
from expertmesh.engine.texts import writer
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import BeamCache, EncoderDecoder
from expertmesh.models.task import Part
from expertmesh.models.token_losses import token_losses
from expertmesh.moe.routing_noise import key_noise
from expertmesh.moe.token_dropout import TokenDropout
from expertmesh.parallel.ranks import Ranks
from expertmesh.training.param_groups import parameter_roles
from expertmesh_families.seq2seq.config import Seq2SeqConfig, Seq2SeqRunConfig
from expertmesh_families.seq2seq.costs import forward_flops, seq2seq_costs
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh_families.seq2seq.recipes import RECIPES
from expertmesh_families.seq2seq.spec import seq2seq_spec
from expertmesh_families.seq2seq.task import Seq2SeqTask

SOURCES = [[2, 30, 14, 50, 9, 0], [3, 7, 0], [2, 8, 8, 61, 0]]
TARGETS = [[0, 5, 260, 17], [0, 9, 12, 4, 44, 7], [0, 20]]


def config(**options):
    values = {
        "vocab_size": 270,
        "max_source_len": 16,
        "max_seq_len": 16,
        "dim": 16,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "ffn_hidden_dim": 24,
        "dropout": 0.0,
        "init_std": 0.3,
        "moe": MoEConfig(num_experts=(3, 4), top_k=1, hidden_dim=20),
    }
    return Seq2SeqConfig(**(values | options))


def padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x, positions):
    """Rotary positions, written with complex numbers."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def attend(q, k, v, *, causal=False, of_places=None):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if of_places is not None:
        scores = (scores + of_places) / 2**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def heads(x, num_heads):
    return x.unflatten(-1, (num_heads, -1)).transpose(0, 1)


def feed_forward(x, w, prefix):
    if f"{prefix}ffn.w_in" in w:
        return F.relu(x @ w[f"{prefix}ffn.w_in"][0].T) @ w[f"{prefix}ffn.w_out"].T
    scores = (x @ w[f"{prefix}moe.router.proj.weight"].T).softmax(-1)
    rows = []
    for token, weights in zip(x, scores, strict=True):
        best = int(weights.argmax())
        hidden = F.relu(w[f"{prefix}moe.experts.w_in"][best, 0] @ token)
        rows.append(weights[best] * (w[f"{prefix}moe.experts.w_out"][best] @ hidden))
    return torch.stack(rows)


def oracle(w, cfg, source, target):
    """One sentence pair, without padding: logits after every target token."""
    H = cfg.num_heads

    def self_attention(x, prefix, causal):
        # rows of the joint matrix: for each head its query, key and value
        q, k, v = (x @ w[f"{prefix}attention.qkv.weight"].T).view(len(x), H, 3, -1).unbind(2)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        places = torch.arange(len(x))
        if cfg.positions == "untied":
            side = "target_places." if causal else "source_places."
            p = norm(w[f"{side}embedding.weight"][: len(x)], w[f"{side}norm.weight"])
            pq, pk = (heads(p @ w[f"{side}{m}.weight"].T, H) for m in "qk")
            of_places = pq @ pk.transpose(-1, -2) / q.shape[-1] ** 0.5
            y = attend(q, k, v, causal=causal, of_places=of_places)
        else:
            y = attend(turned(q, places), turned(k, places), v, causal=causal)
        return y @ w[f"{prefix}attention.out.weight"].T

    x = w["embedding.weight"][source]
    for layer in range(cfg.num_encoder_layers):
        p = f"encoder.{layer}."
        x = x + self_attention(norm(x, w[f"{p}attention_norm.weight"]), p, False)
        x = x + feed_forward(norm(x, w[f"{p}ffn_norm.weight"]), w, p)
    memory = norm(x, w["encoder_norm.weight"])
    x = w["embedding.weight"][target]
    for layer in range(cfg.num_decoder_layers):
        p = f"decoder.{layer}."
        x = x + self_attention(norm(x, w[f"{p}attention_norm.weight"]), p, True)
        k, v = (memory @ w[f"{p}cross_attention.kv.weight"].T).chunk(2, -1)
        q = norm(x, w[f"{p}cross_norm.weight"]) @ w[f"{p}cross_attention.q.weight"].T
        y = attend(heads(q, H), heads(k, H), heads(v, H))
        x = x + y @ w[f"{p}cross_attention.out.weight"].T
        x = x + feed_forward(norm(x, w[f"{p}ffn_norm.weight"]), w, p)
    table = w["output.weight"] if "output.weight" in w else w["embedding.weight"]
    return norm(x, w["final_norm.weight"]) @ table.T


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_embeddings": False, "moe": MoEConfig(num_experts=())}, {"positions": "untied"}],
    ids=str,
)
def test_a_padded_batch_equals_the_oracle_on_each_sentence(options):
    cfg = config(**options)
    model = Seq2Seq(cfg, dtype=torch.float64, seed=1)
    (source, source_mask), (target, target_mask) = padded(SOURCES), padded(TARGETS)
    output = model(source, target, source_mask_BS=source_mask, target_mask_BS=target_mask)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    pairs = zip(SOURCES, TARGETS, strict=True)
    expected = torch.cat([oracle(weights, cfg, torch.tensor(s), torch.tensor(t)) for s, t in pairs])
    assert_close_fp64(output.logits_NV, expected, what="logits")
    factor = torch.randn(expected.shape, dtype=torch.float64)
    (output.logits_NV * factor).sum().backward()
    (expected * factor).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close_fp64(parameter.grad, weights[name].grad, what=name)
    assert len(output.stats) == cfg.num_moe_layers
    if output.stats:  # padding visits no expert
        assert int(output.stats[0].num_tokens_per_expert_E.sum()) == sum(map(len, SOURCES))
        assert int(output.stats[1].num_tokens_per_expert_E.sum()) == sum(map(len, TARGETS))


@torch.no_grad()
@pytest.mark.parametrize("positions, capacity", [("rotary", None), ("untied", None), ("rotary", 0.5)])
def test_cached_beams_that_share_sources_equal_uncached_ones(positions, capacity):
    """Nor does a capacity in evaluation make a translation depend on the texts beside it."""
    free = Seq2Seq(config(positions=positions), dtype=torch.float64, seed=1).eval()
    capped = {"eval_capacity_factor": capacity, "min_capacity": 4 if capacity is None else 1}
    moe = MoEConfig(num_experts=(3, 4), top_k=1, hidden_dim=20, **capped)
    model = Seq2Seq(config(positions=positions, moe=moe), dtype=torch.float64, seed=1).eval()
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(ConfigError, match="reads one text and writes another"):
        writer(model)
    source, mask = padded(SOURCES)
    cache = model.new_cache(batch_size=3, max_len=6)
    assert isinstance(cache, BeamCache)
    model.encode(source, token_mask_BS=mask, cache=cache)
    cache.branch(2)
    rows = [[0], [0], [0], [0], [0], [0]]
    for step in range(5):
        new = torch.tensor([row[-1:] for row in rows])
        logits = model.next_logits(new, token_mask_BS=None, cache=cache)
        for row, ids in enumerate(rows):
            alone = free(torch.tensor([SOURCES[row // 2]]), torch.tensor([ids])).logits_NV[-1]
            assert_close_fp64(logits[row], alone, what=f"step {step}, row {row}")
        order = torch.tensor([1, 0, 2, 2, 5, 4])
        cache.reorder(order)
        rows = [[*rows[i], 7 * n + step] for n, i in enumerate(order.tolist())]


@pytest.mark.parametrize(
    "name, billions",
    [("translate-0.7b", 0.77), ("translate-0.7b-moe8", 1.82), ("translate-0.7b-moe64", 10.28)],
)
def test_published_sizes(name, billions):
    """Kim et al. 2021: 0.7, 1.8 and 10B, with 128,000 tokens and an output matrix of its own."""
    run = RECIPES[name]()
    cfg = run.model
    model = Seq2Seq(cfg, device="meta")
    total = sum(p.numel() for p in model.parameters())
    assert round(total / 1e9, 2) == billions
    costs = seq2seq_costs(run, num_ranks=1, dtype="bfloat16")
    inactive = sum(p.numel() - p.numel() // len(p) for n, p in model.named_parameters() if ".experts." in n)
    assert (costs.parameters, costs.active) == (total, total - inactive)
    assert [len(side) for side in cfg.experts_per_layer()] == [24, 12]
    assert cfg.num_moe_layers in (0, 18)


_WITH = {"top_k": 1, "hidden_dim": 20}
OF_A_LAYER = [
    {"num_experts": ()},
    {"num_experts": (3, 4), "num_shared_experts": 1, "shared_gate": True, **_WITH},
    {"num_experts": (3,), "residual": True, **_WITH},
    {"num_experts": (3,), "router": "cosine", "cosine_dim": 8, **_WITH},
]


@pytest.mark.parametrize("moe", OF_A_LAYER, ids=str)
def test_every_parameter_is_counted(moe):
    options = {"tie_embeddings": False, "positions": "untied"}
    cfg = config(moe=MoEConfig(**moe), **options)
    found = {p.name: p.shape for p in seq2seq_spec(cfg)}
    model = Seq2Seq(cfg, device="meta")
    assert found == {name: tuple(p.shape) for name, p in model.named_parameters()}
    run = Seq2SeqRunConfig(model=cfg)
    alone = seq2seq_costs(run, num_ranks=1, dtype="float32")
    assert alone.parameters == sum(p.numel() for p in model.parameters())
    of_muon = run.updated({"optim.name": "muon"})
    matrices = {n for n, role in parameter_roles(model).items() if role == "matrix"}
    saved = 4 * sum(p.numel() for n, p in model.named_parameters() if n in matrices)
    for one, parts in ((run, 1), (run, 2), (of_muon, 1), (of_muon, 2)):
        costs = seq2seq_costs(one, num_ranks=parts, dtype="float32")
        memory, weights = costs.memory, alone.memory.weights_bytes
        whole = 2 * weights - (saved if one is of_muon else 0)
        # a parameter that ranks cannot halve, a single scale, counts whole on one of them
        odd = 8 * sum(p.numel() % parts for p in model.parameters())
        assert whole // parts <= memory.optimizer_bytes <= whole // parts + odd
        assert memory.gradients_bytes == memory.weights_bytes
        assert weights // parts <= memory.weights_bytes <= weights // parts + odd // 2


@pytest.mark.parametrize("positions", ["rotary", "untied"])
@pytest.mark.parametrize("moe", OF_A_LAYER[:3], ids=str)
def test_operations_are_those_of_the_matrices(moe, positions):
    """Two for each element of a matrix that a token passes, four for each of a head's and each token that attention
    looks at.

    Heads of self-attention are twice as wide with untied positions, whose matrices serve all samples of a batch at
    once.
    """
    cfg = config(moe=MoEConfig(**moe), positions=positions)
    D, S, T, B = cfg.dim, 9, 6, 4
    width = 2 * D if positions == "untied" else D
    of_source = of_target = 0
    for parameter in seq2seq_spec(cfg):
        size = parameter.num_elements
        if parameter.is_expert:
            size //= parameter.shape[0]
        if parameter.name.endswith(("_places.q.weight", "_places.k.weight")):
            size //= B
        elif parameter.layer is None or len(parameter.shape) < 2:
            continue
        if parameter.name.startswith(("encoder", "source")) or "cross_attention.kv" in parameter.name:
            of_source += 2 * size
        else:
            of_target += 2 * size
    of_source += 4 * width * S * cfg.num_encoder_layers
    # a target token sees 1, 2, ... T tokens before it, and the whole source
    of_target += sum(4 * width * n + 4 * D * S for n in range(1, T + 1)) // T * cfg.num_decoder_layers
    of_target += 2 * D * cfg.vocab_size
    flops = forward_flops(cfg, source_len=S, target_len=T, batch_size=B)
    assert (flops.source_flops, flops.target_flops) == (of_source, of_target)
    run = Seq2SeqRunConfig(model=cfg)
    whole = forward_flops(cfg, source_len=16, target_len=16, batch_size=run.train.batch_size)
    costs = seq2seq_costs(run, num_ranks=1, dtype="float32")
    assert costs.flops_per_item == 3 * sum(vars(whole).values())


def test_untied_positions_keep_three_widths_more_for_the_backward_pass():
    """What autograd saves of the places themselves, once for all samples, is less than one width more."""
    S, B, dim = 16, 8, 16
    ids = torch.full((B, S), 5)
    measured, estimated = [], []
    for positions in ("rotary", "untied"):
        cfg = config(positions=positions, moe=MoEConfig(num_experts=()))
        model = Seq2Seq(cfg, seed=0)
        measured.append(saved_bytes(partial(model, ids, ids), parameters=model.parameters()))
        run = Seq2SeqRunConfig(model=cfg).updated({"train.batch_size": B})
        alone = seq2seq_costs(run, num_ranks=1, dtype="float32").memory
        estimated.append(alone.activations_bytes)
    width = 4 * B * S * dim * (cfg.num_encoder_layers + cfg.num_decoder_layers)
    for rotary, untied in (measured, estimated):
        assert (untied - rotary) // width == 3


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_consistent(name):
    cfg = RECIPES[name]()
    assert type(cfg).model_validate_json(cfg.model_dump_json()) == cfg
    assert cfg.train.run_dir == f"runs/{name}"


def batch_of(*, device="cpu"):
    (source, mask), (target, target_mask) = padded(SOURCES), padded(TARGETS)
    tasks = torch.tensor([1, 0, 1])
    batch = source, mask.sum(1), target, target_mask.sum(1), tasks
    return tuple(t.to(device) for t in batch)


def task_of(cfg):
    task = Seq2SeqTask(Seq2SeqRunConfig(model=cfg))
    task._directions = ("de-en", "en-de")
    return task


def test_the_host_waits_for_no_number_of_targets():
    moe = MoEConfig(num_experts=(4,), top_k=1, hidden_dim=32, backend="triton")
    task = task_of(config(dim=32, dropout=0.1, moe=moe))
    model = Seq2Seq(task.config.model, device="meta", dtype=torch.bfloat16)
    model.to_empty(device="meta")  # the keys of the noise, too
    key_noise(model, seed=0, step=0)
    batch = batch_of(device="meta")
    for counted in (True, False):
        part = Part(0, slice(0, 3), Ranks(), sum(map(len, TARGETS)) if counted else None)
        with waits() as watch:
            try:
                task.loss(model, batch, part).total.backward()
            except RuntimeError:  # of values that are not there
                assert not counted
        assert (watch.found == []) == counted, watch.found


def test_an_evaluation_waits_for_no_number_of_targets():
    task = task_of(config(moe=MoEConfig(num_experts=())))
    model = Seq2Seq(task.config.model, device="meta", dtype=torch.bfloat16)
    part = Part(0, slice(0, 3), Ranks(), task.num_items(batch_of()))
    batch = batch_of(device="meta")
    with waits() as watch, torch.no_grad():
        task.measure(model, batch, part)
    assert watch.found == []


def test_targets_at_places_equal_those_of_the_mask_to_the_bit():
    task = task_of(config(dropout=0.1))
    model = Seq2Seq(task.config.model, seed=1)
    key_noise(model, seed=0, step=0)
    source, source_lengths, target, lengths, _ = batch = batch_of()
    part = Part(0, slice(0, 3), Ranks(), int(lengths.sum()))
    found = task.loss(model, batch, part).total
    gradients = torch.autograd.grad(found, list(model.parameters()))
    source_mask, mask = (
        torch.arange(ids.shape[1]) < n[:, None] for ids, n in ((source, source_lengths), (target, lengths))
    )
    before = torch.cat((torch.zeros_like(target[:, :1]), target[:, :-1]), 1)
    output = model(source, before, source_mask_BS=source_mask, target_mask_BS=mask)
    expected = token_losses(output.logits_NV[None], target[mask][None], label_smoothing=0.1).sum()
    assert torch.equal(found, expected)
    others = torch.autograd.grad(expected, list(model.parameters()))
    assert all(map(torch.equal, gradients, others))
    with torch.no_grad():
        sums = task.measure(model.eval(), batch, part)
        assert sums["items_de-en"] == len(TARGETS[1]) and sums["items"] == sum(map(len, TARGETS))
        alone = task.measure(model, tuple(t[1:2] for t in batch), Part(0, slice(1, 2), Ranks()))
    torch.testing.assert_close(sums["nats_de-en"], alone["nats"])


def test_dropout_depends_on_the_token_alone():
    layer = TokenDropout(0.3, site=5)
    key_noise(layer, seed=3, step=2)
    x = torch.ones(64, 500)
    index = torch.arange(64)
    whole = layer(x, index)
    assert torch.equal(whole[20:30], layer(x[20:30], index[20:30]))
    assert torch.equal(whole.view(8, 8, 500), layer(x.view(8, 8, 500), index))
    kept, share = whole != 0, 1 - 77 / 256  # 0.3 rounded
    assert torch.equal(whole[kept], torch.full_like(whole[kept], 256 / 179))
    # binomial: 32,000 draws, six standard deviations
    assert abs(kept.sum() - share * x.numel()) < 6 * (0.21 * x.numel()) ** 0.5
    for side in (kept.double().mean(0), kept.double().mean(1)):
        count = x.numel() / len(side)
        assert (side - share).abs().max() < 6 * (0.21 / count) ** 0.5
    assert torch.equal(layer.eval()(x, index), x)
    other = TokenDropout(0.3, site=6)
    key_noise(other, seed=3, step=2)
    assert not torch.equal(whole, other(x, index))
    assert not torch.equal(layer.train()(x), TokenDropout(0.3, site=5)(x)), "not keyed: drawn anew"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_equals_pytorchs(smoothing):
    logits = torch.randn(2, 9, 33, requires_grad=True)
    targets = torch.randint(33, (2, 9))
    grad = torch.rand(18)

    def plain(x):
        return F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)

    results = []
    for function, x in (
        (lambda x: token_losses(x, targets, label_smoothing=smoothing), logits),
        (plain, logits.detach().requires_grad_()),
        (plain, logits.detach().double().requires_grad_()),
    ):
        losses = function(x)
        (gradient,) = torch.autograd.grad(losses, x, grad.to(losses.dtype))
        results.append((losses.detach(), gradient))
    for what, ours, reference, truth in zip(("losses", "gradient"), *results, strict=True):
        assert_two_times(ours, reference, truth, what=what)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_heads": 3}, "num_heads=3: must divide dim, 16, into heads of an even size"),
        ({"positions": "untied", "rope_base": 5.0}, "rope_base=5.0: has no effect with positions=untied"),
        ({"vocab_size": 200}, "vocab_size=200: must be at least 258"),
        ({"moe_every": 5}, "moe_every=5: must be at most the larger number of layers, 2"),
        ({"moe": MoEConfig(num_experts=(2, 2, 2), top_k=1)}, "must have one entry, or one per MoE layer"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(options, words):
    with pytest.raises(ConfigError, match=words):
        config(**options)
