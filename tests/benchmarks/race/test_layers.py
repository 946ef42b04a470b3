"""The race without a GPU: results are checked before they count, everyone has the same weights, times are taken in
order."""

import time

import pytest
import torch
from benchmarks.race.parts import Keep
from tests.support import stand_ins

from benchmarks import clock
from benchmarks.race import check, contenders, layers, properties, shapes, verdicts


@pytest.fixture
def small_race():
    """A race of our layer and its peers on the CPU: shape, racers, weights, inputs, generator."""
    shape = shapes.SHAPES[0].tiny()
    generator = torch.Generator().manual_seed(0)
    weights = contenders.WeightSet.draw(shape, "cpu", generator)
    inputs = contenders.Inputs.draw(shape, "cpu", generator)
    racers, missing = contenders.field_of(shape, device="cpu")
    return shape, racers, missing, weights, inputs, generator


def test_properties_hold():
    step = properties._Step(shapes.SHAPES[0].tiny(), "cpu")
    assert "X + H" in properties.saved(step)
    assert "bitwise equal" in properties.repeatable(step)
    assert "bitwise equal" in properties.batch_invariant(step)


def test_a_broken_property_is_a_row():
    def broken(step):
        raise AssertionError("y differs")

    broken_one = {"bits": broken}
    (row,) = properties.properties(lambda result: None, device="cpu", tiny=True, on_any_device=broken_one)
    assert row == {"property": "bits", "holds": "NO", "what was seen": "y differs"}


@pytest.mark.parametrize("name", ["w_in", "w_out", "y", "x"])
def test_the_sampled_oracle_sees_a_small_error(small_race, name):
    shape, racers, _, weights, inputs, generator = small_race

    def slightly_wrong(*args):
        found = check.of_racer(*args)
        getattr(found, {"y": "y_SD", "x": "x_SD"}.get(name, name)).mul_(1.05)
        return found

    about = (weights, inputs.batches[0], inputs.grad_TD, generator)
    for racer in racers:
        assert check.check(shape, racer, *about) < check.FAR_OFF
    with pytest.raises(AssertionError, match="expertmesh at qwen3-8k"):
        check.check(shape, racers[0], *about, run=slightly_wrong)


def test_contenders_share_their_weights(small_race):
    _, racers, _, weights, _, _ = small_race
    places = {weights.w_in_EGFD.data_ptr(), weights.w_out_EDF.data_ptr()}
    for racer in racers:
        racer.take(weights)
        large = {p.data_ptr() for p in racer.module.parameters() if p.dim() > 2}
        assert large == places, racer.name
        assert all(p.grad is None for p in racer.module.parameters())


def test_missing_peers_are_named(small_race):
    _, _, missing, _, _, _ = small_race
    assert any(why.startswith("SonicMoE: ") for why in missing)


PEERS = (contenders.GROUPED_MM, verdicts.EINSUM)
"""The others would be stand-ins."""


def raced(tmp_path, name, before=None, checked=check.check):
    """Race a shape in which a contender's results are wrong."""

    def checks(shape, racer, *rest):
        assert racer.name != name, "off by 0.3"
        return checked(shape, racer, *rest)

    keep, shape = Keep(tmp_path / "part.json", before), {"shape": "blog-e16", "device": "cpu"}
    try:
        return layers.race_shape(keep, **shape, tiny=True, rounds=1, peers=PEERS, checked=checks)
    finally:
        stand_ins.remove()


def test_wrong_results_of_a_peer_leave_the_race(tmp_path):
    found = raced(tmp_path, contenders.GROUPED_MM)
    assert [row["contender"] for row in found["rows"]] == [verdicts.OURS, verdicts.EINSUM]
    assert [row["contender"] for row in found["experts"]] == [verdicts.OURS, verdicts.EINSUM]
    assert any("off by 0.3" in note for note in found["notes"])


def test_wrong_results_of_ours_stop_it(tmp_path):
    with pytest.raises(layers.WrongError, match="no time counts"):
        raced(tmp_path, verdicts.OURS)


def test_who_crashed_is_left_out_of_the_second_attempt(tmp_path):
    found = raced(tmp_path, "nobody", before={"trying": verdicts.EINSUM})
    assert [row["contender"] for row in found["rows"]] == [verdicts.OURS, contenders.GROUPED_MM]
    assert f"Out of the race: {verdicts.EINSUM}: crashed or hung." in found["notes"]
    with pytest.raises(layers.WrongError, match="ours crashed or hung"):
        raced(tmp_path, "nobody", before={"trying": verdicts.OURS})


