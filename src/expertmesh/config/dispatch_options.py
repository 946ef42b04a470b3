"""`DispatchOptions`: the all-to-all and degrees by which tokens of a layer reach its experts on several processes."""

from dataclasses import dataclass
from typing import Literal

from expertmesh.config.renamed import reads_former_names

AllToAll = Literal["flat", "hierarchical", "auto"]
DispatchDtype = Literal["same", "int8", "float8_e4m3"]


@dataclass(frozen=True)
class DispatchOptions:
    """Dispatch of the tokens of one call, the same on all processes; None: as the layer was spread.

    Attributes:
        route_degree: number of processes that a token may travel over; the rest of the weights is gathered.
        overlap_degree: number of parts that the tokens travel in, each while the experts compute on another.
        all_to_all: "flat": straight to the processes of their experts; "hierarchical": between nodes first, once to
            each node; "auto": what the cost model says is faster.
        replicated_experts: number of hot experts whose weights come to the tokens, which stay.

    Example:
        >>> import torch
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2)
        >>> how = em.DispatchOptions(route_degree=1)  # all that there is on one process
        >>> y, stats = layer(torch.randn(5, 8), dispatch=how)
        >>> y.shape
        torch.Size([5, 8])
    """

    route_degree: int | None = None
    overlap_degree: int | None = None
    all_to_all: AllToAll | None = None
    replicated_experts: int | None = None


DispatchOptions.__init__ = reads_former_names(DispatchOptions.__init__)  # type: ignore[method-assign]

AS_USUAL = DispatchOptions()
