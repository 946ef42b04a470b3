"""Command line: one file per verb; parse, call, print."""
