"""Every rule of the configuration: a broken one raises ConfigError with one line that says value, rule and fix."""

import pickle
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pytest
from pydantic import model_validator

import expertmesh as em
from expertmesh import MoELayer
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.prog_name import Flags
from expertmesh.config.base import (
    Config,
    FieldError,
    dotted,
    nearest_name,
    option_names,
    saved_run,
    shown,
    user_cache_dir,
)
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import NOT_READ_BY, LayerOptions, RouterKind
from expertmesh.config.run import OptimConfig, RunConfig, TrainConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig

# Changes to the default configuration, the field the message must name, and a word of the rule.
BROKEN = [
    ({"model.moe.top_k": 9}, "model.moe.top_k=9", "fewest experts of a layer, 8"),
    ({"model.moe.num_experts": (8, 8)}, "model.moe.num_experts=(8, 8)", "one per MoE layer (6)"),
    (
        {"model.moe.num_experts": (8, 8, 8, 8, 8, 1)},
        "model.moe.top_k=2",
        "fewest experts of a layer, 1",
    ),
    ({"model.moe.capacity_factor": float("nan")}, "model.moe.capacity_factor=nan", "finite"),
    (
        {"model.moe.max_capacity_factor": 1.0, "model.moe.capacity_factor": 2.0},
        "model.moe.max_capacity_factor=1.0",
        "at least capacity_factor, 2.0",
    ),
    (
        {"model.moe.num_expert_groups": 3},
        "model.moe.num_expert_groups=3",
        "divide the number of experts, 8",
    ),
    (
        {"model.moe.num_limited_groups": 2},
        "model.moe.num_limited_groups=2",
        "at most num_expert_groups, 1",
    ),
    (
        {"model.moe.num_expert_groups": 4, "model.moe.top_k": 3},
        "model.moe.top_k=3",
        "experts in num_limited_groups=1 groups, 2",
    ),
    ({"model.moe.router": "top_k"}, "model.moe.router=top_k", "did you mean topk?"),
    (
        {"model.moe.router": "expert_choice", "model.moe.score_function": "softmax_after_topk"},
        "model.moe.score_function=softmax_after_topk",
        "experts choose",
    ),
    (
        {"model.moe.router": "hash", "model.moe.router_noise": "gumbel"},
        "model.moe.router_noise=gumbel",
        "no effect with router=hash",
    ),
    (
        {"model.moe.router": "expert_choice", "model.moe.bias_update_rate": 0.1},
        "model.moe.bias_update_rate=0.1",
        "no effect with router=expert_choice",
    ),
    ({"model.end_ids": [3, True]}, "model.end_ids[1]=True", "must be a whole number"),
    ({"model.dim": True}, "model.dim=True", "must be a whole number"),
    ({"model.num_kv_heads": False}, "model.num_kv_heads=False", "must be a whole number"),
    ({"optim.lr": True}, "optim.lr=True", "must be a number"),
    ({"model.num_heads": 3}, "model.num_heads=3", "divide dim, 256"),
    ({"model.num_heads": 256}, "model.num_heads=256", "even head size, this gives 1"),
    ({"model.head_dim": 63}, "model.head_dim=63", "even head size"),
    ({"model.num_kv_heads": 3}, "model.num_kv_heads=3", "divide num_heads, 4"),
    ({"model.moe_every": 7}, "model.moe_every=7", "at most num_layers, 6"),
    ({"model.vocab_size": 100}, "model.vocab_size=100", "at least 257"),
    ({"model.dim": 2.5}, "model.dim=2.5", "whole number"),
    ({"data.seq_len": 512}, "data.seq_len=512", "at most model.max_seq_len, 256"),
    ({"data.path": "a", "data.dataset": "b"}, "data.dataset=b", "conflicts with data.path=a"),
    (
        {"optim.warmup_steps": 1001},
        "optim.warmup_steps=1001",
        "at most the steps of the schedule, 1000",
    ),
    ({"optim.lr": float("inf")}, "optim.lr=inf", "finite number"),
    ({"train.micro_batch_size": 3}, "train.micro_batch_size=3", "divide train.batch_size, 16"),
    ({"train.device": "tpu"}, "train.device=tpu", "auto, cpu, cuda or cuda:N"),
    ({"train.run_dir": " "}, "train.run_dir=''", "not be empty"),
    (
        {"train.freeze": ("experts", "router"), "model.moe.router": "hash"},
        "train.freeze=('experts', 'router')",
        "a hash learns nothing",
    ),
    (
        {"train.max_time": "90x"},
        "train.max_time=90x",
        "must be a finite number of seconds, or a time such as 90m",
    ),
    (
        {"train.max_time": "1:99"},
        "train.max_time=1:99",
        "must be a finite number of seconds, or a time such as 90m",
    ),
    ({"train.max_time": "0m"}, "train.max_time=0.0", "greater than 0"),
    ({"train.max_time": "nan"}, "train.max_time=nan", "finite"),
    ({"train.stepz": 1}, "train.stepz=1", "did you mean train.steps?"),
    ({"trian.steps": 1}, "trian.steps=1", "did you mean train.steps?"),
    ({"model.top_k": 1}, "model.top_k=1", "did you mean model.moe.top_k?"),
]


