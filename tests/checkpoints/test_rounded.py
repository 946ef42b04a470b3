"""Experts that are rounded while they are read: bits of a converted model, one expert in memory, formats of files
kept."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.test_hub_parts import in_mxfp4
from tests.support.families import family_model
from tests.support.memory import peak_bytes

from expertmesh.checkpoints.hub.load_pretrained import HubModel, load_pretrained
from expertmesh.checkpoints.kept_experts import Fp8Experts, format_of_files
from expertmesh.checkpoints.rounded import ExpertFormat, RoundedExperts
from expertmesh.checkpoints.source import Stored, read_into, read_whole
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.parallel.construct import give_memory
from expertmesh.runs.quantized import put_quantized

FORMS = ("int8", "int4", "nf4", "fp8", "mxfp4")
SIZE = {"hidden_size": 64, "intermediate_size": 64}
OF_QWEN3 = SIZE | {"moe_intermediate_size": 96}


def opened(source, dtype):
    """The model of a source, without memory for its full matrices."""
    model = GPT(source_config(source), device="meta", dtype=dtype)
    put_quantized(model, source)
    give_memory(model, device="cpu")
    read_into(source, model.state_dict())
    return model


def source_config(source):
    return source._source.config


def packed_folder(folder, name, pack, **size):
    family_model(name, seed=0, dtype=torch.bfloat16, **size).save_pretrained(folder)
    pack_files(folder, pack)


def pack_files(folder, pack):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = pack(tensors)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, path, {"format": "pt"})


def in_fp8(tensors):
    """Matrices of linear maps in FP8, with a scale per block of 128 by 128 whose largest value is no 448."""
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        sizes = [-(-n // 128) for n in tensors[name].shape]
        tensors[name] = tensors[name].float().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(sizes) + 0.5
    return {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_rounded_on_reading_is_the_converted_one(form, dtype, tmp_path):
    family_model("qwen3_moe", seed=0, dtype=dtype, **OF_QWEN3).save_pretrained(tmp_path)
    model = opened(RoundedExperts(HubModel(tmp_path), ExpertFormat(form, dtype, 32)), dtype)
    wanted = load_pretrained(tmp_path, dtype=dtype)
    for _, _, experts in grouped_layers(wanted):
        experts.convert(form, group_size=32)
    found, expected = model.state_dict(), wanted.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {e.format for _, _, e in grouped_layers(model)} == {form}
    assert {e.dtype for _, _, e in grouped_layers(model)} == {dtype}


class Drawn:
    """Experts whose numbers are drawn when they are read; counts how often one is."""

    path = "drawn"

    def __init__(self, *shape):
        self.tensors = {"moe.experts.w_in": Stored(shape, torch.float32)}
        self.reads = 0

    def read(self, name, box, into):
        self.reads += 1
        generator = torch.Generator().manual_seed(box[0].start)
        into.copy_(torch.randn(into.shape, generator=generator))


@pytest.mark.parametrize("form", FORMS)
def test_reading_holds_a_few_copies_of_one_expert_and_reads_each_once(form):
    E, one = 18, (2, 128, 128)
    source = Drawn(E, *one)
    rounding = RoundedExperts(source, ExpertFormat(form, torch.float32))
    targets = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in rounding.tensors.items()}
    expert = 4 * 2 * 128 * 128
    # roundings try several scales, each with temporary copies of the expert; MXFP4 counts codes in int64
    peak = peak_bytes(lambda: read_into(rounding, targets))
    assert peak < 15 * expert < E * expert, peak / expert
    assert source.reads == E
    again = read_whole(rounding, "moe.experts.w_in_scale")  # alone: made again
    assert torch.equal(again, targets["moe.experts.w_in_scale"])
    assert torch.equal(read_whole(rounding, "moe.experts.w_in"), targets["moe.experts.w_in"])


def test_values_of_mxfp4_files_are_kept(tmp_path):
    packed_folder(tmp_path, "gpt_oss", in_mxfp4, **SIZE)
    assert format_of_files(tmp_path) == "mxfp4"
    model = opened(RoundedExperts(HubModel(tmp_path), ExpertFormat("mxfp4", torch.bfloat16)), torch.bfloat16)
    wanted = load_pretrained(tmp_path)
    for (_, _, own), (_, _, wide) in zip(grouped_layers(model), grouped_layers(wanted), strict=True):
        assert own.w_in.dtype == torch.uint8
        own = copy.deepcopy(own)
        own.convert("dense")
        assert torch.equal(own.w_in, wide.w_in) and torch.equal(own.w_out, wide.w_out)


def test_values_and_scales_of_fp8_files_are_kept(tmp_path):
    packed_folder(tmp_path, "qwen3_moe", in_fp8, **OF_QWEN3)
    assert format_of_files(tmp_path) == "fp8"
    source = Fp8Experts(HubModel(tmp_path), ExpertFormat("fp8", torch.bfloat16))
    files = load_file(tmp_path / "model.safetensors")
    path, _, experts = next(iter(grouped_layers(opened(source, torch.bfloat16))))
    inside = f"model.{path.removesuffix('.moe')}.mlp.experts"
    for name, branches in (("w_in", ("gate_proj", "up_proj")), ("w_out", ("down_proj",))):
        for expert in range(experts.num_experts):
            for place, branch in enumerate(branches):
                theirs = f"{inside}.{expert}.{branch}.weight"
                at = (expert, place) if name == "w_in" else expert
                values, scales = getattr(experts, name)[at], getattr(experts, f"{name}_scale")[at]
                assert torch.equal(values.float(), files[theirs].float())
                assert torch.equal(scales, files[f"{theirs}_scale_inv"])
    assert experts.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "value", "text"),
    [
        ((2, 2, 8, 48), 0.0, "48 columns, and int4 needs groups of 64"),
        ((2, 2, 8, 64), float("nan"), "not finite"),
    ],
)
def test_what_cannot_be_rounded_is_one_line(shape, value, text):
    class Filled(Drawn):
        def read(self, name, box, into):
            into.fill_(value)

    with pytest.raises(ConfigError, match=text) as caught:
        read_whole(RoundedExperts(Filled(*shape), ExpertFormat("int4", torch.float32)), "moe.experts.w_in")
    assert "\n" not in str(caught.value)


def test_formats_are_those_of_the_table():
    assert set(FORMS) == {name for name, one in FORMATS.items() if one.name == name} - {"dense"}
