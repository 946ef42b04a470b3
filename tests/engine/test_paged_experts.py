"""Experts in slots: the same bits as all of them, counted like a simulated cache, within a limit of memory."""

import copy
import json
import subprocess
import sys
import textwrap
from collections import OrderedDict
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.large_hub import enlarged

import expertmesh as em
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.cli.main import main
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert, quantize
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.expert_slots import ExpertSlots
from expertmesh.moe.experts import GroupedExperts
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.tokenizer import train_tokenizer

E, D, F = 8, 32, 16
PROMPTS = [[5, 3, 9, 12], [7] * 30, [300]]
FOLDERS = ("run", "hub", "int8", "int4", "fp8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("paged")
    changes = {"model.moe.num_experts": (E,), "model.init_std": 0.3, "train.dtype": "float32"}
    config = em.recipe("gpt-moe-test").updated(changes)
    (found / "run").mkdir()
    texts = ["def main():\n    return 'é'\n", "import os\n"] * 30
    train_tokenizer(texts, vocab_size=config.model.vocab_size).save(str(found / "trained.json"))
    files = {"tokenizer.json": found / "trained.json"}
    RunDir(found / "run").write_description(config, recipe="gpt-moe-test", files=files)
    store = CheckpointStore(RunDir(found / "run").checkpoints, keep_last=1)
    state = GPT(config.model, dtype=torch.float32, seed=1).state_dict()
    tensors = {f"model.{name}": one for name, one in state.items()}
    store.save(5, tensors, {"config": config.model_dump(mode="json"), "step": 5}, eval_loss=None)
    store.wait()
    store.close()
    convert(found / "run", found / "hub")
    for form in FOLDERS[2:]:
        quantize(found / "run", found / form, format=form)
    return found


def answers(engine):
    params = em.SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2)
    return [(o.token_ids, o.logprobs) for o in engine.generate(PROMPTS, params)]


def forms_and_ways():
    """Each form with one of the two ways in which only one of the options is on; the first form in every way."""
    for name, deterministic, fetch_ahead in product(FOLDERS, (False, True), (False, True)):
        often = name == FOLDERS[0] or deterministic != fetch_ahead
        marks = () if often else pytest.mark.exhaustive
        yield pytest.param(name, fetch_ahead, deterministic, marks=marks)


@pytest.mark.parametrize(("name", "fetch_ahead", "deterministic"), [*forms_and_ways()])
def test_answers_have_the_bits_of_experts_that_are_all_there(place, name, fetch_ahead, deterministic):
    options = {"deterministic": deterministic}
    expected = answers(em.Engine(place / name, **options))
    for slots in (1, 3, E):
        engine = em.Engine(place / name, expert_slots=slots, expert_fetch_ahead=fetch_ahead, **options)
        assert answers(engine) == expected
        for counts in engine.expert_paging():
            assert (counts.bypasses > 0) == (slots < E)
            assert slots > 1 or counts.misses > 0


def paged(num_slots, copies=None):
    """Experts in slots beside the same ones that are all there."""
    like = GroupedExperts(num_experts=E, dim=D, hidden_dim=F, activation="swiglu", bias=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in like.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))

    def read(name, e, into):
        if copies is not None:
            copies.append((name, e))
        into.copy_(getattr(like, name)[e])

    slots = copy.deepcopy(like)
    slots.put_into_slots(num_slots, read=read, device="cpu")
    return like.eval(), slots.eval()


def test_hits_and_misses_are_those_of_a_simulated_cache():
    copies = []
    whole, slots = paged(4, copies)
    generator = torch.Generator().manual_seed(5)
    cache, hits, misses, bypasses = OrderedDict(), 0, 0, 0
    for step in range(80):
        num_tokens = 1 + (step % 7 == 0) * 5
        x_TD = torch.randn(num_tokens, D, generator=generator)
        order = torch.rand(num_tokens, E, generator=generator).pow(3).argsort(1, descending=True)
        ids_TK, weights_TK = order[:, :2], torch.rand(num_tokens, 2, generator=generator)
        with torch.no_grad():
            found, expected = (m(x_TD, ids_TK, weights_TK, max_rows=None) for m in (slots, whole))
        assert torch.equal(found, expected)
        needed = sorted({*ids_TK.flatten().tolist()})
        present = [e for e in needed if e in cache]
        hits, misses = hits + len(present), misses + len(needed) - len(present)
        if len(needed) > 4:
            bypasses += 1
            continue
        for e in present:
            cache.move_to_end(e)
        for e in needed:
            if e not in cache:
                if len(cache) == 4:
                    cache.popitem(last=False)
                cache[e] = None
    counts = slots.paging.counts
    assert (counts.hits, counts.misses, counts.bypasses) == (hits, misses, bypasses)
    assert bypasses and hits
    assert counts.bytes_copied == misses * slots.paging.bytes_of_expert
    assert len(copies) == 4 * misses


