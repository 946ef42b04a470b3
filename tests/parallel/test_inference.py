"""A model on ranks that all have the same tokens computes what one process does, with the same bits on all of them."""

import copy
import itertools

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from tests.support.generation import written_ids
from tests.support.ranks import world_of
from tests.support.replicas import messages_of
from tests.support.spread_case import D, SpreadCase, build

from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.construct import give_memory
from expertmesh.parallel.inference import broadcast_from_rank0, spread_for_inference

LAYERS = {
    "gated": {},
    "plain_bias": {"activation": "gelu", "bias": True, "top_k": 1},
    "dense_parts": {"num_shared_experts": 1, "residual": True, "top_k": 4},
    "capacity": {"capacity_factor": 0.75, "min_capacity": 1, "drop_policy": "priority"},
    "expert_choice": {"router": "expert_choice"},
    "own_experts": {"experts": lambda _: torch.nn.Linear(D, D)},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def outputs(options, es_degree, num_tokens, dtype):
    """This rank's y, once compared with the layer in one process, and what went over the wire."""
    case = SpreadCase(layer=options, dtype=dtype, training=False)
    whole, exact, world = build(case, dtype), build(case, torch.float64), world_of()
    spread = copy.deepcopy(whole)
    spread_for_inference(spread, world, es_degree=es_degree)
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, D, dtype=torch.float64, generator=generator).to(dtype)
    mask_T = torch.arange(num_tokens) % 5 != 4
    with torch.no_grad():
        with world.traffic.logged() as log:
            y_TD, stats = spread(x_TD, token_mask=mask_T)
        expected_TD, expected = whole(x_TD, token_mask=mask_T)
        oracle_TD, _ = exact(x_TD.double(), token_mask=mask_T)
    if dtype == torch.float64:
        assert_close_fp64(y_TD, expected_TD, what="y", scale=1.0)
    else:
        assert_two_times(y_TD, expected_TD, oracle_TD, what="y")
    assert torch.equal(stats.num_tokens_per_expert_E, expected.num_tokens_per_expert_E)
    assert torch.equal(stats.num_dropped, expected.num_dropped)
    assert [(t.collective, t.num_bytes) for t in log.transfers] == [("all_gather", (world.size - 1) * y_TD.nbytes)], (
        "one exchange, and no weights"
    )
    numbers = [sum(p.numel() for p in m.experts.parameters()) for m in (whole, exact)]
    mine = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in spread.experts.parameters())
    return y_TD.view(torch.uint8), mine / numbers[0]


def outputs_of(cases):
    return [outputs(LAYERS[name], *case) for name, *case in cases]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_one_process(num_ranks, two_ranks, four_ranks):
    slices = itertools.cycle([None, *(d for d in (1, 2, 4) if num_ranks % d == 0)])
    tokens, dtypes = itertools.cycle((9, 1, 0, 40)), itertools.cycle(DTYPES)
    cases = [
        (name, None if name == "own_experts" else es, *next(zip(tokens, dtypes, strict=False)))
        for name, es in zip([*LAYERS] * 3, slices, strict=False)
    ]
    found = {2: two_ranks, 4: four_ranks}[num_ranks].run(outputs_of, cases)
    for case, *of_ranks in zip(cases, *found, strict=True):
        for bits, share in of_ranks:
            assert torch.equal(bits, of_ranks[0][0]), case
            biases = case[0] in ("plain_bias", "own_experts")
            assert share == 1 / num_ranks or (biases and share < 1), case


def texts():
    """Texts of one process, and of a model that no rank ever had whole."""
    config = RECIPES["gpt-moe-test"]().updated({"model.init_std": 0.3}).model
    whole = GPT(config, dtype=torch.float64, seed=2)
    spread = GPT(config, dtype=torch.float64, device="meta")
    spread_for_inference(spread, world_of())
    give_memory(spread, device="cpu")
    spread.init_weights(2)
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 4, "ends": [0]}
    return [written_ids(model, [[1, 2, 3], [5], [7, 8]], **options) for model in (whole, spread)]


def test_generates_what_one_process_does(two_ranks):
    for found in two_ranks.run(texts):
        assert found[0] == found[1] and max(map(len, found[0])) == 12


def choices():
    layer = build(SpreadCase(training=False), torch.float32)
    before = broadcast_from_rank0(layer)(torch.tensor([3]))
    spread_for_inference(layer, world_of())
    chosen = torch.arange(6).view(2, 3).t() + 10 * world_of().position
    refused = messages_of(lambda: layer(torch.zeros(2, D)))
    return before.tolist(), broadcast_from_rank0(layer)(chosen).tolist(), refused


def test_all_go_on_with_what_the_first_chose(two_ranks):
    for before, chosen, refused in two_ranks.run(choices):
        assert before == [3] and chosen == torch.arange(6).view(2, 3).t().tolist()
        assert "spread for inference" in refused[0] and "torch.no_grad()" in refused[0]
