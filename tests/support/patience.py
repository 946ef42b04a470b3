"""How long tests wait for what ends by itself."""

PATIENCE_S = 600.0
"""So long that only what hangs takes longer, however busy the machine: one run of two loops beside the tests made them
2.7 times as long."""
