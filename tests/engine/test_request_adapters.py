"""Adapters of requests: tokens, logprobs and bits are those of a model that has the one adapter, or none, whatever is
beside it."""

import copy
import gc
import io
import json
import weakref
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.engine.test_engine import ARRANGEMENTS, GREEDY, PROMPTS, gpt
from tests.engine.test_ranks import differences
from tests.engine.test_step_tensors import Operators
from tests.oracle.numerics import assert_close_fp64
from tests.support.adapters import ATTENTION, EXPERTS, make_adapter, merged
from tests.support.replicas import assert_said, messages_of

from expertmesh import lora
from expertmesh.checkpoints.peft_folder import WEIGHTS
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.request_adapters import AdapterSpan
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.peft import save_adapters
from expertmesh.kernels.cpu.library import loaded
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.layer import grouped_layers

needs_kernels = pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
WHO = ["a", None, "b", "a", "a", None]
"""The adapter of each of PROMPTS."""
SCORED = SamplingParams(temperature=0, max_tokens=9, logprobs=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two adapters: on attention and experts, and of another rank on some of both."""
    place, config = tmp_path_factory.mktemp("adapters"), gpt().config
    a = make_adapter(place / "a", config, seed=1)
    only = {"modules": ("v_proj", "q_proj"), "parameters": EXPERTS[1:]}
    return {"a": a, "b": make_adapter(place / "b", config, seed=2, rank=3, alpha=2, **only)}


def engine_of(model, folders, **options):
    return Engine(model, adapters=folders, **options)


def merged_with(model, folders, name):
    """The model with an adapter in its weights."""
    if name is None:
        return model
    engine = Engine(gpt(), adapters=folders)
    return merged(model, engine._runner.adapters.get(name).of_module)


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    ours, theirs = zip(*((a.logprob, b.logprob) for a, b in pairs), strict=True)
    ours, theirs = (torch.tensor(one, dtype=torch.float64) for one in (ours, theirs))
    assert_close_fp64(ours, theirs, what="logprobs")


OPTIONS = {
    **ARRANGEMENTS,
    "guesses": {"num_draft_tokens": 3},
    "roomy": {},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mixed_requests_are_those_of_merged_models(folders, options):
    model = gpt()
    found = engine_of(model, folders, **options).generate(PROMPTS, SCORED, adapter=WHO)
    for name in (None, "a", "b"):
        alone = Engine(merged_with(model, folders, name))
        for prompt, who, answer in zip(PROMPTS, WHO, found, strict=True):
            if who == name:
                assert_same(answer, alone.generate(prompt, SCORED)[0])
    texts = {answer.token_ids for answer in found}
    assert len(texts) == len(PROMPTS)  # the adapters say something


ROUTERS = {
    "shared and residual": {"num_shared_experts": 1, "residual": True, "top_k": 1},
    "biased": {"bias": True},
    "pyramid": {"num_experts": (2, 4)},
}


@pytest.mark.parametrize("moe", ROUTERS.values(), ids=ROUTERS)
def test_layers_of_every_kind_take_them(tmp_path, moe):
    model = gpt(moe=moe)
    folder = make_adapter(tmp_path / "a", model.config, seed=1)
    engine = Engine(model, adapters={"a": folder})
    found = engine.generate(PROMPTS[:3], SCORED, adapter=["a", None, "a"])
    whole = Engine(merged(model, engine._runner.adapters.get("a").of_module))
    for answer, prompt in zip(found[::2], PROMPTS[:3:2], strict=True):
        assert_same(answer, whole.generate(prompt, SCORED)[0])
    assert_same(found[1], Engine(model).generate(PROMPTS[1], SCORED)[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "mxfp4"])
def test_quantised_experts_take_them_as_their_widened_weights_do(tmp_path, form, deterministic):
    model = gpt(batch_invariant=deterministic, dim=64, moe={"hidden_dim": 32})
    for _, _, experts in grouped_layers(model):
        experts.convert(form, group_size=32)
    wide = copy.deepcopy(model)
    for _, _, experts in grouped_layers(wide):
        experts.convert("dense")
    folders = {"a": make_adapter(tmp_path / "a", model.config, seed=1)}
    who = ["a", None, "a"]
    found, expected = (
        Engine(one, adapters=folders).generate(PROMPTS[:3], SCORED, adapter=who) for one in (model, wide)
    )
    for answer, other in zip(found, expected, strict=True):
        assert_same(answer, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("moe", [{}, {"bias": True, "num_shared_experts": 1}], ids=["", "shared"])
def test_deterministic_bits_do_not_depend_on_neighbours(tmp_path, dtype, moe):
    model = gpt(dtype, moe=moe, batch_invariant=True)
    folders = {
        "a": make_adapter(tmp_path / "a", model.config, seed=1),
        "b": make_adapter(tmp_path / "b", model.config, seed=2, rank=17, parameters=EXPERTS[:1]),
    }

    def bits(outputs):
        return [(o.token_ids, tuple(one.logprob for one in o.logprobs)) for o in outputs]

    alone = []
    for prompt, who in zip(PROMPTS, WHO, strict=True):
        own = {} if who is None else {who: folders[who]}
        engine = Engine(model, deterministic=True, adapters=own)
        alone += bits(engine.generate(prompt, SCORED, adapter=who))
    for options in ARRANGEMENTS.values():
        engine = Engine(model, deterministic=True, adapters=folders, **options)
        assert bits(engine.generate(PROMPTS, SCORED, adapter=WHO)) == alone
        turned = engine.generate(PROMPTS[::-1], SCORED, adapter=WHO[::-1])
        assert bits(turned)[::-1] == alone


@needs_kernels
def test_a_step_has_as_many_operators_for_any_number_of_adapters(tmp_path):
    model = gpt(torch.bfloat16, moe={"num_shared_experts": 1})
    ranks = {f"{i}": 2 + i * i for i in range(5)}
    folders = {name: make_adapter(tmp_path / name, model.config, seed=rank, rank=rank) for name, rank in ranks.items()}
    engine = Engine(model, adapters=folders, prefix_caching=False)
    run, counts = engine._runner.run, []

    def counted(step):
        with Operators() as operators:
            result = run(step)
        counts.append(operators.count)
        return result

    engine._runner.run = counted
    of_steps = []
    for who in (["0"] * 5, list(ranks), ["3", None, "1", "1", None]):
        counts.clear()
        engine.generate([[1, i, 7] for i in range(5)], GREEDY, adapter=who)
        of_steps.append(counts[1:])  # without the step of the prompts
    assert len(of_steps[0]) > 3 and of_steps == [of_steps[0]] * 3


def test_prefixes_are_of_one_adapter_and_an_unloaded_one_leaves_none(folders, tmp_path):
    engine = engine_of(gpt(), folders, block_size=2)
    prompt = PROMPTS[3]

    def cached(who):
        return engine.generate(prompt, GREEDY, adapter=who)[0].num_cached_tokens

    assert [cached(who) for who in ("a", "b", None)] == [0, 0, 0]
    assert [cached(who) for who in ("a", "b", None)] == [24, 24, 24]
    engine.unload_adapter("a")
    engine.load_adapter("a", make_adapter(tmp_path / "a", engine.model.config, seed=9))
    assert cached("a") == 0 and cached("b") == 24
    assert engine.adapter_requests() == {"b": 3, "a": 1}
    assert sorted(engine.adapters) == ["a", "b"]


def test_several_answers_and_streams(folders):
    engine = engine_of(gpt(), folders, block_size=2)
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    many = engine.generate(PROMPTS[3], params, adapter="a")
    again = Engine(merged_with(gpt(), folders, "a")).generate(PROMPTS[3], params)
    assert [one.token_ids for one in many] == [one.token_ids for one in again]
    *_, last = engine.stream(PROMPTS[3], GREEDY, adapter="a")
    expected = engine.generate(PROMPTS[3], GREEDY, adapter="a")[0]
    assert last.token_ids == expected.token_ids != engine.generate(PROMPTS[3], GREEDY)[0].token_ids


def test_our_own_adapters_and_the_model_itself_stay_as_they_were(tmp_path):
    """Those of `lora.add`, learned or not, are served as they computed; the model does without them outside of a
    step."""
    trained = gpt()
    lora.add(trained, rank=2, alpha=8, seed=0)
    with torch.no_grad():
        for adapter in lora.adapters(trained).values():
            adapter.b.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    save_adapters(trained, tmp_path / "ours")
    model, ids = gpt(), torch.tensor([PROMPTS[3]])
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        logits = model(ids).logits_BSV
    engine = Engine(model, adapters={"ours": tmp_path / "ours"})
    found = engine.generate(PROMPTS, SCORED, adapter="ours")
    for answer, expected in zip(found, Engine(trained).generate(PROMPTS, SCORED), strict=True):
        assert_same(answer, expected)
    with torch.no_grad():
        assert torch.equal(model(ids).logits_BSV, logits)
    assert all(torch.equal(model.state_dict()[name], one) for name, one in before.items())
    assert model.state_dict().keys() == before.keys()


def test_engines_that_share_a_model_have_adapters_of_their_own(folders):
    each = [{"a": folders["a"]}, {"b": folders["b"]}, {}]
    model = gpt()
    sharing = [engine_of(model, one) for one in each]
    for engine, one in zip(sharing, each, strict=True):
        who = next(iter(one), None)
        found, expected = (
            [(o.token_ids, o.logprobs) for o in e.generate(PROMPTS, SCORED, adapter=who)]
            for e in (engine, engine_of(gpt(), one))
        )
        assert found == expected, who


can_compile = pytest.mark.skipif(find_spec("expertmesh.cpu") is None, reason="no expertmesh.cpu")


@can_compile
@needs_kernels
def test_a_dropped_engine_leaves_the_model_as_it_was(folders):
    """Its adapters take no memory any more, and the next engine may compile; another engine's stay."""
    model = gpt(torch.float32)
    kept = engine_of(model, {"b": folders["b"]})
    once = kept.generate([PROMPTS[0]], GREEDY, adapter="b")[0]
    dropped = engine_of(model, {"a": folders["a"]})
    assert dropped.generate([PROMPTS[0]], GREEDY, adapter="a")[0].token_ids != once.token_ids
    first = next(iter(dropped._runner.adapters.get("a").of_module.values()))
    factors = weakref.ref(next(iter(first.values())).a_ErK)
    num_hooks = hooks_of(model)
    del first, dropped
    gc.collect()
    assert factors() is None
    assert kept.generate([PROMPTS[0]], GREEDY, adapter="b")[0].token_ids == once.token_ids
    other = engine_of(model, {"a": folders["a"]})
    assert hooks_of(model) == num_hooks  # without those of the dropped engine
    with pytest.raises(ConfigError, match="compile=True"):
        Engine(model, compile=True)
    del kept, other
    gc.collect()
    Engine(model, compile=True)
    assert hooks_of(model) == 0


@can_compile
@needs_kernels
def test_a_copy_of_a_model_has_no_adapters_of_its_engine(folders):
    model = gpt(torch.float32)
    engine = engine_of(model, {"a": folders["a"]})
    mine = engine.generate([PROMPTS[0]], GREEDY, adapter="a")[0].token_ids
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with engine._runner.adapters.on((AdapterSpan(0, 3, engine._runner.adapters.get("a")),)):
            torch.testing.assert_close(
                other(torch.tensor([PROMPTS[0][:3]])).logits_BSV,
                gpt(torch.float32)(torch.tensor([PROMPTS[0][:3]])).logits_BSV,
                rtol=0,
                atol=0,
            )
        Engine(other, compile=True)
        assert hooks_of(other) == 0
    assert engine.generate([PROMPTS[0]], GREEDY, adapter="a")[0].token_ids == mine


def hooks_of(model):
    """How many additions the model's modules would ask for."""
    return sum(len(module._forward_hooks) + len(getattr(module, "of_tokens", ())) for module in model.modules())


def test_a_request_that_goes_on_keeps_its_adapter(folders):
    engine = engine_of(gpt(), folders)
    engine.add(PROMPTS[0], GREEDY, adapter="a")
    engine.step()
    with pytest.raises(ConfigError, match=r"adapter='a': 1 requests have it; wait for them"):
        engine.unload_adapter("a")
    while engine.has_work:
        engine.step()
    engine.unload_adapter("a")
    with pytest.raises(ConfigError, match=r"no such adapter \(there are: 'b'\)"):
        engine.add(PROMPTS[0], GREEDY, adapter="a")


def change(tensors, values):
    """Change a folder's tensors and options by functions, or not."""

    def done(folder):
        if tensors is not None:
            found = load_file(folder / WEIGHTS)
            wanted = tensors(found) or found
            save_file({name: one.clone() for name, one in wanted.items()}, folder / WEIGHTS)
        if values is not None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return done


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG = {
    "no folder": (lambda folder: [one.unlink() for one in folder.iterdir()], "no readable adapter"),
    "no tensors": (lambda folder: (folder / WEIGHTS).unlink(), "is missing; restore it"),
    "cut": (lambda folder: (folder / WEIGHTS).write_bytes(b"12345"), "no safetensors file"),
    "cut within a tensor": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-3]),
        "cut short within base_model.* bytes of at least .*save the adapters again",
    ),
    "FP8": (change(lambda t: t | {Q: t[Q].to(torch.float8_e4m3fn)}, None), "q_proj.*type float8"),
    "FP8 of gradients": (
        change(lambda t: t | {Q: t[Q].to(torch.float8_e5m2)}, None),
        "q_proj.*type F8_E5M2",
    ),
    "DoRA": (change(None, {"use_dora": True}), "use_dora=True: is not served"),
    "bias": (change(None, {"bias": "all"}), "bias='all': is not served"),
    "PiSSA": (change(None, {"init_lora_weights": "pissa"}), "init_lora_weights='pissa'"),
    "kind": (change(None, {"peft_type": "IA3"}), "peft_type='IA3': only LORA"),
    "rank": (change(None, {"r": 4}), "has shape .* and must have .* by r=4 in adapter_config.json"),
    "no rank": (
        change(None, {"r": 0}),
        "r=0 in adapter_config.json: must be a whole number above 0",
    ),
    "scaling": (change(None, {"lora_alpha": "x"}), "lora_alpha='x'"),
    "router": (
        change(None, {"target_parameters": ["mlp.gate.weight"]}),
        "target_parameters=mlp.gate.weight: is on no experts",
    ),
    "half": (change(lambda t: t.pop(Q) is None and None, None), "has no tensor .*lora_A.weight"),
    "not finite": (change(lambda t: t[Q].fill_(torch.nan) is None, None), "is not finite"),
    "other width": (change(lambda t: t | {Q: torch.ones(2, 30)}, None), r"\(2, 30\) and must"),
    "other layers": (
        change(lambda t: {k.replace("layers.1", "layers.7"): v for k, v in t.items()}, None),
        "layers.7.* which this model has not",
    ),
    "vocabulary": (
        change(lambda t: {k.replace("self_attn.q_proj", "mlp.gate"): v for k, v in t.items()}, None),
        "mlp.gate, which takes none here",
    ),
    "no factor": (change(lambda t: t | {"x.lora_magnitude": t[Q]}, None), "x.lora_magnitude that"),
    "none": (
        change(lambda t: {"x.lora_A.weight": t[Q], "x.lora_B.weight": t[Q]}, None),
        " x, which",
    ),
}