def test_all_who_crashed_are_left_out_of_further_attempts(tmp_path):
    class CrashError(BaseException):
        """Ends a process where it stands."""

    def crashes(shape, racer, *rest):
        if racer.name != verdicts.OURS:
            raise CrashError
        return check.check(shape, racer, *rest)

    before = None
    for _ in PEERS:
        with pytest.raises(CrashError):
            raced(tmp_path, "nobody", before, crashes)
        before = Keep(tmp_path / "part.json").found()["result"]
    found = raced(tmp_path, "nobody", before, crashes)
    assert [row["contender"] for row in found["rows"]] == [verdicts.OURS]
    crashed = [note for note in found["notes"] if "crashed or hung" in note]
    assert [peer for peer in PEERS for note in crashed if peer in note] == [*PEERS]


def test_who_fails_while_timed_leaves_the_others_their_times(tmp_path):
    def fails(*_):
        raise RuntimeError("out of memory")

    def right_and_then_failing(shape, racer, *rest):
        off = check.check(shape, racer, *rest)
        if racer.name == contenders.GROUPED_MM:
            racer.module.experts = fails
        return off

    found = raced(tmp_path, "nobody", checked=right_and_then_failing)
    others = [verdicts.OURS, verdicts.EINSUM]
    assert [row["contender"] for row in found["rows"]] == others
    assert [row["contender"] for row in found["experts"]] == others
    why = f"Out of the race: {contenders.GROUPED_MM}: RuntimeError: out of memory."
    assert why in found["notes"]


def test_times_stand_where_the_experts_alone_crash(tmp_path):
    first = raced(tmp_path, verdicts.EINSUM)
    before = first | {"missing": [], "out": {}, "trying": contenders.GROUPED_MM}
    found = raced(tmp_path, "nobody", before)
    assert found["rows"] == first["rows"]
    assert [row["contender"] for row in found["experts"]] == [verdicts.OURS]
    assert f"Experts alone: {contenders.GROUPED_MM}: crashed or hung." in found["notes"]


def test_a_lost_gpu_ends_the_process():
    """Another attempt then goes on without who lost it; all that follows in this one would fail."""

    class Lost:
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ends = []
    layers.release("cuda", cuda=Lost(), end=ends.append)
    layers.release("cpu", cuda=Lost(), end=ends.append)
    assert ends == [layers._LOST_GPU]


class _Device:
    """Stands for torch.cuda: writes down what is asked of it."""

    def __init__(self):
        self.calls = []

    def Event(self, enable_timing):  # noqa: N802
        device = self

        class Event:
            def record(self):
                device.calls.append("event")

            def elapsed_time(self, end):
                return 2.0

        return Event()

    def _sleep(self, cycles):
        self.calls.append("wait")

    def synchronize(self):
        self.calls.append("synchronize")


def test_order_of_a_measurement_on_a_gpu():
    device = _Device()
    stopwatch = clock.Stopwatch("cpu")
    stopwatch.is_cuda = True

    class Junk:
        def zero_(self):
            device.calls.append("flush")

    stopwatch._junk = Junk()
    stopwatch.cuda = device
    parts = [lambda: device.calls.append("a"), lambda: device.calls.append("b")]
    seconds = stopwatch.times(parts)
    one = ["wait", "flush", "event", "{}", "event"]
    expected = [c.format(p) for p in "ab" for c in one]
    assert device.calls == [*expected, "synchronize"]
    assert [device_s for device_s, _ in seconds] == [0.002, 0.002]


def test_rounds_take_turns():
    calls = []
    entries = [
        clock.Entry(
            n,
            lambda r, n=n: calls.append(f"{n}{r}"),
            {"p": lambda: time.sleep(0)},
            lambda n=n: calls.append(n),
        )
        for n in "ab"
    ]
    samples = clock.interleaved(entries, clock.Stopwatch("cpu"), rounds=2, warmup=1)
    assert calls == ["a0", "a", "b0", "b", "b1", "b", "a1", "a", "a2", "a", "b2", "b"]
    assert len(samples["a"]["p"].device_s) == 2