@pytest.mark.parametrize(("given", "kept"), [("5", (5,)), (5, (5,)), ([1, 2], (1, 2)), ((), ()), (None, None)])
def test_a_list_that_may_be_none_takes_one_value(given, kept):
    assert GPTRunConfig().updated({"model.start_ids": given}).model.start_ids == kept


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("1.5", 1.5), ("90s", 90), ("90m", 5400), ("1.5h", 5400), ("1h30m", 5400)),
        *(("1h 30m", 5400), ("2d", 172800), ("100:00:00", 360000), ("1:30", 90), ("90:00", 5400)),
        *(("12:00:00", 43200), ("1-12", 129600), ("1-12:30", 131400), ("1-12:00:30", 129630)),
    ],
)
def test_a_duration_is_read_as_people_and_schedulers_write_it(text, seconds):
    assert GPTRunConfig().updated({"train.max_time": text}).train.max_time == seconds
    parsed = parse_run_config(["gpt-moe-test", "--train.max-time", text])
    assert parsed.config.train.max_time == seconds


@pytest.mark.parametrize(("changes", "named", "rule"), BROKEN, ids=lambda value: str(value)[:50])
def test_broken_rule(changes, named, rule):
    with pytest.raises(ConfigError) as caught:
        GPTRunConfig().updated(changes)
    text = str(caught.value)
    assert text.startswith(f"{named}: ")
    assert rule in text
    assert "; " in text, "the message names no fix"
    assert "\n" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"model.moe.num_experts": ()},
        {"model.moe.num_experts": (8, 8, 8, 16, 16, 16), "model.moe.top_k": 8},
        {"model.moe_every": 2, "model.moe.num_experts": (4, 8, 16)},
        {"model.moe.num_expert_groups": 4, "model.moe.num_limited_groups": 2, "model.moe.top_k": 4},
        {"model.moe.capacity_factor": 1.0, "model.moe.max_capacity_factor": 1.0},
        {"model.head_dim": 64, "model.num_heads": 3},
        {"optim.warmup_steps": 1000},
        {"optim.warmup_steps": 0},
        {"train.steps": 20, "optim.schedule_steps": 1000},
        {"train.micro_batch_size": 16},
        {"train.device": "cuda:3"},
        {"model.vocab_size": 257},
    ],
    ids=str,
)
def test_edge_of_a_rule_is_allowed(changes):
    config = GPTRunConfig().updated(changes)
    assert {name: attrgetter(name)(config) for name in changes} == changes


