"""The operators without the layer: what another mixture-of-experts system needs to use them."""

from expertmesh.ops.moe_mlp import moe_mlp
from expertmesh.ops.permute import combine, permute, unpermute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata

__all__ = ["RouteMetadata", "combine", "moe_mlp", "permute", "route_metadata", "unpermute"]
