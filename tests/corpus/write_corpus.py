"""Writes the corpus anew with the code of one revision: `OMP_NUM_THREADS=1 python -m tests.corpus.write_corpus`.

Not part of the suite: the corpus was written once, so that later revisions are held to files that they did not write.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.corpus.cases import CASES, FILES, GPT, config_of
from tests.corpus.outcomes import folder_numbers, resumed_losses
from tests.support.adapters import make_adapter
from tests.support.hub_models import tiny_model
from tests.support.pictures import stripes, write_folder
from tests.support.runs import train_quietly

import expertmesh as em
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import USUAL_NETWORK
from expertmesh.integrations.hub import convert, quantize
from expertmesh.parallel.experts.tuning_cache import save_network, save_plans

_LEFT_OUT = ("tensorboard", "lock", "experts.jsonl", "arithmetic.json")


def write_data() -> None:
    """A text, two languages, small images."""
    folder = FILES / "data"
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "experts",
        "route",
        "tokens",
    ]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(3, 12)) for i in range(200)]
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "parallel").mkdir()
    animals, colours = ("dog", "cat", "bird", "fish"), ("red", "blue", "green")
    for split, count in (("train", 48), ("val", 12)):
        pairs = [(animals[i % 4], colours[(i // 4) % 3]) for i in range(count)]
        for language, form in (("de", "a {1} {0}.\n"), ("xx", "{0} {1} IS HERE!\n")):
            text = "".join(form.format(*pair) for pair in pairs)
            (folder / "parallel" / f"{split}.{language}").write_text(text)
    write_folder(folder / "images", *stripes(40))


def write_run(name: str, cache: Path) -> None:
    """Train one case for a few steps."""
    target = Path("runs", name)
    config = config_of(name, target, cache, files=Path())
    if (ranks := CASES[name].num_ranks) == 1:
        train_quietly(config)
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        options = [cache / "config.json"]
        options[0].write_text(json.dumps(config.model_dump(mode="json")))
        command = [sys.executable, *launcher, "-m", "expertmesh", "train", CASES[name].recipe]
        subprocess.run([*command, "--config", str(options[0])], check=True, env=dict(os.environ))
    for left_out in _LEFT_OUT:
        path = target / left_out
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_folders(cache: Path) -> None:
    """Folders of the hub: whole, in int8, int4, FP8 and MXFP4, and adapters."""
    folders = FILES / "folders"
    changes = {
        **GPT,
        "model.moe_every": 1,
        "model.dim": 32,
        "model.moe.num_experts": 4,
        "model.moe.hidden_dim": 32,
        "model.init_std": 0.2,
        "data.path": ["data/text.txt"],
        "data.cache_dir": str(cache),
        "train.run_dir": str(cache / "source"),
        "train.dtype": "float32",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.steps": 2,
    }
    train_quietly(em.recipe("gpt-moe-test", changes))
    convert(cache / "source", folders / "whole")
    for form, options in (("int8", {}), ("int4", {"group_size": 32}), ("fp8", {})):
        quantize(cache / "source", folders / form, format=form, **options)
    config = em.load(str(cache / "source")).model.config
    make_adapter(folders / "adapter", config, seed=5)
    _write_mxfp4(folders / "mxfp4")


def _write_mxfp4(target: Path) -> None:
    """A tiny gpt-oss whose experts are blocks of any bytes."""
    model = tiny_model(
        "gpt_oss",
        num_experts=4,
        top_k=2,
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    tensors: dict[str, Any] = {n: t.bfloat16().clone() for n, t in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        shape = E, N, K // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    values = model.config.to_dict()
    values |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(values))
    shutil.copy(target.with_name("whole") / "tokenizer.json", target)


def write_tuner() -> None:
    """The tuner's two kinds of files."""
    save_network(FILES / "tuner" / "network.json", USUAL_NETWORK, [{"bytes": 1024, "seconds": 1e-4}])
    plans = {
        "1024": DispatchOptions(2, 4, "flat", 0),
        "2048": DispatchOptions(4, 1, "hierarchical", 1),
    }
    save_plans(FILES / "tuner" / "plans.json", plans, "a model")


def main() -> None:
    """Write everything, and what this revision makes of it."""
    shutil.rmtree(FILES, ignore_errors=True)
    write_data()
    os.chdir(FILES)  # no path of this machine is kept
    expected: dict[str, Any] = {"runs": {}, "folders": {}}
    cache = Path("cache")
    cache.mkdir()
    for name in CASES:
        write_run(name, cache)
    write_folders(cache)
    shutil.rmtree(cache)
    write_tuner()
    for name, case in CASES.items():
        expected["runs"][name] = {moments or "own": resumed_losses(name, moments) for moments in (None, *case.moments)}
    for folder in sorted(path.name for path in (FILES / "folders").iterdir()):
        expected["folders"][folder] = folder_numbers(folder)
    (FILES / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
