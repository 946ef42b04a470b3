"""A folder in the place of a recipe: epochs, what learns, and one line for each mistake."""

import json
import re
from collections import Counter

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hub_text import hub_folder
from tests.support.sentencepiece_vocabulary import sentencepiece_tokenizer
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import Metaspace
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.start_training import parse_and_begin
from expertmesh.cli.train import run as train_verb
from expertmesh.config.run import with_epochs
from expertmesh.data.text import text_data
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import gpt_moe_test
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.tokenizer import token_num_bytes
from expertmesh.training.ends import more_is_better
from expertmesh.training.metrics import read_metrics
from expertmesh.training.optim import freeze, learning_rate
from expertmesh.training.what_learns import counts_of_parts, part_of, what_learns


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = ({"role": "user", "content": "say"}, {"role": "assistant", "content": "well"})
    lines = [json.dumps({"messages": [turns[0], {**turns[1], "content": f"{n}"}]}) for n in range(40)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def words(base, chats, tmp_path):
    places = ["--train.run-dir", f"{tmp_path}/run", "--data.cache-dir", f"{tmp_path}/cache"]
    more = ["--data.path", str(chats), "--train.batch-size", "8", "--train.no-tensorboard"]
    return [str(base), *places, *more, "--train.device", "cpu"]


def test_a_folder_is_trained_for_epochs_and_says_what_learns(words, tmp_path, capsys):
    assert train_verb([*words, "--train.epochs", "1.5", "--train.freeze", "router"]) == 0
    said = capsys.readouterr().out
    config, _ = RunDir(tmp_path / "run").read_config()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    num_samples = int(said.split(" training and")[0].split()[-1])
    assert len(lines) == config.train.steps == -(-3 * num_samples // 16)
    assert config.train.epochs is None and config.optim.lr == 2e-5
    assert config.data.seq_len == config.model.max_seq_len
    assert "frozen: routers" in said and "memory: " in said
    again = [*words, "--train.epochs", "3", "--train.freeze", "router", "--train.resume", "auto"]
    assert train_verb(again) == 0
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == -(-3 * num_samples // 8)


def test_the_table_has_what_gets_gradients():
    model = GPT(gpt_moe_test().model, seed=0)
    freeze(model, ("router",))
    learning, resting = counts_of_parts(model)
    with_gradient = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(learning.values()) == with_gradient and set(resting) == {"routers"}
    assert "the rest" not in learning | resting
    assert f"trainable: {with_gradient:,} of " in what_learns(model)


OBJECTIVES = {
    "sft": ({"prompt": "say", "completion": "well {n}"}, []),
    "dpo": ({"prompt": "say {n}", "chosen": "well {n}", "rejected": "no"}, []),
    "grpo": (
        {"prompt": "say {n}"},
        ["--rl.group", "4", "--rl.max-tokens", "6", "--train.freeze", "none"],
    ),
}
REWARD = "def early(completion_ids, **kwargs):\n    return [sum(ids) / len(ids) for ids in completion_ids]\n"


@pytest.mark.parametrize("what", ["all", "adapters", "adapters and routers"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_a_run_says_to_learn_gets_gradients(objective, what, base, tmp_path, capsys):
    """Part by part, in the second step, as the second factors of adapters are zero in the first."""
    record, more = OBJECTIVES[objective]
    found, learners = Counter(), []

    def recorded(optimizer, args, kwargs):
        found.clear()
        for name, parameter in learners[-1].named_parameters():
            if parameter.grad is not None and parameter.grad.any():
                found[part_of(name)] += parameter.numel()

    records = [{key: text.format(n=n) for key, text in record.items()} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "rewards.py").write_text(REWARD)
    words = f"""--data.path {tmp_path}/data.jsonl --data.completions text --data.cache-dir {tmp_path}/cache
        --train.run-dir {tmp_path}/run --train.steps 2 --train.batch-size 8 --train.no-tensorboard --train.device cpu
        --optim.lr 1e-2 --optim.warmup-steps 0 --objective.name {objective}"""
    given = [*words.split(), *(more if what == "all" else more[:-2])]
    if objective == "grpo":
        given += ["--reward.functions", f"{tmp_path}/rewards.py:early"]
    if what != "all":
        given += ["--adapter.kind", "lora", "--adapter.rank", "4"]
        given += ["--adapter.learn-routers"] * (what == "adapters and routers")
    seen = register_module_forward_pre_hook(
        lambda module, args: learners.append(module) if isinstance(module, GPT) else None
    )
    with register_optimizer_step_pre_hook(recorded), seen:
        assert train_verb([str(base), *given]) == 0
    said = capsys.readouterr().out.split("trainable: ")[1].split("; frozen")[0].split(": ", 1)[1]
    told = dict(part.rsplit(" ", 1) for part in re.findall(r"[a-z_' ]+ [0-9,]*[0-9]", said))
    assert {k.strip(): int(v.replace(",", "")) for k, v in told.items()} == found


MISTAKES = {
    "both lengths": (
        ["--train.epochs", "2", "--train.steps", "3"],
        "train.steps=3: has no effect",
    ),
    "both warm-ups": (
        ["--optim.warmup-ratio", "0.1", "--optim.warmup-steps", "3"],
        "optim.warmup_steps=3: has no effect",
    ),
    "no epochs": (["--train.epochs", "0"], "train.epochs="),
    "all is warm-up": (["--optim.warmup-ratio", "1"], "optim.warmup_ratio="),
    "another model": (
        ["--train.init-from", "runs/x"],
        "train.init_from=runs/x: the first word is",
    ),
    "a floor of nothing": (
        ["--optim.schedule", "constant", "--optim.min-lr-ratio", "0.2"],
        "optim.min_lr_ratio=0.2: has no effect",
    ),
    "a branch": (
        ["--train.epochs", "1", "--train.branch-from", "runs/x", "--optim.schedule", "wsd"],
        "branch",
    ),
    "too long": (["--data.seq-len", "9999"], "seq"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_before_work_starts(mistake, words):
    more, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        parse_and_begin([*words, *more])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["./nothing", "runs/none"])
def test_a_word_that_is_no_folder(word):
    with pytest.raises(ConfigError, match="nor is it a folder with a model's config.json"):
        parse_run_config([word])


def test_a_folder_without_data(base):
    with pytest.raises(ConfigError, match="has nothing to learn from"):
        parse_and_begin([str(base)])
    assert parse_and_begin([str(base), "--dry-run"]).config.data.path is None


def test_given_steps_and_warmup_replace_those_of_the_folder(words):
    given = ["--train.steps", "7", "--optim.warmup-steps", "2"]
    config = parse_run_config([*words, *given]).config
    assert (config.train.steps, config.train.epochs) == (7, None)
    assert (config.optim.warmup_steps, config.optim.warmup_ratio) == (2, None)


def test_epochs_need_the_number_of_samples():
    config = gpt_moe_test().updated({"train.epochs": 2})
    with pytest.raises(ConfigError, match="use train.steps"):
        with_epochs(config, num_samples=None)
    found = with_epochs(config, num_samples=3)
    assert found.train.steps == 1 and found.optim.warmup_steps <= 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25])],
)
def test_schedules(schedule, expected):
    floor = {} if schedule == "constant" else {"optim.min_lr_ratio": 0.25}
    changes = {"optim.schedule": schedule, "optim.lr": 1.0, "optim.warmup_ratio": 0.25, **floor}
    optim = gpt_moe_test().updated(changes).optim
    found = [learning_rate(step, total_steps=6, config=optim) for step in range(6)]
    assert found == expected


def test_samples_change_no_loss(words, tmp_path, capsys):
    short = [*words, "--train.steps", "3", "--data.seq-len", "32"]
    assert train_verb([*short, "--train.sample-every", "2"]) == 0
    said = capsys.readouterr().out
    assert "step 2 wrote: " in said and "step 3 wrote: " in said
    rows = [json.loads(one) for one in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {2, 3} and all("say" in row["prompt"] for row in rows)
    with_samples = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert train_verb(_elsewhere(short, tmp_path)) == 0
    alone = [line["loss"] for line in read_metrics(tmp_path / "other" / "metrics.jsonl")]
    assert with_samples == alone


def _elsewhere(words, tmp_path):
    return [f"{tmp_path}/other" if one == f"{tmp_path}/run" else one for one in words]


def test_the_best_by_another_measure(words, tmp_path):
    more = ["--train.steps", "2", "--train.best-by", "bits_per_byte", "--train.patience", "5"]
    assert train_verb([*words, *more]) == 0
    with pytest.raises(ConfigError, match="train.best_by=f1: is no measure of this run; known: loss"):
        train_verb([*_elsewhere(words, tmp_path), "--train.steps", "2", "--train.best-by", "f1"])


def test_the_direction_of_a_measure():
    assert all(map(more_is_better, ("accuracy", "reward", "accuracy_top5", "eval_reward")))
    assert not any(map(more_is_better, ("loss", "bits_per_byte", "loss_de-en")))


def unigram():
    """A tokenizer of SentencePiece without bytes."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("\u2581a", -3.0)]
    letters = [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = Tokenizer(models.Unigram([*pieces, *letters], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("made", [sentencepiece_tokenizer, unigram])
def test_a_mixtral_with_its_tokenizer_is_fine_tuned(made, tmp_path, capsys):
    tokenizer = made()
    text = "a walk with \u00e9" if made is sentencepiece_tokenizer else "a walk with e"
    sizes = token_num_bytes(tokenizer, 290)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert sum(sizes[ids]) == len(f" {text}".encode())
    end = tokenizer.token_to_id("</s>")
    small = {"vocab_size": 290, "eos_token_id": end, "options": {"eos_token": "</s>"}}
    base = hub_folder(tmp_path / "sp", "mixtral", tokenizer=tokenizer, **small)
    lines = [{"prompt": f"say {n}", "completion": f"well {n}"} for n in range(30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    places = ["--train.run-dir", f"{tmp_path}/run", "--data.cache-dir", f"{tmp_path}/cache"]
    options = ["--data.path", str(path), "--data.completions", "text", "--train.device", "cpu"]
    assert train_verb([str(base), *places, *options, "--train.no-tensorboard"]) == 0
    (line, *_) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 0 < line["initial_eval_bits_per_byte"] < 100


def talks(folder, turns):
    """A file of conversations with equal answers."""
    answer, path = {"role": "assistant", "content": "well"}, folder / "chats.jsonl"
    each = ([{"role": "user", "content": f"say {n}"}, answer] * turns for n in range(30))
    path.write_text("\n".join(json.dumps({"messages": one}) for one in each))
    return path


ENDLESS = {
    "one turn": (1, "{{ m['role'] + ': ' + m['content'] }}"),
    "several turns": (3, "{{ m['role'] + ': ' + m['content'] + '\n' }}"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_of_answers_learns_the_end_of_text(name, tmp_path):
    """Every answer is learned with an end, in a row of its own where the template has none between turns."""
    turns, message = ENDLESS[name]
    asked = "{% if add_generation_prompt %}assistant: {% endif %}"
    template = "{% for m in messages %}" + message + "{% endfor %}" + asked
    base = hub_folder(tmp_path / "tiny", options={"chat_template": template})
    path = talks(tmp_path, turns)
    places = ["--train.run-dir", f"{tmp_path}/run", "--data.cache-dir", f"{tmp_path}/cache"]
    words = [str(base), *places, "--data.path", str(path), "--train.device", "cpu"]
    config = parse_and_begin([*words, "--train.steps", "1"]).config
    data = text_data(config.data, vocab_size=config.model.vocab_size, seed=0, objective="sft")
    _, targets_BS, more = data.batch(0, 12)
    end = byte_tokenizer().token_to_id("<|endoftext|>")
    for targets_S, counts_S in zip(targets_BS, more["counts"], strict=True):
        learned = targets_S[counts_S].tolist()
        assert learned.count(end) == 1 and learned[-1] == end
        assert byte_tokenizer().decode(learned[:-1]).strip() == "well"


def test_a_tokenizer_without_an_end_of_text_is_one_line(tmp_path, words_of_end):
    with pytest.raises((ConfigError, CheckpointError)) as error:
        train_verb(words_of_end)
    assert "end of" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def words_of_end(tmp_path):
    """Words of a run whose tokenizer names no end."""
    base = hub_folder(tmp_path / "tiny")
    values = json.loads((base / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["content"] = token["content"].replace("<|endoftext|>", "<|nothing|>")
    values["model"]["vocab"] = {
        k.replace("<|endoftext|>", "<|nothing|>"): v for k, v in values["model"]["vocab"].items()
    }
    (base / "tokenizer.json").write_text(json.dumps(values))
    (base / "tokenizer_config.json").write_text("{}")
    path = talks(tmp_path, 1)
    places = ["--train.run-dir", f"{tmp_path}/run", "--data.cache-dir", f"{tmp_path}/cache"]
    more = ["--train.device", "cpu", "--train.steps", "1", "--train.no-tensorboard"]
    return [str(base), *places, "--data.path", str(path), *more]
