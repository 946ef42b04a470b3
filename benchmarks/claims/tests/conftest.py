"""Fixtures of the project's tests."""

from tests.conftest import *  # noqa: F403
