"""`expertmesh quantize`: folders that compressed-tensors reads to the same bits, and that answer like what they were
made of."""

import codecs
import gzip
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.calls import calls_of
from tests.support.runs import train_quietly

import expertmesh as em
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.cli.main import main
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert, quantize
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.layer import grouped_layers
from expertmesh.runs.calibration import importance_of
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.threads import settle_threads

FORMS = ("int8", "int4", "fp8")
OPTIONS = {"model.moe.weight_scale": 2.0}
"""Of a model that the hub has nothing like."""


def make_run(place, **changes):
    config = em.recipe("gpt-moe-test").updated({"train.dtype": "float32", "model.init_std": 0.2, **changes})
    texts = ["def main():\n    return 'é'\n", "import os\n"] * 30
    place.mkdir()
    train_tokenizer(texts, vocab_size=config.model.vocab_size).save(str(place / "trained.json"))
    files = {"tokenizer.json": place / "trained.json"}
    RunDir(place).write_description(config, recipe="gpt-moe-test", files=files)
    store = CheckpointStore(RunDir(place).checkpoints, keep_last=1)
    state = GPT(config.model, dtype=torch.float32, seed=1).state_dict()
    tensors = {f"model.{name}": one for name, one in state.items()}
    store.save(5, tensors, {"config": config.model_dump(mode="json"), "step": 5}, eval_loss=None)
    store.wait()
    store.close()
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("quantize")
    make_run(found / "run")
    make_run(found / "own", **OPTIONS)
    convert(found / "run", found / "hub")
    for form in FORMS:
        for source in ("run", "own", "hub"):
            quantize(found / source, found / f"{source}-{form}", format=form)
    return found


def weights_of(folder):
    """Our matrices of routed experts, widened, by layer; and all other tensors."""
    model = open_model(folder).model
    wide = []
    for _, _, experts in grouped_layers(model):
        one = experts.weights().slices()[0].unpacked(torch.float32)
        wide.append((one.w_in_EGFD, one.w_out_EDF))
    return wide, model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_compressed_tensors_reads_the_same_bits(place, tmp_path, form, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantize(place / "run", tmp_path / "made", format=form, dtype=dtype)
    values = json.loads((tmp_path / "made/config.json").read_text())
    config = QuantizationConfig.model_validate(values["quantization_config"])
    (scheme,) = config.config_groups.values()
    reader = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(tmp_path / "made/model.safetensors")
    wide, _ = weights_of(tmp_path / "made")
    for layer, (w_in, w_out) in enumerate(wide):
        for e in range(w_in.shape[0]):
            ours = {"w1": w_in[e, 0], "w3": w_in[e, 1], "w2": w_out[e]}
            for name, mine in ours.items():
                module = f"model.layers.{layer}.block_sparse_moe.experts.{e}.{name}."
                own = {n.removeprefix(module): t for n, t in tensors.items() if n.startswith(module)}
                theirs = reader.decompress(own, scheme)["weight"]
                assert torch.equal(theirs.float(), mine)
                assert module.removesuffix(".") not in config.ignore
    gates = [name for name in config.ignore if name.endswith("gate")]
    assert len(gates) == len(wide)


@pytest.mark.parametrize("form", FORMS)
def test_folders_of_runs_and_of_the_hub_are_the_same_model(place, form):
    wide, model = weights_of(place / f"run-{form}")
    also, again = weights_of(place / f"hub-{form}")
    own, _ = weights_of(place / f"own-{form}")
    for pairs in zip(wide, also, own, strict=True):
        for several in zip(*pairs, strict=True):
            assert torch.equal(several[0], several[1]) and torch.equal(several[0], several[2])
    source = open_model(place / "run").model.state_dict()
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            assert torch.equal(tensor, source[name]) and torch.equal(tensor, again.state_dict()[name])


def test_a_mark_in_a_hub_folders_configuration_is_no_part_of_it(place, tmp_path):
    shutil.copytree(place / "hub", tmp_path / "hub")
    config = tmp_path / "hub/config.json"
    config.write_bytes(codecs.BOM_UTF8 + config.read_bytes())
    quantize(tmp_path / "hub", tmp_path / "made", format="int8")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "made" / name).read_bytes() == (place / "hub-int8" / name).read_bytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["run", "own"])
def test_answers_are_near_those_of_the_source(place, source, form):
    params = em.SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    plain, made = (
        em.Engine(place / name).generate([0, 277, 280, 8], params)[0].logprobs[0].top
        for name in (source, f"{source}-{form}")
    )
    near = {"int8": 0.1, "fp8": 0.4, "int4": 1.5}[form]
    found = dict(made)
    assert any(token in found for token, _ in plain)
    assert all(abs(found[token] - value) < near for token, value in plain if token in found)


