"""`tokens.add`: tokens of a fine-tune get rows, which alone learn under adapters, and go where the run goes."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hub_text import chats_file, hub_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh as em
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.grown_rows import is_token_rows
from expertmesh.checkpoints.source import read_whole
from expertmesh.cli.main import main
from expertmesh.cli.train import run as train_verb
from expertmesh.config.tokens import TokensConfig
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import quantize
from expertmesh.integrations.hub.save import save_pretrained
from expertmesh.runs.run_dir import find_model, load_run
from expertmesh.text import new_tokens
from expertmesh.training.metrics import read_metrics

# peft 0.21 asks transformers 5.23 for an attribute by its old name
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    # and warns of patterns for parameters, which it goes by all the same
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
LORA = ["--adapter.kind", "lora", "--adapter.rank", "4"]
ADD = ["--tokens.add", "<plan>", "--tokens.add", "</plan>", "--tokens.add", "<|user|>"]
ROWS, V = [257, 260, 261], 261  # a mark of the tokenizer, a row without a token, and a row that is to come
WITH_TOKENS = "<plan>{n}</plan>"


def base_of(place, **changes):
    return hub_folder(place, "qwen2_moe", vocab_size=V, **changes)


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def base(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("tokens")
    chats_file(place / "chats.jsonl", WITH_TOKENS, count=20)
    return base_of(place / "base", tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    place = tmp_path_factory.mktemp("alone")
    chats_file(place / "chats.jsonl", WITH_TOKENS, count=20)
    return base_of(place / "base")


def trained(base, run, steps, *words, records="chats", lr="3e-2"):
    place = base.parent
    where = ["--train.run-dir", f"{place}/{run}", "--data.cache-dir", f"{place}/cache"]
    data = ["--data.path", f"{place}/{records}.jsonl", "--train.batch-size", "4", "--optim.lr", lr]
    rest = ["--train.no-tensorboard", "--train.device", "cpu", "--optim.schedule-steps", "4"]
    assert train_verb([str(base), *where, *data, *rest, "--train.steps", str(steps), *words]) == 0
    return place / run


def tables(source):
    return {n: read_whole(source, n) for n in ("embedding.weight", "output.weight") if n in source.tensors}


def test_rows_of_the_tokens_alone_learn_under_adapters(base, capsys, tmp_path):
    peft = pytest.importorskip("peft")
    run = trained(base, "run", 4, *LORA, *ADD)
    said = "".join(capsys.readouterr())
    tokens = TokensConfig(add=tuple(ADD[1::2]))
    grown = new_tokens.grown_vocabulary(base / "tokenizer.json", tokens, vocab_size=V)
    assert grown == new_tokens.GrownVocabulary(V - 1, V + 1, tuple(ROWS), (260, 261))
    before = tables(find_model(base).with_weights().growing(grown).open_weights())
    after, original = tables(load_run(run).open_weights()), tables(find_model(base).with_weights().open_weights())
    num_learned = len(after) * len(ROWS) * 24
    assert f"new tokens {num_learned:,}" in said.split("trainable: ")[1].split("frozen")[0]
    assert f"new tokens {num_learned:,}" in said.split("adapters: ")[1].split("; rank")[0]
    assert "tokens.add <|user|>: in the tokenizer already, with rows that begin as they are; special among" in said
    for name, rows in after.items():
        mean = original[name][: V - 1].double().mean(0).float()  # the last row has no token
        assert torch.equal(before[name][260:], mean.expand(2, -1))
        changed = (rows != before[name]).any(1).nonzero().flatten().tolist()
        assert changed == ROWS and len(rows) == 262, name
    saved = Checkpoint(load_run(run).checkpoint, prefix="model.").tensors
    assert sum(map(is_token_rows, saved)) == len(after)
    # broken and whole runs have the same bits
    trained(base, "broken", 2, *LORA, *ADD)
    trained(base, "broken", 4, *LORA, *ADD, "--train.resume", "required")
    lines = [[line["loss"] for line in read_metrics(base.parent / one / "metrics.jsonl")] for one in ("run", "broken")]
    assert lines[0] == lines[1] and len(lines[0]) == 4
    for name, rows in tables(load_run(base.parent / "broken").open_weights()).items():
        assert torch.equal(rows, after[name])
    # merged, and as peft's folder
    for name, more in (("merged", []), ("peft", ["--adapter-only"])):
        assert main(["convert", "--from", str(run), "--to", f"{tmp_path}/{name}", *more]) == 0
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.encode("<plan>", add_special_tokens=False) == [260]
        assert tokenizer.decode([260, 261], skip_special_tokens=True).replace(" ", "") == "<plan></plan>"
    values = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert values["vocab_size"] == 262
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    other = AutoModelForCausalLM.from_pretrained(base)
    other.resize_token_embeddings(262)
    other = peft.PeftModel.from_pretrained(other, tmp_path / "peft").eval()
    ids = torch.randint(262, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[:, ::4] = torch.tensor(ROWS + [260])
    ours, tokenizer = em.load(run)
    assert tokenizer.token_to_id("</plan>") == 261
    with torch.no_grad():
        expected = ours(ids).logits_BSV
        for found in (merged(ids).logits, other(ids).logits):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert main(["generate", str(tmp_path / "merged"), "<plan>", "--max-tokens", "3"]) == 0


def test_preferences_go_on_with_the_rows_of_the_conversations(base, tmp_path):
    """SFT -> DPO, from the run and from its folder of peft, whose ids may come in any order."""
    sft = trained(base, "sft", 1, *LORA, *ADD)
    pairs = [{"prompt": f"say {n}", "chosen": f"<plan>{n}</plan>", "rejected": "no"} for n in range(20)]
    (base.parent / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    assert main(["convert", "--from", str(sft), "--to", str(base.parent / "sft-peft"), "--adapter-only"]) == 0
    folder = base.parent / "sft-peft"
    turn_round(folder)
    rows = tables(load_run(sft).open_weights())
    for start in (sft, folder):
        dpo = ["--objective.name", "dpo", "--adapter.init-from", str(start)]
        run = trained(base, f"dpo-{start.name}", 1, *LORA, *ADD, *dpo, records="pairs", lr="1e-6")
        (line,) = read_metrics(run / "metrics.jsonl")
        assert line["loss"] == pytest.approx(math.log(2))
        for name, after in tables(load_run(run).open_weights()).items():
            moved = (after - rows[name]).abs().amax(1)
            assert moved.nonzero().flatten().tolist() == ROWS and moved.max() < 1e-5
            assert (rows[name][260] - rows[name][261]).abs().max() > 1e-3, "rows that began as one mean"
        for more, adds in (([], "none"), (ADD[:2], "<plan>"), ([*ADD[2:4], *ADD[:2], *ADD[4:]], "</plan> <plan>")):
            with pytest.raises(ConfigError, match=rf"has rows of the tokens <\|user\|> <plan> </plan>, .* adds {adds}"):
                trained(base, "none", 1, *LORA, *more, *dpo, records="pairs")
        with pytest.raises(ConfigError, match="tokens.add=<plan>: is an added token .* that is not special"):
            trained(base, "none", 1, *LORA, *ADD, *dpo, "--tokens.special", records="pairs")
    with pytest.raises(ConfigError, match=r"trainable_token_indices=.* merge .* of with expertmesh convert"):
        em.Engine(str(base), adapters={"sft": folder})


def test_tokens_that_were_special_stay_special(alone):
    special = [*ADD[:2], "--tokens.special"]
    goes_on = ["--adapter.init-from", str(trained(alone, "special", 1, *LORA, *special))]
    with pytest.raises(ConfigError, match=r"tokens.special=False: <plan> is special in .*; give tokens.special"):
        trained(alone, "none", 1, *LORA, *ADD[:2], *goes_on)
    trained(alone, "on", 1, *LORA, *special, *goes_on)


def turn_round(folder):
    """Give the rows of a folder of peft in the other order."""
    values = json.loads((folder / "adapter_config.json").read_text())
    values["trainable_token_indices"] = {k: ids[::-1] for k, ids in values["trainable_token_indices"].items()}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    turned = {name: t.flip(0).contiguous() if "trainable_tokens" in name else t for name, t in tensors.items()}
    save_file(turned, file)


def test_all_weights_learn_with_a_grown_vocabulary(alone, tmp_path):
    run = trained(alone, "full", 2, *ADD[:4], "--tokens.special")
    rows = tables(load_run(run).open_weights())
    assert all(len(one) == 262 for one in rows.values())
    assert main(["convert", "--from", str(run), "--to", f"{tmp_path}/hub"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hub").config.vocab_size == 262
    assert "<plan>" in AutoTokenizer.from_pretrained(tmp_path / "hub").get_added_vocab()
    # special: no text is encoded with it
    model, tokenizer = em.load(run)
    assert 260 not in tokenizer.encode("<plan>").ids and model.vocab_size == 262
    again = trained(run, "again", 1, *ADD[:2])  # from a run that has it
    assert all(len(one) == 262 for one in tables(load_run(again).open_weights()).values())
    more = trained(run, "more", 1, "--tokens.add", "<note>")  # which convert then writes with its tokenizer
    assert main(["convert", "--from", str(more), "--to", f"{tmp_path}/more"]) == 0
    saved = load_run(more)
    shutil.copyfile(alone / "tokenizer.json", more / "hub" / "tokenizer.json")  # as runs of old versions keep it
    save_pretrained(saved.checkpoint, more, saved.config, tmp_path / "old")
    for folder in (tmp_path / "more", tmp_path / "old"):
        assert AutoTokenizer.from_pretrained(folder).encode("<note>", add_special_tokens=False) == [262]


@pytest.mark.parametrize("storage", ["fp8", "int4"])
def test_rows_learn_beside_experts_in_few_bits(storage, tmp_path):
    base = base_of(tmp_path / "base", hidden_size=64, moe_intermediate_size=64)
    chats_file(tmp_path / "chats.jsonl", WITH_TOKENS, count=20)
    run = trained(base, "run", 1, *LORA, *ADD, "--base.storage", storage)
    model, original = em.load(run).model, tables(find_model(base).with_weights().open_weights())
    for name, rows in original.items():
        found = model.state_dict()[name]
        assert len(found) == 262 and (found[:261] != rows).any(1).nonzero().flatten().tolist() == ROWS[:2]
    assert model(torch.tensor([ROWS])).logits_BSV.isfinite().all()


MISTAKES = {
    "blank": (["--tokens.add", " "], "tokens.add '': must not be empty"),
    "twice": (["--tokens.add", "<a>", "--tokens.add", "<a>"], "tokens.add=('<a>', '<a>'): names something twice"),
    "special alone": (["--tokens.special"], "tokens.special=True: has no effect without added tokens"),
    "a head's adapter": ([*LORA, *ADD, "--adapter.targets", "head"], "conflicts with an adapter of the head"),
    "answers of its own": (
        [*ADD, "--objective.name", "grpo", "--reward.functions", "number"],
        "adds tokens that no answer has yet",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, alone):
    words, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        trained(alone, "none", 1, *words)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_other_tokens_at_resume_no_model_and_packed_ones_are_one_line(alone):
    words = ["gpt-moe-test", "--tokens.add", "<plan>", "--train.run-dir", f"{alone.parent}/new"]
    with pytest.raises(ConfigError, match="needs a trained model"):
        train_verb(words)
    trained(alone, "first", 1, *LORA, *ADD[:2])
    with pytest.raises(ConfigError, match=r"tokens.add=</plan>: the run in .* has \['<plan>'\]"):
        trained(alone, "first", 2, *LORA, *ADD[2:4], "--train.resume", "required")
    quantize(alone, alone.parent / "packed", format="int8", dtype=torch.float32)
    with pytest.raises(ConfigError, match="which is quantised; begin with the model that it was made of"):
        trained(alone.parent / "packed", "none", 1, *LORA, *ADD)
