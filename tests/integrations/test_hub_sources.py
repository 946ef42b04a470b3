"""One source for each tensor of a hub folder: the file that the index names, and no other; experts under the names of
transformers' modules."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hub_models import tiny_model

from expertmesh.checkpoints.hub.find_family import FAMILIES
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import load_pretrained

NORM = "model.norm.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
GATE, DOWN = (f"model.layers.1.mlp.experts.0.{kind}_proj.weight" for kind in ("gate", "down"))


@pytest.fixture
def folder(tmp_path):
    """A Qwen3-MoE in two shards with an index."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    place = {n: SHARDS[2 * i >= len(names)] for i, n in enumerate(names)}
    for shard in SHARDS:
        save_file({n: tensors[n] for n in names if place[n] == shard}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": place}))
    return tmp_path


def put(folder, file, name, *, without=False):
    """Another tensor of this name in a file, or none."""
    tensors = load_file(folder / file)
    shape = next(load_file(folder / f)[name].shape for f in SHARDS if name in load_file(folder / f))
    tensors.pop(name, None)
    if not without:
        tensors[name] = torch.randn(shape)
    save_file(tensors, folder / file)


def named_in(folder, name, file):
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"].pop(name)
    if file:
        values["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(values))


@pytest.mark.parametrize("name", [GATE, NORM, "model.embed_tokens.weight"])
def test_of_two_copies_the_one_that_the_index_names_is_read(folder, name):
    expected = load_pretrained(folder).state_dict()
    place = json.loads((folder / INDEX).read_text())["weight_map"]
    put(folder, SHARDS[place[name] == SHARDS[0]], name)
    found = load_pretrained(folder).state_dict()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def nothing_named(folder):
    put(folder, SHARDS[0], NORM)
    named_in(folder, NORM, None)


def another_named(folder):
    named_in(folder, NORM, SHARDS[0])


def both_kinds(folder):
    save_file(load_file(folder / SHARDS[0]), folder / "model.safetensors")


def a_name_twice_in_the_index(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{SHARDS[0]}", '))


def a_name_twice_in_a_header(folder):
    path = folder / SHARDS[1]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode().strip()
    entry = json.dumps(json.loads(header)[NORM])
    header = f'{{"{NORM}": {entry}, {header[1:]}'
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + size :])


def fused_too(folder):
    tensors = load_file(folder / SHARDS[1])
    E, (D, F) = 4, tensors.get(DOWN, load_file(folder / SHARDS[0]).get(DOWN)).shape
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.randn(E, D, F)
    save_file(tensors, folder / SHARDS[1])


WRONG = {
    "no file is named": (nothing_named, f"{NORM} is in .* and {INDEX} names none for it"),
    "another is named": (another_named, f"{NORM} is in {SHARDS[1]}, and {INDEX} names {SHARDS[0]}"),
    "a single file, too": (both_kinds, f"has both model.safetensors and {INDEX}"),
    "twice in the index": (a_name_twice_in_the_index, f"{INDEX}: is unreadable"),
    "twice in a header": (a_name_twice_in_a_header, f"{SHARDS[1]}: is no safetensors file"),
    "under two names": (fused_too, "has both model.layers.1.mlp.experts.*for one tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_two_sources_for_a_tensor_are_refused(folder, case):
    change, words = WRONG[case]
    change(folder)
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_files_that_the_index_does_not_name_are_not_read(folder):
    expected = load_pretrained(folder).state_dict()
    for name in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        save_file({NORM: torch.randn(expected["final_norm.weight"].shape)}, folder / name)
    found = load_pretrained(folder).state_dict()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_transformers_modules_are_read(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "modules", save_original_format=False)
    expected, found = (load_pretrained(tmp_path / n).state_dict() for n in ("hub", "modules"))
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_fused_experts_in_fp8_are_read(tmp_path):
    """With scales by block of each expert, which are powers of two in one file, and numbers in the other."""
    model = tiny_model("qwen3_moe", moe_intermediate_size=16)
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    for kind, is_original in (("hub", True), ("modules", False)):
        model.save_pretrained(tmp_path / kind, save_original_format=is_original)
        path = tmp_path / kind / "model.safetensors"
        tensors = load_file(path)
        for name in [n for n in tensors if ".experts." in n]:
            *lead, N, K = tensors[name].shape
            scales = torch.full((*lead, -(-N // 16), -(-K // 16)), 0.25)
            tensors[name] = (tensors[name] * 4).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales.to(torch.float32 if is_original else torch.float8_e8m0fnu)
        save_file(tensors, path, {"format": "pt"})
        config = json.loads((tmp_path / kind / "config.json").read_text())
        config["quantization_config"] = quantized
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    expected, found = (load_pretrained(tmp_path / n).state_dict() for n in ("hub", "modules"))
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert expected["layers.0.moe.experts.w_in"].abs().max() > 0


def renamed(old, new):
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


def in_fp8(ending, dtype, shape):
    def change(tensors):
        scales = {f"{DOWN}{ending}": torch.ones(shape).to(dtype)} if ending else {}
        return {**tensors, DOWN: tensors[DOWN].to(torch.float8_e4m3fn), **scales}

    return change


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
REASONS = {
    "names of another program": (
        renamed("model.layers", "layers"),
        {},
        r"has no tensor model\.layers\S* and \d+ more, but layers\S* and \d+ more, which the arch",
    ),
    "missing alone": (
        lambda t: {n: v for n, v in t.items() if n != NORM},
        {},
        f"has no tensor {NORM}; restore",
    ),
    "extra alone": (
        lambda t: {**t, "more": torch.ones(1)},
        {},
        "has a tensor more, which the arch",
    ),
    "scales of a type": (
        in_fp8("_scale_inv", torch.int32, (1, 1)),
        FP8,
        "_scale_inv is of type int32, and expertmesh reads scales in float32",
    ),
    "scales of a shape": (
        in_fp8("_scale_inv", torch.float32, (2, 1)),
        FP8,
        r"_scale_inv has shape \(2, 1\), and .* needs \(1, 1\)",
    ),
    "scales of a channel": (
        in_fp8("_scale", torch.float32, (8, 1)),
        FP8,
        "of .*weight_scale nothing is read; give scales of blocks",
    ),
    "a switch as a text": (lambda t: t, {"norm_topk_prob": "false"}, "norm_topk_prob='false': must be true or false"),
    "no scales": (in_fp8("", None, ()), FP8, "_scale_inv beside it; restore the files"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_is_what_is_wrong(case, tmp_path):
    change, values, words = REASONS[case]
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
