"""Low-rank adapters on experts (LoRA: Hu et al. 2022), trained while all other parameters are frozen.

Example:
    >>> import torch
    >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0)
    >>> em.lora.add(layer, rank=2)
    1
    >>> [name for name, p in layer.named_parameters() if p.requires_grad][0]
    'experts.adapters.w_in.a'
    >>> y, stats = layer(torch.randn(5, 8))  # as before: the second factors are zero at first
    >>> em.lora.merge(layer)  # into the weights
    1
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.moe.check_arguments import check_draw, check_dtype, check_module
from expertmesh.moe.expert_adapters import TARGETS, Adapter, ExpertAdapters
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.init import draw_seed, init_normal_
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.experts.weights import FORMATS

_log = logging.getLogger("expertmesh.lora")
_RANK = Number(1, fix="use 8, for example", types=WHOLE)
_ALPHA = Number(0, fix="use twice the rank, for example", is_open=True)

__all__ = ["adapters", "add", "merge", "remove"]


def add(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    shared: bool = False,
    freeze: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> int:
    """Add adapters to the experts of every MoE layer: W becomes W + (alpha / rank) B A.

    B starts at zero, so outputs are unchanged; A is N(0, 1 / fan_in). The product is computed as x A^T B^T: neither the
    sum nor a gradient of W is formed. Shard the model over ranks afterwards, with full expert parallelism.

    Args:
        model: a model or a layer.
        rank: r, the inner size of each adapter.
        alpha: numerator of the factor of every addition.
        targets: "w_in", "w_out" or both.
        shared: one adapter for all experts of a layer; else one per expert.
        freeze: freeze all parameters except adapters, until `merge` or `remove`, which make all of them trainable.
        dtype: dtype of the factors; matmuls use the dtype of the weights.
        seed: seed of the first factors; None: drawn from torch's default generator.

    Returns:
        Number of layers with adapters.

    Raises:
        ConfigError: no layer has grouped experts; a layer has adapters already, is sharded or batch-invariant; rank,
            alpha, targets, dtype or seed break a rule. The model is then unchanged.
    """
    found = dict(_experts(model))
    _check(found, rank=rank, alpha=alpha, targets=targets)
    check_dtype(dtype)
    check_draw(seed, std=None, out_std=None)
    seed = draw_seed() if seed is None else seed
    all_made: list[tuple[GroupedExperts, ExpertAdapters]] = []
    for path, experts in found.items():
        made: dict[str, Adapter] = {}
        for name in targets:
            weight = getattr(experts, name)
            _, G, F, D = experts.shape
            rows, columns = (G * F, D) if name == "w_in" else (D, F)
            made[name] = Adapter(
                num_experts=experts.num_experts,
                rows=rows,
                columns=columns,
                rank=rank,
                scaling=alpha / rank,
                shared=shared,
                device=weight.device,
                dtype=dtype,
            )
            if weight.device.type != "meta":
                std = columns**-0.5
                init_normal_(
                    made[name].a, std=std, seed=seed, name=f"{path}.{name}.a", per_expert=True
                )
                nn.init.zeros_(made[name].b)
        all_made.append((experts, ExpertAdapters(made, froze_model=freeze)))
    if freeze:
        model.requires_grad_(False)
    for experts, its_adapters in all_made:
        experts.adapters = its_adapters
    return len(found)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """All adapters of a model, by the names of the adapted parameters.

    Raises:
        ConfigError: there are no adapters.
    """
    found: dict[str, Adapter] = {}
    for path, experts in _experts(model):
        if experts.adapters is not None:
            for name, one in experts.adapters.named_children():
                if isinstance(one, Adapter):
                    found[f"{path}.experts.{name}".removeprefix(".")] = one
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no adapters; put some there with expertmesh.lora.add"
        )
    return found


def merge(model: nn.Module) -> int:
    """Merge every adapter into its weights, and remove it; see `remove` for which parameters are trainable then.

    Quantised weights are widened, added to and rounded to their format again, which a warning compares with the change.

    Returns:
        Number of layers that had adapters.

    Raises:
        ConfigError: there are no adapters, or the model is sharded over ranks.
    """
    adapters(model)
    found = [(path, experts) for path, experts in _experts(model) if experts.adapters is not None]
    for path, experts in found:
        if type(experts.w_in.data) is not torch.Tensor:
            raise ConfigError(
                f"{path}: is spread over ranks; save the adapters, and merge them into the whole model"
            )
    for path, experts in found:
        _merge(path, experts)
    return remove(model)


def remove(model: nn.Module) -> int:
    """Remove all adapters without merging; if `add` froze the model, all its parameters are trainable then.

    Returns:
        Number of layers that had adapters.

    Raises:
        ConfigError: there are no adapters.
    """
    adapters(model)
    adapted = [experts for _, experts in _experts(model) if experts.adapters is not None]
    is_frozen = any(experts.adapters.froze_model for experts in adapted if experts.adapters)
    for experts in adapted:
        experts.adapters = None
    if is_frozen:
        model.requires_grad_(True)
    return len(adapted)


def _merge(path: str, experts: GroupedExperts) -> None:
    """Merge a layer's adapters; quantised weights are widened for it, a layer at a time."""
    form = FORMATS[experts.format]
    assert experts.adapters is not None
    own = {name: one for name, one in experts.adapters.named_children() if isinstance(one, Adapter)}
    if form.name == "dense":
        for name, adapter in own.items():
            adapter.add_to(getattr(experts, name))
        return
    group_size = form.unit(experts.weights().slices()[0])
    experts.convert("dense")
    before = {name: getattr(experts, name).detach().clone() for name in own}
    for name, adapter in own.items():
        adapter.add_to(getattr(experts, name))
    merged = {name: getattr(experts, name).detach() for name in own}
    experts.convert(form.name, group_size=group_size)
    one = experts.weights().slices()[0].unpacked(experts.dtype)
    after = {"w_in": one.w_in_EGFD, "w_out": one.w_out_EDF}
    for name, w in merged.items():
        change, error = (float((w - other[name]).norm() / w.norm()) for other in (before, after))
        _log.warning(
            f"{path or 'experts'}.{name}: adapters changed {change:.2g} of the weights' norm, rounding them to {form.name} again {error:.2g}"
        )


