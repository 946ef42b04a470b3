"""What gpt-oss has of its own: sinks, windows in every other layer, biases everywhere, clamped gates, experts in
MXFP4."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracle import numerics
from tests.support.bits import assert_bits_follow_no_neighbour_and_training_has_them
from tests.support.hub_models import tiny_model
from tests.support.memory import peak_bytes
from tests.support.runs import assert_resumed_to_the_bit, train_quietly
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import expertmesh as em
from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.checkpoints.hub.parts import layer_types
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import load_pretrained
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.ops.experts.moe_mlp import moe_mlp
from expertmesh.ops.route_metadata import route_metadata
from expertmesh.training.init_from import with_init_from

VOCAB = 300
PUBLISHED = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "eos_token_id": 200002,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tiny model of transformers, whose gates reach the clamp, and its folder."""
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 32}
    model = tiny_model(
        "gpt_oss",
        num_experts=4,
        top_k=2,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_key_value_heads=1,
        max_position_embeddings=128,
        rope_parameters=rope,
        eos_token_id=None,
    ).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 or name.endswith("bias"):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
            if name.endswith("gate_up_proj"):
                tensor.mul_(4)
    folder = tmp_path_factory.mktemp("gpt_oss") / "hub"
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_both_branches_are_clamped(backend):
    """Values and gradients by the formula, with gates and ups on both sides of 7."""
    shapes = (9, 6), (3, 2, 5, 6), (3, 6, 5), (9, 2)
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    leaves[1] *= 5
    ids = torch.randint(3, (9, 2))
    x, w_in, w_out, weights = [leaf.requires_grad_() for leaf in leaves]
    y = moe_mlp(*leaves[:3], weights, route_metadata(ids, 3), activation="clamped_swiglu", backend=backend)
    gate, up = torch.einsum("td,egfd->getf", x, w_in)
    assert all((h > 7).any() and (h < -7).any() for h in (gate, up))
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    a_ETF = (up + 1) * gate * torch.sigmoid(gate * 1.702)
    y_ETD = torch.einsum("etf,edf->etd", a_ETF, w_out)
    plain = sum(weights[:, j, None] * y_ETD[ids[:, j], range(9)] for j in range(2))
    grad = torch.randn_like(y)
    numerics.assert_close_fp64(y, plain, what="y")
    ours, expected = (torch.autograd.grad(one, leaves, grad) for one in (y, plain))
    for name, *pair in zip(("x", "w_in", "w_out", "weights"), ours, expected, strict=True):
        numerics.assert_close_fp64(*pair, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_follow_no_neighbour_and_training_has_them(theirs, dtype):
    given = load_pretrained(theirs[0], dtype=dtype)
    model = em.GPT(given.config.model_copy(update={"batch_invariant": True}), dtype=dtype).eval()
    model.load_state_dict(given.state_dict())
    prompts = [list(range(5, 30)), [3, 1, 4], list(range(7, 20))]
    params = SamplingParams(temperature=1.1, seed=2, max_tokens=7, logprobs=0)
    cache = {"token_budget": 3, "block_size": 4}
    assert_bits_follow_no_neighbour_and_training_has_them(model, prompts, params, cache)


def packed_folder(folder, target):
    """The folder with experts in MXFP4, of any bytes, and what transformers makes of them."""
    tensors, wide = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, (E, N, K // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks, scales)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors | {}, target / "model.safetensors", {"format": "pt"})
    return tensors, wide


def test_mxfp4_is_widened_as_in_transformers(theirs, tmp_path):
    _, wide = packed_folder(theirs[0], tmp_path / "packed")
    model = load_pretrained(tmp_path / "packed")
    for layer, block in enumerate(model.layers):
        inside = f"model.layers.{layer}.mlp.experts"
        w_in, w_out = block.moe.experts.w_in, block.moe.experts.w_out
        assert w_in.dtype == torch.bfloat16
        for g in range(2):
            assert torch.equal(w_in[:, g].mT, wide[f"{inside}.gate_up_proj"][..., g::2])
        assert torch.equal(w_out.mT, wide[f"{inside}.down_proj"])
    size = sum(t.nbytes for t in model.state_dict().values())
    assert peak_bytes(lambda: load_pretrained(tmp_path / "packed")) <= 1.1 * size


def test_every_byte_and_exponent_is_widened_to_the_bit():
    from expertmesh.checkpoints.hub.mxfp4 import widened

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    ours = widened(blocks, scales)
    assert torch.equal(ours.view(torch.int16), expected.contiguous().view(torch.int16))


def test_blocks_without_scales_are_refused(theirs, tmp_path):
    tensors, _ = packed_folder(theirs[0], tmp_path / "packed")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has no .*down_proj_scales"):
        load_pretrained(tmp_path / "packed")


@pytest.mark.parametrize(("layers", "experts", "total"), [(24, 32, 20.91), (36, 128, 116.83)])
def test_the_published_models_have_their_sizes(layers, experts, total):
    values = PUBLISHED | {"num_hidden_layers": layers, "num_local_experts": experts}
    spec = gpt_spec(model_config(values))
    assert round(spec.num_parameters / 1e9, 2) == total
    assert spec.num_active / 1e9 == pytest.approx({24: 4.19, 36: 5.7}[layers], rel=5e-3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (layer_types(6, 2), (128, 2)),
        (layer_types(6, 3), (128, 3)),
        (layer_types(6, None), (128, None)),
        (layer_types(6, 1), (None, None)),
        (["full_attention", *["sliding_attention"] * 5], None),
    ],
)
def test_windows_are_read_layer_by_layer(kinds, expected):
    values = PUBLISHED | {"num_hidden_layers": 6, "num_local_experts": 4, "layer_types": kinds}
    if expected is None:
        with pytest.raises(ConfigError, match="layer_types=.*all but every n-th of 6"):
            model_config(values)
        return
    config = model_config(values)
    assert (config.sliding_window, config.full_attention_every) == expected
    windows = [config.window_of(i) for i in range(6)]
    assert windows == [128 if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"full_attention_every": 2}, "full_attention_every.*no effect without sliding_window"),
        ({"sinks": True, "latent": {"kv_lora_rank": 8}}, "sinks.*latent attention"),
        ({"moe": {"router": "cosine", "router_bias": True}}, "router_bias.*router=cosine"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**options)