def test_what_was_fetched_ahead_is_there_and_an_error_of_it_is_raised():
    whole, slots = paged(4)
    slots.paging.fetch([2, 5])
    x_TD, ids_TK, weights_TK = torch.randn(1, D), torch.tensor([[5, 6]]), torch.rand(1, 2)
    with torch.no_grad():
        found, expected = (m(x_TD, ids_TK, weights_TK, max_rows=None) for m in (slots, whole))
    assert torch.equal(found, expected)
    counts = slots.paging.counts
    assert (counts.fetched_ahead, counts.useful, counts.hits, counts.misses) == (2, 1, 1, 1)

    def fail(name, e, into):
        raise OSError("the disk is gone")

    healthy, slots.paging._read = slots.paging._read, fail
    slots.paging.fetch([1])
    with pytest.raises(OSError, match="the disk is gone"):
        slots(x_TD, ids_TK, weights_TK, max_rows=None)
    slots.paging._read = healthy
    with torch.no_grad():  # and nothing that did not come counts as there
        ids_TK = torch.tensor([[1, 0]])
        found, expected = (m(x_TD, ids_TK, weights_TK, max_rows=None) for m in (slots, whole))
    assert torch.equal(found, expected)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.booleans()), max_size=30),
)
def test_no_two_experts_have_one_slot(num_slots, steps):
    slots, present = ExpertSlots(num_slots), {}
    for wanted, fails in steps:
        wanted = list(dict.fromkeys(wanted))[:num_slots]
        placed = slots.place(wanted)
        for e, slot in placed:
            assert 0 <= slot < num_slots
            present = {other: s for other, s in present.items() if s != slot} | {e: slot}
        if fails:
            for e, _ in placed:
                slots.forget(e)
                del present[e]
        assert all(slots.slot_of(e) == slot for e, slot in present.items())
        assert len({*present.values()}) == len(present)
        assert all((e in slots) == (e in present) for e in range(8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_slots": 0}, "greater than 0"),
        ({"expert_slots": E + 1}, f"a layer has {E} experts"),
    ],
)
def test_wrong_numbers_of_slots_are_refused(place, options, text):
    with pytest.raises(ConfigError, match=text):
        em.Engine(place / "run", **options)
    model, _ = em.load(place / "run")
    with pytest.raises(ConfigError, match="is for a folder"):
        em.Engine(model, expert_slots=2)


def test_new_weights_of_an_engine_with_slots_are_all_or_nothing(place):
    engine = em.Engine(place / "run", expert_slots=2)
    before, whole = answers(engine), em.load(place / "run").model.state_dict()
    dense = {name: one * 2 for name, one in whole.items() if name in engine.model.state_dict()}
    for state in (whole, dense, dict(list(dense.items())[:1])):
        with pytest.raises(ConfigError, match="reads experts from their files") as caught:
            engine.update_weights(state)
        assert "\n" not in str(caught.value)
    engine.update_weights({})
    assert answers(engine) == before


def test_the_verb_takes_slots(place, capsys):
    said = []
    for words in ([], ["--expert-slots", "2"]):
        assert main(["generate", str(place / "hub"), "def", "--max-tokens", "6", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    words = ["generate", str(place / "hub"), "def", "--expert-slots", "99"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--expert-slots 99" in line


@pytest.mark.slow
def test_a_model_of_three_times_the_limit_answers(place, tmp_path):
    """Its experts are zeros in a file with holes, so that the disk holds them."""
    folder = tmp_path / "large"
    size = enlarged(place / "hub", folder, hidden=4096, layers=4, experts=64)
    room = size // 3
    program = f"""
        import json, resource
        import expertmesh as em
        from expertmesh.runs.paged import put_slots
        def kib(name):
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
        em.Engine({str(place / "hub")!r}, expert_slots=2, device="cpu").generate([[1, 2]])
        before = kib("RssAnon")
        limit = kib("VmData") * 1024 + {room}
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        params = em.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine = em.Engine({str(folder)!r}, expert_slots=8, num_blocks=8, device="cpu")
        (answer,) = engine.generate([[1, 2, 3]], params)
        print(json.dumps([len(answer.token_ids), (kib("RssAnon") - before) * 1024]))
        try:
            em.Engine({str(folder)!r}, num_blocks=8, device="cpu")
        except (MemoryError, RuntimeError, em.ConfigError):
            print("without slots: no")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    numbers, refused = done.stdout.splitlines()
    count, grown = json.loads(numbers)
    assert count == 3 and grown < room and refused == "without slots: no"