@pytest.mark.parametrize("form", FORMS)
def test_all_layers_are_rounded_on_request(place, tmp_path, form):
    for source in ("run", "own"):
        size = 32 if form == "int4" else None
        made = quantize(place / source, tmp_path / source, format=form, layers="all", group_size=size)
        part = json.loads((place / f"{source}-{form}/quantization.json").read_text())
        assert made.report["bytes"] < part["bytes"]
        _, model = weights_of(tmp_path / source)
        plain = open_model(place / source).model
        for name, tensor in model.state_dict().items():
            if "attention." in name and name.endswith("weight") and tensor.dim() == 2:
                other = plain.get_parameter(name)
                off = (tensor - other).norm() / other.norm()
                assert 0 < off < 0.2, name


def damaged(place, name, change):
    tensors = load_file(place / "model.safetensors")
    change(tensors, next(n for n in tensors if n.endswith(name)))
    save_file(tensors, place / "model.safetensors", {"format": "pt"})


def cut(tensors, name):
    tensors[name] = tensors[name][:-1].contiguous()


def swapped(tensors, name):
    other = name.replace("w1", "w2") if "w1" in name else name.replace("w2", "w1")
    tensors[name], tensors[other] = tensors[other], tensors[name]


def retyped(tensors, name):
    tensors[name] = tensors[name].to(torch.int32)


def dropped(tensors, name):
    del tensors[name]


@pytest.mark.parametrize(
    ("end", "change", "text"),
    [
        ("w1.weight_scale", cut, r"w1.weight_scale is float32 of shape \(63, 1\)"),
        ("w1.weight_packed", cut, r"w1.weight_packed is int32 of shape \(63, 16\)"),
        ("w1.weight_scale", retyped, "weight_scale is int32"),
        ("w1.weight_shape", dropped, "has no tensor"),
    ],
)
def test_damaged_folders_are_refused(place, tmp_path, end, change, text):
    shutil.copytree(place / "run-int8", tmp_path / "bad")
    damaged(tmp_path / "bad", end, change)
    with pytest.raises(CheckpointError, match=text):
        open_model(tmp_path / "bad")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quant_method": "gptq"}, "is of 'gptq'"),
        ({"config_groups": {}}, "in a form that is not read"),
        ({"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "in a form that is not read"),
    ],
)
def test_other_forms_are_refused(place, tmp_path, change, text):
    shutil.copytree(place / "run-int8", tmp_path / "bad")
    path = tmp_path / "bad/config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=text):
        open_model(tmp_path / "bad")


def mistakes(place, tmp_path):
    base = ["quantize", str(place / "run"), "--to", str(tmp_path / "x"), "--format"]
    quantized = str(place / "run-int8")
    (tmp_path / "short.txt").write_text("def")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe\x00")
    yield [*base, "int4", "--calibration", str(tmp_path / "short.txt")], "has 1 tokens"
    yield [*base, "int4", "--calibration", str(tmp_path / "odd.txt")], "is no text"
    yield [*base, "int4", "--calibration", str(tmp_path / "none.txt")], "is no text"
    yield [*base, "fp8", "--calibration", str(tmp_path / "short.txt")], "changes nothing in fp8"
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk))
    (tmp_path / "none.json").write_text('{"a": 1}')
    (tmp_path / "table.csv").write_text("text\na\n")
    for name, text in (
        ("talk.jsonl", "holds a conversation"),
        ("none.json", "is no file of texts (its first entry has a)"),
        ("table.csv", "ends in .csv, which is not read here"),
    ):
        yield [*base, "int4", "--calibration", str(tmp_path / name)], text
    yield [*base, "int3"], "int3"
    yield [*base, "int4", "--group-size", "48"], "48"
    yield [*base, "int4", "--group-size", "128"], "must divide the 64 columns"
    yield (
        ["quantize", quantized, "--to", str(tmp_path / "x"), "--format", "int8"],
        (f"error: --run {quantized}: is quantised already"),
    )
    for form in ("int8", "fp8"):
        yield [*base, form, "--group-size", "64"], f"--group-size 64: has no effect with {form}"
    yield ["quantize", str(place / "run"), "--to", quantized, "--format", "int8"], "exists already"
    yield ["convert", "--from", quantized, "--to", str(tmp_path / "x")], "quantised"
    yield ["export", quantized, "--output", str(tmp_path / "x.safetensors")], "quantised"
    begin = ["--train.init-from", quantized, "--train.run-dir", str(tmp_path / "y")]
    yield ["train", "gpt-moe-test", *begin], "quantised"
    yield ["train", "gpt-moe-test", "--train.run-dir", str(place / "own-int8")], "holds a run"


