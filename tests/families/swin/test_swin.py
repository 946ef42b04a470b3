"""Swin Transformers: equal to transformers' Swin V2 and to a loop over tokens, of the published sizes and costs."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64, assert_two_times, magnitude

from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.moe.routing_noise import key_noise
from expertmesh.training.param_groups import parameter_roles
from expertmesh_families.swin.config import SwinConfig, SwinRunConfig
from expertmesh_families.swin.costs import count_multiply_adds, swin_costs
from expertmesh_families.swin.drop_path import DropPath
from expertmesh_families.swin.model import Swin
from expertmesh_families.swin.recipes import RECIPES

MILLIONS = {
    "swin-t": 28.35, "swin-s": 49.73, "swin-b": 87.92,
    "swin-s-moe8": 173.26, "swin-s-moe16": 296.11, "swin-s-moe32": 541.81, "swin-s-moe64": 1033.2, "swin-s-moe128": 2016.0,  # noqa: E501
    "swin-b-moe8": 300.33, "swin-b-moe16": 518.66, "swin-b-moe32": 955.31,
}  # fmt: skip


def config(**options):
    values = {
        "image_size": 16,
        "num_channels": 3,
        "num_classes": 5,
        "patch_size": 2,
        "dim": 8,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
        "mlp_ratio": 2.0,
        "drop_path": 0.0,
        "init_std": 0.3,
        "moe_stages": (1, 2),
        "moe": MoEConfig(num_experts=(3, 4), top_k=1),
    }
    return SwinConfig(**(values | options))


def shaken(model):
    """Norms, biases and scales get values of their own, so that each has to be used rightly."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("b_in", "b_out")):
                parameter += 0.4 * torch.randn(parameter.shape, generator=generator)
    return model


def norm(x, w, prefix):
    return F.layer_norm(x, x.shape[-1:], w[f"{prefix}.weight"], w[f"{prefix}.bias"])


def position_bias(offset, window, w, p, is_v2):
    at = [8 * d / (window - 1) for d in offset]
    at = [math.copysign(math.log2(1 + abs(d)) / 3, d) for d in at]
    at = torch.tensor(at, dtype=torch.float64)
    hidden = F.relu(w[f"{p}position_embedding.0.weight"] @ at + w[f"{p}position_embedding.0.bias"])
    bias_H = w[f"{p}position_embedding.2.weight"] @ hidden
    return 16 / (1 + (-bias_H).exp()) if is_v2 else bias_H


