"""The table of published measurements, and how far the model is from it."""

import pytest
from benchmarks.planner.__main__ import main
from benchmarks.planner.tables import MISS, SET, validation_text
from benchmarks.planner.validation import Judged, Summary, predicted, source_of, validate

from expertmesh.costs.step_time import Efficiency
from expertmesh.planner.fit import fit
from expertmesh.planner.published import published_points
from expertmesh.planner.search_result import ERROR_BAR, MEMORY_BAR
from expertmesh.planner.serve import SERVE_BAR


@pytest.fixture(scope="module")
def found():
    return validate()


def test_the_table_is_large_and_whole():
    points = published_points()
    assert len(points) >= 40
    assert len({point.name for point in points}) == len(points)
    for point in points:
        layout = point.layout
        assert layout.accumulation >= 1, point.name
        assert layout.tokens_per_step(point.work.seq_len) > 0
        assert layout.dp_degree * layout.tp_degree * layout.cp_degree * layout.pp_degree == layout.num_ranks
        assert layout.stage_ranks % layout.route_degree == 0, point.name
        for block in point.sizes.blocks:
            assert block.num_experts % layout.route_degree == 0, point.name


def test_rows_are_chosen_by_the_rule_that_the_table_states():
    for place, point in enumerate(published_points()):
        assert point.is_fitted == (place % 3 == 1), point.name


def test_rows_that_nothing_was_fitted_on_are_close(found):
    assert Summary.of(found.in_sight).median <= 0.16
    assert Summary.of(found.later).median <= 0.19
    assert Summary.of(found.left_out).median <= 0.18
    assert Summary.of(found.memory).median <= 0.08
    assert Summary.of(found.serving_left_out).median <= 0.30
    assert Summary.of(found.parts, (0.7, 1.4)).within == 1
    assert len(found.left_out) == len(found.throughput) + len(found.later) >= 100


def test_no_source_has_a_say_in_its_own_left_out_rows(found):
    """Of sources with marked rows the constants differ, so that predictions do; of others they are the usual ones."""
    usual = {row.point.name: row.predicted for row in (*found.throughput, *found.later)}
    marked = {source_of(row.point) for row in found.fitted}
    for row in found.left_out:
        is_same = row.predicted == usual[row.point.name]
        assert is_same == (source_of(row.point) not in marked), row.point.name


def test_the_shipped_constants_are_those_of_the_fit(found):
    for name, value in vars(Efficiency()).items():
        assert value == pytest.approx(getattr(found.efficiency, name), rel=5e-3), name


def test_another_third_would_do_as_well():
    """The constants are no accident of the rows: two other thirds leave errors of the same size."""
    points = published_points()
    for first in (0, 2):
        chosen = [p for place, p in enumerate(points) if place % 3 == first]
        efficiency = fit(chosen)
        rest = [Judged(p, predicted(p, efficiency)) for p in points if p not in chosen]
        assert Summary.of(rest).median <= 0.25


@pytest.mark.parametrize(
    ("rows", "bar", "most"),
    [("left_out", ERROR_BAR, 0.9), ("memory", MEMORY_BAR, 0.9), ("serving_left_out", SERVE_BAR, 1)],
)
def test_bars_hold_what_they_say_and_are_narrow(found, rows, bar, most):
    assert 0.7 <= Summary.of(getattr(found, rows), bar).within <= most
    assert 1 / 1.36 <= bar[0] < 1 < bar[1] <= 1.35


def test_every_constant_says_where_it_comes_from(found):
    text = validation_text(found).split("\nconstants\n")[1].split("errors:")[0]
    for name in vars(found.efficiency):
        assert f"  {name} " in text
    assert text.count("fitted rows, most") >= 7
    assert all(by for _, by in SET.values())


def test_the_program_prints_own_rows_and_refuses_a_file_in_one_line(tmp_path, capsys):
    own = tmp_path / "own.toml"
    own.write_text(
        '[points.mine]\nmodel = "qwen3-30b"\ncluster = "h100x8"\nmeasured = 3000\nep = 8\nmbs = 2\ngbs = 64\n'
    )
    assert main(["--measured", str(own)]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["--measured", str(tmp_path / "none.toml")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["--claims"]) == 0
    assert "8.49 x" in capsys.readouterr().out


def test_large_errors_are_explained(found):
    text = validation_text(found)
    for row in found.throughput:
        assert row.point.name in text
    rest = text.split(f"rows beyond {MISS:g}, and why")[1].splitlines()[1:]
    judged = (*found.throughput, *found.later, *found.serving, *found.memory)
    assert len(rest) == sum(abs(row.log_ratio) > MISS for row in judged)
    assert not any(line.endswith("not known") for line in rest)
