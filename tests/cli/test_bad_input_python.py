"""Mistakes in Python: each raises an error of one line that names the value, the rule and the fix."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from tests.support.generation import written_ids
from tests.support.known_rows import known
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from torch import nn

import expertmesh as em
from expertmesh import ConfigError, MoELayer, Routing
from expertmesh.config.moe import MoEConfig
from expertmesh.engine.request import SamplingParams
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.training.loop import train

D, T = 8, 5


def layer(**options):
    return MoELayer(**{"dim": D, "hidden_dim": 16, "num_experts": 4, "top_k": 2, "seed": 0, **options})


def tokens(dim=D, dtype=torch.float32):
    return torch.zeros(T, dim, dtype=dtype)


def in_autocast(function, x):
    with torch.autocast("cpu", torch.bfloat16):
        function(x)


def model():
    config = ModelConfig(
        vocab_size=300,
        max_seq_len=16,
        dim=16,
        num_layers=1,
        num_heads=2,
        ffn_hidden_dim=16,
        moe=MoEConfig(num_experts=(2,), top_k=1, hidden_dim=16),
    )
    return GPT(config, seed=0)


def words():
    """A tokenizer of one word."""
    return Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))


@pytest.mark.parametrize(
    "call",
    [em.load, em.Engine, em.report, partial(em.save, None, None, "copy")],
    ids=("load", "Engine", "report", "save"),
)
def test_a_folder_that_is_not_there_is_said_in_words_of_python(call, tmp_path):
    options = {"like": tmp_path / "nope"} if isinstance(call, partial) else {}
    with pytest.raises(ConfigError, match="does not exist") as caught:
        call(*([] if options else [tmp_path / "nope"]), **options)
    said = str(caught.value)
    assert "em.train" in said and "expertmesh train" not in said and "--" not in said


def load(change: Callable[[dict], None]):
    """Loads a layer's own state dict after a change."""
    target = layer()
    state = target.state_dict()
    change(state)
    target.load_state_dict(state)


def own(module=None, config=None, **options):
    """Trains a module; mistakes come before the first step."""
    module = partial(nn.Linear, 2, 1) if module is None else module
    config = {"train.steps": 2, "train.device": "cpu"} if config is None else config
    given = {"data": torch.zeros(40, 2), "loss": lambda m, x: m(x).mean(), **options}
    em.train(module, config, **given, quiet=True)


@dataclass
class Mistake:
    call: Callable[[], object]
    says: list[str]
    error: type[Exception] = ConfigError


LAYER = {
    "more choices than experts": Mistake(
        lambda: layer(top_k=5),
        ["top_k=5", "at most the fewest experts of a layer, 4", "lower top_k"],
    ),
    "no choice": Mistake(lambda: layer(top_k=0), ["top_k=0", "greater than 0", "for example 2"]),
    "half an expert": Mistake(lambda: layer(num_experts=2.5), ["num_experts=2.5", "whole number", "change it"]),
    "negative capacity": Mistake(
        lambda: layer(capacity_factor=-1.0),
        ["capacity_factor=-1.0", "greater than 0", "leave it out"],
    ),
    "NaN capacity": Mistake(
        lambda: layer(capacity_factor=float("nan")),
        ["capacity_factor=nan", "finite number", "leave it out"],
    ),
    "unknown activation": Mistake(
        lambda: layer(activation="swigul"),
        ["activation=swigul", "must be one of", "did you mean swiglu?"],
    ),
    "unknown router": Mistake(lambda: layer(router="top2"), ["router=top2", "must be one of", "did you mean topk?"]),
    "unknown backend": Mistake(lambda: layer(backend="cuda"), ["backend=cuda", "must be one of auto", "choose one"]),
    "integer parameters": Mistake(
        lambda: layer(dtype=torch.int32),
        ["dtype=torch.int32", "must be one of torch.float64", "did you mean torch.float32?"],
    ),
    "groups that do not divide": Mistake(
        lambda: layer(num_expert_groups=3), ["num_expert_groups=3", "must divide", "divisor"]
    ),
    "jitter of one": Mistake(lambda: layer(input_jitter=1.0), ["input_jitter=1.0", "less than 1", "for example 0.0"]),
    "negative loss weight": Mistake(
        lambda: layer(aux_loss_weight=-1.0),
        ["aux_loss_weight=-1.0", "at least 0", "for example 0.01"],
    ),
    "too few modules": Mistake(
        lambda: layer(experts=nn.ModuleList([nn.Identity()])),
        ["1 modules", "num_experts=4", "give one module per expert"],
    ),
    "option without effect": Mistake(
        lambda: layer(router="hash", input_dropout=0.1),
        ["input_dropout=0.1", "no effect", "leave it at 0"],
    ),
    "misspelled option": Mistake(lambda: layer(topk=2), ["topk"], TypeError),
}

