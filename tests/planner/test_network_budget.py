"""Communication hides once: no step is shorter than what its links carry."""

from dataclasses import replace

import pytest

from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.rank_layout import IMBALANCE, Workload
from expertmesh.costs.step_time import BOUNDS, Efficiency, raw_step, step_seconds
from expertmesh.planner.planned_model import planned_model
from expertmesh.planner.search import Problem, layouts, with_batch

MODELS = (
    *("gpt-moe-1b", "gpt-350m-moe128", "gpt-350m-prmoe", "gpt-1.3b-moe128", "gpt-1.3b-prmoe"),
    *("gpt-6.7b", "gpt-15b", "gpt-100b", "gpt-400b", "gpt-1.1t", "gpt-3.5t"),
    *("qwen3-30b", "qwen3-235b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3", "kimi-k2"),
    *("moonlight", "mixtral-8x7b", "mixtral-8x22b", "qwen2-57b", "gpt-1t-moe128"),
)
CLUSTERS = (
    *("v100x64", "a100-40x512", "h100x8", "h100x256", "h100x4096", "h800x2048", "gb200x72"),
    "mi300xx64",
)
EAGER = replace(Efficiency(), hidden=BOUNDS["hidden"][1], network=BOUNDS["network"][0])
"""Software that hides most, over the slowest network."""


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_step_is_never_shorter_than_its_network(cluster):
    where = find_cluster(cluster)
    for name in MODELS:
        sizes = planned_model(name).sizes
        work = Workload(2048, imbalance=IMBALANCE)
        problem = Problem(sizes, where, work, 2 * where.num_gpus, Efficiency())
        sized = [one for layout in layouts(problem) for one in with_batch(problem, layout)]
        for place, layout in enumerate(sized[:: max(1, len(sized) // 10)]):
            layout = replace(
                layout,
                overlap_degree=(1, 2, 4)[place % 3],
                offload=layout.zero_stage > 1 and place % 5 == 4,
                virtual_stages=1,
            )
            raw = raw_step(sizes, layout, work, where)
            for e in (Efficiency(), EAGER):
                assert raw.network_s(e) <= step_seconds(raw, e).total_s, (name, layout)


def test_what_one_communication_hides_under_no_other_does():
    work = Workload(4096, imbalance=IMBALANCE)
    problem = Problem(planned_model("deepseek-v3").sizes, find_cluster("h100x4096"), work, 8192, Efficiency())
    layout = replace(next(iter(layouts(problem))), route_degree=64, micro_batch=2, overlap_degree=4)
    raw, e = raw_step(problem.sizes, layout, work, problem.cluster), Efficiency()
    found = step_seconds(raw, e)
    products = found.dense_s + found.grouped_s + found.attention_s + found.element_s
    exposed = found.exchange_inside_s + found.exchange_across_s + found.tensor_s + found.zero_s
    assert raw.network_s(e) - exposed <= e.hidden * products * (1 + 1e-9)
