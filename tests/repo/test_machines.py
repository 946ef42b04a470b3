"""`make test-machines`: what one set of instructions compiled is not read back by another."""

from tools import test_machines as machines


def test_each_set_of_instructions_has_a_cache_of_its_own():
    caches = {name: machines.environment(name)["TORCHINDUCTOR_CACHE_DIR"] for name in machines.SETTINGS}
    assert len({caches[name] for name in ("avx2", "avx512", "unrestricted")}) == 3
    assert caches["threads-2"] == caches["threads-4"] == caches["unrestricted"]
