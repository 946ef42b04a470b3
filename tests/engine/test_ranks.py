"""An engine over ranks says what one process says, whoever has which part, and tells how many messages that took."""

import copy
import itertools
import json
import threading
from functools import partial

import pytest
import torch
from tests.engine.test_engine import PROMPTS, gpt
from tests.support.replicas import fill_biases, messages_of

from expertmesh.comm.world import World, check_backend
from expertmesh.config.run import ParallelConfig
from expertmesh.costs.communication import coordinated_exchange, wide_exchange
from expertmesh.engine.block_pool import BlockPool
from expertmesh.engine.engine import Engine
from expertmesh.engine.groups import GroupScheduler
from expertmesh.engine.parallel import StepReader, StepWriter, Wire, share
from expertmesh.engine.request import Request, SamplingParams
from expertmesh.engine.runner import batch_of
from expertmesh.engine.scheduler import Scheduler
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

PARAMS = SamplingParams(temperature=0, max_tokens=9, logprobs=2)
DRAWN = SamplingParams(
    temperature=1.2, top_k=20, max_tokens=7, n=2, seed=3, prompt_logprobs=1, return_routed_experts=True
)
SHARES = {
    2: [{}, {"tp_degree": 2}, {"es_degree": 2}, {"tp_degree": 2, "ep_degree": 1, "es_degree": 1}],
    4: [
        {},
        {"tp_degree": 2},
        {"tp_degree": 2, "ep_degree": 2},
        {"tp_degree": 2, "ep_degree": 2, "es_degree": 1},
        {"ep_degree": 2, "es_degree": 2},
    ],
}
MODELS = {
    "plain": {},
    "dense parts": {"moe": {"num_shared_experts": 1, "residual": True, "bias": True}},
    "some dense layers": {"moe_every": 2, "qkv_bias": True},
    "cosine": {"moe": {"router": "cosine", "num_experts": (4, 8)}, "tie_embeddings": False},
}
CACHE = {"block_size": 4, "num_blocks": 30, "token_budget": 16}


def answers(model, params, parallel=None, **options):
    """What rank 0 is answered; None on the others."""
    engine = Engine(model, parallel=parallel, compile=False, **CACHE | options)
    if not engine.leads:
        engine.follow()
        return None
    found = engine.generate(PROMPTS, params)
    engine.close()
    return found


def differences(a, b):
    """Whether tokens are the same, and how far logprobs are apart at most."""
    same = all(x.token_ids == y.token_ids for x, y in zip(a, b, strict=True))
    logprobs = [(x.logprobs or ()) + (x.prompt_logprobs or ()) for x in (*a,)]
    others = [(x.logprobs or ()) + (x.prompt_logprobs or ()) for x in (*b,)]
    pairs = zip(itertools.chain(*logprobs), itertools.chain(*others), strict=True)
    far = [abs(u.logprob - v.logprob) for u, v in pairs if u is not None and v is not None]
    routed = all(
        x.routed_experts is y.routed_experts or torch.equal(x.routed_experts, y.routed_experts)
        for x, y in zip(a, b, strict=True)
    )
    return same and routed, max(far)


def compared(cases):
    found = []
    for model_options, dtype, params, parallel, options in cases:
        model = gpt(getattr(torch, dtype), **model_options)
        fill_biases(model)
        whole = copy.deepcopy(model)
        here = answers(model, params, parallel, **options)
        if here is not None:
            found.append(differences(here, answers(whole, params, **options)))
    return found


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_same_tokens_as_one_process(num_ranks, rounds, two_ranks, four_ranks):
    """Each share of the model once, models, draws and engines by turns; every share with other ones in further
    rounds."""
    models, params = itertools.cycle(MODELS.values()), itertools.cycle((PARAMS, DRAWN))
    engines = itertools.cycle(({}, {"num_blocks": 14}, {"num_draft_tokens": 2}))
    cases = [
        (next(models), "float64", next(params), parallel, next(engines)) for parallel in SHARES[num_ranks] * rounds
    ]
    found, *_ = {2: two_ranks, 4: four_ranks}[num_ranks].run(compared, cases)
    for case, (same, far) in zip(cases, found, strict=True):
        assert same and far < 1e-9, (case, far)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_experts_are_the_same_to_the_bit(dtype, two_ranks, four_ranks):
    exact = {"deterministic": True}
    options = {"batch_invariant": True, "moe": {"num_shared_experts": 1, "top_k": 3}}
    cases = [
        (options, dtype, params, {}, exact | engine)
        for params, engine in ((PARAMS, {}), (DRAWN, {"token_budget": 7, "num_blocks": 14}))
    ]
    for pool in (two_ranks, four_ranks):
        found, *_ = pool.run(compared, cases)
        assert found == [(True, 0.0)] * len(cases)


def told(parallel):
    """What goes over the wire in one layer: [(collective, purpose, bytes)] of this rank."""
    dim, tokens = 24, 6
    model = gpt(torch.float32, moe_every=1)
    engine = Engine(model, parallel=parallel, compile=False, num_blocks=30, block_size=4)
    with engine._ranks.world.traffic.logged() as log:
        if engine.leads:
            engine.generate([[1] * tokens], SamplingParams(temperature=0, max_tokens=1))
            engine.close()
        else:
            engine.follow()
    kinds = ("dispatch", "combine", "gather")
    of_layer = [t for t in log.transfers if t.where in {f"layer 0, {kind}" for kind in kinds}]
    return [(t.collective, t.where.rpartition(" ")[2], t.num_bytes) for t in of_layer], dim, tokens


