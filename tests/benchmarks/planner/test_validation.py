"""The table of published measurements, and how far the model is from it."""

from statistics import median

import pytest
from benchmarks.planner.__main__ import main
from benchmarks.planner.tables import validation_text
from benchmarks.planner.validation import Summary, validate

from expertmesh.costs.step_time import Efficiency
from expertmesh.planner.fit import fit
from expertmesh.planner.published import published_points
from expertmesh.planner.search_result import ERROR_BAR


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
        assert (
            layout.dp_degree * layout.tp_degree * layout.cp_degree * layout.pp_degree
            == layout.num_ranks
        )
        assert layout.stage_ranks % layout.route_degree == 0, point.name
        for block in point.sizes.blocks:
            assert block.num_experts % layout.route_degree == 0, point.name


def test_rows_are_chosen_by_the_rule_that_the_table_states():
    for place, point in enumerate(published_points()):
        assert point.is_fitted == (place % 3 == 1), point.name


def test_rows_that_nothing_was_fitted_on_are_close(found):
    s = Summary.of(found.held_out)
    assert s.median <= 0.2 and s.within >= 0.8
    assert s.low < 1 < s.high
    memory = Summary.of(found.memory, 0.15)
    assert memory.median <= 0.15 and memory.within >= 0.8
    assert Summary.of(found.parts).within == 1


def test_the_shipped_constants_are_those_of_the_fit(found):
    for name, value in vars(Efficiency()).items():
        assert value == pytest.approx(getattr(found.efficiency, name), rel=5e-3), name


def test_another_third_would_do_as_well():
    """The constants are no accident of the rows: two other thirds leave errors of the same size."""
    points = published_points()
    for first in (0, 2):
        chosen = [p for place, p in enumerate(points) if place % 3 == first]
        from benchmarks.planner.validation import Judged, predicted

        efficiency = fit(chosen)
        rest = [Judged(p, predicted(p, efficiency)) for p in points if p not in chosen]
        assert median(abs(row.time_error) for row in rest) <= 0.25


def test_error_bars_are_those_of_the_validation(found):
    s = Summary.of(found.held_out)
    assert (pytest.approx(s.low, abs=0.01), pytest.approx(s.high, abs=0.01)) == ERROR_BAR


def test_rows_of_generation_whose_batch_is_known_are_close(found):
    rows = {row.point.name: row.error for row in found.serving}
    assert abs(rows["oii-decode"]) < 0.25
    assert abs(rows["tt-qwen3-30b-a100"]) < 0.25


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
    rest = text.split("rows beyond 40 %, and why")[1].splitlines()[1:]
    misses = [row for row in (*found.throughput, *found.serving) if abs(row.time_error) > 0.4]
    assert len(rest) == len(misses)