# Values that would change something elsewhere, and that a dense model, or the condition of a row, leaves without
# effect.
OTHER = {
    "shared_hidden_dim": 5,
    "router": "cosine",
    "score_function": "sigmoid",
    "normalize_weights": "kept",
    "router_noise": "gumbel",
    "group_score": "max",
    "drop_policy": "first",
    "balance_loss": "gshard",
    "balance_loss_scope": "global",
    "backend": "torch",
    "input_jitter": 0.5,
    "input_dropout": 0.5,
    "expert_output_masking": 0.5,
    "capacity_factor": 1.0,
    "eval_capacity_factor": 1.0,
    "max_capacity_factor": 1.0,
    "routing_group_size": 8,
    "num_expert_groups": 4,
}
IDLE = {
    "dense": (
        {"num_experts": ()},
        sorted(set(MoEConfig.model_fields) - {"num_experts", "num_limited_groups"}),
    ),
    "hash": (
        {"router": "hash"},
        ["num_expert_groups", "bias_update_rate", "router_noise", "input_jitter", "input_dropout"]
        + [
            "logit_temperature",
            "cosine_dim",
            "score_function",
            "balance_loss",
            "balance_loss_scope",
        ]
        + ["aux_loss_weight", "z_loss_weight"],
    ),
    "expert_choice": (
        {"router": "expert_choice", "capacity_factor": 1.0},
        ["num_expert_groups", "bias_update_rate", "min_capacity", "drop_policy"],
    ),
    "not cosine": ({}, ["cosine_dim"]),
    "no noise": ({}, ["router_noise_std"]),
    "dropless": ({}, ["min_capacity", "drop_policy"]),
}


def other_than_default(name):
    default = MoEConfig.model_fields[name].default
    return OTHER.get(name, not default if isinstance(default, bool) else None) or default + 1


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, (_, names) in IDLE.items() for name in names])
def test_an_option_without_effect_is_refused(where, name):
    condition = IDLE[where][0]
    value, default = other_than_default(name), MoEConfig.model_fields[name].default
    MoEConfig(**condition | {name: default})  # its default never is
    with pytest.raises(ConfigError, match=f"^{name}=.*: has no effect .*; leave it at") as caught:
        MoEConfig(**condition | {name: value})
    assert "\n" not in str(caught.value)


def test_every_router_says_what_it_does_not_read():
    assert set(NOT_READ_BY) == set(get_args(RouterKind))


def test_what_has_an_effect_or_says_that_there_is_none_is_allowed():
    MoEConfig(router="hash", balance_loss="none", aux_loss_weight=0.0)
    MoEConfig(router="cosine", cosine_dim=8, score_function="sigmoid")


def test_with_a_router_goes_what_a_recipe_said_of_its_logits():
    """But for what is given beside it."""
    recipe = GPTRunConfig(model={"moe": {"z_loss_weight": 0.1, "weight_scale": 2.0}})
    hashed = recipe.updated({"model.moe.router": "hash"}).model.moe
    assert hashed == MoEConfig(router="hash", weight_scale=2.0)
    with pytest.raises(ConfigError, match=r"model\.moe\.z_loss_weight=0.2: has no effect with router"):
        recipe.updated({"model.moe.router": "hash", "model.moe.z_loss_weight": 0.2})


def test_the_model_of_a_run_with_an_idle_option_is_built():
    """They were once accepted; so is going on with the run, which has the defaults then."""
    values = GPTRunConfig().model_dump()
    values["model"]["moe"] |= {"router": "hash", "input_jitter": 0.1}
    with saved_run():
        moe = GPTRunConfig.model_validate(values).model.moe
    assert moe == MoEConfig(router="hash")


def test_decay_fraction_needs_wsd():
    assert GPTRunConfig(optim={"schedule": "wsd", "decay_fraction": 0.5}).optim.decay_fraction == 0.5
    with pytest.raises(ConfigError, match="decay_fraction=0.5: has no effect with optim.schedule=cosine"):
        GPTRunConfig(optim={"decay_fraction": 0.5})


