"""`--config run.yaml` beside flags."""

import json

import pytest

from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.prog_name import Flags
from expertmesh.errors import ConfigError


def parsed(tmp_path, text, *words):
    (tmp_path / "run.yaml").write_text(text)
    return parse_run_config([*words, "--config", str(tmp_path / "run.yaml")])


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path):
    text = "train: {steps: 30, batch-size: 4}\nmodel.moe: {num_experts: [8]}\ndata:\n  path: [a, 'b:2']\n"
    found = parsed(tmp_path, text, "gpt-moe-test", "--train.steps", "40").config
    assert (found.train.steps, found.train.batch_size) == (40, 4)
    assert found.model.moe.num_experts == (8,) and found.data.path == ("a", "b:2")
    assert found.train.eval_every == 10


def test_a_list_of_one_needs_no_brackets(tmp_path):
    text = "train: {freeze: 'experts,router'}\nmodel.moe: {num_experts: 8}\nparallel: {ep_degree: 2}\n"
    found = parsed(tmp_path, text, "gpt-moe-test").config
    assert found.train.freeze == ("experts", "router") and found.model.moe.num_experts == (8,)
    assert found.parallel.ep_degree == (2,)


def test_none_is_no_value_as_on_the_command_line(tmp_path):
    text = "train: {keep_every: none}\ndata: {path: None}\nparallel: {ep_degree: none}\n"
    found = parsed(tmp_path, text, "gpt-moe-test").config
    assert found == parse_run_config(["gpt-moe-test"]).config


def test_a_run_s_own_config_is_such_a_file(tmp_path):
    first = parse_run_config(["gpt-moe-test", "--model.moe.top-k", "1"])
    text = json.dumps({"recipe": first.recipe, **first.config.model_dump(mode="json")})
    again = parsed(tmp_path, text)
    assert again.config == first.config and again.recipe == "gpt-moe-test"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {stepz: 3}", "unknown option train.stepz; did you mean train.steps?"),
        ("trian: {steps: 3}", "unknown option trian; did you mean train?"),
        ("model: {mo: {top_k: 1}}", "unknown option model.mo; did you mean model.moe?"),
        ("train: {steps: 3}\ntrain: {seed: 4}", "train is given twice"),
        ("train: {steps: 3, steps: 4}", "steps is given twice"),
        ("train: {steps: 3}\ntrain.steps: 4", "train.steps is given twice; give it once"),
        ("model.moe: {top_k: 1}\nmodel: {moe.top-k: 2}", "model.moe.top_k is given twice"),
        ("train: 3", "train holds 3, and is a section; name a field of it, for example train."),
        ("model: {moe: [4]}", "model.moe holds [4], and is a section; "),
        ("train: {steps: zero}", "--train.steps zero: must be a whole number"),
        ("- 1", "not sections"),
        ("a: [", "is no YAML"),
        ("family: 'os:system'", "a file names no module to import"),
        ("!!python/object/apply:os.system ['true']", "is no YAML"),
        ("recipe: gpt-moe-tset\n", "unknown recipe 'gpt-moe-tset'; did you mean gpt-moe-test?"),
    ],
)
def test_mistakes_name_the_option_and_the_nearest(text, says, tmp_path):
    words = [] if text.startswith("recipe") else ["gpt-moe-test"]
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, text, *words)
    assert says in Flags().spell(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.yaml: does not exist; check the path"):
        parse_run_config(["gpt-moe-test", "--config", str(tmp_path / "nothing.yaml")])


def test_a_path_may_be_repeated_and_no_other_option(tmp_path):
    words = ["gpt-moe-test", "--data.path", "a", "--data.path=b:2"]
    assert parse_run_config(words).config.data.path == ("a", "b:2")
    assert parse_run_config(words[:3]).config.data.path == "a"
    with pytest.raises(ConfigError, match="is given twice"):
        parse_run_config(["gpt-moe-test", "--train.steps", "3", "--train.steps", "4"])
