"""Objectives of a GPT's training by name (`objective.name`)."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from expertmesh.models.gpt.preference_task import PreferenceTask
from expertmesh.models.gpt.task import GPTTask

OBJECTIVES: Mapping[str, type[GPTTask] | str] = MappingProxyType(
    {
        **dict.fromkeys(("auto", "lm", "sft"), GPTTask),
        "dpo": PreferenceTask,
        "grpo": "expertmesh.rl.policy_task:PolicyTask",
    }
)
"""Task of each objective: its data, what a step makes of them, and its loss; "module:name" of one that stands above
models."""


def task_class(name: str) -> type[GPTTask]:
    """Task of an objective."""
    found = OBJECTIVES[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    assert isinstance(found, type)
    return found
