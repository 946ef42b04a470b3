"""Expert parallelism for transformers with our exchange: `ep_implementation="expertmesh"`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from expertmesh.comm.mesh import ExpertDegrees
from expertmesh.comm.world import World
from expertmesh.moe.dispatch import Dispatched
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.experts.exchange import Alone, Exchange, Ragged, Route
from expertmesh.parallel.experts.route_split import make_split


class ExpertMeshEP(EPImplementation):
    """Exchange that sends a token once to each rank with experts of its choice, and returns one sum per rank.

    transformers' own all-to-all sends one copy per choice. Ranks of a tensor-parallel group have the same batch, and
    each sends its part of it.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        world = World(ep_mesh.get_group(), device_type=ep_mesh.device_type)
        experts_here: Any = self.num_local_experts
        self.count = int(experts_here)
        W, count = world.size, self.count
        self.exchange: Exchange = (Ragged if W > 1 else Alone)(
            Route(
                make_split(ExpertDegrees(W, 1), None),
                world.all_ranks(),
                W * count,
                world.position * count,
                [[place] for place in range(W)],
                "experts of transformers",
            )
        )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of all ranks for (T, D) tokens of this rank -> (T, D)."""
        whole: Any = hidden_states
        parts = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() > 1:
            parts = tuple(  # type: ignore[assignment]
                DTensor.from_local(part, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for part in parts
            )
        x_TD, ids_TK, weights_TK = parts
        weights_TK = weights_TK.to(accumulate_dtype(weights_TK.dtype))
        dispatch_handle = self.exchange.start(Dispatched(x_TD, ids_TK, weights_TK))
        dispatch_handle.advance()
        tokens = dispatch_handle.finish()
        rows = tokens.x_TD, tokens.expert_ids_TK, tokens.weights_TK
        num_rows = len(tokens.x_TD)
        if not num_rows:  # transformers' implementations need at least one row: a dummy one
            fills = (0, self.count, 0)
            rows = tuple(F.pad(r, (0, 0, 0, 1), value=f) for r, f in zip(rows, fills, strict=True))  # type: ignore[assignment]
        y_RD = self.experts_forward(*rows)[:num_rows]
        combine_handle = dispatch_handle.start_home(y_RD)
        combine_handle.advance()
        y_TD = combine_handle.finish()
        if self.tp_mesh.size() == 1:
            return y_TD
        gathered: Tensor = DTensor.from_local(
            y_TD.contiguous(),
            self.tp_mesh,
            [Shard(0)],
            shape=whole.shape,
            stride=(whole.shape[1], 1),
        ).full_tensor()
        return gathered
