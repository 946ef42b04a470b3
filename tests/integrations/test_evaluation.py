"""lm-evaluation-harness judges our model as it judges the export through its own backend."""

import json

import pytest
import torch
from tests.oracle import numerics
from tests.support.full_screen import full_screen
from tests.support.hub_text import byte_tokenizer, hub_folder
from tests.support.real_text import DOCS

from expertmesh.cli.main import main
from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert
from expertmesh.models.gpt.config import ModelConfig

lm_eval = pytest.importorskip("lm_eval")
pytestmark = [
    # what lm-evaluation-harness and its own libraries do is theirs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning"),
]
END = 0

QUIZ = """
task: quiz
dataset_path: json
dataset_kwargs: {data_files: {test: quiz.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: text.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: quiz.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: " the"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A folder with tasks and their data, a short run, and its export."""
    from expertmesh import RunConfig, train
    from expertmesh.models.gpt.config import GPTRunConfig

    folder = tmp_path_factory.mktemp("judged")
    text = (DOCS / "glossary.md").read_text() + (DOCS / "numerics.md").read_text()
    (folder / "corpus.txt").write_text(text)
    words = text.split()
    quiz = [
        {"question": " ".join(words[i : i + 5]), "answer": 0, "choices": words[i + 5 : i + 8]} for i in range(0, 60, 10)
    ]
    rows = {"quiz": quiz, "text": [{"text": text[i : i + 300]} for i in (0, 700)]}
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
    for name, task in (("quiz", QUIZ), ("text", TEXT), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(task)
    moe = MoEConfig(num_experts=(4,), top_k=2, hidden_dim=32)
    options = {"vocab_size": 300, "max_seq_len": 64, "dim": 32, "num_layers": 2, "num_heads": 2}
    config = GPTRunConfig(
        model=ModelConfig(**options, ffn_hidden_dim=32, qk_norm=True, moe=moe),
        data={"path": str(folder / "corpus.txt"), "seq_len": 32, "cache_dir": str(folder)},
        optim={"lr": 1e-2, "warmup_steps": 2},
        train={"steps": 20, "batch_size": 4, "run_dir": str(folder / "run"), "dtype": "float32",
               "device": "cpu", "eval_every": 20, "eval_batches": 1, "tensorboard": False},
    )  # fmt: skip
    assert isinstance(config, RunConfig)
    train(config, quiet=True)
    convert(folder / "run", folder / "hub")
    return folder


@pytest.fixture(autouse=True)
def _inside(judged, monkeypatch):
    monkeypatch.chdir(judged)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def requests(kind, *arguments):
    return [lm_eval.api.instance.Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


def test_every_request_equals_the_harness_own_backend(judged):
    from lm_eval.models.huggingface import HFLM

    from expertmesh.api import load
    from expertmesh.integrations.evaluation import ExpertMeshLM

    model, tokenizer = load(judged / "run")
    ours = ExpertMeshLM(model, tokenizer, end_id=END, batch_size=3)
    theirs = HFLM(str(judged / "hub"), device="cpu", batch_size=2, dtype="float32")
    texts = [json.loads(line)["text"] for line in (judged / "text.jsonl").read_text().splitlines()]
    pairs = [(t[:n], t[n : n + 9]) for t in texts for n in (0, 5, 40, 250)] + [("a word ", "b")]
    asked = requests("loglikelihood", *pairs)
    for a, b in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert abs(a[0] - b[0]) <= numerics.LIKELIHOOD_NATS and a[1] == b[1]
    asked = requests("loglikelihood_rolling", *[(t,) for t in texts], ("",), ("x",))
    found = ours.loglikelihood_rolling(asked)
    for a, b in zip(found, theirs.loglikelihood_rolling(asked), strict=True):
        assert abs(a - b) <= numerics.LIKELIHOOD_NATS
    assert 0.0 > found[2] > found[3]  # the harness counts the start token, too
    assert ours.tok_encode("x") == theirs.tok_encode("x") == [0, *tokenizer.encode("x").ids]
    options = {"until": ["\n", "."], "max_gen_toks": 10, "do_sample": False}
    asked = requests("generate_until", *[(t[:n], options) for t in texts for n in (7, 30, 290)])
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.parametrize("start", [None, "<|begin|>"])
def test_a_converted_model_is_asked_as_transformers_asks_it(judged, tmp_path, start):
    """Contexts begin with what the model's tokenizer puts before them, or with nothing."""
    from lm_eval.models.huggingface import HFLM

    from expertmesh.api import load
    from expertmesh.integrations.evaluation import ExpertMeshLM
    from expertmesh.integrations.hub import convert

    options = {} if start is None else {"bos_token": start}
    source = hub_folder(tmp_path / "hub", tokenizer=byte_tokenizer(start=start), options=options)
    convert(source, tmp_path / "run")
    ours = ExpertMeshLM(*load(tmp_path / "run"), end_id=256, batch_size=2)
    theirs = HFLM(str(source), device="cpu", batch_size=2, dtype="float32")
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in ("few words", ""):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    asked = requests("loglikelihood", ("few", " words"), ("", "others"))
    for a, b in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert abs(a[0] - b[0]) <= numerics.LIKELIHOOD_NATS and a[1] == b[1]
    asked = requests("generate_until", ("few words", {"until": [], "max_gen_toks": 6}))
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_a_capacity_in_evaluation_changes_no_score(judged):
    from expertmesh.api import load
    from expertmesh.integrations.evaluation import ExpertMeshLM
    from expertmesh.models.gpt.model import GPT

    model, tokenizer = load(judged / "run")
    moe = model.config.moe.model_copy(update={"eval_capacity_factor": 0.5, "min_capacity": 1})
    capped = GPT(model.config.model_copy(update={"moe": moe}))
    capped.load_state_dict(model.state_dict())
    asked = requests("loglikelihood", *[("a word " * n, "of text") for n in range(1, 6)])
    free, bound = (
        ExpertMeshLM(one.eval(), tokenizer, end_id=END, batch_size=5).loglikelihood(asked) for one in (model, capped)
    )
    assert bound == free


def test_repeated_requests_are_drawn_anew_in_every_batch(judged):
    from expertmesh.api import load
    from expertmesh.integrations.evaluation import ExpertMeshLM

    options = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    asked = requests("generate_until", *[("a word", options)] * 4)
    for size in (1, 3):
        ours = ExpertMeshLM(*load(judged / "run"), end_id=END, batch_size=size)
        assert len(set(ours.generate_until(asked))) == 4


def test_the_verb_judges_a_run(judged, capsys):
    files = [f"{name}.yaml" for name in ("quiz", "text", "write")]
    where = ["--run", "run", "--output", "results.json"]
    assert main(["evaluate", *where, "--tasks", *files, "--limit", "4"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((judged / "results.json").read_text())["results"]
    assert set(found) == {"quiz", "text", "write"}
    assert f"quiz  acc  {found['quiz']['acc,none']:.4f}" in shown
    assert 0 < found["text"]["bits_per_byte,none"] < 8
    assert "write  exact_match" in shown


def test_the_results_are_written_before_the_screen(judged):
    where = ["--run", "run", "--output", "kept.json"]
    with full_screen():
        assert main(["evaluate", *where, "--tasks", "quiz.yaml", "--limit", "1"]) == 1
    assert set(json.loads((judged / "kept.json").read_text())["results"]) == {"quiz"}


def test_the_verb_judges_a_folder_of_the_hub_as_the_run_of_it(judged):
    """In BF16, the type of the files: what FP32 weights compute in is measured."""
    convert("run", "as_hub", dtype=torch.bfloat16)
    convert("as_hub", "as_run")
    found = []
    for folder in ("as_hub", "as_run"):
        where = ["--run", folder, "--output", f"{folder}.json"]
        assert main(["evaluate", *where, "--tasks", "quiz.yaml", "text.yaml", "--limit", "4"]) == 0
        found.append(json.loads((judged / f"{folder}.json").read_text())["results"])
    assert found[0] == found[1] and set(found[0]) == {"quiz", "text"}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("none.yaml", "is no file"),
        ("quiz.jsonl", "is no YAML mapping|has no task"),
        ("hub.yaml", "dataset_path=squad would be downloaded"),
        ("far.yaml", "dataset_kwargs would be downloaded"),
    ],
)
def test_what_is_no_local_task_is_refused(judged, capsys, task, words):
    (judged / "hub.yaml").write_text(QUIZ.replace("path: json", "path: squad"))
    (judged / "far.yaml").write_text(QUIZ.replace("quiz.jsonl", "'https://nowhere.invalid/x'"))
    with pytest.raises(ConfigError, match=words):
        main(["--debug", "evaluate", "--run", "run", "--tasks", task])


def test_options_of_generation_that_are_not_known_are_refused(judged):
    from expertmesh.api import load
    from expertmesh.integrations.evaluation import ExpertMeshLM

    ours = ExpertMeshLM(*load(judged / "run"), end_id=END)
    for options, words in (
        ({"num_beams": 4}, "num_beams=4: is none of"),
        ({"max_gen_toks": 64}, "max_gen_toks=64: leaves no room"),
    ):
        with pytest.raises(ConfigError, match=words):
            ours.generate_until(requests("generate_until", ("a", options)))
    with pytest.raises(ConfigError, match="batch_size=0"):
        ExpertMeshLM(*load(judged / "run"), end_id=END, batch_size=0)
