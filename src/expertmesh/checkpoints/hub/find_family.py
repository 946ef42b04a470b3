"""Look-up of the hub architectures that our GPT can run: from `families/` and from installed packages. Never imports
torch."""

from expertmesh.checkpoints.hub.families.deepseek_v2 import DEEPSEEK_V2
from expertmesh.checkpoints.hub.families.deepseek_v3 import DEEPSEEK_V3
from expertmesh.checkpoints.hub.families.dots1 import DOTS1
from expertmesh.checkpoints.hub.families.glm4_moe import GLM4_MOE
from expertmesh.checkpoints.hub.families.gpt_oss import GPT_OSS
from expertmesh.checkpoints.hub.families.mixtral import MIXTRAL
from expertmesh.checkpoints.hub.families.olmoe import OLMOE
from expertmesh.checkpoints.hub.families.qwen2_moe import QWEN2_MOE
from expertmesh.checkpoints.hub.families.qwen3_moe import QWEN3_MOE
from expertmesh.checkpoints.hub.family import HubFamily, Values
from expertmesh.config.plugins import Plugins
from expertmesh.errors import ConfigError

ENTRY_POINTS = "expertmesh.hub_families"
"""Group of entry points by which a package adds an architecture: its `model_type`, and the place of its `HubFamily`."""
_OURS = (MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, GLM4_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, DOTS1)
FAMILIES = {family.model_type: family for family in _OURS}
"""Architectures of this package by `model_type`; a model of ours is exported as the first that fits."""
_ALIASES = {alias: family for family in _OURS for alias in family.aliases}
_ADDED = Plugins("model_type", HubFamily, ENTRY_POINTS, key="model_type")


def find_hub_family(name: str) -> HubFamily:
    """Architecture of a `model_type`, from this package or from an installed one, whose module is imported."""
    found = FAMILIES.get(name) or _ALIASES.get(name) or _ADDED.get(name)
    if found is not None:
        return found
    raise ConfigError(
        f"model_type={name!r}: is none that runs as a GPT of expertmesh ({', '.join([*FAMILIES, *_ADDED.names])}); run "
        "its experts through expertmesh.integrations.transformers.apply(model), or make experts of a dense one with "
        "expertmesh.models.upcycle"
    )


def hub_family(values: Values) -> HubFamily:
    """The architecture of a config.json."""
    return find_hub_family(str(values.get("model_type")))
