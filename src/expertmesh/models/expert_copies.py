"""Experts initialised as copies of a dense feed-forward block, whole or cut into slices, optionally with noise or
redrawn units."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.moe.router import LinearRouter

_WHOLE = Number(fix="for example 2", types=WHOLE)


def check_whole(**numbers: object) -> None:
    """Check that arguments, given by name, are integers."""
    for name, value in numbers.items():
        _WHOLE.check(name, value)


@dataclass(frozen=True)
class ExpertCopies:
    """Options for turning a dense block into the experts of a layer."""

    num_copies: int  # copies of the block
    top_k: int  # copies that a token uses
    granularity: int = 1  # experts that each copy is cut into (g), along its hidden size
    noise_std: float = 0.0  # standard deviation of Gaussian noise on each weight tensor, relative to the tensor's own
    redraw: float = 0.0  # fraction of the hidden units of each expert that are redrawn (r)
    seed: int = 0  # seed of the noise and the redrawn units

    def __post_init__(self) -> None:
        """Check types and ranges."""
        whole = {"num_experts": self.num_copies, "top_k": self.top_k}
        check_whole(**whole, granularity=self.granularity, seed=self.seed)
        Number(0, fix="use 0 for none").check("noise_std", self.noise_std)
        Number(0, 1, "use 0 for none").check("redraw", self.redraw)

    def hidden_dim(self, whole: int) -> int:
        """Hidden size of an expert, made from a block with hidden size `whole`."""
        if self.granularity < 1 or whole % self.granularity:
            raise ConfigError(f"granularity={self.granularity}: must divide the hidden size {whole}; choose a divisor")
        return whole // self.granularity

    def fill(
        self,
        layer: nn.Module,  # the layer; its router is already initialised, and its rows become equal within a copy
        w_in_GFD: Tensor,  # (G, F, D) input matrices of the block
        w_out_DF: Tensor,  # (D, F) output matrix
        b_in_GF: Tensor | None = None,  # (G, F) input biases, or None
        b_out_D: Tensor | None = None,  # (D,) output bias, or None
        *,
        layer_index: int,  # index of the layer, which with the seed determines the noise
    ) -> None:
        """Fill experts and router of a layer with num_copies * g experts, the g slices of each copy in order.

        Each expert redraws different units (Nakamura et al., arXiv 2502.19261, section 3: Drop-Upcycling). Their
        weights are Gaussian with the mean and standard deviation of the weights that they replace.
        """
        if self.granularity > 1 and not isinstance(layer.router, LinearRouter):
            raise ConfigError(
                f"granularity={self.granularity}: needs the linear router, whose rows are one expert's each; use "
                "router=topk, or granularity=1"
            )
        generator = torch.Generator().manual_seed(self.seed + layer_index)
        n, g = self.num_copies, self.granularity
        of = dict(layer.named_parameters())

        def copied(part_g: Tensor) -> Tensor:
            found = part_g.repeat(n, *[1] * (part_g.dim() - 1))
            if self.noise_std > 0:
                noise = torch.randn(found.shape, generator=generator).to(found)
                found.add_(noise, alpha=self.noise_std * float(part_g.float().std()))
            return found

        w_in = copied(w_in_GFD.unflatten(1, (g, -1)).transpose(0, 1))
        w_out = copied(w_out_DF.unflatten(1, (g, -1)).transpose(0, 1))
        if self.redraw > 0:
            hidden = w_out.shape[2]
            count = round(self.redraw * hidden)
            if not count:
                raise ConfigError(
                    f"redraw={self.redraw}: is none of the {hidden} hidden units of an expert; use at least "
                    f"{1 / hidden:.3g}, or 0 for none"
                )
            for e in range(n * g):
                units = torch.randperm(hidden, generator=generator)[:count].to(w_in.device)
                for branch in range(w_in.shape[1]):
                    w_in[e, branch, units] = _alike(w_in[e, branch, units], generator)
                w_out[e][:, units] = _alike(w_out[e][:, units], generator)
        with torch.no_grad():
            of["experts.w_in"].copy_(w_in)
            of["experts.w_out"].copy_(w_out)
            if b_in_GF is not None and b_out_D is not None:
                parts = b_in_GF.unflatten(1, (g, -1)).transpose(0, 1)
                of["experts.b_in"].copy_(parts.repeat(n, 1, 1))
                # the outputs of a copy's g slices are summed, so each has a g-th of the bias
                of["experts.b_out"].copy_((b_out_D / g).expand_as(of["experts.b_out"]))
            if g > 1:
                rows = of["router.proj.weight"][::g].clone()
                of["router.proj.weight"].copy_(rows.repeat_interleave(g, 0))


def _alike(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian numbers with the mean and standard deviation of the given weights; empty for empty weights."""
    if not weights.numel():
        return weights
    noise = torch.randn(weights.shape, generator=generator).to(weights)
    wide = weights.float()
    return noise * wide.std(correction=0) + wide.mean()
