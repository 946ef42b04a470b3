"""Checkpoints of the hub in and out: nothing is lost or guessed on the way (`test_hub_parity.py`: and they compute the
same)."""

import copy
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import VOCAB, family_model
from tests.support.generation import written_ids
from tests.support.hub_models import tiny_model
from tests.support.memory import peak_bytes
from tests.support.sentencepiece_vocabulary import END, START, sentencepiece_tokenizer
from transformers import AutoModelForCausalLM

from expertmesh.checkpoints.hub.configs import end_ids
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.text.tokenizer import end_of_text_id, train_tokenizer

TEXT = ["a few words of some text " * 9]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders as transformers saves them, of some families, with a tokenizer, and the models."""
    found = {}
    torch.manual_seed(0)  # before the fixture of every test
    tokenizer = train_tokenizer(TEXT, vocab_size=VOCAB)
    for name in ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"):
        model = family_model(name, seed=0, dtype=torch.float32)
        folder = tmp_path_factory.mktemp(name) / "hub"
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        found[name] = folder, model
    return found


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits_BSV


def halved(folder, model, target):
    """A folder of the hub in BF16."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # FP32 on the hub
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    model.save_pretrained(target)
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_a_model_that_is_only_used_keeps_the_type_of_its_files(hub, name, tmp_path):
    import expertmesh as em
    from expertmesh.runs.open import open_model

    folder = halved(*hub[name], tmp_path / "half")
    convert(folder, tmp_path / "run")
    ours = em.load(tmp_path / "run").model
    wide = [n for n, t in ours.state_dict().items() if t.dtype != torch.bfloat16]
    assert wide and all("router" in n or "expert_bias" in n for n in wide)
    ids = torch.randint(VOCAB, (6, 24))
    assert torch.equal(logits_of(ours, ids), logits_of(load_pretrained(folder).eval(), ids))
    opened = open_model(tmp_path / "run", for_autocast=True)
    decoder, precision = opened.decoder, opened.precision
    with precision.autocast():
        assert torch.equal(logits_of(decoder, ids), logits_of(ours, ids))


def test_shards_are_read_and_written(hub, tmp_path):
    from expertmesh.integrations.hub.save import save_pretrained
    from expertmesh.runs.run_dir import load_run

    folder, model = hub["qwen3_moe"]
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, parts = load_pretrained(folder), load_pretrained(tmp_path / "shards")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name
    convert(folder, tmp_path / "run")
    run = load_run(tmp_path / "run")
    out = tmp_path / "models" / "out"  # folders above are made
    save_pretrained(run.checkpoint, run.path, run.config, out, shard_bytes=30_000)
    again = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def spoiled(folder, target, change=None, **values):
    """A copy of the folder with changed weights, and values in config.json."""
    shutil.copytree(folder, target)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize("more", [0, 1])