def attend(x_HWD, w, p, cfg, stage, shift):
    """Each query looks at every token of its window, if both were neighbours before the map was rolled."""
    side, D = x_HWD.shape[0], x_HWD.shape[-1]
    window, heads, is_v2 = min(cfg.window_size, side), cfg.num_heads[stage], cfg.variant == "v2"
    qkv = x_HWD @ w[f"{p}qkv.weight"].T
    if is_v2:
        zero = torch.zeros(D, dtype=torch.float64)
        qkv = qkv + torch.cat((w[f"{p}q_bias"], zero, w[f"{p}v_bias"]))
    else:
        qkv = qkv + w[f"{p}qkv.bias"]
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in qkv.chunk(3, -1))
    places = list(product(range(side), range(side)))
    group = {}  # of every token: its window, and the piece of the map that it comes from
    for place in places:
        rolled = [(c - shift) % side for c in place]
        group[place] = tuple((r // window, r < side - shift) for r in rolled)
    biases = {
        offset: position_bias(offset, window, w, p, is_v2) for offset in product(range(1 - window, window), repeat=2)
    }
    rows = []
    for y, x in places:
        others = [other for other in places if group[other] == group[y, x]]
        logits = []
        for b, a in others:
            dot = (q[y, x] * k[b, a]).sum(-1)
            if is_v2:
                sizes = q[y, x].norm(dim=-1) * k[b, a].norm(dim=-1)
                dot = dot / sizes * w[f"{p}log_scale"].clamp(max=math.log(100)).exp()
            else:
                dot = dot / (D // heads) ** 0.5
            logits.append(dot + biases[y - b, x - a])
        share = torch.stack(logits).softmax(0)
        values = torch.stack([v[other] for other in others])
        rows.append((share[..., None] * values).sum(0).flatten())
    y_HWD = torch.stack(rows).view(side, side, D)
    return y_HWD @ w[f"{p}out.weight"].T + w[f"{p}out.bias"]


def mlp(x, w_in, b_in, w_out, b_out):
    y = w_out @ F.gelu(w_in @ x + b_in)
    return y if b_out is None else y + b_out


def feed_forward(x_HWD, w, p):
    names = ("w_in", "b_in", "w_out", "b_out")
    rows = []
    for x in x_HWD.flatten(0, 1):
        if f"{p}ffn.w_in" in w:
            w_in, b_in, w_out, b_out = (w.get(f"{p}ffn.{n}") for n in names)
            rows.append(mlp(x, w_in[0], b_in[0], w_out, b_out))
            continue
        scores = (w[f"{p}moe.router.proj.weight"] @ x).softmax(-1)
        best = int(scores.argmax())
        w_in, b_in, w_out, b_out = (w.get(f"{p}moe.experts.{n}") for n in names)
        y = mlp(x, w_in[best, 0], b_in[best, 0], w_out[best], None if b_out is None else b_out[best])
        rows.append(scores[best] * y)
    return torch.stack(rows).view_as(x_HWD)


def oracle(w, cfg, image_CHW):
    """Logits and feature maps of one image."""
    is_v2, size = cfg.variant == "v2", cfg.patch_size
    side = cfg.image_size // size
    patches = [
        image_CHW[:, y * size : (y + 1) * size, x * size : (x + 1) * size].flatten()
        for y, x in product(range(side), repeat=2)
    ]
    x = torch.stack(patches).view(side, side, -1) @ w["patches.weight"].T + w["patches.bias"]
    x, maps = norm(x, w, "patch_norm"), []
    for stage, depth in enumerate(cfg.depths):
        for block in range(depth):
            p = f"stages.{stage}.{block}."
            shift = cfg.window_size // 2 if block % 2 and len(x) > cfg.window_size else 0
            if is_v2:
                y = attend(x, w, f"{p}attention.", cfg, stage, shift)
                x = x + norm(y, w, f"{p}attention_norm")
                x = x + norm(feed_forward(x, w, p), w, f"{p}ffn_norm")
            else:
                y = norm(x, w, f"{p}attention_norm")
                x = x + attend(y, w, f"{p}attention.", cfg, stage, shift)
                x = x + feed_forward(norm(x, w, f"{p}ffn_norm"), w, p)
        maps.append(x.permute(2, 0, 1))
        if stage + 1 < len(cfg.depths):
            x = torch.cat([x[dy::2, dx::2] for dy, dx in ((0, 0), (1, 0), (0, 1), (1, 1))], -1)
            p = f"merges.{stage}"
            if is_v2:
                x = norm(x @ w[f"{p}.proj.weight"].T, w, f"{p}.norm")
            else:
                x = norm(x, w, f"{p}.norm") @ w[f"{p}.proj.weight"].T
    mean = norm(x, w, "final_norm").mean((0, 1))
    return w["head.weight"] @ mean + w["head.bias"], maps


@pytest.mark.parametrize("variant", ["v2", "released"])
def test_equals_a_loop_over_tokens(variant):
    cfg = config(variant=variant, image_size=8, window_size=2)
    model = shaken(Swin(cfg, dtype=torch.float64, seed=1))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    weights = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    expected, maps = zip(*[oracle(weights, cfg, image) for image in images], strict=True)
    output = model(images)
    logits = torch.stack(expected)
    assert_close_fp64(output.logits_BC, logits, what="logits")
    for stage, features in enumerate(output.features):
        wanted = torch.stack([of_image[stage] for of_image in maps])
        assert_close_fp64(features, wanted, what=f"features of stage {stage}")
    factor = torch.randn(logits.shape, dtype=torch.float64)
    (output.logits_BC * factor).sum().backward()
    (logits * factor).sum().backward()
    largest = max(magnitude(weight.grad) for weight in weights.values())
    for name, parameter in model.named_parameters():
        wanted = weights[name].grad  # a router's may be a millionth of its summands
        scale = max(magnitude(wanted), 1e-3 * largest)
        assert_close_fp64(parameter.grad, wanted, what=name, scale=scale)
    biases = {name.rpartition(".")[2] for name in weights if name.endswith("b_out")}
    assert biases == ({"b_out"} if variant == "v2" else set())
    assert len(output.stats) == 2 and output.stats[0].topk_expert_ids_TK.shape == (32, 1)


def copied(ours, theirs):
    """The weights of transformers' Swin V2 in ours, one to one."""
    theirs, left = dict(theirs.named_parameters()), set()

    def put(target, *names):
        values = [theirs[name] for name in names]
        left.update(names)
        target.copy_(torch.cat([v.flatten(1) if v.ndim > 1 else v for v in values]).view_as(target))

    def both(module, name):
        put(module.weight, f"{name}.weight")
        put(module.bias, f"{name}.bias")

    with torch.no_grad():
        both(ours.patches, "swinv2.embeddings.patch_embeddings.projection")
        both(ours.patch_norm, "swinv2.embeddings.norm")
        both(ours.final_norm, "swinv2.layernorm")
        both(ours.head, "classifier")
        for stage, blocks in enumerate(ours.stages):
            at = f"swinv2.encoder.layers.{stage}"
            if stage < len(ours.merges):
                put(ours.merges[stage].proj.weight, f"{at}.downsample.reduction.weight")
                both(ours.merges[stage].norm, f"{at}.downsample.norm")
            for number, block in enumerate(blocks):
                p, attention = f"{at}.blocks.{number}", block.attention
                inner = f"{p}.attention.self"
                put(
                    attention.qkv.weight,
                    *(f"{inner}.{n}.weight" for n in ("query", "key", "value")),
                )
                put(attention.q_bias, f"{inner}.query.bias")
                put(attention.v_bias, f"{inner}.value.bias")
                put(attention.log_scale, f"{inner}.logit_scale")
                both(attention.position_embedding[0], f"{inner}.continuous_position_bias_mlp.0")
                last = f"{inner}.continuous_position_bias_mlp.2.weight"
                put(attention.position_embedding[2].weight, last)
                both(attention.out, f"{p}.attention.output.dense")
                both(block.attention_norm, f"{p}.layernorm_before")
                both(block.ffn_norm, f"{p}.layernorm_after")
                for part, name in (("in", "intermediate"), ("out", "output")):
                    put(getattr(block.ffn, f"w_{part}"), f"{p}.{name}.dense.weight")
                    put(getattr(block.ffn, f"b_{part}"), f"{p}.{name}.dense.bias")
    assert left == set(theirs), "a weight was left out"


def test_equals_the_swin_v2_of_transformers():
    transformers = pytest.importorskip("transformers")
    cfg = config(image_size=32, depths=(2, 2, 2), num_heads=(1, 2, 4), moe=MoEConfig(num_experts=()))
    torch.manual_seed(5)
    theirs = transformers.Swinv2ForImageClassification(
        transformers.Swinv2Config(
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2, 2],
            num_heads=[1, 2, 4],
            window_size=4,
            mlp_ratio=2.0,
            drop_path_rate=0.0,
            initializer_range=0.3,
            num_labels=5,
        )
    )
    shaken(theirs)
    ours = Swin(cfg, seed=0)
    copied(ours, theirs)
    images = torch.randn(2, 3, 32, 32)
    found = ours(images)
    reference = theirs(images, output_hidden_states=True)
    truth = theirs.double()(images.double(), output_hidden_states=True)
    assert_two_times(found.logits_BC, reference.logits, truth.logits, what="logits")
    # the last stage has no merge, so that its map is theirs
    last, exact = reference.reshaped_hidden_states[-1], truth.reshaped_hidden_states[-1]
    assert_two_times(found.features[-1], last, exact, what="features of the last stage")
    assert [tuple(f.shape[1:]) for f in found.features] == [(8, 16, 16), (16, 8, 8), (32, 4, 4)]


@pytest.mark.parametrize("name", RECIPES)
def test_sizes(name):
    cfg = RECIPES[name]()
    total = sum(p.numel() for p in Swin(cfg.model, device="meta").parameters())
    assert swin_costs(cfg, num_ranks=1, dtype="float32").parameters == total
    if name in MILLIONS:
        assert abs(total / 1e6 / MILLIONS[name] - 1) < 0.002
        other = {"v2": "released", "released": "v2"}[cfg.model.variant]
        twin = Swin(cfg.model.updated({"variant": other}), device="meta")
        assert abs(sum(p.numel() for p in twin.parameters()) / 1e6 / MILLIONS[name] - 1) < 0.002
        assert cfg.model.num_moe_layers == (10 if "moe" in name else 0)
    assert type(cfg).model_validate_json(cfg.model_dump_json()) == cfg
    assert cfg.train.run_dir == f"runs/{name}"


PUBLISHED_TRAINING = [
    ("swin-t", 0.2, 300, 20, 1_281_167, 0.05, 5.0, 0.02),
    ("swin-s", 0.3, 300, 20, 1_281_167, 0.05, 5.0, 0.02),
    ("swin-b", 0.5, 300, 20, 1_281_167, 0.05, 5.0, 0.02),
    ("swin-s-moe8", 0.2, 90, 10, 14_197_122, 0.1, 3.0, 0.005),
    ("swin-b-moe8", 0.3, 90, 10, 14_197_122, 0.1, 3.0, 0.005),
]
"""Stochastic depth, epochs, those of the warm-up, images, decay, clipping, initial weights of the released
configurations."""


@pytest.mark.parametrize("name, drop_path, epochs, warm_up, images, decay, clip, std", PUBLISHED_TRAINING)
def test_published_training(name, drop_path, epochs, warm_up, images, decay, clip, std):
    cfg = RECIPES[name]()
    found = cfg.model.drop_path, cfg.model.init_std, cfg.optim.weight_decay, cfg.optim.grad_clip
    assert found == (drop_path, std, decay, clip)
    per_epoch = images / cfg.train.batch_size
    assert abs(cfg.train.steps / per_epoch / epochs - 1) < 0.03
    assert abs(cfg.optim.warmup_steps / per_epoch / warm_up - 1) < 0.03


@pytest.mark.parametrize(
    "options",
    [{"router": "cosine", "cosine_dim": 8}, {"num_shared_experts": 1}, {"residual": True}],
    ids=str,
)
def test_every_kind_of_block_computes_and_is_counted(options):
    cfg = config(moe=MoEConfig(num_experts=(3, 4), top_k=1, **options))
    model = Swin(cfg, seed=0)
    output = model(torch.randn(2, 3, 16, 16))
    (output.logits_BC.square().sum() + sum(s.aux_loss for s in output.stats)).backward()
    assert all(p.grad is not None for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    run = SwinRunConfig(model=cfg)
    assert swin_costs(run, num_ranks=2, dtype="bfloat16").parameters == total
    matrices = {n for n, role in parameter_roles(model).items() if role == "matrix"}
    saved = 4 * sum(p.numel() for n, p in model.named_parameters() if n in matrices)
    for name, less in (("adamw", 0), ("muon", saved)):
        one = run.updated({"optim.name": name})
        for parts in (1, 2):
            costs = swin_costs(one, num_ranks=parts, dtype="float32")
            found, whole = costs.memory.optimizer_bytes, 8 * total - less
            # a parameter that ranks cannot halve counts whole on one of them
            odd = 8 * sum(p.numel() % parts for p in model.parameters())
            assert whole // parts <= found <= whole // parts + odd


def test_published_multiply_adds():
    """ "GFLOPs" of arXiv 2206.03382, table 9 (dense, 192 x 192, 21,841 classes), and of 2111.09883, table 5 (256 x
    256)."""
    for name, billions in (("swin-s-moe8", 6.756), ("swin-b-moe8", 11.782)):
        dense = RECIPES[name]().model.updated({"moe": MoEConfig(num_experts=())})
        assert abs(count_multiply_adds(dense) / 1e9 / billions - 1) < 0.001
    for name, billions in (("swin-s-moe8", 7.18), ("swin-b-moe8", 12.54)):
        assert round(count_multiply_adds(RECIPES[name]().model) / 1e9, 2) == billions
    for name, of_8, of_16 in (("swin-t", 5.9, 6.6), ("swin-s", 11.5, 12.6), ("swin-b", 20.3, 21.8)):
        for window, billions in ((8, of_8), (16, of_16)):
            cfg = RECIPES[name]().model.updated({"window_size": window})
            assert round(count_multiply_adds(cfg) / 1e9, 1) == billions


def test_what_stands_beside_experts_is_multiplied_too():
    """As often as their matrices have elements, once for each token of the last stage."""
    plain, beside = (
        Swin(config(moe=MoEConfig(num_experts=(3, 4), top_k=1, **options)), device="meta")
        for options in ({}, {"num_shared_experts": 1, "shared_gate": True, "residual": True})
    )
    extra = 0
    for name, parameter in beside.named_parameters():
        is_matrix = parameter.ndim > 1 and not name.endswith(("b_in", "b_out"))
        if is_matrix and name not in dict(plain.named_parameters()):
            stage = int(name.split(".")[1])
            extra += plain.config.map_sides[stage] ** 2 * parameter.numel()
    found = [count_multiply_adds(model.config) for model in (plain, beside)]
    assert extra and found[1] - found[0] == extra


def test_the_position_bias_of_another_window_is_interpolated():
    """A larger window measures offsets by the old one: at an offset that both have, the bias is the same."""
    old = shaken(Swin(config(window_size=2), dtype=torch.float64, seed=1))
    new_config = config(window_size=4, pretrained_window_sizes=(2, 2))
    new = Swin(new_config, dtype=torch.float64, seed=2)
    new.load_state_dict(old.state_dict())  # tables are no part of it
    for before, after in zip(old.blocks(), new.blocks(), strict=True):
        ours, theirs = after.attention.position_bias(), before.attention.position_bias()
        # place 0 of both windows; right, below and diagonal neighbours are 1, 4 and 5 of four columns
        assert_close_fp64(ours[:, 0, [0, 1, 4, 5]], theirs[:, 0, :4], what="bias")


def test_stochastic_depth_depends_on_the_image_alone():
    layer = DropPath([0.0, 0.3, 0.3])
    key_noise(layer, seed=3, step=2)
    index = torch.arange(4000)
    whole = layer(index)
    assert torch.equal(whole[:, 20:30], layer(index[20:30]))
    assert torch.equal(whole[0], torch.ones(4000)) and not torch.equal(whole[1], whole[2])
    dropped = whole[1:] == 0
    assert torch.equal(whole[1:][~dropped], (torch.ones(2, 4000) / (1 - torch.tensor(0.3)))[~dropped])
    # binomial, six standard deviations
    assert (dropped.sum(1) - 0.3 * 4000).abs().max() < 6 * (0.21 * 4000) ** 0.5
    assert layer.eval()(index) is None
    rates = Swin(config(drop_path=0.3, depths=(2, 2)), device="meta").drop_path.rates
    assert [round(rate, 6) for rate in rates] == [0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]


def test_every_block_of_v2_starts_as_the_identity():
    for block in Swin(config(), seed=1).blocks():
        x = torch.randn(1, block.attention.side, block.attention.side, len(block.ffn_norm.weight))
        assert torch.equal(block(x, torch.arange(1), None)[0], x)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_heads": (2,)}, "must have one entry for each stage"),
        ({"num_heads": (3, 4)}, "num_heads=3: must divide the stage's width, 8"),
        ({"image_size": 18}, "image_size=18: must be a multiple of 4"),
        ({"window_size": 3}, "window_size=3: must divide the side of each stage's map"),
        ({"moe_stages": (2, 5)}, "must be different stages from 1 to 2"),
        ({"moe_stages": ()}, "names no stage of two blocks"),
        ({"moe": {"num_experts": (2, 2, 2), "top_k": 1}}, "one per MoE block"),
        ({"moe": {"hidden_dim": 64, "top_k": 1}}, "is that of the MLPs which the experts replace"),
        ({"pretrained_window_sizes": (2,)}, "must have one entry for each of the 2 stages"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        config(**options)
    assert "\n" not in str(caught.value)


def test_images_of_another_shape_are_refused():
    words = r"images_BCHW has shape \(1, 3, 32, 32\); it must be \(B, 3, 16, 16\).*; resize them"
    with pytest.raises(ConfigError, match=words):
        Swin(config(), seed=0)(torch.zeros(1, 3, 32, 32))