CALL = {
    "wrong width": Mistake(
        lambda: layer()(tokens(7)),
        ["x has shape (5, 7)", "(..., 8)", "reshape it, or build the layer with dim"],
    ),
    "integer input": Mistake(lambda: layer()(tokens(dtype=torch.int64)), ["torch.int64", "floating-point", "convert"]),
    "other precision": Mistake(
        lambda: layer()(tokens(dtype=torch.bfloat16)),
        ["torch.bfloat16", "torch.float32", "equal outside autocast", "x.to"],
    ),
    "double precision under autocast": Mistake(
        lambda: in_autocast(layer(), tokens(dtype=torch.float64)),
        ["torch.float64", "torch.float32", "autocast leaves float64 as it is", "x.to"],
    ),
    "counts in a list": Mistake(
        lambda: layer(bias_update_rate=0.1).update_expert_bias([1, 2, 3, 4]),
        ["num_tokens_per_expert_E is a list", "shape (4,)", "convert it with torch.tensor"],
    ),
    "a word for a seed": Mistake(
        lambda: layer().reset_parameters("a"), ["seed='a'", "whole number from", "for example 0"]
    ),
    "negative deviation": Mistake(
        lambda: layer().reset_parameters(std=-1.0), ["std=-1.0", "at least 0", "leave it out"]
    ),
    "layer without memory": Mistake(lambda: layer(device="meta")(tokens()), ["cpu", "meta", "to_empty"]),
    "a list for x": Mistake(lambda: layer()([1.0]), ["list", "tensor", "convert"]),
    "short mask": Mistake(
        lambda: layer()(tokens(), token_mask=torch.ones(T - 1, dtype=torch.bool)),
        ["token_mask", "(4,)", "per token", "reshape"],
    ),
    "mask of numbers": Mistake(
        lambda: layer()(tokens(), token_mask=torch.ones(T)),
        ["token_mask", "torch.float32", "must be bool", "convert"],
    ),
    "hash without ids": Mistake(lambda: layer(router="hash")(tokens()), ["token_ids", "hash"]),
    "too many choices in a call": Mistake(
        lambda: layer()(tokens(), top_k=9), ["top_k=9", "num_experts=4", "lower top_k"]
    ),
    "no capacity in a call": Mistake(
        lambda: layer()(tokens(), capacity_factor=0.0),
        ["capacity_factor=0.0", "above 0", "leave it out"],
    ),
    "replay of other tokens": Mistake(
        lambda: layer()(tokens(), routing=Routing(torch.zeros(T + 1, 2, dtype=torch.int64))),
        ["(6, 2)", "(5, K)", "replay the same tokens"],
    ),
    "replay of unknown experts": Mistake(
        lambda: layer()(tokens(), routing=Routing(torch.full((T, 2), 9))),
        ["holds 9", "from 0 to 4 (num_experts,", "same size"],
    ),
}

