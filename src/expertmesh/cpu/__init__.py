"""Faster ways on processors, all optional: without this folder everything is computed, more slowly."""