@pytest.mark.parametrize(("spoil", "line"), WRONG.values(), ids=WRONG)
def test_a_wrong_folder_is_named_and_nothing_is_loaded(folders, tmp_path, spoil, line):
    model = gpt()
    folder = make_adapter(tmp_path / "wrong", model.config, seed=1)
    spoil(folder)
    engine = engine_of(model, {"b": folders["b"]})
    with pytest.raises((ConfigError, CheckpointError), match=line) as caught:
        engine.load_adapter("wrong", folder)
    assert str(caught.value).count("\n") == 0 and list(engine.adapters) == ["b"]
    (answer,) = engine.generate(PROMPTS[0], GREEDY)
    assert answer.token_ids == Engine(model).generate(PROMPTS[0], GREEDY)[0].token_ids


def test_names_and_engines_that_take_none(folders):
    engine = Engine(gpt())
    for ask in (
        lambda: engine.add(PROMPTS[0], adapter="a"),
        lambda: engine.unload_adapter("a"),
        lambda: engine.load_adapter("", folders["a"]),
        lambda: engine.load_adapter("a", 3),
        lambda: Engine(gpt(), adapters=[folders["a"]]),
        lambda: engine_of(gpt(), folders).load_adapter("a", folders["b"]),
        lambda: engine_of(gpt(), folders).add(PROMPTS[0], adapter=3),
        lambda: engine_of(gpt(), folders).generate(PROMPTS, adapter=["a"]),
    ):
        with pytest.raises(ConfigError, match=r"adapters?\b"):
            ask()
    has_own = gpt()
    lora.add(has_own, seed=0)
    with pytest.raises(ConfigError, match="has adapters already; merge or remove them"):
        engine_of(has_own, folders)


