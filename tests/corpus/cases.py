"""The cases of the corpus: what was trained or written by an earlier revision, and how it is opened."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.known_rows import known

import expertmesh as em

FILES = Path(__file__).parent / "files"
STEPS = 3
"""Steps of each run in the corpus; it is resumed for two more."""
MOMENTS = ("float32", "bfloat16", "int8", "fp16-scaled")
TORCHAO = ("torchao-int8", "torchao-int4")


@dataclass(frozen=True)
class Case:
    """A run of the corpus.

    Attributes:
        recipe: the recipe.
        data: folder or file of `files/data`.
        changes: options beside those of all runs.
        num_ranks: ranks that wrote it.
        moments: types of moments with which it is resumed; none: its own.
    """

    recipe: str
    data: str
    changes: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    moments: tuple[str, ...] = ()


GPT = {
    "model.vocab_size": 320,
    "model.dim": 16,
    "model.num_heads": 1,
    "model.ffn_hidden_dim": 16,
    "model.moe_every": 2,
    "model.moe.num_experts": 8,
    "model.moe.hidden_dim": 16,
    "data.seq_len": 32,
    "train.batch_size": 4,
}
SMALL_SEQ2SEQ = {"model.dim": 8, "model.ffn_hidden_dim": 16, "model.moe.hidden_dim": 16}
CASES = {
    **{
        f"gpt-{moments}": Case(
            "gpt-moe-test",
            "text.txt",
            {**GPT, "optim.state_dtype": moments},
            moments=tuple(other for other in MOMENTS if other != moments),
        )
        for moments in MOMENTS
    },
    **{
        f"gpt-{moments}": Case(
            "gpt-moe-test",
            "text.txt",
            {**GPT, "optim.state_dtype": moments, "train.dtype": "float32"},
        )
        for moments in TORCHAO
    },
    "gpt-muon": Case("gpt-moe-test", "text.txt", {**GPT, "optim.name": "muon"}, moments=("int8",)),
    "gpt-2-ranks": Case("gpt-moe-test", "text.txt", GPT, num_ranks=2),
    "gpt-4-ranks": Case(
        "gpt-moe-test",
        "text.txt",
        {**GPT, "parallel.es_degree": 2},
        num_ranks=4,
        moments=("bfloat16",),
    ),
    "seq2seq": Case("translate-test", "parallel", {**SMALL_SEQ2SEQ, "data.denoising": 0.25}),
    "swin": Case(
        "swin-test",
        "images",
        {"model.depths": (2,), "model.num_heads": (1,), "model.moe_stages": (1,)},
    ),
}


CASES = known(CASES)


def config_of(name: str, run_dir: Path, cache_dir: Path, *, files: Path = FILES, **changes: Any) -> Any:
    """Configuration of a run of the corpus.

    Args:
        name: name of the case.
        run_dir: its folder.
        cache_dir: folder for tokens.
        files: the corpus.
        **changes: `steps` and `moments` of a resumption.
    """
    case = CASES[name]
    values = {
        "data.path": [str(files / "data" / case.data)],
        "data.cache_dir": str(cache_dir),
        "train.run_dir": str(run_dir),
        "train.dtype": "float64",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.resume": "auto",
        "train.steps": changes.get("steps", STEPS),
        "optim.schedule_steps": 20,
        **case.changes,
    }
    if "steps" in changes:  # the rank that goes on is one
        values["parallel.es_degree"] = None
    if moments := changes.get("moments"):
        values["optim.state_dtype"] = moments
    return em.recipe(case.recipe, values)
