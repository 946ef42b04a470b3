"""`base.storage`: weights that rest under adapters in few bits, read without the memory of the full ones."""

import pytest
import torch
from tests.checkpoints.test_hub_parts import in_mxfp4
from tests.checkpoints.test_rounded import in_fp8, pack_files
from tests.support.hub_text import chats_file, hub_folder
from tests.support.memory import peak_bytes
from tests.support.runs import assert_same_lines, lines_of

from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.merged_adapters import factor_prefix
from expertmesh.checkpoints.source import read_whole
from expertmesh.cli.train import run as train_verb
from expertmesh.config.frozen_base import GROUPED, QUANTIZED
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert, load_pretrained, quantize
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import gpt_moe_test
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.moe.layer import grouped_layers
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.runs.precision import plain_precision
from expertmesh.runs.run_dir import RunDir, find_model, load_run
from expertmesh.training.metrics import read_metrics
from expertmesh.training.place_base import place_model, with_format

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("base") / "tiny", **SIZES)


@pytest.fixture(scope="module")
def packed(base):
    quantize(base, base.parent / "packed", format="int4", group_size=32, dtype=torch.float32)
    return base.parent / "packed"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return chats_file(tmp_path_factory.mktemp("chats") / "chats.jsonl", "{n} is well")


@pytest.fixture
def words(base, chats, tmp_path):
    return words_of(base, chats, tmp_path)


def words_of(base, chats, place, *, run="run"):
    places = ["--train.run-dir", f"{place}/{run}", "--data.cache-dir", f"{place}/cache"]
    more = ["--data.path", str(chats), "--train.batch-size", "4", "--train.no-tensorboard"]
    more += ["--train.device", "cpu", "--train.dtype", "float32", "--optim.lr", "0.01"]
    return [str(base), *places, *more]


def lora(steps=6):
    return ["--adapter.kind", "lora", "--train.steps", f"{steps}", "--optim.schedule-steps", "6"]


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("storage", ["auto", *QUANTIZED])
def test_adapters_learn_on_a_base_of_each_storage(storage, words, tmp_path, capsys):
    given = [] if storage == "auto" else ["--base.storage", storage]
    assert train_verb([*words, *lora(), *given]) == 0
    found, said = losses(tmp_path / "run"), capsys.readouterr().out
    assert found[-1] < 0.8 * found[0]
    assert storage == "auto" or f"experts in {storage} " in said


def test_an_adapter_on_a_packed_base_is_what_the_run_answers_with(words, tmp_path, base):
    """Evaluations, a resumed run and the opened model read the rounded base, not the folder's full numbers."""
    more = [
        "--base.storage",
        "nf4",
        "--base.group-size",
        "32",
        "--adapter.targets",
        "experts",
    ]
    assert train_verb([*words, *lora(), *more]) == 0
    opened = open_model(tmp_path / "run")
    tuned = load_pretrained(base, dtype=torch.float32)
    for _, _, experts in grouped_layers(tuned):
        experts.convert("nf4", group_size=32)
        experts.convert("dense")
    checkpoint = load_run(tmp_path / "run").checkpoint
    learned = Checkpoint(checkpoint, prefix="model.")
    for name, own in tuned.state_dict().items():
        prefix = factor_prefix(name)
        if f"{prefix}.a" in learned.tensors:
            a, b = (read_whole(learned, f"{prefix}.{factor}") for factor in "ab")
            own += 32 / a.shape[1] * (b.flatten(1, -2) @ a).view(own.shape)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = opened.model(ids).logits_BSV, tuned.eval()(ids).logits_BSV
    assert (found - expected).norm() < 1e-5 * expected.norm()
    lines = lines_of(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "merged")
    merged = load_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert (merged(ids).logits_BSV - expected).norm() < 1e-5 * expected.norm()
    convert(tmp_path / "run", tmp_path / "adapter", adapter_only=True)  # compares logits
    again = [*[w.replace(f"{tmp_path}/run", f"{tmp_path}/again") for w in words], *more]
    assert train_verb([*again, *lora(steps=3)]) == 0
    assert train_verb([*again, *lora(), "--train.resume", "auto"]) == 0
    assert [x["loss"] for x in lines_of(tmp_path / "again")] == [x["loss"] for x in lines]
    other = ["int4" if word == "nf4" else word for word in again]
    with pytest.raises(ConfigError, match="base.storage=int4: the run in .* has nf4"):
        train_verb([*other, *lora(), "--train.resume", "auto"])


def test_a_packed_folder_is_a_base_as_it_is(base, packed, chats, tmp_path):
    assert train_verb([*words_of(packed, chats, tmp_path), *lora()]) == 0
    config, _ = RunDir(tmp_path / "run").read_config()
    assert (config.base.storage, config.base.group_size) == ("int4", 32)
    found = losses(tmp_path / "run")
    assert found[-1] < 0.8 * found[0]
    rounded = ["--base.storage", "int4", "--base.group-size", "32"]
    assert train_verb([*words_of(base, chats, tmp_path, run="rounded"), *lora(), *rounded]) == 0
    assert losses(tmp_path / "rounded") == found


