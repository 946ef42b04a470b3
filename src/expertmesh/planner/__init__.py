"""Planner: memory, time, days and price of a mixture of experts on a cluster, with error bars. Never imports torch."""
