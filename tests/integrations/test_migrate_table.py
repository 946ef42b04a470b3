"""The numbers in the tables of docs/migrate.md: a layer with the options of a row gives what the row's system computes.

transformers is asked itself; of the others the published formula is written here once more, for one token and expert at
a time.
"""

import math
from pathlib import Path

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from expertmesh import MoELayer

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
T, D, E, L, W = 23, 6, 5, 3, 0.7  # L layers, a loss of weight W


class Told(nn.Module):
    """A router whose logits are given; keeps what it was asked with."""

    def __init__(self, logits_TE):
        super().__init__()
        self.logits_TE = logits_TE

    def forward(self, x_TD):
        self.seen_TD = x_TD
        return self.logits_TE


def logits_of_layers():
    """Skewed, so that every formula gives another number, and some experts are over capacity."""
    torch.manual_seed(7)
    skew = torch.linspace(1, -1, E, dtype=torch.float64)
    return [torch.randn(T, E, dtype=torch.float64) + skew for _ in range(L)]


def layer_of(logits_TE, **options):
    given = {"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": 2, "seed": 1}
    return MoELayer(**given | options, dtype=torch.float64, router=Told(logits_TE))


def row_of(system, beginning):
    """The right side of the row, so that the page cannot say something else than what is tested."""
    table = PAGE.read_text().split(f"\n| {system}")[1].split("\n\n")[0]
    rows = [line.split(" | ", 1) for line in table.splitlines() if line.startswith("| ")]
    (found,) = (right for left, right in rows if left.startswith(f"| {beginning}"))
    return found


def shares_and_scores(logits_TE, k):
    """Shares of first choices and of all choices, and mean probability, per expert: plain lists."""
    p = torch.softmax(logits_TE, -1).tolist()
    best = [sorted(range(E), key=lambda e, row=row: -row[e])[:k] for row in p]
    first = [sum(row[0] == e for row in best) / T for e in range(E)]
    every = [sum(e in row for row in best) / T for e in range(E)]
    return first, every, [sum(row[e] for row in p) / T for e in range(E)]


def of_every_layer(k, of_one):
    return [of_one(*shares_and_scores(logits, k)) for logits in logits_of_layers()]


def first_choices(first, every, mean):  # GShard's, of Tutel, DeepSpeed's top2gating and fairseq
    return sum(f * m * E for f, m in zip(first, mean, strict=True))


def all_choices(k):  # DeepSpeed's topkgating, MegaBlocks
    def loss(first, every, mean):
        return sum(f * m * E / k for f, m in zip(every, mean, strict=True))

    return loss


def unbiased(values):  # torch's var
    mean = sum(values) / E
    return sum((v - mean) ** 2 for v in values) / (E - 1) / mean**2


def importance_and_load(first, every, mean):  # Tutel's, the load being the choices made
    return (unbiased(mean) + unbiased(every)) / 2


LOSSES = [
    # system, row, what the row must say, K, options, the system's term in the loss
    ("Tutel", "`w * l_aux`, `is_gshard_loss=True`", "aux_loss_weight=w`", 2)
    + (
        {"balance_loss": "gshard", "aux_loss_weight": W},
        lambda k: W * sum(of_every_layer(k, first_choices)),
    ),
    ("Tutel", "`w * l_aux`, `is_gshard_loss=False`", "aux_loss_weight=w * E / (E - 1)`", 2)
    + ({"balance_loss": "importance_load", "aux_loss_weight": W * E / (E - 1)},)
    + (lambda k: W * sum(of_every_layer(k, importance_and_load)),),
    ("DeepSpeed", "`w * l_aux`", 'else `"switch"`', 1)
    + ({"aux_loss_weight": W}, lambda k: W * sum(of_every_layer(k, first_choices))),
    ("DeepSpeed", "`w * l_aux`", '`balance_loss="gshard"` for k = 2', 2)
    + (
        {"balance_loss": "gshard", "aux_loss_weight": W},
        lambda k: W * sum(of_every_layer(k, first_choices)),
    ),
    ("DeepSpeed", "`w * l_aux`", "aux_loss_weight=w`", 3)
    + ({"aux_loss_weight": W}, lambda k: W * sum(of_every_layer(k, all_choices(k)))),
    ("fairseq", "`moe_gate_loss_wt` w", "= w / L", 2)
    + ({"balance_loss": "gshard", "aux_loss_weight": W / L},)
    + (lambda k: W * sum(of_every_layer(k, first_choices)) / L,),
    ("fairseq", "`moe_gate_loss_wt` w", "= w / L", 1)
    + ({"aux_loss_weight": W / L}, lambda k: W * sum(of_every_layer(k, first_choices)) / L),
    ("MegaBlocks", "`moe_loss_weight` w", "= w / L", 2)
    + ({"aux_loss_weight": W / L},)
    # E w / (L T K) times the product of tokens and mean scores, over all layers
    + (
        lambda k: sum(
            of_every_layer(
                k,
                lambda f, a, m: E * W / (L * T * k) * sum(T * x * y for x, y in zip(a, m, strict=True)),
            )
        ),
    ),
]