TRAINING = {
    "options in a list": Mistake(
        lambda: em.recipe("gpt-moe-test", ["train.steps"]),
        ["changes=['train.steps']", "options and their values", "for example"],
    ),
    "options in a word": Mistake(
        lambda: own(config="train.steps=2"), ["changes=train.steps=2", "options and their values"]
    ),
    "misspelled option of a section": Mistake(
        lambda: em.recipe("gpt-moe-test", {"train": {"step": 3}}),
        ["train.step=3", "did you mean train.steps?"],
    ),
    "samples beside a configuration": Mistake(
        lambda: em.train(em.recipe("gpt-moe-test"), validation=torch.zeros(40, 2), quiet=True),
        ["validation: belongs to a module", "leave validation out"],
    ),
    "fewer samples than a split needs": Mistake(
        lambda: own(data=torch.zeros(3, 2)), ["data: 3 samples", "at least 20", "validation="]
    ),
    "a short list for data": Mistake(lambda: own(data=[1.0, 2.0]), ["data: 2 samples", "at least 20", "validation="]),
    "arrays for data": Mistake(lambda: own(data=(np.zeros((40, 2)), np.zeros(40))), ["data=tuple", "torch.from_numpy"]),
    "tensors by name": Mistake(
        lambda: own(data={"x": torch.zeros(40, 2)}, validation={"x": torch.zeros(3, 2)}),
        ["data=dict", "alone or in a tuple", "samples by number"],
    ),
    "inputs without targets": Mistake(
        lambda: own(data=(torch.zeros(40, 2), torch.zeros(30))),
        ["tensors of 30, 40 samples", "equally many", "first axes"],
    ),
    "validation without targets": Mistake(
        lambda: own(data=(torch.zeros(40, 2), torch.zeros(40)), validation=torch.zeros(3, 2)),
        ["data: 2 training and 1 validation tensors", "equally many", "give the same of both"],
    ),
    "validation of one number": Mistake(
        lambda: own(data=torch.zeros(40, 2), validation=torch.zeros(())),
        ["validation tensors of [0] samples", "at least 1", "first axes"],
    ),
    "tensors beside a dataset": Mistake(
        lambda: own(data=[1.0] * 40, validation=(torch.zeros(3, 2), torch.zeros(3))),
        ["data=list, validation=tuple", "on both sides", "give the same of both"],
    ),
    "nothing to train": Mistake(lambda: own(nn.ReLU), ["ReLU has no parameter", "requires a gradient", "give one"]),
    "a loss without a gradient": Mistake(
        lambda: own(loss=lambda m, x: m(x).mean().detach()),
        ["loss: depends on no parameter", "without detach()"],
    ),
    "a loss and logits": Mistake(
        lambda: own(loss=lambda m, x: (m(x).mean(), m(x))),
        ["loss: returned a Tensor after it", "RoutingStats"],
    ),
    "no loss": Mistake(lambda: own(loss=lambda m, x: None), ["loss: returned a NoneType", "scalar"]),
    "a measure of every sample": Mistake(
        lambda: own(loss=lambda m, x: (m(x).mean(), {"right": m(x)})),
        ["right is a tensor of shape (", "a measure must be a number"],
    ),
    **{
        f"a measure named {name}": Mistake(
            lambda name=name: own(loss=lambda m, x: (m(x).mean(), {name: 7.0})),
            [f"loss: returned a measure {name!r}", "the name is taken", "another name"],
        )
        for name in ("loss", "items")
    },
    "a metric that is not measured": Mistake(
        lambda: own(metric="accuracy"), ["metric=accuracy", "returned loss", "return it"]
    ),
}

STATE = {
    "missing tensor": Mistake(lambda: load(lambda s: s.pop("experts.w_in")), ["experts.w_in"], RuntimeError),
    "tensor of another shape": Mistake(
        lambda: load(lambda s: s.update({"experts.w_out": torch.zeros(4, D, 3)})),
        ["experts.w_out"],
        RuntimeError,
    ),
    "tensor too many": Mistake(
        lambda: load(lambda s: s.update({"experts.b_in": torch.zeros(1)})),
        ["experts.b_in"],
        RuntimeError,
    ),
}

