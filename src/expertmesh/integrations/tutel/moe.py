"""Replacement for `tutel.moe`: the layer, and its parts for layers of your own."""

from expertmesh.integrations.tutel import refused
from expertmesh.integrations.tutel.moe_layer import MOELayer, moe_layer
from expertmesh.integrations.tutel.padded import (
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    get_reversed_sample_ids,
    get_topk_selection,
    top_k_routing,
)

__all__ = [
    "MOELayer",
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "get_reversed_sample_ids",
    "get_topk_selection",
    "moe_layer",
    "top_k_routing",
]

__getattr__ = refused.refusing("tutel.moe")
