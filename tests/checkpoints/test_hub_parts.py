"""Any part of any tensor of a hub folder is the whole one's, and reading it takes little more memory than it has
itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import FAMILIES, family_model
from tests.support.memory import peak_bytes

from expertmesh.checkpoints import safetensors
from expertmesh.checkpoints.hub.load_pretrained import HubModel
from expertmesh.checkpoints.source import read_whole

BLOCK = [16, 8]


def in_fp8(tensors):
    """Matrices of linear maps in FP8, with a scale per block."""
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        sizes = [-(-n // b) for n, b in zip(tensors[name].shape, BLOCK, strict=True)]
        tensors[name] = tensors[name].float().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(sizes) + 0.5
    return {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}


def in_mxfp4(tensors):
    """Experts in MXFP4, of any bytes."""
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, (E, N, K // 32), dtype=torch.uint8)
    return {"quant_method": "mxfp4"}


FOLDERS = {name: (name, None) for name in FAMILIES} | {
    "fp8": ("deepseek_v3", in_fp8),
    "mxfp4": ("gpt_oss", in_mxfp4),
    "odd header": ("qwen2_moe", None),
}


def saved(folder, name, pack, *, is_odd):
    """A folder in BF16, packed; or with a header that ends at an odd byte."""
    size = {"hidden_size": 64, "intermediate_size": 64} if pack is in_mxfp4 else {}
    family_model(name, seed=0, dtype=torch.bfloat16, **size).save_pretrained(folder)
    path = folder / "model.safetensors"
    if pack is not None:
        tensors = load_file(path)
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = pack(tensors)
        (folder / "config.json").write_text(json.dumps(values))
        save_file(tensors, path, {"format": "pt"})
    if is_odd:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].rstrip() + b" " * (length % 2 + 1)
        text += b" " * (len(text) % 2 == 0)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def boxes(shape, rank, num_ranks):
    """A rank's parts: along each dimension in turn the same share, which begins where no block or group does."""
    for dim, size in enumerate(shape):
        start, stop = (
            0 if i == 0 else size if i == num_ranks else min(size * i // num_ranks + 1, size) for i in (rank, rank + 1)
        )
        if start < stop:
            at = [slice(0, n) for n in shape]
            at[dim] = slice(start, stop)
            yield tuple(at)


@pytest.mark.parametrize("kind", FOLDERS)
def test_parts_of_ranks_are_those_of_the_whole_and_take_their_own_memory(kind, tmp_path, threshold):
    """Of 1, 2 and 4 ranks; at most 1.1 times what a rank gets is alive at a time."""
    name, pack = FOLDERS[kind]
    saved(tmp_path, name, pack, is_odd=kind == "odd header")
    # smaller blocks of packed values make millions of events for a profiler to keep
    threshold(safetensors, "_ELEMENTS", 1024 if kind == "mxfp4" else 64)
    source = HubModel(tmp_path)
    whole = {name: read_whole(source, name) for name in source.tensors}
    for num_ranks in (1, 2, 4):
        rank = num_ranks - 1
        parts = []

        def load(rank=rank, num_ranks=num_ranks, parts=parts):
            for name, (shape, dtype) in source.tensors.items():
                for box in boxes(shape, rank, num_ranks):
                    into = torch.empty([at.stop - at.start for at in box], dtype=dtype)
                    parts.append((name, box, into))
                    source.read(name, box, into)

        peak = peak_bytes(load)
        assert peak <= 1.1 * sum(into.nbytes for *_, into in parts)
        for name, box, into in parts:
            assert torch.equal(into, whole[name][box]), (name, box)


def test_a_type_of_its_own_is_rounded_twice_as_the_whole_tensor_is(tmp_path):
    """To the type of the files first, whatever asks."""
    family_model("qwen3_moe", seed=0, dtype=torch.float32).save_pretrained(tmp_path)
    source = HubModel(tmp_path, dtype=torch.bfloat16)
    name = next(n for n in source.tensors if n.endswith("w_in"))
    into = torch.empty(source.tensors[name].shape, dtype=torch.float64)
    source.read(name, tuple(slice(0, n) for n in into.shape), into)
    assert torch.equal(into, read_whole(source, name).double())