def test_the_dense_form_of_a_recipe_forgets_what_it_says_of_experts():
    recipe = GPTRunConfig(model={"moe": {"top_k": 3, "hidden_dim": 64}})
    assert recipe.updated({"model.moe.num_experts": ()}).model.moe == MoEConfig(num_experts=())
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k=3: has no effect in a dense model"):
        recipe.updated({"model.moe.num_experts": (), "model.moe.top_k": 3})


def test_the_same_error_from_every_door():
    doors = [
        lambda: GPTRunConfig(model={"moe": {"top_k": 9}}),
        lambda: GPTRunConfig(model=ModelConfig.model_validate({"moe": {"top_k": 9}})),
        lambda: GPTRunConfig.model_validate({"model": {"moe": {"top_k": 9}}}),
        lambda: GPTRunConfig.model_validate_json('{"model": {"moe": {"top_k": 9}}}'),
        lambda: MoEConfig(top_k=9),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match=r"top_k=9: must be at most .*; lower top_k") as caught:
            door()
        assert "\n" not in str(caught.value)


TEXTS = {
    "9": "top_k='9': must be a whole number above 0; for example 2",
    "many": "top_k=many: must be a whole number above 0; for example 2",
    "None": "top_k='None': must be a whole number above 0; for example 2",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_reads_as_a_number_is_shown_with_its_quotes(text):
    with pytest.raises(ConfigError) as caught:
        MoELayer(dim=8, hidden_dim=8, num_experts=2, top_k=text)
    assert str(caught.value) == TEXTS[text]


def test_on_the_command_line_no_value_has_quotes():
    with pytest.raises(ConfigError) as caught:
        parse_run_config(["gpt-moe-test", "--train.steps", "-3"])
    assert Flags().spell(caught.value).startswith("--train.steps -3: must be greater than 0")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dim": "wide"}, "num_experts=None: must be given; give one"),
        (
            {"num_experts": 2.5, "dim": 8},
            "num_experts=2.5: must be a whole number above 0; change it",
        ),
    ],
)
def test_nobody_is_told_to_leave_out_what_is_required(values, says):
    with pytest.raises(ConfigError) as caught:
        LayerOptions(**values)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("door", "named"),
    [
        (lambda: GPTRunConfig(train="x"), "train=x"),
        (lambda: GPTRunConfig().updated({"train": 3}), "train=3"),
        (lambda: GPTRunConfig.model_validate({"train": None}), "train=None"),
        (lambda: TrainConfig.model_validate("x"), "configuration=x"),
        (lambda: TrainConfig.model_validate_json("[1]"), "configuration=[1]"),
    ],
)
def test_a_section_that_is_no_mapping_is_named(door, named):
    with pytest.raises(ConfigError) as caught:
        door()
    rule = "must be a mapping of options to their values; for example {'steps': ...}"
    assert str(caught.value) == f"{named}: {rule}"


def test_broken_json_is_one_line():
    with pytest.raises(ConfigError, match="Invalid JSON") as caught:
        GPTRunConfig.model_validate_json('{"model": {"dim":')
    assert "\n" not in str(caught.value)


def test_configurations_are_frozen_and_survive_json():
    config = GPTRunConfig().updated({"model.moe.num_experts": (4,), "train.steps": 77})
    assert GPTRunConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_updated_leaves_the_original():
    config = GPTRunConfig()
    assert config.updated({"train.steps": 60}).train.steps == 60
    assert config == GPTRunConfig()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 77}, "model": {"moe": {"top_k": 1}}},
        {"train": {"steps": 77}, "model.moe": {"top_k": 1}},
        {"train": {"steps": 77}, "model.moe.top_k": 1},
    ],
    ids=str,
)
def test_of_a_section_what_is_not_named_stays(changes):
    config = GPTRunConfig(train={"seed": 5}, model={"moe": {"weight_scale": 2.0}})
    changed = config.updated(changes)
    assert changed.train == TrainConfig(seed=5, steps=77)
    assert changed.model == ModelConfig(moe=MoEConfig(weight_scale=2.0, top_k=1))
    assert config.model.updated({"moe": {"top_k": 1}}) == changed.model
    whole = config.updated({"train": TrainConfig(steps=77), "train.keep_last": 5})
    assert whole.train == TrainConfig(steps=77, keep_last=5)