def test_layers_that_predict_further_tokens_are_left_out(hub, tmp_path, more, caplog):
    """GLM-4.5 has one behind its last layer, which config.json counts apart. It is said."""
    ahead = {"model.layers.2.eh_proj.weight": torch.zeros(24, 48)}
    values = {"num_nextn_predict_layers": more}
    folder = spoiled(hub["glm4_moe"][0], tmp_path / "ahead", lambda t: t.update(ahead), **values)
    if not more:
        with pytest.raises(CheckpointError, match=r"has a tensor model\.layers\.2\.eh_proj"):
            load_pretrained(folder)
        return
    plain = load_pretrained(hub["glm4_moe"][0]).state_dict()
    assert not caplog.messages
    found = load_pretrained(folder).state_dict()
    (line,) = caplog.messages
    assert "model.layers.2.* predicts a further token, and is left out: 1,152 numbers" in line
    for name, tensor in found.items():
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(DOWN), f"has no tensor {DOWN}"),
        (lambda t: t.update({"model.new": torch.zeros(1)}), "has a tensor model.new"),
        (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), f"{DOWN}.*transposed"),
        (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), f"{DOWN} has dtype torch.int8"),
    ],
    ids=["missing", "extra", "transposed", "dtype"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(hub, tmp_path, change, words):
    folder = spoiled(hub["qwen3_moe"][0], tmp_path / "spoiled", change)
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(folder)


def test_a_file_cut_short_is_refused_by_the_tensor_in_it(hub, tmp_path):
    folder = spoiled(hub["mixtral"][0], tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cut short within model"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [VOCAB + 1, 24]}, "embed_tokens.weight has .* bytes and its shape"),
        ({"data_offsets": [0, 8]}, "embed_tokens.weight has 8 bytes"),
        ({"data_offsets": None}, "has no valid entry for model.embed_tokens.weight"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_by_the_tensor(hub, tmp_path, change, words):
    folder = spoiled(hub["mixtral"][0], tmp_path / "odd")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.embed_tokens.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(folder)


def test_training_begins_with_a_converted_checkpoint(hub, tmp_path):
    from expertmesh.checkpoints.dcp import Checkpoint
    from expertmesh.checkpoints.source import read_whole
    from expertmesh.models.gpt.config import GPTRunConfig
    from expertmesh.models.gpt.family import GPT
    from expertmesh.runs.run_dir import load_run
    from expertmesh.training.init_from import with_init_from
    from expertmesh.training.loop import train

    convert(hub["qwen3_moe"][0], tmp_path / "run")
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words of some text. " * 99)
    places = {"path": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache")}
    small = {"steps": 1, "batch_size": 2, "eval_batches": 1, "tensorboard": False}
    where = {"init_from": str(tmp_path / "run"), "run_dir": str(tmp_path / "tuned")}
    config = GPTRunConfig(
        data={**places, "seq_len": 16},
        train={**small, **where, "device": "cpu", "dtype": "float32"},
        optim={"lr": 1e-30, "warmup_steps": 0},  # a step too small to change a number
    )
    config = with_init_from(config, GPT)
    begin = load_run(tmp_path / "run")
    assert config.model == begin.config.model
    result = train(config)
    kept, given = (json.loads((tmp_path / run / "tokenizer.json").read_bytes())["model"] for run in ("tuned", "run"))
    assert kept == given
    sources = [Checkpoint(at, prefix="model.") for at in (begin.checkpoint, result.checkpoint)]
    for name in load_pretrained(hub["qwen3_moe"][0]).state_dict():
        assert torch.equal(*(read_whole(source, name) for source in sources)), name


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def talker(hub, tmp_path_factory):
    """A hub model that talks, with two ends of a text; its run."""
    folder = tmp_path_factory.mktemp("talker")
    source = spoiled(hub["qwen3_moe"][0], folder / "hub")
    tokenizer = train_tokenizer(TEXT, vocab_size=VOCAB - 9)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), 0]
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    values = {"chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    convert(source, folder / "run")
    return folder / "run", ends


def test_a_converted_model_learns_conversations_by_its_own_template(talker, tmp_path, capsys):
    from transformers import AutoTokenizer, GenerationConfig

    from expertmesh.cli.main import main
    from expertmesh.runs.run_dir import load_run

    run, ends = talker
    talks = [[("user", f"What is {n}?"), ("assistant", f"It is {n}.")] for n in range(40)]
    lines = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in talks]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tuned = tmp_path / "tuned"
    options = {
        "--train.init-from": run,
        "--data.path": tmp_path / "a.jsonl",
        "--data.cache-dir": tmp_path / "cache",
        "--data.seq-len": 32,
        "--data.validation-fraction": 0.2,
        "--train.run-dir": tuned,
        "--train.steps": 2,
        "--train.dtype": "float32",
        "--train.tensorboard": "false",
    }
    words = [str(word) for pair in options.items() for word in pair]
    assert main(["train", "gpt-moe-test", *words]) == 0
    config = load_run(tuned).config
    assert config.model.end_ids == tuple(ends)
    assert (tuned / "hub" / "tokenizer_config.json").is_file()
    assert main(["generate", "--run", str(tuned), "--chat", "--max-tokens", "2", "What is 3?"]) == 0
    convert(tuned, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = [{"role": "user", "content": "What is 3?"}]
    shown = theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\nWhat is 3?<|im_end|>\n<|im_start|>assistant\n"
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends
    capsys.readouterr()


@pytest.mark.parametrize("which", [0, 1])
def test_each_of_several_ends_ends_a_text(talker, which):

    import expertmesh as em
    from expertmesh.integrations.transformers import ExpertMeshForCausalLM

    run, ends = talker
    model, tokenizer = em.load(run)
    prompt, seen = [0, *tokenizer.encode("a").ids], []
    hook = model.final_norm.register_forward_hook(lambda *call: seen.append(call[2].flatten(0, -2)[-1]))
    written_ids(model, [prompt], max_tokens=1)
    hook.remove()
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.weight[ends[which]] = seen[0]  # the only logit above zero
        model.output.weight[9] = seen[0] / 2
    assert em.generate(model, tokenizer, "a", max_tokens=3, temperature=0) == ""
    assert written_ids(model, [prompt], max_tokens=1) == [[ends[which]]]  # no end was asked for
    outside = ExpertMeshForCausalLM.from_run(run)
    outside.gpt.load_state_dict(model.state_dict())
    found = outside.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
    assert found[0, len(prompt) :].tolist() == [ends[which]]


def test_a_text_begins_with_what_the_tokenizer_puts_before_it(hub, tmp_path, capsys):
    """Mixtral's `<s>`, of `generate` in Python and as a verb, and what is said of it is text."""
    import expertmesh as em
    from expertmesh.cli.main import main
    from expertmesh.text.stream import TextStream

    source = spoiled(hub["mixtral"][0], tmp_path / "hub")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save(str(source / "tokenizer.json"))
    convert(source, tmp_path / "run")
    prompt = tokenizer.encode("few words").ids
    assert prompt[0] == START
    theirs = AutoModelForCausalLM.from_pretrained(source)
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": END, "pad_token_id": END}
    found = theirs.generate(torch.tensor([prompt]), **how)[0]
    stream = TextStream(tokenizer)
    text = "".join(map(stream.feed, found.tolist()[len(prompt) :])) + stream.finish()
    model, loaded = em.load(tmp_path / "run")
    assert em.generate(model, loaded, "few words", max_tokens=5, temperature=0) == text
    words = ["--run", str(tmp_path / "run"), "--greedy", "--max-tokens", "5", "few words"]
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out == f"few words{text}\n"


@pytest.mark.parametrize("given", [True, [0, True], ["</s>"]])
def test_ends_that_are_no_ids_are_refused(given):
    with pytest.raises(ConfigError, match="eos_token_id=.*: is neither a token id"):
        end_ids({"eos_token_id": given, "vocab_size": 9})
    assert end_ids({"eos_token_id": [0, 9], "vocab_size": 9}) == (0,)
    assert end_ids({"vocab_size": 9}) == ()


def test_one_file_of_our_names_is_for_export(talker, tmp_path):
    with pytest.raises(ConfigError, match="expertmesh export .*run --output .*demo.safetensors"):
        convert(talker[0], tmp_path / "demo.safetensors")


def test_a_converted_tokenizer_ends_texts_by_its_own_token(hub, tmp_path):
    """Id 0 is any token there; it is the end of a text only in tokenizers that are trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    import expertmesh as em

    source = spoiled(hub["mixtral"][0], tmp_path / "hub", lambda t: t["model.norm.weight"].zero_())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["a"], trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    convert(source, tmp_path / "run")
    model, found = em.load(tmp_path / "run")
    assert end_of_text_id(found) == 256 and found.id_to_token(0) == "!"
    # all logits are zero, and the first of them is the most likely
    assert em.generate(model, found, "a", max_tokens=3, temperature=0) == "!!!"
    with pytest.raises(CheckpointError, match="has no token for the end of a text"):
        end_of_text_id(Tokenizer(models.BPE()))


def test_loading_needs_little_more_than_the_model(hub):
    for name in ("mixtral", "glm4_moe", "gpt_oss"):
        folder, _ = hub[name]
        size = sum(t.numel() * t.element_size() for t in load_pretrained(folder).state_dict().values())
        assert peak_bytes(lambda folder=folder: load_pretrained(folder)) <= 1.1 * size


class Inline(ThreadPoolExecutor):
    """Runs at once what is given to it: the allocator's events of other threads are not seen."""

    def submit(self, fn, /, *args):
        done = Future()
        done.set_result(fn(*args))
        return done


def test_converting_holds_what_is_being_written(larger, tmp_path, monkeypatch):
    from expertmesh.checkpoints import store as checkpoint

    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", Inline)
    hub, _ = larger
    shard = max(path.stat().st_size for path in hub.glob("*.safetensors"))
    tensors = load_pretrained(hub).state_dict().values()
    written = max(t.nbytes for t in tensors)
    most = 1.1 * shard + written
    assert most < sum(t.nbytes for t in tensors)
    assert peak_bytes(lambda: convert(hub, tmp_path / "run")) <= most
    assert peak_bytes(lambda: convert(tmp_path / "run", tmp_path / "again")) <= most


def spread_and_loaded(folder, run, layout):
    """Of one rank: bytes that it holds, peaks of both ways to load them, and whether the values are right."""
    from torch.distributed.tensor import DTensor

    from expertmesh.config.run import ParallelConfig
    from expertmesh.models.gpt.model import GPT
    from expertmesh.models.gpt.parallelize import parallelize_gpt
    from expertmesh.parallel.construct import give_memory
    from expertmesh.runs.run_dir import load_run

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    parallel, found = ParallelConfig(**layout), load_run(run)
    made = []

    def from_run():
        model = GPT(found.config.model, device="meta")
        made.append(model)
        parallelize_gpt(model, parallel)
        give_memory(model, device="cpu")
        found.load_into(model.state_dict())

    peaks = [
        peak_bytes(from_run),
        peak_bytes(lambda: made.append(load_pretrained(folder, parallel=parallel))),
    ]
    whole = load_pretrained(folder).state_dict()
    for model in made:
        for name, tensor in model.state_dict().items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full, whole[name]), name
    held = sum(local(t).nbytes for t in made[1].state_dict().values())
    return held, peaks, sum(t.nbytes for t in whole.values())


@pytest.mark.parametrize("layout", [{}, {"ep_degree": 1}, {"tp_degree": 2}], ids=str)
def test_a_rank_needs_little_more_than_its_part(tmp_path_factory, two_ranks, larger, layout):
    for held, peaks, everything in two_ranks.run(spread_and_loaded, *larger, layout):
        assert held < 0.6 * everything
        for peak in peaks:
            assert peak <= 1.1 * held


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model of some layers, so that no tensor is most of it: its hub folder, and a run of it."""
    folder = tmp_path_factory.mktemp("larger")
    model = tiny_model("qwen3_moe", num_experts=8, top_k=2, vocab_size=VOCAB, num_hidden_layers=6, hidden_size=64)
    model.save_pretrained(folder / "hub", max_shard_size="200KB")
    train_tokenizer(TEXT, vocab_size=VOCAB).save(str(folder / "hub" / "tokenizer.json"))
    convert(folder / "hub", folder / "run")
    return folder / "hub", folder / "run"


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    from expertmesh.text.tokenizer import given_tokenizer

    path, words = tmp_path / "tokenizer.json", Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    few_bytes = Tokenizer(models.BPE({"a": 0}, []))
    few_bytes.decoder = decoders.ByteLevel()
    for tokenizer, said in (
        (words, "is neither byte-level nor of SentencePiece"),
        (few_bytes, "has no token for 242 of the bytes"),
        (
            Tokenizer(models.WordLevel({"a": 0}, unk_token="b")),
            "is not a readable tokenizer .WordLevel error: Missing",
        ),
    ):
        tokenizer.save(str(path))
        with pytest.raises(ConfigError, match=said):
            given_tokenizer(path, vocab_size=300)
    train_tokenizer(["words " * 99], vocab_size=270).save(str(path))
    with pytest.raises(ConfigError, match="model.vocab_size is 9"):
        given_tokenizer(path, vocab_size=9)