@pytest.mark.parametrize("parallel", SHARES[4], ids=str)
def test_messages_and_bytes_are_those_of_the_formula(parallel, four_ranks):
    for transfers, dim, tokens in four_ranks.run(told, parallel):
        L = parallel.get("tp_degree", 1)
        is_split = L > 1 and parallel.get("es_degree") == 1
        numbers = {"dim": dim, "top_k": 2, "element_bytes": 4, "num_tokens": tokens}
        cost = coordinated_exchange(4, tp_degree=L, is_split=is_split, **numbers)
        sizes = {"dispatch": 4 // L, "combine": 4 // L, "gather": L}
        assert sum(sizes[purpose] - 1 for _, purpose, _ in transfers) == cost.messages
        assert sum(size for _, _, size in transfers) == cost.num_bytes
        assert cost.messages == 2 * (4 // L - 1) + (L - 1)
        wide = wide_exchange(4, **numbers)
        assert L == 1 or (cost.messages < wide.messages and cost.across_bytes < wide.across_bytes)


def test_steps_survive_their_messages():
    params = SamplingParams(max_tokens=6)
    schedulers = [Scheduler(BlockPool(9, block_size=2), token_budget=5, max_sequences=3) for _ in range(2)]
    joint, writer, reader = GroupScheduler(schedulers), StepWriter(), StepReader()
    for number in range(5):
        prompt = tuple(range(1, 4 + number))
        joint.add(Request(str(number), prompt, params, number, 6))
    lengths = []
    for _ in range(60):
        step = joint.schedule()
        if not step.chunks:
            break
        batches = [batch_of(part)[0] for part in step.parts]
        message = json.dumps(writer.message(step.parts, batches))
        lengths.append(len(message))
        found = reader.batches(*json.loads(message))
        for batch, again in zip(batches, found, strict=True):
            assert again.rows == batch.rows and again.copies == batch.copies
            for one, other in zip(batch.chunks, again.chunks, strict=True):
                assert (list(one.ids), one.start, list(one.blocks)) == (
                    other.ids,
                    other.start,
                    other.blocks,
                )
        drawn = {sequence: 7 for chunk in step.chunks for sequence in chunk.samples}
        joint.commit(step, drawn)
        for sequence in drawn:
            if len(sequence.new_ids) == 6:
                joint.finish(sequence, "length")
    assert not joint.has_work and max(lengths) < 400


class Sending(Wire):
    """Keeps what is sent."""

    def _broadcast(self, data):
        self._group.append(data)


class Receiving(Wire):
    """Receives what was kept."""

    def _broadcast(self, data):
        assert len(data) == len(self._group[0])
        return self._group.pop(0)


def test_messages_of_any_length_arrive():
    sent = []
    for text in ("", *("x" * (4096 - 8 - len('["",""]') + more) for more in (-1, 0, 1, 9000)), "ß\udcff"):
        Sending(sent).send("", text)
        assert Receiving(sent).receive() == ["", text] and not sent


def mistakes():
    sizes = {"vocab_size": 64, "dim": 24, "num_layers": 1, "num_heads": 4}
    dense = ModelConfig(**sizes, moe={"num_experts": ()})

    def engine(**given):
        return lambda: Engine(gpt(torch.float32), **given)

    of_gpus = World()
    of_gpus.check_moves = partial(check_backend, backends="cuda:nccl")
    return messages_of(
        lambda: share(gpt(torch.float32), ParallelConfig(), of_gpus),
        engine(parallel={"tp_degree": 3}),
        engine(parallel={"ep_degree": (3,)}),
        engine(parallel={"zero_stage": 1}),
        engine(parallel={"ep_degree": (2, 1)}),
        engine(parallel=3),
        lambda: Engine(gpt(torch.float32, batch_invariant=True), deterministic=True, parallel={"es_degree": 2}),
        lambda: Engine(GPT(dense).eval(), parallel={"ep_degree": (2,)}),
    )


def assert_said(by_rank, expected):
    """Each rank has said all of it, each mistake in one line."""
    for found in by_rank:
        for message, part in zip(found, expected, strict=True):
            assert part in message and "\n" not in message, message


def test_mistakes_are_named(two_ranks):
    expected = (
        "tensors on cpu: the process group moves those on cuda only",
        "parallel.tp_degree=3: must divide the 2 ranks; nearest: 2",
        "use ep_degree x es_degree of 2 x 1, 1 x 2",
        "parallel.zero_stage=1: is for training",
        "is one number for an engine",
        "parallel is an int; it must be a ParallelConfig",
        "deterministic=True: needs whole products",
        "has no effect in a model without experts",
    )
    assert_said(two_ranks.run(mistakes), expected)


def test_one_process_has_nobody_to_share_with():
    with pytest.raises(ConfigError, match="start several with torchrun"):
        Engine(gpt(torch.float32), parallel={})


def idle():
    """An engine that is asked nothing for longer than the others' patience, then something."""
    engine = Engine(gpt(torch.float64), parallel={"timeout_s": 8.0}, compile=False, **CACHE)
    if not engine.leads:
        engine.follow()
        return None
    threading.Event().wait(12.0)
    found = engine.generate([[1, 2, 3]], PARAMS)[0].token_ids
    with pytest.raises(ConfigError, match="tensor"):
        engine.update_weights({"final_norm.weight": torch.ones(24)})
    engine.update_weights({})
    again = engine.generate([[1, 2, 3]], PARAMS)[0].token_ids
    load = engine.expert_load()
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([[1]], PARAMS)
    return found == again, sum(load[0])


def test_waits_for_questions(two_ranks):
    (same, load), _ = two_ranks.run(idle)
    assert same and load == 2 * 2 * (3 + 8)
