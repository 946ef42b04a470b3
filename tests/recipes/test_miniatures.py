"""Every recipe in miniature: trained, broken off, gone on with on two ranks, evaluated; its options as they are, its
sizes small.

That a run survives being killed at any moment is tests/training/test_kill.py's and, for each family, that of its own
tests; these also train the recipes named -test, which are left out here.
"""

import shutil

import pytest
from tests.support.pictures import stripes, write_folder
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.config.run import DistillConfig
from expertmesh.models.registry import FAMILIES
from expertmesh.models.registry import recipe as recipe_of

STEPS, BROKEN_OFF = 8, 6
SEQ_LEN = 16
RECIPES = {
    name: (family, recipe)
    for family in FAMILIES.values()
    for name, recipe in family.find_recipes().items()
    if not name.endswith("-test")
}
# Nobody is dropped: that is decided among the tokens of a rank.
ROOMY = {
    "capacity_factor": 8.0,
    "eval_capacity_factor": 8.0,
    "routing_group_size": None,
    "balance_loss_scope": "global",
}


def sizes_of(family, recipe, *names):
    """Those of a recipe that is small already; none where its family is not there."""
    model = recipe_of(recipe).model if family in FAMILIES else None
    return {name: getattr(model, name) for name in names if model is not None}


OF_MODEL = {
    "gpt": {
        "vocab_size": 300,
        "max_seq_len": SEQ_LEN,
        "dim": 16,
        "num_heads": 2,
        "head_dim": None,
        "ffn_hidden_dim": 24,
        "init_std": 0.1,
    },
    "seq2seq": sizes_of(
        "seq2seq",
        "translate-test",
        *("vocab_size", "max_source_len", "max_seq_len"),
        *("num_encoder_layers", "num_decoder_layers", "num_heads"),
    )
    | {"dim": 16, "ffn_hidden_dim": 24, "init_std": 0.1},
    "swin": sizes_of(
        "swin",
        "swin-test",
        *("image_size", "num_channels", "num_classes", "patch_size"),
        *("dim", "depths", "num_heads", "window_size"),
    )
    | {"init_std": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("miniatures")
    write_folder(place / "images", *stripes(48))
    (place / "text").mkdir()
    for i in range(12):
        lines = "".join(f"{j} and {i} make {i + j}\n" for j in range(40))
        (place / "text" / f"{i}.txt").write_text(lines)
    (place / "lines").mkdir()
    for split in ("train", "val"):
        for code, word in (("en", "dogs"), ("de", "Hunde"), ("fr", "chiens"), ("cs", "psi")):
            lines = "".join(f"{i} {word}. {i + 1} {word}.\n" for i in range(16))
            (place / "lines" / f"{split}.{code}").write_text(lines)
    return place


def miniature(name, folder):
    """A recipe's run: small sizes, few steps, FP64; everything else as the recipe has it."""
    family, recipe = RECIPES[name]
    config = recipe()
    model = config.model.model_dump() | OF_MODEL[family.name]
    counts = config.model.moe.num_experts
    if family.name == "gpt":
        model["num_layers"] = 2 * model["moe_every"]
        model["num_kv_heads"] = model["num_kv_heads"] and 1
        if len(counts) > 1:  # the pyramid's top is whole
            counts = (3, 6)
            model["num_layers"] = 4
    elif family.name == "swin":
        model["moe_stages"] = (1, 2)
        model["pretrained_window_sizes"] = ()
    if counts:
        roomy = dict(ROOMY)
        if config.model.moe.capacity_factor is None:
            roomy |= {"capacity_factor": None, "eval_capacity_factor": None}
        # experts of images have the width of the MLPs
        width = {} if family.name == "swin" else {"hidden_dim": 16}
        model["moe"] |= {"num_experts": tuple(min(n, 6) for n in counts), **roomy, **width}
    data = {"gpt": "text", "seq2seq": "lines", "swin": "images"}[family.name]
    path = str(folder / data)
    changes = {
        "model": model,
        "data.path": path if family.name == "gpt" else (path,),
        "data.cache_dir": str(folder / "cache"),
        "optim.warmup_steps": 2,
        "optim.schedule_steps": STEPS,
        "optim.lr": 3e-3,
        "train.steps": STEPS,
        "train.batch_size": 4,
        "train.micro_batch_size": None if config.train.micro_batch_size is None else 2,
        "train.eval_every": STEPS,
        "train.eval_batches": 1,
        "train.checkpoint_every": BROKEN_OFF,
        "train.dtype": "float64",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.resume": "auto",
    }
    if family.name == "gpt":
        changes |= {"data.seq_len": SEQ_LEN, "data.max_bytes": None}
    if family.name == "seq2seq":
        changes["data.languages"] = config.data.languages and ("cs", "de", "en", "fr")
        pairs = tuple(p for p in config.data.pairs if set(p.split("-")) <= {"cs", "de", "en", "fr"})
        changes |= {"data.pairs": pairs, "data.neighbours": 4}
    if family.name == "swin":
        changes["data.train_images"] = ()
    if config.distill.teacher is not None:
        changes["distill.teacher"] = str(folder / "teacher")
    return config.updated(changes), family


def kind_of(values, without):
    """Options by what they do and not by how much: numbers are there, or zero."""
    return {
        name: bool(value) if isinstance(value, int | float | list) else value
        for name, value in values.items()
        if name not in without
    }


def same_miniatures():
    """Recipes whose miniatures differ in numbers only, which one of them stands for."""
    groups = {}
    for name, (family, recipe) in RECIPES.items():
        values = recipe().model_dump(mode="json")
        moe = values["model"].pop("moe")
        kind = (
            family.name,
            kind_of(values["model"], (*OF_MODEL[family.name], "num_layers", "moe_stages")),
            kind_of(moe, ("hidden_dim", "cosine_dim")) if moe["num_experts"] else None,
            len(set(moe["num_experts"])),
            kind_of(values["data"], ("path", "languages", "train_images", "max_bytes")),
            kind_of(values["distill"] | {"teacher": values["distill"]["teacher"] is None}, ()),
            kind_of(values["optim"], ()),
            values["train"]["activation_checkpointing"],
        )
        groups.setdefault(repr(kind), []).append(name)
    return list(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("names", same_miniatures(), ids=lambda names: names[0])
def test_trained_broken_off_gone_on_with_on_two_ranks_and_evaluated(names, folder, two_ranks):
    config, family = miniature(names[0], folder)
    if config.distill.teacher is not None and not (folder / "teacher").exists():
        teacher = config.updated(
            {"distill": DistillConfig(), "model.num_layers": 6, "model.moe.num_experts": (3, 3, 6)}
        )
        train_quietly(teacher.updated({"train.run_dir": str(folder / "teacher"), "train.steps": 2}))
    run_dir = folder / names[0]
    config = config.updated({"train.run_dir": str(run_dir)})
    result = train_quietly(config)
    assert result.step == STEPS and family.metric.key in result.evaluation
    straight = lines_of(run_dir)
    # as if it had been killed after the checkpoint before the last
    shutil.rmtree(result.checkpoint)
    two_ranks.run(train_quietly, config)
    again = lines_of(run_dir)
    assert len(straight) == len(again) == STEPS and "eval_loss" in again[-1]
    assert straight[:BROKEN_OFF] == again[:BROKEN_OFF]
    names = "loss", "grad_norm", "aux_loss", "eval_loss"
    assert_same_lines(again[BROKEN_OFF:], straight[BROKEN_OFF:], *names)


def test_every_recipe_is_there():
    assert sorted(name for names in same_miniatures() for name in names) == sorted(RECIPES)
    assert len(RECIPES) >= (30 if {"seq2seq", "swin"} <= FAMILIES.keys() else 19)
