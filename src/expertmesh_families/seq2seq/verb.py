"""The verb of the seq2seq family."""

from expertmesh.cli.family_verbs import Verb

TRANSLATE = Verb(
    "translate",
    "translate texts",
    run="expertmesh_families.seq2seq.translate_verb:run",
    is_of_all_ranks=True,
    memory_fix="lower --batch-size, or use a smaller model",
)
"""`expertmesh translate`."""
