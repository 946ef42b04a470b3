"""FP8 weights with a scale per block: the numbers that they stand for, whole, in parts and at cut edges, and what is
refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hub_models import tiny_model
from tests.support.memory import peak_bytes
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import expertmesh as em
from expertmesh.checkpoints.hub.fp8 import Fp8Files, widened
from expertmesh.checkpoints.hub.load_pretrained import HubModel
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.runs.open import open_model
from expertmesh.text.tokenizer import train_tokenizer

VOCAB = 300
BLOCK = [16, 8]
CHANGES = {
    "deepseek_v3": {"num_nextn_predict_layers": 0, "moe_intermediate_size": 20},
    "qwen3_moe": {"decoder_sparse_step": 1, "num_key_value_heads": 1},
}


def rounded(matrix, block):
    """FP8 values and scales by block, the last ones cut."""
    sizes = [-(-size // b) for size, b in zip(matrix.shape, block, strict=True)]
    scales = torch.empty(sizes)
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            at = [slice(k * b, (k + 1) * b) for k, b in zip((i, j), block, strict=True)]
            scales[i, j] = matrix[*at].abs().max() / 448
            values[*at] = (matrix[*at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def by_loops(values, scales, block):
    """A number after the other."""
    found = torch.empty(values.shape)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            found[i, j] = values[i, j].float() * scales[i // block[0], j // block[1]].float()
    return found


@pytest.fixture(scope="module", params=CHANGES)
def pair(request, tmp_path_factory):
    """A folder in FP8, and the one in BF16 that it stands for."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, num_experts=4, top_k=2, vocab_size=VOCAB, **CHANGES[request.param])
    model.to(torch.bfloat16).save_pretrained(place / "wide")
    tokenizer = train_tokenizer(["a few words of some text " * 9], vocab_size=VOCAB)
    tokenizer.save(str(place / "wide/tokenizer.json"))
    shutil.copytree(place / "wide", place / "fp8")
    wide = load_file(place / "wide/model.safetensors")
    packed = dict(wide)
    for name, tensor in wide.items():
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
            packed[name], packed[f"{name}_scale_inv"] = rounded(tensor.float(), BLOCK)
            both = packed[name], packed[f"{name}_scale_inv"]
            wide[name] = by_loops(*both, BLOCK).to(torch.bfloat16)
    save_file(wide, place / "wide/model.safetensors", {"format": "pt"})
    save_file(packed, place / "fp8/model.safetensors", {"format": "pt"})
    change_config(place / "fp8", lambda c: c)
    return place / "fp8", place / "wide"