def test_mistakes_are_one_line(place, tmp_path, capsys):
    for words, text in mistakes(place, tmp_path):
        assert main(words) == 2, words
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and text in said[0], (words, said)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "int8", "group_size": 32}, "group_size=32: has no effect with int8"),
        ({"format": "fp8", "group_size": 64}, "group_size=64: has no effect with fp8"),
        ({"format": "int4", "group_size": 16}, "group_size=16: must be 32, 64 or 128"),
        ({"format": "int3"}, "format=int3: must be int8 or int4 or fp8"),
        ({"format": "int8", "layers": "most"}, "layers=most: must be experts or all"),
    ],
)
def test_options_of_the_function_are_refused_before_anything_is_read(tmp_path, options, text):
    with pytest.raises(ConfigError, match=text):
        quantize(tmp_path / "none", tmp_path / "made", **options)


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (float("nan"), None, "experts.0.w1.weight has numbers that are not finite"),
        (7e4, torch.float16, "dtype=float16: cannot hold .*experts.0.w1.weight, which has numbers above 65,504"),
    ],
)
def test_numbers_that_a_format_would_hide_are_refused(place, tmp_path, number, dtype, text):
    folder = shutil.copytree(place / "hub", tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    next(one for name, one in tensors.items() if "experts.0.w1" in name)[1, 2] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=text):
        quantize(folder, tmp_path / "out", format="int8", dtype=dtype)
    assert not (tmp_path / "out").exists()
    if dtype is not None:  # on the way in, and on the way out
        with pytest.raises(ConfigError, match=text):
            em.load(folder, dtype="float16")
        convert(folder, tmp_path / "run")
        with pytest.raises(ConfigError, match="dtype=float16: cannot hold"):
            convert(tmp_path / "run", tmp_path / "back", dtype=dtype)


def test_the_verb_makes_what_answers(place, tmp_path, capsys):
    made = str(tmp_path / "made")
    assert main(["quantize", str(place / "run"), "--to", made, "--format", "int8"]) == 0
    assert "in int8" in capsys.readouterr().out
    assert main(["generate", made, "def main(", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def main(")


def test_a_report_says_bytes_and_what_they_cost(tmp_path, capsys):
    config = em.recipe("gpt-moe-test").updated(
        {
            "train.run_dir": str(tmp_path / "run"),
            "train.steps": 2,
            "train.dtype": "float32",
            "optim.warmup_steps": 1,
        }
    )
    train_quietly(config)
    quantize(tmp_path / "run", tmp_path / "made", format="int4", group_size=32)
    assert main(["report", str(tmp_path / "made")]) == 0
    said = capsys.readouterr().out
    assert "int4 in groups of 32" in said and "bits per byte" in said and "it cost " in said
    shutil.rmtree(tmp_path / "run")
    assert main(["report", str(tmp_path / "made")]) == 0
    assert "not measured beside what it was made of" in capsys.readouterr().out


@pytest.mark.parametrize("most_bytes", [1 << 30, 0])
@pytest.mark.parametrize("source", ["run", "own", "hub"])
def test_experts_are_rounded_for_a_text(place, tmp_path, source, most_bytes):
    """The first layer's experts, which see the same tokens as those of the source, give what is nearer to them."""
    text = tmp_path / "text.txt"
    words = "def main os import return lambda except while self"
    text.write_text(" ".join(random.choice(words.split()) for _ in range(4000)))
    given = {"calibration": text, "calibration_bytes": most_bytes}
    quantize(place / source, tmp_path / "made", format="int4", **given)
    opened = open_model(place / source)
    ids = torch.tensor([opened.text.tokenizer.encode(text.read_text()).ids[:512]]).view(8, 64)
    found = []
    for folder in (place / source, place / f"{source}-int4", tmp_path / "made"):
        model = open_model(folder).model
        model.layers[0].moe.experts.register_forward_hook(lambda *seen: found.append(seen[2]))
        with torch.no_grad():
            model(ids)
    exact, plain, made = found
    share = (made - exact).square().mean() / (plain - exact).square().mean()
    assert share < (0.7 if most_bytes else 1)


def test_a_text_is_read_as_training_reads_it(place, tmp_path):
    """Under every encoding, packed, and in the objects of a JSON file."""
    content = "def main os import return lambda " * 60
    opened = open_model(place / "run")
    files = {
        "a.txt": content.encode(),
        "b.txt": content.encode("utf-8-sig"),
        "c.txt": content.encode("utf-16"),
        "d.txt.gz": gzip.compress(content.encode()),
        "e.jsonl": json.dumps({"id": 1, "text": content}).encode(),
        "f.json": json.dumps([{"text": content, "id": 1}]).encode(),
    }
    found = []
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        found.append(importance_of(opened, tmp_path / name, most_bytes=0))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def test_calibration_measures_the_number_of_threads(place, tmp_path):
    (tmp_path / "text.txt").write_text("def main os import return lambda " * 30)
    with calls_of(settle_threads) as calls:
        given = {"format": "int8", "calibration": tmp_path / "text.txt"}
        quantize(place / "run", tmp_path / "made", **given)
    assert len(calls) == 1


@pytest.mark.parametrize("source", ["run", "hub"])
def test_squares_are_the_products_of_a_column_with_itself(place, tmp_path, source):
    """In FP32, also where the model computes under autocast."""
    text = tmp_path / "text.txt"
    text.write_text("def main os import return lambda " * 200)
    opened = open_model(place / source)
    squares, products = (importance_of(opened, text, most_bytes=most) for most in (0, 1 << 30))
    for name, found in products.items():
        assert torch.allclose(found.diagonal(dim1=1, dim2=2), squares[name], rtol=1e-4)