@can_compile
@needs_kernels
def test_steps_with_adapters_are_not_compiled(folders):
    with pytest.raises(ConfigError, match="steps with adapters are not recorded"):
        Engine(gpt(torch.float32), adapters=folders, compile=True)


def test_dense_models_take_them_on_attention(tmp_path):
    sizes = {"vocab_size": 64, "max_seq_len": 64, "dim": 24, "num_layers": 2, "num_heads": 4}
    config = ModelConfig(**sizes, init_std=0.3, moe={"num_experts": ()})
    model = GPT(config, dtype=torch.float64, seed=1).eval()
    folder = make_adapter(tmp_path / "a", model.config, seed=1, modules=ATTENTION, parameters=())
    engine = Engine(model, adapters={"a": folder})
    found = engine.generate(PROMPTS[:2], SCORED, adapter=["a", None])
    whole = merged(model, engine._runner.adapters.get("a").of_module)
    assert_same(found[0], Engine(whole).generate(PROMPTS[0], SCORED)[0])
    assert_same(found[1], Engine(model).generate(PROMPTS[1], SCORED)[0])


def over_ranks(folders):
    """What mixed requests are answered by ranks, as by one process: to rounding, and in deterministic mode to the
    bit."""
    found = []
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2)
    for options, is_exact in (({}, False), ({"batch_invariant": True}, True)):
        given = {"deterministic": is_exact, "token_budget": 16, "compile": False}
        model = gpt(torch.bfloat16 if is_exact else torch.float64, **options)
        whole = copy.deepcopy(model)
        engine = Engine(model, parallel={}, adapters={"a": folders["a"]}, **given)
        if not engine.leads:
            engine.follow()
            continue
        engine.load_adapter("b", folders["b"])
        here = engine.generate(PROMPTS, params, adapter=WHO)
        engine.unload_adapter("b")
        engine.load_adapter("b", folders["a"])
        again = engine.generate(PROMPTS, params, adapter=["b" if who == "a" else None for who in WHO])
        engine.close()
        alone = Engine(whole, adapters=folders, **given).generate(PROMPTS, params, adapter=WHO)
        found.append((*differences(here, alone), differences(again[::3], here[::3])[0]))
    return found


