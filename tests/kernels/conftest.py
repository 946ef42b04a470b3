"""What several tests of the kernels change."""

from dataclasses import replace

import pytest

from expertmesh.kernels import tiles


@pytest.fixture
def use_config(monkeypatch):
    """A function that lets the kernels run with a changed config: `use_config(tma=False)`."""

    def install(**changes):
        choose = tiles.config_for
        monkeypatch.setattr(tiles, "config_for", lambda *a, **k: replace(choose(*a, **k), **changes))

    return install
