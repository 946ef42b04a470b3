import sys

from expertmesh.cli.heap import keep_freed_memory


def test_glibc_takes_the_settings_and_others_are_left_alone(monkeypatch):
    if sys.platform.startswith("linux"):
        assert keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
