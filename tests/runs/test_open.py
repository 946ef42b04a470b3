"""One way from a folder to a model: runs and folders of the hub alike, and nobody goes another."""

import ast
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.support.hub_text import byte_tokenizer, hub_folder
from tests.support.serving import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.cli.serve import precision_of
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert
from expertmesh.integrations.transformers import ExpertMeshForCausalLM
from expertmesh.ops.backend import cpu_kernels
from expertmesh.ops.cpu.products import usual_library
from expertmesh.runs import precision
from expertmesh.runs.arithmetic import Arithmetic
from expertmesh.runs.open import LoadedModel, open_model
from expertmesh.runs.run_dir import find_model
from expertmesh.training.loop import train

SOURCE = Path(em.__file__).parent
PROMPT = "few words"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def folders(request, tmp_path_factory):
    """A model of the hub, and the run that it is converted to."""
    at = tmp_path_factory.mktemp("hub")
    start = "<|begin|>" if request.param == torch.float32 else None
    hub_folder(at / "hub", tokenizer=byte_tokenizer(start=start), dtype=request.param)
    convert(at / "hub", at / "run")
    return at / "hub", at / "run"


def printed(folder, capsys, *words):
    assert main(["generate", str(folder), PROMPT, "--max-tokens", "8", *words]) == 0
    return capsys.readouterr().out


def test_a_hub_folder_is_what_it_would_be_converted(folders, capsys):
    hub, run = folders
    direct, converted = open_model(hub), open_model(run)
    ours, theirs = direct.model.state_dict(), converted.model.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert direct.model.config == converted.model.config
    for name in ("start_ids", "end_ids"):
        assert getattr(direct.text, name) == getattr(converted.text, name), name
    texts = [em.generate(*em.load(folder), PROMPT, max_tokens=8) for folder in folders]
    assert texts[0] == texts[1]
    shown = printed(hub, capsys)
    assert shown.startswith(PROMPT)
    if direct.precision.master_dtype == torch.bfloat16:  # what FP32 weights compute in is measured
        assert shown == printed(run, capsys)
        assert printed(hub, capsys, "--greedy") == printed(run, capsys, "--greedy")
    door = ExpertMeshForCausalLM.from_run(hub)
    assert door.config.eos_token_id == list(direct.text.end_ids)
    assert sorted(path.name for path in hub.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ], "nothing is written there"


def test_a_run_begins_with_a_hub_folder_as_with_the_run_of_it(folders, tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"{i} words of text. " * 9)
    found = []
    for begin in folders:
        changes = {
            "data.path": str(tmp_path / "*.txt"),
            "data.cache_dir": str(tmp_path / "cache"),
            "data.seq_len": 16,
            "train.init_from": str(begin),
            "train.run_dir": str(tmp_path / f"from_{begin.name}"),
            "train.steps": 1,
            "train.tensorboard": False,
            "train.device": "cpu",
            "train.dtype": "float32",
        }
        train(em.recipe("gpt-moe-test", changes), console=Console(quiet=True))
        found.append(open_model(tmp_path / f"from_{begin.name}"))
    one, other = (loaded.model.state_dict() for loaded in found)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert found[0].text.start_ids == found[1].text.start_ids
    kept = [sorted(p.name for p in (loaded.run.path / "hub").iterdir()) for loaded in found]
    assert kept[0] == kept[1], "what goes back to the hub with it"


def test_type_and_device_are_no_options_of_the_training(folders):
    before = find_model(folders[1])
    opened = open_model(folders[1], device="cpu", dtype=torch.float64)
    assert opened.run.config == before.config
    assert opened.precision.compute_dtype == opened.precision.master_dtype == torch.float64
    assert opened.model.embedding.weight.dtype == torch.float64
    with pytest.raises(ConfigError, match="^device=mps: must be auto, cpu, cuda or cuda:N"):
        em.load(folders[1], device="mps")


@pytest.mark.parametrize("processor", ["bfloat16", "float32"])
def test_a_folder_computes_in_the_type_of_its_files_on_any_processor(folders, capsys, monkeypatch, processor):
    """Whatever `auto` would be for a training here; the first line of a verb says so."""
    fastest = Arithmetic("cpu", processor, usual_library(), "auto: asked")
    for place in ("chosen", "fastest"):
        monkeypatch.setattr(precision, place, lambda products: fastest, raising=False)
    stored = open_model(folders[0]).model.embedding.weight.dtype
    name = str(stored).removeprefix("torch.")
    for folder in folders:
        opened = open_model(folder)
        assert {opened.precision.compute_dtype, opened.precision.master_dtype} == {stored}
        assert em.Engine(folder).model.embedding.weight.dtype == stored
        printed(folder, capsys)
        assert said(folder, capsys) == f"{name} {ON_CPU} (the type of its files)"
        assert said(folder, capsys, "--dtype", "float64") == f"float64 {ON_CPU} (as asked for)"
        assert em.load(folder, dtype="float64").model.embedding.weight.dtype == torch.float64
    with pytest.raises(ConfigError, match="^dtype=float31: must be one of float32, bfloat16"):
        em.load(folders[0], dtype="float31")


