"""A GPT with K = 8 on several ranks, for several ways and with DeepSpeed's MoE in place of ours: whole steps, by
turns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh import GPT, MoELayer
from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.registry import recipe
from expertmesh.moe.experts import DenseMLP


class _Expert(nn.Module):
    """A gated MLP as DeepSpeed calls it: (..., D) -> (..., D)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mlp = DenseMLP(
            dim=model.dim,
            hidden_dim=model.moe.hidden_dim,
            activation=model.activation,
            bias=False,
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=model.init_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.flatten(0, -2)).view_as(x)


class DeepSpeedLayer(nn.Module):
    """DeepSpeed's `MoE` over all ranks with gated experts, called as our layer is.

    Args:
        model: shape of the GPT around it.
        drop_tokens: its capacity mode with its default factor, 1.0; else its dropless mode.
    """

    def __init__(self, model: ModelConfig, *, drop_tokens: bool) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            model.dim,
            _Expert(model),
            num_experts=model.moe.num_experts[0],
            ep_size=dist.get_world_size(),
            k=model.moe.top_k,
            drop_tokens=drop_tokens,
            top2_2nd_expert_sampling=False,
        )
        self.moe.set_deepspeed_parallelism()

    def forward(self, x_TD: Tensor, **_: Any) -> tuple[Tensor, None]:
        y_BTD, _, _ = self.moe(x_TD[None])
        return y_BTD[0], None


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finish_gradients: Callable[[], None],
    ids_BS: Tensor,
) -> None:
    """Forward, backward and update; the loss is this rank's part of the batch's mean."""
    logits_BSV = model(ids_BS).logits_BSV[:, :-1]
    loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), ids_BS[:, 1:].flatten())
    (loss / dist.get_world_size()).backward()
    finish_gradients()
    optimizer.step()
    optimizer.zero_grad()


def ours(config: ModelConfig, world: World, way: dict[str, Any]) -> tuple[GPT, Callable[[Tensor], None]]:
    """Our GPT, spread over all ranks, and a step of it."""
    model = GPT(config, seed=0)
    parallelize_gpt(model, ParallelConfig(**way), world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, partial(step, model, optimizer, lambda: None)


def settled(model: GPT) -> dict[str, Any]:
    """What the tuner has chosen for the layers of a model."""
    dispatcher: Any = next(m for m in model.modules() if isinstance(m, MoELayer)).dispatcher
    return {bucket: vars(way) for bucket, way in dispatcher.chooser.tuner.settled.items()}


def deepspeed(config: ModelConfig, *, drop_tokens: bool) -> Callable[[Tensor], None]:
    """A step of the same GPT with DeepSpeed's layers; dense gradients are summed as one tensor."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = GPT(config, seed=0)
    for block in model.layers:
        block.moe = DeepSpeedLayer(config, drop_tokens=drop_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dense = [p for p in model.parameters() if getattr(p, "allreduce", True)]

    def sum_gradients() -> None:
        together = torch.cat([p.grad.flatten() for p in dense if p.grad is not None])
        dist.all_reduce(together)
        sizes = [p.numel() for p in dense if p.grad is not None]
        for p, grad in zip([p for p in dense if p.grad is not None], together.split(sizes), strict=True):
            p.grad = grad.view_as(p)

    return partial(step, model, optimizer, sum_gradients)


def steps(job: dict[str, Any], world: World) -> tuple[dict[str, Callable[[], object]], Callable[[], dict[str, Any]]]:
    """What is timed, by name, the adaptive one settled; and what tells the plan that it settled on.

    Args:
        job: "tokens" per rank, "ways" by name, "deepspeed" whether it takes part, "settle" steps before anything is
            timed.
        world: all ranks.
    """
    config = recipe("gpt-moe-demo", {"model.moe.top_k": 8}).model
    generator = torch.Generator().manual_seed(world.position)
    length = config.max_seq_len
    ids_BS = torch.randint(config.vocab_size, (job["tokens"] // length, length), generator=generator)
    models = {name: ours(config, world, way) for name, way in job["ways"].items()}
    found: dict[str, Callable[[], object]] = {name: partial(run, ids_BS) for name, (_, run) in models.items()}
    if job["deepspeed"]:
        for name, drops in (("DeepSpeed, dropless", False), ("DeepSpeed, capacity 1.0", True)):
            found[name] = partial(deepspeed(config, drop_tokens=drops), ids_BS)
    for name, run in found.items():
        for _ in range(job["settle"] if "adaptive" in name else 0):
            run()
    return found, lambda: settled(models["adaptive"][0])
