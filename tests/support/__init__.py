"""Harnesses of the tests: ranks, builds of kernels, cases that several tests judge."""