MODEL = {
    "unknown option": Mistake(
        lambda: MoEConfig(num_expert=4),
        ["num_expert=4", "unknown option", "did you mean num_experts?"],
    ),
    "unknown option of a section": Mistake(
        lambda: GPTRunConfig.model_validate({"model": {"max_sequence_len": 3}}),
        ["model.max_sequence_len=3", "did you mean model.max_seq_len?"],
    ),
    "rule between fields": Mistake(
        lambda: ModelConfig(dim=10, num_heads=4), ["num_heads=4", "divide dim, 10", "divisor"]
    ),
    "unknown name in an update": Mistake(
        lambda: GPTRunConfig().updated({"train.stepz": 3}),
        ["train.stepz=3", "unknown option", "did you mean train.steps?"],
    ),
    "sequence longer than the model": Mistake(
        lambda: model()(torch.zeros(1, 17, dtype=torch.int64)), ["17", "max_seq_len=16"]
    ),
    "empty prompt": Mistake(lambda: written_ids(model(), [[]]), ["empty", "give at least one"]),
    "token outside the vocabulary": Mistake(
        lambda: written_ids(model(), [[300]]), ["300", "from 0 to 299", "tokenizer"]
    ),
    "prompt too long": Mistake(lambda: written_ids(model(), [[1] * 16]), ["16 tokens", "max_seq_len=16", "shorten"]),
    "negative temperature": Mistake(
        lambda: SamplingParams(temperature=-1.0), ["temperature=-1.0", "at least 0", "use 0"]
    ),
    "no tokenizer": Mistake(
        lambda: em.generate(model(), None, "a"),
        ["tokenizer is a NoneType", "writes text", "give both of load()"],
    ),
    "path for a model that writes": Mistake(
        lambda: em.generate("runs/x", Tokenizer(BPE()), "a"),
        ["model is a str", "writes text", "give both of load()"],
    ),
    **{
        f"path for a model, {name}": Mistake(
            partial(function, "runs/x", **options),
            ["model is a str", "torch.nn.Module", "load it first"],
        )
        for name, function, options in (
            ("upcycle", em.upcycle, {}),
            ("moeify", em.moeify, {"names": ["mlp"]}),
            ("parallelize", em.parallelize, {"config": em.RunConfig().parallel}),
            ("lora.add", em.lora.add, {}),
            ("lora.merge", em.lora.merge, {}),
        )
    },
    "no token to add": Mistake(
        lambda: em.generate(model(), words(), "a", max_tokens=0),
        ["max_tokens=0: must be at least 1", "ask for a token or more"],
    ),
    "half a token to add": Mistake(
        lambda: em.generate(model(), words(), "a", max_tokens=2.5),
        ["max_tokens=2.5", "whole number", "give one"],
    ),
    "several answers where one is returned": Mistake(
        lambda: em.generate(model(), words(), "a", n=2),
        ["n=2: asks for more than the text of one answer", "leave it out"],
    ),
    "an option that is mistyped": Mistake(
        lambda: em.generate(model(), words(), "a", max_token=2),
        ["max_token=2: unknown option", "did you mean max_tokens?"],
    ),
    **{
        f"a text for {name}": Mistake(partial(SamplingParams, **{name: "1"}), [f"{name}='1'", "number", "give one"])
        for name in ("temperature", "top_k", "top_p", "seed")
    },
    "half a choice": Mistake(lambda: SamplingParams(top_k=1.5), ["top_k=1.5", "whole number"]),
    "half a batch": Mistake(lambda: em.generate(model(), words(), "a", batch_size=0.5), ["batch_size=0.5", "whole"]),
    "bytes for a prompt": Mistake(
        lambda: em.generate(model(), words(), b"a"), ["prompt is a bytes", "it must be a text"]
    ),
    "half a character": Mistake(lambda: em.generate(model(), words(), "a\ud800"), [r"'a\ud800'", "UTF-8", "give text"]),
    "one sequence without a batch": Mistake(
        lambda: model()(torch.tensor([1, 2])), ["ids_BS", "(2,)", "(B, S)", "sequences", "[None]"]
    ),
    "numbers for ids": Mistake(
        lambda: model()(torch.zeros(1, 2)),
        ["ids_BS has dtype torch.float32", "must be int64 or int32", ".long()"],
    ),
    "the whole run for a model": Mistake(
        lambda: GPT(GPTRunConfig()), ["config is a GPTRunConfig", "ModelConfig", ".model"]
    ),
    "tokens for a prompt": Mistake(
        lambda: em.generate(model(), Tokenizer(BPE()), [1, 2]),
        ["prompt: 1 is an int", "it must be a text"],
    ),
    "no prompt": Mistake(
        lambda: em.generate(model(), Tokenizer(BPE()), None),
        ["prompt is a NoneType", "it must be a text"],
    ),
    **known(
        {
            "recipe of another family, misspelled": Mistake(
                lambda: em.recipe("swin-mnst"), ["recipe=swin-mnst", "did you mean swin-mnist?"]
            )
        }
    ),
    "half a rank": Mistake(lambda: em.lora.add(layer(), rank=2.5), ["rank=2.5", "whole number", "use 8"]),
    "adapters of NaN": Mistake(
        lambda: em.lora.add(layer(), alpha=float("nan")), ["alpha=nan", "finite", "twice the rank"]
    ),
    "missing corpus": Mistake(
        lambda: train(GPTRunConfig().updated({"data.path": "no/such.txt", "train.device": "cpu"}), recipe="x"),
        ["data.path=no/such.txt", "does not exist", "give"],
    ),
}

MISTAKES = {
    f"{group}: {name}": mistake
    for group, table in (
        ("layer", LAYER),
        ("call", CALL),
        ("state", STATE),
        ("model", MODEL),
        ("training", TRAINING),
    )
    for name, mistake in table.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    text = str(caught.value)
    assert [word for word in mistake.says if word not in text] == [], text
    if mistake.error is ConfigError:
        assert "\n" not in text
        assert ";" in text, f"no fix in: {text}"


def test_a_refused_call_leaves_the_layer_as_it_was():
    target = layer()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    for mistake in ({"top_k": 9}, {"capacity_factor": 0.0}):
        with pytest.raises(ConfigError):
            target(tokens(), **mistake)
    assert target.top_k == 2
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
