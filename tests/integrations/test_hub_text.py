"""A converted model gets before a prompt what transformers puts there, and learns to end its answers whatever its
template."""

import json
import shutil

import pytest
import torch
from rich.console import Console
from tests.support.calls import calls_of
from tests.support.generation import written_ids
from tests.support.hub_text import byte_tokenizer, hub_folder
from tests.support.older_runs import as_older
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.engine.engine import Engine
from expertmesh.integrations.hub import convert, load_pretrained, quantize
from expertmesh.integrations.transformers import ExpertMeshForCausalLM
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run
from expertmesh.text.chat import TemplateFormat
from expertmesh.text.format import find_format, hub_start, text_format
from expertmesh.text.tokenizer import load_tokenizer, own_start, with_start
from expertmesh.training.loop import train

GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>\n{% endif %}"
)
PROMPT = "few words"


STARTS = [({}, None, []), ({"bos_token": "<|begin|>"}, None, []), ({}, "<|begin|>", [259])]


@pytest.mark.parametrize(("options", "start", "expected"), STARTS)
def test_every_generator_puts_before_a_prompt_what_transformers_does(tmp_path, capsys, options, start, expected):
    source = hub_folder(tmp_path / "hub", tokenizer=byte_tokenizer(start=start), options=options)
    theirs = AutoTokenizer.from_pretrained(source)
    ids = theirs(PROMPT)["input_ids"]
    assert ids[: len(ids) - len(PROMPT)] == expected, "what transformers does"
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 256}
    text = theirs.decode(model.generate(torch.tensor([ids]), **how)[0, len(ids) :])
    convert(source, tmp_path / "run")
    loaded, tokenizer = em.load(tmp_path / "run")
    with calls_of(Engine._add) as calls:
        assert em.generate(loaded, tokenizer, PROMPT, max_tokens=8, temperature=0) == text
        plain = load_pretrained(source).eval()
        assert em.generate(plain, tokenizer, PROMPT, max_tokens=8, temperature=0) == text
        words = ["--run", str(tmp_path / "run"), "--greedy", "--max-tokens", "8"]
        assert main(["generate", *words, PROMPT]) == 0
        assert main(["generate", *words, PROMPT, PROMPT]) == 0
    assert capsys.readouterr().out.count(PROMPT) == 3
    asked = [one[0]["ids"] for one in calls]
    assert len(asked) >= 5 and all(prompt == ids for prompt in asked)
    door = ExpertMeshForCausalLM.from_run(tmp_path / "run")
    assert door.config.bos_token_id == (expected[0] if expected else None)


def test_a_run_that_begins_with_a_converted_one_asks_as_it_does(tmp_path, capsys):
    """Also one that was converted before models knew it, by its files; reports begin with some token in any case."""
    source = hub_folder(tmp_path / "hub")
    convert(source, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"].pop("start_ids") == []
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    as_older(tmp_path / "run")
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"{i} words of text. " * 9)
    changes = {
        "data.path": str(tmp_path / "*.txt"),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.seq_len": 16,
        "train.init_from": str(tmp_path / "run"),
        "train.run_dir": str(tmp_path / "tuned"),
        "train.steps": 1,
        "train.tensorboard": False,
        "train.device": "cpu",
        "train.dtype": "float32",
    }
    train(em.recipe("gpt-moe-test", changes), console=Console(quiet=True))
    capsys.readouterr()
    ids = list(PROMPT.encode())
    for run in ("run", "tuned"):
        model, tokenizer = em.load(tmp_path / run)
        assert model.start_ids == ()
        assert text_format(tokenizer, model=model).prompt_ids("") == [256]
        with calls_of(Engine._add) as calls:
            em.generate(model, tokenizer, PROMPT, max_tokens=1)
            assert main(["report", str(tmp_path / run), "--samples", "1", "--tokens", "2"]) == 0
        byte_ids = tokenizer.encode(PROMPT).ids
        assert calls[0][0]["ids"] == byte_ids and len(byte_ids) == len(ids)
        for one in calls[1:]:  # of samples of the text, and of a page
            assert one[0]["ids"][0] != 256 or one[0]["ids"] == [256]
        assert len(calls) > 1


