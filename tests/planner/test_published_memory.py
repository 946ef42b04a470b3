"""Every published run ran: by the model of memory it fits its own device, and what a row recomputes or keeps makes it
so."""

from dataclasses import replace

import pytest

from expertmesh.costs.memory import GIB, peak_memory
from expertmesh.costs.state_bytes import OTHERS
from expertmesh.planner.published import published_points

ROWS = (*published_points(), *published_points("later"))


@pytest.mark.parametrize("point", ROWS, ids=lambda point: point.name)
def test_a_run_that_ran_fits_its_device(point):
    memory = peak_memory(point.sizes, point.layout, point.work)
    assert memory.device_bytes <= 1.10 * GIB * point.cluster.device.memory_gib


def of(name, **changes):
    point = next(point for point in ROWS if point.name == name)
    return replace(point, **changes)


def live(point, stage="most"):
    return peak_memory(point.sizes, point.layout, point.work, stage=stage).live_bytes


def test_types_of_gradients_and_moments_are_counted():
    point = of("mb-qwen3-30b-16-plain")
    held = {
        kind: peak_memory(point.sizes, point.layout, replace(point.work, states=kind)).states_bytes
        for kind in ("megatron", "megatron_bf16_gradients", "megatron_bf16_moments")
    }
    assert list(held.values()) == sorted(held.values(), reverse=True)
    one = OTHERS["megatron_bf16_moments"]
    assert one.weight + one.gradient + one.optimizer == 12
    assert sum(vars(OTHERS["pure_bf16"]).values()) - 1 == 8  # and it is sharded


@pytest.mark.parametrize("part", ["layernorm", "moe_act", "mla_up_proj", "mlp"])
def test_what_is_recomputed_is_not_kept(part):
    point = of("v3-original")
    none, some = (live(replace(point, layout=replace(point.layout, recomputed=parts))) for parts in ((), (part,)))
    assert some < none


def test_the_last_stage_keeps_less_than_the_first():
    point = of("ml-mixtral-8x7b")
    plain = replace(point, layout=replace(point.layout, virtual_stages=1))
    assert live(plain, "last") < live(plain, "first") == live(plain)
    assert live(plain, "last") < live(point, "last")  # interleaved, it keeps more passes