def test_ranks_with_whole_experts_serve_them(folders, two_ranks):
    (rounded, exact), *_ = two_ranks.run(over_ranks, folders)
    assert rounded[0] and rounded[1] < 1e-9 and rounded[2]
    assert exact == (True, 0.0, True)


def faults_over_ranks(folder, none):
    """What an engine says, and still answers, where an adapter fails on one side or has a name that is no text."""
    said, options = [], {"parallel": {"timeout_s": 20.0}, "compile": False}
    if dist.get_rank() == 0:
        said += messages_of(lambda: Engine(gpt(), adapters={"a": none}, **options))
        said += messages_of(lambda: Engine(gpt(), adapters=[folder], **options))
    else:
        Engine(gpt(), adapters={"a": none}, **options).follow()
        Engine(gpt(), adapters=[folder], **options).follow()
    engine = Engine(gpt(), **options)
    if not engine.leads:
        said += messages_of(lambda: engine.load_adapter("a", folder), lambda: engine.unload_adapter("a"))
        adapters = engine._runner._room_for_adapters()
        load, errors = adapters.load, [MemoryError("no room for it")]

        def full(*args, **place):
            if errors:
                raise errors.pop()
            return load(*args, **place)

        adapters.load = full
        engine.follow()
        return said, [one.name for one in adapters.all]
    said += messages_of(lambda: engine.load_adapter("a", folder))
    for name in ("\ud800", "a"):
        engine.load_adapter(name, folder)
    engine.unload_adapter("\ud800")
    assert engine.generate(PROMPTS[:1], GREEDY, adapter="a")
    engine.close()
    said += messages_of(lambda: engine.load_adapter("b", folder))
    return said, [*engine.adapters]


