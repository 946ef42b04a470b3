"""The Python of docs/parallelism.md runs on two ranks."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from expertmesh import MoELayer
from expertmesh.comm.world import World
from expertmesh.moe.types import Routing
from expertmesh.parallel.experts.dispatcher import spread_experts

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def blocks_with(text):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if text in block]


def run_example(number):
    code = blocks_with("parallelize(")[number]
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    names["world"].close()
    return names["loss"].item()


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_run(two_ranks, number):
    assert all(torch.tensor(loss).isfinite() for loss in two_ranks.run(run_example, number))


def example_of_bytes():
    """What the page's function gives, and what it and the lines below it print."""
    (code,) = blocks_with("def megabytes")
    names, said = {}, io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(PAGE), "exec"), names)
    return names["megabytes"], said.getvalue()


def test_the_table_is_what_the_example_prints():
    _, said = example_of_bytes()
    page = PAGE.read_text(encoding="utf-8")
    for line in said.splitlines():
        _, tokens, weights = (float(part.strip("(),")) for part in line.split())
        assert f"| {tokens:,.0f} | {weights:,.0f} |" in page


def counted(route_degree):
    """Bytes of one layer in FP32 whose tokens choose in turn, weights gathered twice: (tokens, weights)."""
    world = World()
    layer = MoELayer(dim=8, hidden_dim=12, num_experts=8, top_k=1, aux_loss_weight=0.0, seed=0)
    spread_experts(layer, world, route_degree=route_degree, keep="regather")
    x = torch.randn(16, 8, requires_grad=True)
    ids = torch.arange(16)[:, None] % 8
    with world.traffic.logged() as log:
        layer(x, routing=Routing(ids))[0].sum().backward()
    counts = log.num_bytes(where="counts")
    weights = log.num_bytes(where="weight")
    tokens = log.num_bytes(where="dispatch") + log.num_bytes(where="combine") - counts
    world.close()
    return tokens, weights


@pytest.mark.parametrize("route_degree", [1, 2, 4])
def test_the_formula_is_what_a_layer_sends(four_ranks, route_degree):
    megabytes, _ = example_of_bytes()
    expected = megabytes(route_degree, W=4, T=16, D=8, F=12, E=8, K=1, element=4)
    for found in four_ranks.run(counted, route_degree):
        assert [round(1e6 * value) for value in expected] == list(found)