def change_config(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    given = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    values["quantization_config"] = change(given)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("shape", [(576, 100), (256, 384), (1, 1), (127, 129)], ids=str)
def test_every_part_is_that_of_the_whole(shape):
    generator = torch.Generator().manual_seed(0)
    values, scales = rounded(torch.randn(shape, generator=generator), (128, 128))
    whole = by_loops(values, scales, (128, 128))
    assert scales.shape == tuple(-(-n // 128) for n in shape)  # 576 rows have five
    for _ in range(30):
        at = []
        for n in shape:
            start, stop = sorted(torch.randint(n + 1, (2,), generator=generator).tolist())
            at.append(slice(start, stop))
        assert torch.equal(widened(values, scales, (128, 128), tuple(at)), whole[*at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_in_whole_blocks_is_widened_as_in_transformers(dtype):
    bits = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    values, scales = bits.view(torch.float8_e4m3fn), torch.tensor([[0.37, 3e-5], [1.7, 1e-39]])
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=dtype)
    ours = widened(values, scales, (128, 128), (slice(0, 256), slice(0, 256))).to(dtype)
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(ours.view(kind), theirs.view(kind))


def test_a_model_in_fp8_has_the_weights_and_tokens_of_its_twin(pair):
    fp8, wide = map(load_pretrained, pair)
    assert fp8.config == wide.config
    twin = wide.state_dict()
    for name, tensor in fp8.state_dict().items():
        assert tensor.dtype == twin[name].dtype
        assert torch.equal(tensor, twin[name]), name
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = [em.Engine(str(one)).generate([[5, 6, 7]], params)[0].token_ids for one in pair]
    assert found[0] == found[1]
    model, *_ = open_model(pair[0])
    assert Engine(model.eval()).generate([[5, 6, 7]], params)[0].token_ids == found[0]


def test_wider_parameters_have_the_digits_of_fp32(pair):
    name = next(n for n in load_file(pair[0] / "model.safetensors") if n.endswith("_scale_inv"))
    name = name.removesuffix("_scale_inv")
    files = load_file(pair[0] / "model.safetensors")
    exact = by_loops(files[name], files[f"{name}_scale_inv"], BLOCK)
    source = HubModel(pair[0], dtype=torch.float32)
    assert torch.equal(source._files.tensor(name), exact)
    assert not torch.equal(exact, exact.bfloat16().float())
    model = load_pretrained(pair[0], dtype=torch.float32)
    assert sum(p.double().abs().sum() for p in model.parameters()) != sum(
        p.double().abs().sum() for p in load_pretrained(pair[1]).parameters()
    )


def test_it_converts_as_its_twin_does(pair, tmp_path):
    for folder in pair:
        convert(folder, tmp_path / folder.name)
        convert(tmp_path / folder.name, tmp_path / f"{folder.name}-back")
    tensors = [load_file(tmp_path / f"{f.name}-back/model.safetensors") for f in pair]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][n], tensors[1][n]) for n in tensors[0])
    assert "quantization_config" not in (tmp_path / "fp8-back/config.json").read_text()


def test_loading_takes_the_model_and_one_matrix(pair):
    model = load_pretrained(pair[0])
    size = sum(t.nbytes for t in model.state_dict().values())
    scaled = Fp8Files(pair[0], json.loads((pair[0] / "config.json").read_text()))._scaled
    largest = max(entry.shape[0] * entry.shape[1] for entry in scaled)
    limit = 1.1 * size + 3 * 4 * largest  # values, scales, and a product of both
    assert peak_bytes(lambda: load_pretrained(pair[0])) <= limit


def drop_scale(tensors, name):
    del tensors[f"{name}_scale_inv"]


def cut_scale(tensors, name):
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][:-1].clone()


def whole_scale(tensors, name):
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].int()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (drop_scale, r"down_proj.weight is in FP8 and has no .*down_proj.weight_scale_inv"),
        (cut_scale, r"down_proj.weight_scale_inv has shape .* needs"),
        (whole_scale, r"down_proj.weight_scale_inv is of type int32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(pair, tmp_path, damage, text):
    shutil.copytree(pair[0], tmp_path / "bad")
    path = tmp_path / "bad/model.safetensors"
    tensors = load_file(path)
    damage(tensors, next(n for n in tensors if n.endswith("down_proj.weight")))
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=text) as caught:
        load_pretrained(tmp_path / "bad")
    assert "\n" not in str(caught.value)


def test_scales_of_no_matrix_are_refused(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "bad")
    path = tmp_path / "bad/model.safetensors"
    tensors = load_file(path) | {"lm_head.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has a tensor lm_head.weight_scale_inv"):
        load_pretrained(tmp_path / "bad")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quant_method": "awq"}, "is of 'awq'"),
        ({"weight_block_size": None}, "weight_block_size=None in quantization_config"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] in"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] in"),
        ({"weight_block_size": [128, 128]}, "weight_scale_inv has shape"),
    ],
    ids=str,
)
def test_other_ways_are_refused(pair, tmp_path, change, text):
    shutil.copytree(pair[0], tmp_path / "bad")
    change_config(tmp_path / "bad", lambda given: given | change)
    with pytest.raises(ConfigError, match=text) as caught:
        open_model(tmp_path / "bad")
    assert "\n" not in str(caught.value)
