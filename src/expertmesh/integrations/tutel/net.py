"""Replacement for `tutel.net`: collectives, those with a backward pass among them, and the sharded optimizer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import refused
from expertmesh.integrations.tutel.rank_groups import create_groups_from_world

__all__ = ["create_groups_from_world"]
__getattr__ = refused.refusing("tutel.net")

Group = Any
Move = Callable[[Tensor], Tensor]
_SUM = dist.ReduceOp.SUM


def get_world_size(group: Group = None) -> int:
    """Number of ranks; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_rank(group: Group = None) -> int:
    """Position of this rank; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def barrier(group: Group = None) -> None:
    """Wait for all ranks."""
    if get_world_size(group) > 1:
        dist.barrier(group=group)


def create_standalone_group() -> Group:
    """A group of this rank alone; None without torch.distributed. Every rank must call."""
    if not dist.is_initialized():
        return None
    return dist.new_subgroups_by_enumeration([[r] for r in range(dist.get_world_size())])[0]


def simple_broadcast(input: Tensor, src: int = 0, group: Group = None) -> Tensor:
    """Replace the values by the values of one rank, in place; without a backward pass, as all `simple_` functions."""
    if get_world_size(group) > 1:
        dist.broadcast(input, src=src, group=group)
    return input


def simple_all_reduce(input: Tensor, group: Group = None, op: Any = _SUM, inplace: bool = False) -> Tensor:
    """Sum over ranks."""
    if get_world_size(group) == 1:
        return input
    output = input if inplace else input.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, op=op, group=group)
    return output


def simple_all_to_all(input: Tensor, group: Group = None, background: bool = False) -> Any:
    """Send the i-th of W pieces of the first dimension to rank i; with `background` also a function that waits."""
    if get_world_size(group) == 1:
        return (input, lambda: None) if background else input
    _check_pieces(input, group)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    work = dist.all_to_all_single(output, input.contiguous(), group=group, async_op=background)
    return (output, work.wait) if background else output


def simple_split(input: Tensor, group: Group = None) -> Tensor:
    """Piece of the first dimension for this rank."""
    _check_pieces(input, group)
    return input.chunk(get_world_size(group))[get_world_rank(group)]


def simple_reduce_scatter(input: Tensor, group: Group = None, op: Any = _SUM) -> Tensor:
    """Piece of the sum over ranks for this rank."""
    return simple_split(simple_all_reduce(input, group, op), group)


def simple_all_gather(input: Tensor, group: Group = None) -> Tensor:
    """All ranks' tensors, of equal shapes, one after the other along the first dimension."""
    ranks = get_world_size(group)
    if ranks == 1:
        return input
    pieces = [torch.empty_like(input, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(pieces, input.contiguous(), group=group)
    return torch.cat(pieces)


class _Moved(torch.autograd.Function):
    """Collective whose backward pass is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        moved = there(x)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0].contiguous()), None, None


def _moved(x: Tensor, there: Callable[..., Any], back: Callable[..., Any], group: Group) -> Tensor:
    moved: Tensor = _Moved.apply(x, partial(there, group=group), partial(back, group=group))
    return moved


def _same(x: Tensor, group: Group) -> Tensor:
    return x


def all_to_all_single(input: Tensor, group: Group = None) -> Tensor:
    """`simple_all_to_all` with a backward pass."""
    return _moved(input, simple_all_to_all, simple_all_to_all, group)


def all_to_all(
    input: Tensor,  # of equal shapes on all ranks
    input_dim: int,  # the dimension that the ranks' pieces are joined along
    output_dim: int,  # the dimension that is split
    group: Group = None,  # the ranks; None: all
    background: bool = False,  # return a function that returns the result, which is there at once
    use_2dh: bool = False,  # no effect; `expertmesh.parallel` has the all-to-all in two steps
) -> Any:
    """Split one dimension over ranks and join another."""
    output = input
    if input_dim != output_dim and get_world_size(group) > 1:
        _check_pieces(input, group, output_dim)
        pieces = torch.stack(input.chunk(get_world_size(group), output_dim))
        output = torch.cat(all_to_all_single(pieces, group).unbind(), input_dim)
    return (lambda *_: output) if background else output


def reduce_scatter(input: Tensor, dim: int, group: Group = None) -> Tensor:
    """Piece of the sum over ranks along a dimension for this rank; the backward pass gathers."""
    return _along(dim, input, simple_reduce_scatter, simple_all_gather, group)


def all_gather(input: Tensor, dim: int, fused: bool = False, group: Group = None) -> Tensor:
    """All ranks' tensors along a dimension. The backward pass takes this rank's piece, summed over ranks if `fused`."""
    back = simple_reduce_scatter if fused else simple_split
    return _along(dim, input, simple_all_gather, back, group)


def spatial_split(input: Tensor, dim: int, group: Group = None) -> Tensor:
    """Piece along a dimension for this rank; the backward pass gathers."""
    return _along(dim, input, simple_split, simple_all_gather, group)


def _along(dim: int, x: Tensor, there: Callable[..., Any], back: Callable[..., Any], group: Group) -> Tensor:
    return _moved(x.transpose(0, dim), there, back, group).transpose(0, dim)


def allreduce_forward(input: Tensor, op: Any = _SUM, group: Group = None) -> Tensor:
    """Sum over ranks; the backward pass hands the gradient on."""
    return _moved(input, partial(simple_all_reduce, op=op), _same, group)


def allreduce_backward(input: Tensor, op: Any = _SUM, group: Group = None) -> Tensor:
    """The input; the backward pass sums the gradient over ranks."""
    return _moved(input, _same, partial(simple_all_reduce, op=op), group)


def zero_gather(input: Tensor, full_shape: Iterable[int] | None = None, group: Group = None) -> Tensor:
    """All ranks' slices of a parameter, without the padding; the backward pass sums over ranks and scatters."""
    whole = _moved(input, simple_all_gather, simple_reduce_scatter, group)
    shape = whole.shape if full_shape is None else torch.Size(full_shape)
    return whole.reshape(-1)[: shape.numel()].view(shape)


def zero_scatter(input: Tensor, scatter_fn: Callable[..., Tensor], group: Group = None) -> tuple[Tensor, torch.Size]:
    """Apply `scatter_fn` to the values, padded with zeros to equal slices; also returns the shape before."""
    padding = -input.numel() % get_world_size(group)
    values = torch.nn.functional.pad(input.reshape(-1), (0, padding))
    return scatter_fn(values, group=group), input.shape


def batch_all_to_all_v(
    datas: Iterable[Tensor], partition_sizes: Any, group: Group = None
) -> tuple[list[Tensor], Tensor]:
    """Send pieces of different sizes of several tensors: the received values, and how many came from each rank."""
    datas = [data.reshape(-1) for data in datas]
    sizes = torch.as_tensor(partition_sizes, dtype=torch.int64, device=datas[0].device)
    if len(sizes) != get_world_size(group):
        raise ConfigError(f"partition_sizes has {len(sizes)} numbers for {get_world_size(group)} ranks; give one each")
    if len(sizes) == 1:
        return datas, sizes
    arriving = simple_all_to_all(sizes, group)
    outputs = [data.new_empty(int(arriving.sum())) for data in datas]
    for data, output in zip(datas, outputs, strict=True):
        dist.all_to_all_single(output, data, arriving.tolist(), sizes.tolist(), group=group)
    return outputs, arriving


def batch_all_gather_v(datas: Iterable[Tensor], group: Group = None) -> tuple[list[Tensor], Tensor]:
    """All ranks' values of several tensors, whose sizes may differ between ranks, and these sizes."""
    datas = [data.reshape(-1) for data in datas]
    ranks = get_world_size(group)
    copies = datas if ranks == 1 else [data.repeat(ranks) for data in datas]
    return batch_all_to_all_v(copies, [datas[0].numel()] * ranks, group)


class TutelDistributedOptimizer:
    """Optimizer whose ranks update a slice of the shared parameters each; experts stay whole on their ranks.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> optimizer = TutelDistributedOptimizer(net.parameters(), average_shared=True)
        >>> optimizer = optimizer.warp_local(torch.optim.SGD, lr=0.1)
        >>> net(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],  # parameters; experts' ones have the attribute `_tutel_expert`
        group: Group = None,  # the ranks; None: all
        average_shared: bool = False,  # average gradients of shared parameters over ranks; False: sum them
    ) -> None:
        params = list(params)
        self.params = [p for p in params if not hasattr(p, "_tutel_expert")]
        self.expert_params = [p for p in params if hasattr(p, "_tutel_expert")]
        self.group, self.average_shared = group, average_shared
        self.local_optim: Any = None

    def warp_local(self, local_optim: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Build the optimizer of this rank's slices, of a class of torch.optim; returns this object."""
        self.virt_params = [zero_scatter(p.data, simple_split, self.group)[0] for p in self.params]
        self.virt_params = [piece.clone() for piece in self.virt_params]
        self.local_optim = local_optim(self.virt_params + self.expert_params, *args, **kwargs)
        return self

    def zero_grad(self) -> None:
        """Set gradients to zero."""
        for p in [*self.params, *self.expert_params]:
            p.grad = None

    def step(self) -> None:
        """Reduce gradients, update this rank's slices, and gather the shared parameters."""
        if self.local_optim is None:
            raise ConfigError("TutelDistributedOptimizer has no optimizer yet; call warp_local first")
        share = get_world_size(self.group) if self.average_shared else 1
        for p, piece in zip(self.params, self.virt_params, strict=True):
            if p.grad is not None:
                piece.grad = zero_scatter(p.grad / share, simple_reduce_scatter, self.group)[0]
        self.local_optim.step()
        for p, piece in zip(self.params, self.virt_params, strict=True):
            p.data = zero_gather(piece.data, p.shape, self.group)


def _check_pieces(x: Tensor, group: Group, dim: int = 0) -> None:
    if x.shape[dim] % get_world_size(group):
        raise ConfigError(
            f"dimension {dim} of size {x.shape[dim]}: the {get_world_size(group)} ranks must divide it; pad it"
        )