def _experts(model: nn.Module) -> Iterator[tuple[str, GroupedExperts]]:
    """Experts of every layer, by the layer's name."""
    check_module(model)
    return ((path, experts) for path, _, experts in grouped_layers(model))


def _check(
    found: dict[str, GroupedExperts], *, rank: int, alpha: float, targets: Sequence[str]
) -> None:
    if not found:
        raise ConfigError(
            "this model has no layer with grouped experts; give one with a MoELayer whose experts are not modules of your own"
        )
    _RANK.check("rank", rank)
    _ALPHA.check("alpha", alpha)
    is_list = isinstance(targets, Sequence) and all(isinstance(one, str) for one in targets)
    if (
        isinstance(targets, str)
        or not is_list
        or sorted(targets) not in (["w_in"], ["w_out"], ["w_in", "w_out"])
    ):
        raise ConfigError(
            f"targets={targets!r}: must be a list of {' or '.join(TARGETS)}, or both; name one or both"
        )
    for path, experts in found.items():
        if experts.adapters is not None:
            raise ConfigError(
                f"{path}: has adapters already; merge or remove them first (expertmesh.lora.merge, expertmesh.lora.remove)"
            )
        if experts.paging is not None:
            raise ConfigError(
                f"{path}: its experts are in slots, for inference; open it with all of them"
            )
        if experts.arithmetic.batch_invariant:
            raise ConfigError(
                f"{path}: batch_invariant=True with adapters: their products are ordinary ones; leave one out"
            )
        if type(experts.w_in.data) is not torch.Tensor:
            raise ConfigError(
                f"{path}: is spread over ranks already; add adapters first, then spread the model"
            )
