"""Verbs that model families add to the command line."""

from dataclasses import dataclass
from importlib import import_module

from expertmesh.config.plugins import Plugins


@dataclass(frozen=True)
class Verb:
    """A verb of a family. `expertmesh --help` imports the module of this object, which therefore imports nothing
    else."""

    name: str  # word after `expertmesh`
    text: str  # its line of help
    # "module:name" of a function of the words after the verb that returns the exit code; imported when it is called
    run: str
    is_of_all_ranks: bool = False  # whether every process runs it under torchrun; False: rank 0 alone
    memory_fix: str = "use a smaller model"  # what a user can do when memory runs out

    def __call__(self, argv: list[str]) -> int:
        """Run the verb and return its exit code."""
        module, _, name = self.run.partition(":")
        code: int = getattr(import_module(module), name)(argv)
        return code


FAMILY_VERBS = Plugins(
    "verb",
    Verb,
    "expertmesh.verbs",
    {
        "translate": "expertmesh_families.seq2seq.verb:TRANSLATE",
        "classify": "expertmesh_families.swin.verb:CLASSIFY",
    },
)
"""Verbs of families by name."""