@pytest.mark.parametrize(("system", "row", "says", "k", "options", "theirs"), LOSSES)
def test_weights_of_balance_losses(system, row, says, k, options, theirs):
    assert says in row_of(system, row)
    x = torch.randn(T, D, dtype=torch.float64)
    stats = [layer_of(logits, top_k=k, **options).eval()(x)[1] for logits in logits_of_layers()]
    ours = torch.stack([s.aux_loss for s in stats]).sum()
    assert_close_fp64(ours.detach(), theirs(k), what=f"{system}: {row}")


def test_weight_of_megablocks_z_loss():
    assert "`z_loss_weight` = w where you add up" in row_of("MegaBlocks", "`moe_zloss_weight` w")
    x = torch.randn(T, D, dtype=torch.float64)
    theirs = [
        W * sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / T
        for logits in logits_of_layers()
    ]
    for weight, combined in ((W, sum(theirs)), (W / L, sum(theirs) / L)):
        layers = [layer_of(one, z_loss_weight=weight).eval() for one in logits_of_layers()]
        ours = torch.stack([layer(x)[1].z_loss for layer in layers]).sum()
        assert_close_fp64(ours.detach(), combined, what="z-loss")


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, L])
def test_weight_of_transformers_balance_loss(k, layers):
    """Equal for one layer whatever it chooses, and for several at balance."""
    assert "= c K / L" in row_of("transformers", "`router_aux_loss_coef` c")
    logits = logits_of_layers()[:layers]
    if layers > 1:
        logits = [torch.zeros_like(one) for one in logits]  # every expert as likely
    x, weight = torch.randn(T, D, dtype=torch.float64), W * k / layers
    stats = [layer_of(one, top_k=k, aux_loss_weight=weight).eval()(x)[1] for one in logits]
    ours = torch.stack([s.aux_loss for s in stats]).sum().float()
    theirs = W * load_balancing_loss_func(tuple(one.float() for one in logits), E, k)
    choices = [shares_and_scores(one, k)[1:] for one in logits]
    shares, means = ([sum(v) / layers for v in zip(*c, strict=True)] for c in zip(*choices, strict=True))
    oracle = torch.tensor(W * E * sum(f * m for f, m in zip(shares, means, strict=True)))
    assert_two_times(ours.detach(), theirs, oracle.double(), what="balance loss")


CAPACITIES = [
    # system, row, says, K, training, options, the system's rows per expert, rounded as the page says that ours are
    ("Tutel", "`capacity_factor` c", "`min_capacity=1`", 2, False)
    + ({"capacity_factor": 0.5, "eval_capacity_factor": 0.5}, lambda k, t: k * 0.5 * t / E),
    ("Tutel", "`capacity_factor` c", "`max_capacity_factor=-c`", 2, True)
    + ({"max_capacity_factor": 0.5}, lambda k, t: k * 0.5 * t / E),
    ("DeepSpeed", "`capacity_factor`", "1, 1 and 4", 1, True)
    + ({"capacity_factor": 1.0, "min_capacity": 4}, lambda k, t: max(t / E, 4)),
    ("DeepSpeed", "`capacity_factor`", "1, 1 and 4", 2, False)
    + ({"eval_capacity_factor": 1.0, "min_capacity": 4}, lambda k, t: max(2 * t / E, 4)),
    ("DeepSpeed", "`capacity_factor`", "1, 1 and 4", 3, True)
    + ({"capacity_factor": 0.1, "min_capacity": 4}, lambda k, t: max(0.1 * 3 * t / E, 4)),
    ("fairseq", "`capacity_factor` of `Top1Gate`", "`min_capacity=1`", 2, True)
    + ({"capacity_factor": 1.0}, lambda k, t: 2 * t / E),
    ("fairseq", "`moe_eval_capacity_token_fraction`", "f E / K", 2, False)
    + ({"eval_capacity_factor": 0.25 * E / 2}, lambda k, t: 0.25 * t),
    ("fairseq", "`moe_eval_capacity_token_fraction`", "f E / K", 1, False)
    + ({"eval_capacity_factor": 0.25 * E}, lambda k, t: 0.25 * t),
    ("MegaBlocks", "`moe_capacity_factor` c", "`min_capacity=0`", 2, True)
    + ({"capacity_factor": 0.5, "min_capacity": 0}, lambda k, t: 0.5 * k * t / E),
]


@pytest.mark.parametrize(("system", "row", "says", "k", "training", "options", "rows"), CAPACITIES)
def test_capacities(system, row, says, k, training, options, rows):
    """Rows that are dropped, of choices that crowd the first experts."""
    assert says in row_of(system, row)
    (logits, *_), x = logits_of_layers(), torch.randn(T, D, dtype=torch.float64)
    options = {"min_capacity": 1, "drop_policy": "first"} | options
    _, stats = layer_of(logits, top_k=k, **options).train(training)(x)
    capacity = math.ceil(rows(k, T))
    counts = [round(share * T) for share in shares_and_scores(logits, k)[1]]
    expected = sum(max(count - capacity, 0) for count in counts)
    assert expected > 0 and stats.num_dropped.item() == expected


