"""The verb of the swin family."""

from expertmesh.cli.family_verbs import Verb

CLASSIFY = Verb(
    "classify",
    "classify images",
    run="expertmesh_families.swin.classify_verb:run",
    memory_fix="lower --batch-size, or use a smaller model",
)
"""`expertmesh classify`."""