def test_what_fails_on_one_rank_is_said_and_the_others_go_on(folders, tmp_path, two_ranks):
    leader, follower = two_ranks.run(faults_over_ranks, folders["a"], tmp_path / "none")
    expected = (
        "no readable adapter",
        "it must be folders by name",
        "cannot read .*, as they report",
    )
    assert_said(leader[0], *expected, "the engine is closed")
    assert_said(follower[0], *["adapters go to rank 0; call follow"] * 2)
    assert leader[1] == follower[1] == ["a"]


def refused_over_ranks(folder):
    """What rank 0 says where ranks cut products, move experts, or one of them cannot read an adapter; and how it then
    answers."""
    said = []
    eplb = {"enable_eplb": True}
    for parallel, options in (({"tp_degree": 2}, {}), ({"es_degree": 2}, {}), ({}, eplb), ({}, {})):
        engine = Engine(gpt(), parallel=parallel, compile=False, **options)
        if not engine.leads:
            # another one has the name here, so that this rank does not take it
            engine._runner._room_for_adapters().load("a", folder)
            engine.follow()
            continue
        said += messages_of(lambda engine=engine: engine.load_adapter("a", folder))
        assert not engine.adapters
        answers = engine.generate(PROMPTS[:1], GREEDY)
        engine.close()
        (alone,) = Engine(gpt()).generate(PROMPTS[:1], GREEDY)
        assert answers[0].token_ids == alone.token_ids
    return said


def test_ranks_that_cannot_have_them_say_so(folders, two_ranks):
    *cut, unread = two_ranks.run(refused_over_ranks, folders["a"])[0]
    assert [line.partition(" are served")[0] for line in cut] == ["adapters over ranks"] * 3
    assert unread.startswith("adapter 'a': 1 of the other ranks cannot read")