WEIGHTS = [
    # system, row, says, K, normalize_weights; whether weights are divided by the sum over all choices, over those that
    # stay, or not
    ("Tutel", "`normalize_gate`", '"none"` for k = 1', 1, "none", None),
    ("Tutel", "`normalize_gate`", '"topk"', 2, "topk", "all"),
    ("DeepSpeed", "`k`", '"none"` for 1', 1, "none", None),
    ("DeepSpeed", "`k`", '"kept"` above', 2, "kept", "kept"),
    ("fairseq", "`normalize_gate_prob_before_dropping`", '"topk"', 2, "topk", "all"),
    ("fairseq", "`normalize_gate_prob_before_dropping`", '"kept"', 2, "kept", "kept"),
    ("fairseq", "`normalize_gate_prob_before_dropping`", '"none"` for `Top1Gate`', 1, "none", None),
    ("MegaBlocks", "`moe_normalize_expert_weights=1`", '"topk"', 2, "topk", "all"),
    ("MegaBlocks", "`moe_normalize_expert_weights=1`", '"none"', 2, "none", None),
    ("transformers", "`norm_topk_prob`", '"topk"', 2, "topk", "all"),
    ("transformers", "`norm_topk_prob`", "also for K = 1", 1, "topk", "all"),
]


class Given(nn.Module):
    """An expert that adds its number to nothing: gives the unit vector of its place."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        return torch.nn.functional.one_hot(torch.tensor(self.place), D).to(x).expand(len(x), D)


@pytest.mark.parametrize(("system", "row", "says", "k", "normalize", "over"), WEIGHTS)
def test_weights_of_the_chosen(system, row, says, k, normalize, over):
    assert says in row_of(system, row)
    (logits, *_), x = logits_of_layers(), torch.randn(T, D, dtype=torch.float64)
    layer = layer_of(
        logits,
        top_k=k,
        normalize_weights=normalize,
        experts=Given,
        capacity_factor=0.5,
        min_capacity=0,
        drop_policy="first",
    )
    y, _ = layer(x)
    capacity = math.ceil(0.5 * k * T / E)
    p = torch.softmax(logits, -1).tolist()
    best = [sorted(range(E), key=lambda e, row=row: -row[e])[:k] for row in p]
    taken, kept = [0] * E, [[] for _ in range(T)]
    for place in range(k):
        for t in range(T):
            e = best[t][place]
            taken[e] += 1
            if taken[e] <= capacity:
                kept[t].append(e)
    expected = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        among = {None: None, "all": best[t], "kept": kept[t]}[over]
        total = 1.0 if among is None else sum(p[t][e] for e in among)
        for e in kept[t]:
            expected[t, e] = p[t][e] / total
    assert sum(map(len, kept)) < k * T
    assert_close_fp64(y.detach(), expected, what="weights")


@pytest.mark.parametrize(
    ("system", "row", "says", "eps"),
    [
        ("DeepSpeed", '`noisy_gate_policy="Jitter"`', "`input_jitter=0.01`", 0.01),
        ("MegaBlocks", "`moe_jitter_eps`", "`input_jitter`", 0.2),
    ],
)
def test_jitter_is_uniform_around_one_on_the_routers_input(system, row, says, eps):
    assert says in row_of(system, row)
    (logits, *_), x = logits_of_layers(), torch.rand(T, D, dtype=torch.float64) + 1
    layer = layer_of(logits, input_jitter=eps, experts=Given)
    y, _ = layer(x)
    factors = (layer.router.seen_TD / x - 1).detach()
    assert 0.9 * eps < factors.abs().max() <= eps * (1 + 1e-9) and factors.min() < 0 < factors.max()
    layer.eval()(x)
    assert torch.equal(layer.router.seen_TD, x)


def test_tutels_noise_has_the_size_of_the_row():
    """How often an expert that is a gap behind is chosen all the same tells the deviation."""
    assert "router_noise_std=gate_noise / E" in row_of("Tutel", "`gate_noise`")
    noise, gap, tokens = 2.0, 0.5, 20_000
    logits = torch.tensor([0.0, -gap, -99, -99, -99], dtype=torch.float64).expand(tokens, E)
    layer = layer_of(logits, top_k=1, router_noise="gaussian", router_noise_std=noise / E)
    _, stats = layer.train()(torch.zeros(tokens, D, dtype=torch.float64))
    found = stats.num_tokens_per_expert_E[1].item() / tokens
    expected = 0.5 * math.erfc(gap / (noise / E) / 2)  # of the difference of two such
    assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / tokens)
