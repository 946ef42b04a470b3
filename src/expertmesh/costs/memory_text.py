"""Memory of a run, in words."""

from expertmesh.costs.memory import PeakMemory


def memory_text(memory: PeakMemory, num_ranks: int, *, on_gpu: bool) -> str:
    """Memory at the peak of a step, of the rank that has most, in all and by part; and what is not counted."""
    of = "" if num_ranks == 1 else f"of each of {num_ranks} ranks "
    parts = ", ".join(f"{words} {bytes_text(size)}" for words, size in memory.parts)
    host = f"; offloaded to the host {bytes_text(memory.host_bytes)}" if memory.host_bytes else ""
    left = "" if on_gpu else "; a GPU's context, buffers and fragments come on top (plan counts them)"
    return f"{of}{bytes_text(memory.device_bytes)}: {parts} (activations are estimates){host}{left}"


def bytes_text(number: float) -> str:
    """A number of bytes in the unit that fits."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