@pytest.mark.parametrize("changes", [{"train": {"stepz": 3}}, {"train": {3: 3}}, {3: 3}], ids=str)
def test_an_unknown_name_in_a_section_is_an_error(changes):
    with pytest.raises(ConfigError, match=r"3: unknown option; "):
        GPTRunConfig().updated(changes)


def test_the_warm_up_of_a_whole_section_is_kept():
    section = OptimConfig(warmup_steps=7)
    assert em.recipe("gpt-moe-test", {"optim": section, "train.steps": 300}).optim == section


def test_who_has_no_home_folder_is_told(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(ConfigError, match="there is no home folder; set HOME, or write the whole path"):
        user_cache_dir()


def test_every_option_has_a_help_text():
    def missing(config_type):
        for name, field in config_type.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                yield from missing(field.annotation)
            elif not (field.description or "").strip().endswith("."):
                yield f"{config_type.__name__}.{name}"

    assert list(missing(GPTRunConfig)) == []


def test_field_error_pickles():
    error = FieldError(("model", "dim"), -1, "must be positive", "raise it")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.location, copy.value) == (str(error), ("model", "dim"), -1)


def test_names_and_values_for_messages():
    assert dotted(("model", "moe", "num_experts", 1)) == "model.moe.num_experts[1]"
    assert shown("a\nb") == "a b"
    assert len(shown("x" * 500)) == 60
    assert shown(np.zeros((2, 1))) == "array([[0.], [0.]])"
    names = option_names(GPTRunConfig)
    assert nearest_name("train.stepz", names) == "train.steps"
    assert nearest_name("learning_rate", names) == "optim.lr"  # a name of TRL's
    assert nearest_name("colour_of_sky", names) is None
    assert nearest_name("train.top_k", names) == "model.moe.top_k"


def test_options_take_what_python_writes():
    """One value for a list of them, None for none, and paths."""
    given = {
        "model.moe.num_experts": 16,
        "train.freeze": "router",
        "train.run_dir": Path("runs/x"),
        "data.path": [Path("a.txt"), "b.txt:2"],
        "model.end_ids": np.int64(3),
        "parallel.ep_degree": None,
    }
    config = em.recipe("gpt-moe-test", given)
    assert config.model.moe.num_experts == (16,) and config.train.freeze == ("router",)
    assert config.train.run_dir == "runs/x" and config.data.path == ("a.txt", "b.txt:2")
    assert config.model.end_ids == (3,) and config.parallel.ep_degree == ()
    assert em.recipe("gpt-moe-test", {"model.moe.num_experts": None}).model.moe.num_experts == ()
    with pytest.raises(ConfigError, match=r"^data\.path=12: input"):
        em.recipe("gpt-moe-test", {"data.path": 12})


class _Counted(Config):
    width: int = 1
    checked: ClassVar[list[int]] = []

    @model_validator(mode="after")
    def _check(self):
        self.checked.append(self.width)
        return self


class _WithSection(RunConfig):
    model: _Counted = _Counted()


@pytest.mark.parametrize(
    "door",
    [
        lambda: _WithSection(model={"width": 2}),
        lambda: _WithSection.model_validate({"model": {"width": 2}}),
        lambda: _WithSection.model_validate_json('{"model": {"width": 2}}'),
        lambda: _WithSection().updated({"model.width": 2}),
    ],
    ids=("constructor", "validate", "json", "updated"),
)
def test_a_section_is_checked_once(door):
    _Counted.checked.clear()
    assert door().model.width == 2
    assert _Counted.checked == [2]