WAYS = {
    "engine": lambda folder, n: em.Engine(folder).generate([PROMPT], em.SamplingParams(temperature=0, max_tokens=n))[0].text,  # noqa: E501
    "generate": lambda folder, n: em.generate(*em.load(folder), PROMPT, max_tokens=n, temperature=0),
    "verb": lambda folder, n: main(["generate", str(folder), PROMPT, "--greedy", "--max-tokens", str(n)]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_of_an_fp32_folder_is_transformers(tmp_path, capsys, way):
    """BF16 would differ after some tokens."""
    folder = hub_folder(tmp_path / "hub")
    theirs, tokenizer = (one.from_pretrained(folder) for one in (AutoModelForCausalLM, AutoTokenizer))
    given = tokenizer(PROMPT, return_tensors="pt")
    ids = theirs.generate(**given, do_sample=False, max_new_tokens=40)[0, given.input_ids.shape[1] :]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    found = WAYS[way](folder, 40)
    found = capsys.readouterr().out if way == "verb" else found
    assert found.strip("\n").removeprefix(PROMPT).strip() == expected.strip() != ""


ON_CPU = f"on cpu, kernels {cpu_kernels()}"
TRAINED = {
    ("float32", None): f"float32 {ON_CPU} (the type of its files)",
    ("bfloat16", None): f"float32 {ON_CPU} (the type of its files; its training computed in bfloat16, which --dtype "
                        "bfloat16 would be)",
    ("bfloat16", "bfloat16"): f"bfloat16 {ON_CPU} (as asked for)",
}  # fmt: skip


@pytest.mark.parametrize(("trained", "asked"), TRAINED)
def test_a_server_says_where_training_computed_in_another_type(tmp_path, trained, asked):
    run = make_run(tmp_path / "run", **{"train.dtype": trained})
    engine = em.Engine(run, num_blocks=8, device="cpu", **({} if asked is None else {"dtype": asked}))
    assert precision_of(engine, str(run)).description == TRAINED[trained, asked]


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_calibration_says_its_type(folders, tmp_path, capsys, calibrated):
    (tmp_path / "text.txt").write_text("a few words of text " * 200)
    words = ["quantize", str(folders[0]), "--to", str(tmp_path / "to"), "--format", "int8"]
    assert main([*words, *(["--calibration", str(tmp_path / "text.txt")] if calibrated else [])]) == 0
    assert ("computing in " in capsys.readouterr().err) == calibrated


def said(folder, capsys, *words):
    assert main(["generate", str(folder), PROMPT, "--max-tokens", "1", *words]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("computing in ")
    return first.removeprefix("computing in ")


def test_a_loaded_model_is_model_and_tokenizer(folders):
    loaded = em.load(folders[1])
    model, tokenizer = loaded
    assert isinstance(loaded, LoadedModel) and model is loaded.model
    assert tokenizer is loaded.tokenizer and loaded.text.tokenizer is tokenizer


WHO_MAY = {
    # who reads tensors of folders: what opens models, what goes on from checkpoints, and what turns files into others
    ("Checkpoint", "HubModel"): {
        *("runs/run_dir.py", "runs/started_adapters.py", "training/state.py"),
        *(
            "integrations/hub/convert.py",
            "integrations/hub/save.py",
            "integrations/hub/adapter_folder.py",
        ),
    },
    # who says in what a trained model computes, beside two that tell what training would
    ("resolve_precision",): {"cli/doctor.py", "cli/train.py"},
    ("Precision.of",): {"runs/open.py"},
    # who puts tokenizer and model together: those that are given both: em.generate, the engine, lm_eval, models of
    # transformers;
    # and folders of the hub, whose tokenizer says what the run's prompts begin with
    ("text_format",): {
        *("runs/open.py", "api.py", "engine/engine.py"),
        *("integrations/evaluation.py", "integrations/transformers/decoder.py"),
        "integrations/hub/save.py",
    },
    # and who begins rows of plain texts with the start tokens of the folder
    ("options_of_files",): {"runs/open.py", "data/plain_completions.py"},
    ("spread_for_inference",): {"runs/open.py"},
}
"""Calls by which a model was put together in nine places, and who makes them."""


def test_models_are_opened_in_one_place():
    found = {names: set() for names in WHO_MAY}
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith(("checkpoints/", "testing/")) or place == "runs/precision.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            for names in WHO_MAY:
                if called in names:
                    found[names].add(place)
    assert found == WHO_MAY


def test_between_a_folder_and_its_model_is_one_container():
    """Of five (Run, Precision, Trained, Decoder, Loaded); run and precision are fields of it."""
    holders = []
    for path in set(SOURCE.rglob("*.py")) - set(SOURCE.glob("cli/*")):  # verbs hold words
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                if "model" in fields and fields & {"tokenizer", "precision", "task", "run"}:
                    holders.append(node.name)
    assert holders == ["LoadedModel"]