@pytest.mark.parametrize(
    ("form", "name", "pack", "error"),
    # numbers in FP8 are rounded to BF16 where they are widened on reading
    [("mxfp4", "gpt_oss", in_mxfp4, 1e-5), ("fp8", "qwen3_moe", in_fp8, 5e-3)],
)
def test_experts_of_the_hub_stay_in_the_format_of_their_files(form, name, pack, error, chats, tmp_path):
    size = SIZES | {"intermediate_size": 64, "dtype": torch.bfloat16}
    pack_files(hub_folder(tmp_path / "hub", name, **size), pack)
    words = words_of(tmp_path / "hub", chats, tmp_path)
    assert train_verb([*words, *lora()]) == 0
    config, _ = RunDir(tmp_path / "run").read_config()
    found = losses(tmp_path / "run")
    assert config.base.storage == form and found[-1] < found[0]
    wide = words_of(tmp_path / "hub", chats, tmp_path, run="wide")
    assert train_verb([*wide, *lora(), "--base.storage", "float32"]) == 0
    assert found[:2] == pytest.approx(losses(tmp_path / "wide")[:2], rel=error)


MISTAKES = {
    "no adapter": (
        ["ALL", "--base.storage", "int4"],
        "base.storage=int4: is for frozen weights under adapters; leave it out, or give adapter.kind=lora",
    ),
    "no groups": (
        ["--base.storage", "int8", "--base.group-size", "32"],
        "base.group_size=32: has no",
    ),
    "too wide": (["--base.storage", "int4", "--base.group-size", "128"], "needs groups of 128"),
    "products in FP32": (
        ["--base.storage", "bfloat16"],
        "base.storage=bfloat16: products are in float32",
    ),
    "two formats": (["PACKED", "--base.storage", "nf4"], "packed has experts in int4"),
    "packed weights that learn": (["PACKED", "ALL"], "adapter.kind=lora"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, packed, words):
    more, said = MISTAKES[mistake]
    if "PACKED" in more:
        words = [str(packed), *words[1:]]
    options = [word for word in more if word.startswith("-") or word.islower() or word.isdigit()]
    with pytest.raises(ConfigError) as caught:
        train_verb([*words, *([] if "ALL" in more else lora()), *options])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def on_rank(words):
    """On every rank."""
    assert train_verb(words) == 0


LAYOUTS = {
    "experts on other ranks": ("nf4", "--parallel.ep-degree 2"),
    "gathered codes": ("fp8", "--parallel.route-degree 1"),
    "copies": ("int8", "--parallel.dp-replicate-degree 2"),
    "slices": ("int4", "--parallel.es-degree 2"),
    "gathered slices": ("mxfp4", "--parallel.es-degree 2 --parallel.route-degree 1"),
    "shared sequences": ("int8", "--parallel.tp-degree 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_on_a_packed_base_over_ranks_learn_what_one_process_does(layout, base, chats, tmp_path, two_ranks):
    storage, degrees = LAYOUTS[layout]
    more = [*lora(3), "--base.storage", storage, "--base.group-size", "32"]
    if storage not in GROUPED:
        more = more[:-2]
    more += ["--train.micro-batch-size", "2"]
    one, words = (
        ["float64" if word == "float32" else word for word in words_of(base, chats, tmp_path, run=run)]
        for run in ("run", "two")
    )
    assert train_verb([*one, *more]) == 0
    two_ranks.run(on_rank, [*words, *more, *degrees.split()])
    found, expected = (lines_of(tmp_path / run) for run in ("two", "run"))
    assert_same_lines(found, expected, "loss", "grad_norm")
    assert expected[-1]["loss"] < expected[0]["loss"]


def test_slices_that_part_a_group_are_one_line(base, chats, tmp_path, two_ranks):
    words = [*words_of(base, chats, tmp_path), *lora(1), "--base.storage", "fp8"]
    with pytest.raises(AssertionError, match="no whole groups of 128; the degrees that fit are 1"):
        two_ranks.run(on_rank, [*words, "--parallel.es-degree", "2"])


def test_ranks_keep_what_rests_in_fp32(base):
    changes = {"train.init_from": str(base), "adapter.kind": "lora"}
    config = gpt_moe_test().updated(changes | {"train.dtype": "bfloat16"})
    GPT.open_task(config).builder.check(2)
    found = [gpt_costs(config, num_ranks=n, dtype="bfloat16").memory for n in (1, 2)]
    one, two = (memory.weights_bytes - memory.gradients_bytes for memory in found)
    assert two == pytest.approx(one, rel=0.01)  # half of them in twice the bytes, but for routers
    dense = config.updated({"base.storage": "nf4", "model.moe.num_experts": ()})
    with pytest.raises(ConfigError, match="base.storage=nf4: is of routed experts, and the"):
        GPT.open_task(dense).builder.check(1)
    with pytest.raises(ConfigError, match="base.storage=bfloat16: .*not quantized are FP32 on"):
        GPT.open_task(config.updated({"base.storage": "bfloat16"})).builder.check(2)


def test_the_full_model_never_is_in_memory(tmp_path):
    sizes = {"num_experts": 32, "hidden_size": 64, "moe_intermediate_size": 128}
    base = hub_folder(tmp_path / "many", **sizes)
    changes = {"train.init_from": str(base), "adapter.kind": "lora", "base.storage": "nf4"}
    changes |= {"adapter.targets": ("attention",), "train.dtype": "float32"}
    begin = find_model(base)
    config = begin.config.updated(changes)
    precision = plain_precision(torch.float32, torch.device("cpu"))
    begin = with_format(begin, config, precision)

    def opened():
        model = place_model(GPT.open_task(config), begin, precision, Ranks())
        begin.load_into({n: t for n, t in model.state_dict().items() if ".adapters." not in n})
        return model

    full = 4 * gpt_spec(config.model).num_parameters
    assert peak_bytes(opened) < 0.4 * full
    held = [t.nbytes for t in opened().state_dict().values()]
    assert sum(held) == gpt_costs(config, num_ranks=1, dtype="float32").memory.weights_bytes
