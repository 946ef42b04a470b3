"""Balance over a batch in micro-batches: what counts, what has gradients, and what a batch in one piece has."""

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error
from torch.utils.checkpoint import checkpoint

from expertmesh.errors import ConfigError
from expertmesh.moe.batch_balance import BatchBalance
from expertmesh.moe.layer import MoELayer

D, E, K, T = 6, 5, 2, 24
KINDS = {
    "switch": {},
    "gshard": {"balance_loss": "gshard"},
    "importance": {"balance_loss": "importance_load"},
    "load": {"balance_loss": "importance_load", "router_noise": "gaussian"},
}


def make(kind, **options):
    return MoELayer(
        dim=D,
        hidden_dim=4,
        num_experts=E,
        top_k=K,
        seed=0,
        dtype=torch.float64,
        z_loss_weight=0.0,
        aux_loss_weight=0.3,
        **{"balance_loss_scope": "global"} | KINDS[kind] | options,
    )


def pieces(sizes, seed=0):
    """Tokens and masks of micro-batches."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), D, dtype=torch.float64, generator=draw)
    mask = torch.rand(sum(sizes), generator=draw) < 0.8
    return list(zip(x.split(sizes), mask.split(sizes), strict=True))


def oracle(layer, parts):
    """The weighted mean of the losses by the formula, from the router's weight alone."""
    whole = sum(int(mask.sum()) for _, mask in parts)
    choices, scores_so_far, loss = torch.zeros(E, dtype=torch.float64), 0.0, 0.0
    for x, mask in parts:
        scores_TE = (x @ layer.router.proj.weight.T).softmax(-1)[mask]
        first = 1 if layer.options.balance_loss == "gshard" else K
        ids = scores_TE.topk(K).indices[:, :first]
        choices = choices + torch.bincount(ids.flatten(), minlength=E)
        sums_E = scores_TE.sum(0)
        share = len(scores_TE) / whole
        if layer.options.balance_loss != "importance_load":
            f_E = choices / choices.sum()
            loss = loss + share * E * (f_E * sums_E / len(scores_TE)).sum()
            continue
        scores_so_far = scores_so_far + sums_E.detach()
        scaled = scores_so_far * (sums_E.detach().sum() / scores_so_far.sum())
        both = (scaled + sums_E - sums_E.detach(), choices)
        cv = [v.var(correction=0) / v.mean() ** 2 for v in both]
        loss = loss + share * sum(cv) / 2
    return 0.3 * loss


def total(layer, parts, call=lambda layer, x, mask: layer(x, token_mask=mask)):
    """The loss of a batch, whose gradients are the router's then."""
    whole = sum(int(mask.sum()) for _, mask in parts)
    value = 0.0
    with BatchBalance(layer) as batch:
        for x, mask in parts:
            _, stats = call(layer, x, mask)
            loss = stats.aux_loss * (int(mask.sum()) / whole)
            loss.backward()
            batch.add([stats])
            value = value + loss.detach()
    return value


SIZES = [(24,), (8, 16), (6, 6, 6, 6), (1, 23), (3,) * 8]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["switch", "gshard", "importance"])
def test_losses_and_gradients_are_those_of_the_formula(kind, sizes):
    layer, parts = make(kind), pieces(sizes)
    weight = layer.router.proj.weight
    (expected,) = torch.autograd.grad(expected_loss := oracle(layer, parts), [weight])
    found = total(layer, parts)
    assert relative_error(found, expected_loss.detach()) <= FP64_RELATIVE
    assert relative_error(weight.grad, expected) <= FP64_RELATIVE
    assert layer.earlier_sums_RE is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_micro_batch_has_the_gradients_of_the_whole_batch(kind):
    parts = pieces((16, 8))
    grads = []
    for pieced in (False, True):
        layer = make(kind)
        layer.noise_key.fill_(3)
        layer.noise_is_keyed = True
        x, masks = (torch.cat(each) for each in zip(*parts, strict=True))
        x = x.requires_grad_()
        index = torch.arange(T)
        if not pieced:
            layer(x, token_mask=masks, token_index=index)[1].aux_loss.backward()
            grads.append(x.grad[16:])
            continue
        with BatchBalance(layer) as batch:
            batch.add([layer(x[:16], token_mask=masks[:16], token_index=index[:16])[1]])
            _, stats = layer(x[16:], token_mask=masks[16:], token_index=index[16:])
            (stats.aux_loss * (int(masks[16:].sum()) / int(masks.sum()))).backward()
        grads.append(x.grad[16:])
    assert relative_error(grads[1], grads[0]) <= FP64_RELATIVE


@pytest.mark.parametrize("kind", KINDS)
def test_one_micro_batch_is_as_without(kind):
    ((x, mask),) = pieces((T,))
    layer = make(kind).eval()
    plain = layer(x, token_mask=mask)[1].aux_loss
    layer = make(kind, balance_loss_scope="group").eval()
    assert torch.equal(layer(x, token_mask=mask)[1].aux_loss, plain)


def checkpointed(layer, x, mask):
    return checkpoint(lambda x: layer(x, token_mask=mask), x, use_reentrant=False)


def compiled(layer, x, mask):
    return torch.compile(layer, backend="eager")(x, token_mask=mask)


@pytest.mark.parametrize("call", [checkpointed, compiled])
@pytest.mark.parametrize("kind", ["switch", "importance"])
def test_checkpointing_and_compile_change_nothing(kind, call):
    parts, layers = pieces((8, 8, 8)), [make(kind), make(kind)]
    losses = [total(layers[0], parts), total(layers[1], parts, call)]
    assert relative_error(losses[1], losses[0]) <= FP64_RELATIVE
    grads = [layer.router.proj.weight.grad for layer in layers]
    assert relative_error(grads[1], grads[0]) <= FP64_RELATIVE


def test_other_scopes_and_evaluation_remember_nothing():
    (x, _), (y, _) = pieces((8, 8))
    group, layer = make("switch", balance_loss_scope="group"), make("switch")
    assert group(x)[1].balance_sums_RE is None
    with BatchBalance(layer) as batch:
        batch.add([layer(x)[1]])
        assert layer.earlier_sums_RE is not None
        layer.eval()
        found = layer(y)[1].aux_loss
        with pytest.raises(ConfigError, match="2 RoutingStats for 1 MoE layers"):
            batch.add([layer(x)[1]] * 2)
    assert torch.equal(found, layer(y)[1].aux_loss)
