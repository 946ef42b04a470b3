"""What several tests of the kernels change."""

from dataclasses import replace

import pytest

from expertmesh.kernels import tiles


@pytest.fixture
def use_plan(monkeypatch):
    """A function that lets the kernels run with a changed plan: `use_plan(tma=False)`."""

    def install(**changes):
        choose = tiles.plan_for
        monkeypatch.setattr(tiles, "plan_for", lambda *a, **k: replace(choose(*a, **k), **changes))

    return install
