"""What is compiled ahead of time is what a launch on a GPU compiles: the same types, constants and alignments.

The builds of test_compile_cover.py start from recorded launches; here Triton's own launch code says what it makes of
the same arguments. Nothing is compiled.
"""

import pytest
import torch
from tests.support.aot import TARGETS
from tests.support.experts_builds import step_launches
from triton.runtime import driver

SHAPES = {
    "qwen3": ((8192, 2048, 768, 128, 8), "swiglu"),
    "decode": ((1, 2048, 768, 128, 8), "swiglu"),
    "odd": ((4096, 1001, 333, 61, 2), "swiglu"),
    "plain": ((4096, 512, 256, 2, 2), "gelu"),
}


class _Hopper:
    """A driver of a GPU that is not there."""

    def get_current_target(self):
        return TARGETS["sm_90"]

    def get_current_device(self):
        return 0


@pytest.fixture
def hopper(monkeypatch):
    """Triton takes the machine for one with a Hopper GPU."""
    monkeypatch.setattr(driver, "_active", _Hopper())


def as_the_launch_code_sees_it(launch):
    """(Types by argument, arguments known to be multiples of 16)."""
    kernel = launch.kernel
    *_, backend, binder = kernel.create_binder()
    arguments = launch.values | launch.options | {"debug": False, "instrumentation_mode": ""}
    bound, found, options = binder(**arguments)
    _, signature, _, attributes = kernel._pack_args(backend, arguments, bound, found, options)
    types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    aligned = {kernel.arg_names[place[0]] for place, hints in attributes.items() if ["tt.divisibility", 16] in hints}
    return types, aligned


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_recorded_launches_are_what_is_compiled(hopper, shape, bias):
    sizes, activation = SHAPES[shape]
    for launch in step_launches("sm_90", torch.bfloat16, shape=sizes, activation=activation, bias=bias):
        types, aligned = as_the_launch_code_sees_it(launch)
        ours, constants, unaligned = launch._compiled_for()
        assert types == ours, launch.name
        assert not set(constants) & set(types), launch.name
        plain = {p.name for p in launch.kernel.params if p.do_not_specialize}
        may = {name for name, kind in ours.items() if kind.startswith("*") or kind in ("i32", "i64")}
        assert aligned == may - plain - set(unaligned), launch.name
