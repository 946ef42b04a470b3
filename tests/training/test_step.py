"""One optimizer step: accumulation, recomputation, precision, what is not finite."""

import math

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs, assert_two_times

from expertmesh.models import token_losses as objective
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.token_losses import token_losses
from expertmesh.moe.routing_noise import key_noise
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.optim import build_optimizer
from expertmesh.training.step import accumulate_gradients, training_step

CPU = torch.device("cpu")


def build(config):
    precision = resolve_precision(config.train)
    return GPTTask(config).builder.build(device="cpu", dtype=precision.master_dtype), precision


def batch(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (config.train.batch_size, config.data.seq_len + 1)
    ids = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    return ids[:, :-1], ids[:, 1:]


def gradients(config, micro_batch_size, *, noise_step=3, checkpointing=False):
    model, precision = build(config)
    model.set_activation_checkpointing(checkpointing)
    key_noise(model, seed=config.train.seed, step=noise_step)
    sums, counter, _ = accumulate_gradients(
        GPTTask(config),
        model,
        batch(config),
        step=noise_step,
        micro_batch_size=micro_batch_size,
        scaler=precision.scaler(),
        precision=precision,
    )
    return sums, {n: p.grad for n, p in model.named_parameters()}, counter


NOISY = {"model.moe.router_noise": "gumbel", "model.moe.input_jitter": 0.1}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
@pytest.mark.parametrize("noise", [{}, NOISY], ids=["plain", "noisy"])
def test_micro_batches_add_up_to_the_big_batch(tiny, micro_batch_size, noise):
    # One routing group per sequence, so that the balance loss means the same for any micro-batch.
    config = tiny(
        **{"train.dtype": "float64", "train.batch_size": 6, "model.moe.z_loss_weight": 0.01},
        **{"model.moe.routing_group_size": 16, "model.moe.aux_loss_weight": 0.1},
        **noise,
    )
    whole_sums, whole, whole_counter = gradients(config, 6)
    part_sums, part, part_counter = gradients(config, micro_batch_size)
    assert_close_fp64(part_sums, whole_sums, what="losses")
    for name, gradient in whole.items():
        assert_close_fp64(part[name], gradient, what=name)
    for a, b in zip(part_counter.counts, whole_counter.counts, strict=True):
        assert torch.equal(a, b)


WEIGHTS = {"z_loss_weight": 0.1, "aux_loss_weight": 0.1, "routing_group_size": 8}


def conversations(tiny):
    """Rows with other shares of padding and of tokens that are learned."""
    moe = {f"model.moe.{name}": value for name, value in WEIGHTS.items()}
    config = tiny(**{"train.dtype": "float64", "train.batch_size": 4} | moe)
    place_S = torch.arange(config.data.seq_len)
    is_token = place_S < torch.tensor([[3], [16], [9], [5]])
    counts = is_token & (place_S >= torch.tensor([[2], [1], [6], [0]]))
    return GPTTask(config), (*batch(config), {"counts": counts.double(), "is_token": is_token})


def test_routing_losses_are_means_over_the_tokens_that_layers_see(tiny):
    """Which are not those that the loss is a mean over."""
    assert_routing_losses_are_means(*conversations(tiny))


def assert_routing_losses_are_means(task, samples):
    precision, found = resolve_precision(task.config.train), []
    for size in (4, 1):
        model = task.builder.build(device="cpu", dtype=precision.master_dtype)
        key_noise(model, seed=0, step=0)
        options = {"scaler": precision.scaler(), "precision": precision}
        sums, *_ = accumulate_gradients(task, model, samples, step=0, micro_batch_size=size, **options)
        found.append(sums)
    assert_close_fp64(found[1], found[0], what="losses")


def test_noise_depends_on_the_step(tiny):
    config = tiny(**NOISY)
    assert_differs(gradients(config, 4)[0], gradients(config, 4, noise_step=4)[0], what="losses")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_activations_changes_no_bit(tiny, dtype):
    config = tiny(**{"train.dtype": dtype}, **NOISY)
    sums, kept, _ = gradients(config, 2)
    again_sums, recomputed, _ = gradients(config, 2, checkpointing=True)
    assert torch.equal(sums, again_sums)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def run_steps(config, count, *, model=None, spoil=None):
    built, precision = build(config)
    model = model or built
    optimizer = build_optimizer(model, config.optim)
    scaler = precision.scaler()
    results = []
    for step in range(count):
        if spoil is not None:
            spoil(step, model, scaler)
        results.append(
            training_step(
                GPTTask(config),
                model,
                optimizer,
                scaler,
                batch(config),
                step=step,
                precision=precision,
            )
        )
    return results, model, scaler


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_precision_learns_one_batch_by_heart(tiny, dtype):
    config = tiny(**{"train.dtype": dtype, "optim.lr": 1e-2})
    results, model, _ = run_steps(config, 25)
    losses = [r.loss for r in results]
    assert all(r.is_finite for r in results)
    assert losses[0] > math.log(300) - 0.5 and losses[-1] < losses[0] - 1.5
    master = torch.float64 if dtype == "float64" else torch.float32
    assert all(p.dtype == master for p in model.parameters())


def test_fp16_scaler_backs_off_and_the_step_is_not_done(tiny):
    config = tiny(**{"train.dtype": "float16"})

    def too_large(step, model, scaler):
        if step == 0:
            scaler._lazy_init_scale_growth_tracker(CPU)
            scaler._scale.fill_(2.0**40)

    before, _ = build(config)
    model, _ = build(config)
    results, model, scaler = run_steps(config, 1, model=model, spoil=too_large)
    assert not results[0].is_finite and math.isfinite(results[0].loss)
    assert scaler.get_scale() == 2.0**39
    for a, b in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_is_by_the_global_norm_and_reports_the_norm_before(tiny):
    config = tiny(**{"optim.grad_clip": 1e-3, "optim.weight_decay": 0.0})
    _, named, _ = gradients(config, 4, noise_step=0)
    norm = torch.cat([g.flatten() for g in named.values()]).double().norm()
    results, model, _ = run_steps(config, 1)
    assert math.isclose(results[0].grad_norm, float(norm), rel_tol=1e-5)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
    assert math.isclose(float(clipped), 1e-3, rel_tol=1e-3)


def test_nan_in_the_weights_changes_nothing_and_is_told(tiny):
    config = tiny(**{"model.moe.bias_update_rate": 0.1})
    model, _ = build(config)
    with torch.no_grad():
        model.layers[0].moe.experts.w_in[0, 0, 0, 0] = math.nan
    before = {n: t.clone() for n, t in model.state_dict().items()}
    results, model, _ = run_steps(config, 2, model=model)
    assert not any(r.is_finite for r in results)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("frozen", [("router",), ()])
def test_a_frozen_router_keeps_its_balancing_bias(tiny, frozen):
    config = tiny(**{"model.moe.bias_update_rate": 0.1, "train.freeze": frozen})
    _, model, _ = run_steps(config, 1)
    assert model.layers[0].moe.expert_bias_E.any() == (not frozen)


def test_a_bad_step_between_good_ones_leaves_weights_and_moments(tiny):
    config = tiny()

    def spoil(step, model, scaler):
        bad = step == 1
        handle = getattr(model, "_spoiler", None)
        if bad:
            model._spoiler = model.final_norm.weight.register_hook(lambda g: g * math.inf)
        elif handle is not None:
            handle.remove()

    results, model, _ = run_steps(config, 3, spoil=spoil)
    assert [r.is_finite for r in results] == [True, False, True]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_routing_statistics_are_those_of_the_batch(tiny):
    config = tiny(**{"model.moe.capacity_factor": 0.5, "model.moe.min_capacity": 1})
    results, _, _ = run_steps(config, 1)
    load = results[0].load
    assert 0.4 < load.dropped_fraction < 0.75
    assert load.load_imbalance >= 1.0


def test_a_dense_model_has_no_routing_losses(tiny):
    config = tiny(**{"model.moe.num_experts": (), "model.moe.hidden_dim": 512})
    results, _, _ = run_steps(config, 1)
    assert results[0].aux_loss == results[0].z_loss == 0.0
    assert results[0].load is None


def losses_and_gradient(function, logits, targets, weights):
    leaf = logits.clone().requires_grad_()
    losses = function(leaf, targets)
    (losses * weights.to(losses)).sum().backward()
    return losses.detach(), leaf.grad


def plain_losses(logits, targets):
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(wide, targets.flatten(), reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 50), (1, 1, 7), (3, 1000, 301)])
def test_token_losses_by_the_two_times_rule(dtype, shape):
    logits = (3 * torch.randn(shape)).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1])
    weights = torch.rand(shape[0] * shape[1])
    oracle = losses_and_gradient(plain_losses, logits.double(), targets, weights)
    plain = losses_and_gradient(plain_losses, logits, targets, weights)
    ours = losses_and_gradient(token_losses, logits, targets, weights)
    for value, reference, exact, what in zip(ours, plain, oracle, ("loss", "grad"), strict=True):
        assert_two_times(value, reference, exact, what=what)


@pytest.fixture
def _small_blocks(threshold):
    threshold(objective, "_BLOCK_ELEMENTS_CPU", 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_small_blocks")
def test_the_gradient_may_take_the_place_of_the_logits(dtype):
    leaf = torch.randn(2, 5, 30).to(dtype).requires_grad_()
    targets = torch.randint(0, 30, (2, 5))
    found = []
    for overwrite in (False, True):
        logits = leaf * 2
        losses = token_losses(logits, targets, overwrite_logits=overwrite)
        found.append((losses, *torch.autograd.grad(losses.sum(), leaf, retain_graph=True)))
        if overwrite:
            assert torch.equal(logits.detach() * 2, found[-1][1])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                losses.sum().backward()
        else:
            assert torch.equal(logits, leaf * 2)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("_small_blocks")
def test_token_losses_in_fp64():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (2, 5))
    assert torch.autograd.gradcheck(lambda z: token_losses(z, targets), (logits,))
    huge = torch.full((1, 1, 4), 1e5)
    assert math.isclose(token_losses(huge, targets[:1, :1] % 4).item(), math.log(4), rel_tol=0.01)
