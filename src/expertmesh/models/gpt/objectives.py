"""Objectives of a GPT's training by name (`objective.name`)."""

from collections.abc import Mapping
from types import MappingProxyType

from expertmesh.models.gpt.preference_task import PreferenceTask
from expertmesh.models.gpt.task import GPTTask

OBJECTIVES: Mapping[str, type[GPTTask]] = MappingProxyType(
    {"auto": GPTTask, "lm": GPTTask, "sft": GPTTask, "dpo": PreferenceTask}
)
"""Task of each objective: its data, what a step makes of them, and its loss."""