@pytest.fixture(scope="module", params=["texts", "chats"])
def own(request, tmp_path_factory):
    """A short run of our own, of texts or of conversations."""
    folder = tmp_path_factory.mktemp("own")
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"{i} words of text. " * 9)
    talk = [{"role": r, "content": "words of text"} for r in ("user", "assistant")]
    lines = [json.dumps({"messages": [*talk, {"role": "user", "content": str(i)}, talk[1]]}) for i in range(40)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    changes = {
        "data.path": str(folder / ("*.txt" if request.param == "texts" else "chats.jsonl")),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": 16 if request.param == "texts" else 64,
        "model.init_std": 0.2,
        "train.run_dir": str(folder / "own"),
        "train.steps": 1,
        "train.tensorboard": False,
        "train.dtype": "float32",
        "train.device": "cpu",
    }
    train(em.recipe("gpt-moe-test", changes), console=Console(quiet=True))
    return folder / "own"


def test_a_run_of_our_own_begins_with_the_end_of_text_unless_told(own, capsys):
    words = ["generate", "--run", str(own), "--max-tokens", "1"]
    with calls_of(Engine._add) as calls:
        assert main([*words, PROMPT]) == 0
        assert main([*words, "--no-start", PROMPT]) == 0
    first, second = (calls[at][0]["ids"] for at in (0, -1))
    assert first == [0, *second]
    assert main([*words, "--no-start", "--chat", PROMPT]) == 2
    assert "--no-start: has no effect with --chat" in capsys.readouterr().err


def test_folders_made_of_a_run_of_our_own_ask_as_it_does(own, tmp_path):
    """Also in transformers, and in conversations."""
    places = {name: tmp_path / name for name in ("hub", "back", "again", "int8", "int8_back")}
    convert(own, places["hub"])
    convert(places["hub"], places["back"])
    convert(places["back"], places["again"])
    quantize(own, places["int8"], format="int8")
    quantize(places["back"], places["int8_back"], format="int8")
    talk = [{"role": "user", "content": PROMPT}]
    run = open_model(own, dtype=torch.float32)
    ids, chat = run.text.prompt_ids(PROMPT), run.text.chat.prompt(talk)
    assert run.text.start_ids == (0,) and ids.count(0) == 1 and chat[0] == 0
    greedy = {"own": written_ids(run.model, [ids], max_tokens=8)}
    for name, place in places.items():
        opened = open_model(place, dtype=torch.float32)
        assert opened.text.start_ids == (0,) and opened.text.end_ids == run.text.end_ids, name
        assert opened.text.prompt_ids(PROMPT) == ids, name
        assert opened.text.chat.prompt(talk) == chat, name
        greedy[name] = written_ids(opened.model, [ids], max_tokens=8)
        if name == "back":
            continue
        theirs = AutoTokenizer.from_pretrained(place)
        assert theirs(PROMPT)["input_ids"] == ids and theirs.bos_token_id == 0, name
        assert theirs(PROMPT, PROMPT)["input_ids"] == ids * 2, name
        config = GenerationConfig.from_pretrained(place)
        assert config.bos_token_id == 0 and config.eos_token_id == [0], name
        if theirs.chat_template is not None:
            how = {"add_generation_prompt": True, "return_dict": False}
            assert theirs.apply_chat_template(talk, **how) == chat, name
    assert greedy["own"] == greedy["hub"] == greedy["back"] == greedy["again"]
    assert greedy["int8"] == greedy["int8_back"]
    files = [(places[name] / "tokenizer.json").read_bytes() for name in places]
    assert all(content == files[0] for content in files)


def test_a_given_tokenizer_keeps_its_files_and_gets_the_start(own, tmp_path):
    """Also where transformers would make another start of these files."""
    run = tmp_path / "run"
    as_older(shutil.copytree(own, run, ignore=shutil.ignore_patterns("lock")))
    values = json.loads((run / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "ByteLevel",
        "trim_offsets": True,
        "add_prefix_space": False,
        "use_regex": True,
    }
    (run / "tokenizer.json").write_text(json.dumps(values))
    (run / "hub").mkdir()
    told = {
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "GPTNeoXTokenizer",
        "add_bos_token": False,
        "x": 1,
    }
    (run / "hub" / "tokenizer_config.json").write_text(json.dumps(told))
    convert(run, tmp_path / "hub")
    ids = open_model(run).text.prompt_ids(PROMPT)
    assert AutoTokenizer.from_pretrained(tmp_path / "hub")(PROMPT)["input_ids"] == ids
    made = json.loads((tmp_path / "hub" / "tokenizer_config.json").read_text())
    ours = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    assert made == {"eos_token": "<|endoftext|>", "x": 1, **ours}
    kinds = json.loads((tmp_path / "hub" / "tokenizer.json").read_text())["post_processor"]["processors"]
    assert [one["type"] for one in kinds] == ["ByteLevel", "TemplateProcessing"]


@pytest.mark.parametrize("given", [None, "<|begin|>"])
@pytest.mark.parametrize("start", [(), (256,), (259, 257)])
def test_a_tokenizer_is_made_to_put_any_tokens_before_a_text(tmp_path, given, start):
    path = tmp_path / "tokenizer.json"
    byte_tokenizer(start=given).save(str(path))
    made = with_start(path, start)
    is_same = start == (() if given is None else (259,))
    assert (made is None) == is_same
    if made is not None:
        path.write_text(made)
    ids = load_tokenizer(path).encode("ab").ids
    assert ids == [*start, *ids[-2:]] and own_start(load_tokenizer(path)) == start
    assert with_start(path, start) is None


@pytest.mark.parametrize(("options", "start", "expected"), STARTS)
def test_a_model_of_the_hub_goes_back_with_its_own_tokenizer(tmp_path, options, start, expected):
    source = hub_folder(tmp_path / "hub", tokenizer=byte_tokenizer(start=start), options=options)
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    quantize(tmp_path / "run", tmp_path / "int8", format="int8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for place in ("back", "int8"):
            assert (tmp_path / place / name).read_bytes() == (source / name).read_bytes()
    assert hub_start(tmp_path / "back") == tuple(expected)


THINKING = GLM.replace(
    "<|assistant|>\n{% endif %}",
    "<|assistant|>\n{% if enable_thinking is defined and not enable_thinking %}<no_thoughts>{% endif %}{% endif %}",
)


def test_variables_of_the_template_are_given_on_the_command_line(tmp_path, capsys, typed):
    """For words, files and a talk; ids are those of transformers. What would have no effect is refused."""
    source = hub_folder(tmp_path / "hub", options={"chat_template": THINKING})
    theirs = AutoTokenizer.from_pretrained(source)
    turns = [{"role": "user", "content": PROMPT}]
    how = {"add_generation_prompt": True, "return_dict": False}
    ids = theirs.apply_chat_template(turns, enable_thinking=False, **how)
    plain = theirs.apply_chat_template(turns, **how)
    assert ids[: len(plain)] == plain != ids
    parts = [{"type": "text", "text": PROMPT[:3]}, {"type": "text", "text": PROMPT[3:]}]
    in_parts = [{"role": "user", "content": parts}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": in_parts}))
    asked = ["--input", str(tmp_path / "asked.jsonl")]
    off = ["--chat-template-kwargs", '{"enable_thinking": false}']
    words = ["generate", str(source), "--greedy", "--max-tokens", "1"]
    for given, expected in (
        (["--chat", PROMPT], plain),
        ([*off, "--chat", PROMPT], ids),
        (asked, plain),
        ([*off, *asked], ids),
        (["--chat", "--interactive"], plain),
        ([*off, "--chat", "--interactive"], ids),
    ):
        typed(PROMPT)
        with calls_of(Engine._add) as calls:
            assert main([*words, *given]) == 0
        assert [call[0]["ids"] for call in calls] == [expected]
    capsys.readouterr()
    (tmp_path / "texts.txt").write_text(PROMPT)
    for given, said in (
        ([*off, PROMPT], "has no effect on prompts that are no conversation"),
        ([*off, "--interactive"], "has no effect on prompts that are no conversation"),
        ([*off, "--input", str(tmp_path / "texts.txt")], "has no effect on prompts that"),
        ([off[0], "{", "--chat", PROMPT], "must be a JSON object"),
        ([off[0], "[1]", "--chat", PROMPT], "must be a JSON object"),
        ([off[0], r'{"a": "\ud800"}', "--chat", PROMPT], "must be a JSON object"),
        ([off[0], '{"messages": []}', "--chat", PROMPT], "may not have messages"),
        ([off[0], '{"thinks": 1}', "--chat", PROMPT], "does not read thinks; leave it out"),
    ):
        assert main([*words, *given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_the_start_of_a_folder_without_a_tokenizer_is_nothing(tmp_path):
    assert hub_start(tmp_path) == ()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A GLM-4-MoE of three layers that learned short answers by a template without ends."""
    folder = tmp_path_factory.mktemp("glm")
    source = hub_folder(folder / "hub", "glm4_moe", options={"chat_template": GLM}, num_hidden_layers=3)
    convert(source, folder / "run")
    lines = []
    for i in range(60):
        turns = [("user", f"say {'abc'[i % 3]}{i}"), ("assistant", "ok")]
        turns = turns * 2 if i % 2 else turns
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    changes = {
        "data.path": str(folder / "chats.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": 64,
        "train.init_from": str(folder / "run"),
        "train.run_dir": str(folder / "tuned"),
        "train.steps": 60,
        "train.batch_size": 8,
        "train.eval_every": 60,
        "train.tensorboard": False,
        "train.device": "cpu",
        "train.dtype": "float32",
        "optim.lr": 1e-2,
        "optim.warmup_steps": 5,
        "optim.schedule_steps": 60,
    }
    train(em.recipe("gpt-moe-test", changes), console=Console(quiet=True))
    return folder


def test_a_model_whose_template_writes_no_ends_learns_to_stop(tuned, capsys):
    words = ["generate", "--run", str(tuned / "tuned"), "--chat", "--greedy", "--max-tokens", "20"]
    assert main([*words, "say a1", "say b9"]) == 0
    assert capsys.readouterr().out == "--- 1\nsay a1\nok\n--- 2\nsay b9\nok\n"
    model, tokenizer = em.load(tuned / "tuned")
    form = find_format(tokenizer, tuned / "tuned" / "tokenizer.json")
    assert isinstance(form, TemplateFormat)
    ends = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|user|>")}
    assert set(form.ends) == ends <= set(model.end_ids)
    ids = form.prompt([{"role": "user", "content": "say c2"}])
    door = ExpertMeshForCausalLM.from_run(tuned / "tuned")
    assert ends <= set(door.config.eos_token_id)
    # every generator stops at the same, of whatever it is asked
    found = written_ids(model, [ids], max_tokens=20, ends=text_format(tokenizer).end_ids)[0]
    assert tokenizer.decode(found) == "ok"
    out = door.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(out.tolist(), skip_special_tokens=True) == "ok"


def test_what_it_learned_to_stop_at_goes_to_the_hub(tuned, tmp_path):
    convert(tuned / "tuned", tmp_path / "out")
    tokenizer = load_tokenizer(tuned / "tuned" / "tokenizer.json")
    ends = [tokenizer.token_to_id(mark) for mark in ("<|endoftext|>", "<|user|>")]
    assert set(GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id) == set(ends)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = find_format(tokenizer, tuned / "tuned" / "tokenizer.json").prompt([{"role": "user", "content": "say c2"}])
    found = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(found[0, len(ids) :].tolist(), skip_special_tokens=True) == "ok"
    assert load_run(tuned / "tuned").config.model.start_ids == ()