def test_models_of_the_hub_are_quantised(theirs, tmp_path):
    from expertmesh.integrations.hub.quantize import quantize
    from expertmesh.text.tokenizer import train_tokenizer

    folder, model = theirs
    train_tokenizer(["a few words " * 9], vocab_size=VOCAB).save(str(folder / "tokenizer.json"))
    ids = torch.randint(VOCAB, (1, 12))
    with torch.no_grad():
        plain = model(ids).logits
        for format in ("int8", "int4", "fp8"):
            size = 32 if format == "int4" else None
            quantize(folder, tmp_path / format, format=format, group_size=size)
            found = em.load(tmp_path / format).model.eval()(ids).logits_BSV
            assert found.isfinite().all()
            if format == "int8":
                assert (found - plain).norm() < 0.2 * plain.norm()


def test_adapters_learn_what_the_sum_of_weights_says(theirs):
    """Behind clamped gates and biases, with FP64 for both: logits, and gradients of both factors from those of W + s B
    A."""
    adapted = load_pretrained(theirs[0], dtype=torch.float64)
    assert em.lora.add(adapted, rank=3, alpha=6.0, dtype=torch.float64, seed=1) == 4
    generator = torch.Generator().manual_seed(2)
    for name, p in adapted.named_parameters():
        if name.endswith(".b"):
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    merged = copy.deepcopy(adapted)
    em.lora.merge(merged)
    for p in merged.parameters():
        p.requires_grad_()
    ids = torch.randint(VOCAB, (2, 24))
    logits = [one(ids).logits_BSV for one in (adapted, merged)]
    for one in logits:
        one.backward(torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one))
    numerics.assert_close_fp64(*logits, what="logits")
    for ours, plain in zip(adapted.layers, merged.layers, strict=True):
        for name, one in em.lora.adapters(ours).items():
            grad = getattr(plain.moe.experts, name.rpartition(".")[2]).grad.flatten(1, -2)
            b, d_b = (t.flatten(1, -2) for t in (one.b, one.b.grad))
            numerics.assert_close_fp64(one.a.grad, one.scaling * b.mT @ grad, what=name)
            numerics.assert_close_fp64(d_b, one.scaling * grad @ one.a.mT, what=name)
    assert all(p.grad is None for n, p in adapted.named_parameters() if "adapters" not in n)


def test_training_in_bf16_goes_on_to_the_bit(theirs, tmp_path):
    """From the weights of the hub, stopped and resumed; the loss falls."""
    from expertmesh.integrations.hub import convert
    from expertmesh.text.tokenizer import train_tokenizer

    texts = [f"{number} words of some text. " * 99 for number in range(4)]
    shutil.copytree(theirs[0], tmp_path / "hub")
    train_tokenizer(texts, vocab_size=VOCAB).save(str(tmp_path / "hub" / "tokenizer.json"))
    convert(tmp_path / "hub", tmp_path / "run")
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number}.txt").write_text(text)

    def run_of(run_dir, **changes):
        places = {"path": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache")}
        small = {"steps": 20, "batch_size": 2, "eval_batches": 1, "tensorboard": False}
        where = {"init_from": str(tmp_path / "run"), "run_dir": str(run_dir), "resume": "auto"}
        config = GPTRunConfig(
            data={**places, "seq_len": 32},
            train={**small, **where, "device": "cpu", "dtype": "bfloat16"},
            optim={"lr": 1e-3, "warmup_steps": 2},
        )
        return with_init_from(config, GPT).updated(changes)

    result = train_quietly(run_of(tmp_path / "straight"))
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    assert_resumed_to_the_bit(run_of, tmp_path / "straight", tmp_path / "parts")
