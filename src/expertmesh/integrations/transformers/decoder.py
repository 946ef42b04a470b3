"""Any causal mixture of transformers as a model that our engine serves: its attention over pages, its experts by ours.

A model is served that keeps to transformers' attention interface: each layer calls the registered function once with queries,
keys and values, and its mask is a window or a chunk of the causal order. Both are found out when the model is opened, by
a pass of a few tokens, which also has to give the logits that the model gives by itself. What has other state (Mamba, gated
delta nets), or attends otherwise, is refused by name.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.config.base import expanded
from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers.register import apply, is_experts, is_packed
from expertmesh.models.attention import AttentionContext
from expertmesh.ops.attention import query_blocks
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.op_set import DEFAULT_OPS
from expertmesh.runs.precision import resolve_device
from expertmesh.text.format import TextFormat, hub_start, text_format
from expertmesh.text.tokenizer import load_tokenizer

ATTENTION = "expertmesh_pages"
"""The name of our attention in transformers' registries."""
_PROBE = 12
"""Tokens of the pass that tells how a model attends."""
_FAR = 1 << 20
"""A position for which masks are asked what it sees."""


@dataclass(frozen=True)
class _Layers:
    """What the engine asks of the experts' options."""

    dropless_factor: float = math.inf
    max_capacity_factor: float | None = None
    router: str = "topk"


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a model, by the names that the engine reads.

    Attributes:
        vocab_size: rows of the embedding.
        max_seq_len: longest sequence.
        num_layers: layers that attend.
        cache_heads: heads of keys.
        cache_size: size of one.
        experts: of each layer with experts that ours compute.
    """

    vocab_size: int
    max_seq_len: int
    num_layers: int
    cache_heads: int
    cache_size: int
    experts: tuple[int, ...]
    is_latent: bool = False
    batch_invariant: bool = False
    moe: _Layers = field(default_factory=_Layers)

    @property
    def cache_numbers(self) -> int:
        """Numbers that a cache keeps per token and layer."""
        return 2 * self.cache_heads * self.cache_size

    def experts_per_layer(self) -> tuple[int, ...]:
        """Experts of the layers that have some."""
        return self.experts


class _Choices(NamedTuple):
    """What a layer's experts were asked to do."""

    topk_expert_ids_TK: Tensor


class _Output(NamedTuple):
    logits_BSV: Tensor
    stats: tuple[_Choices, ...]


class TransformersDecoder(nn.Module):
    """A causal model of transformers with the face of our GPT, as far as the engine looks.

    Args:
        model: a loaded model; it is put into evaluation mode, its attention and experts are switched to ours.
        end_ids: tokens that end a text.
        start_ids: tokens put before a prompt; None: those that the tokenizer puts there.

    Raises:
        ConfigError: the model cannot be served; names why.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("models/granite-3.0-1b-a400m-base")
        >>> engine = em.Engine(TransformersDecoder(model))
    """

    def __init__(
        self, model: Any, *, end_ids: tuple[int, ...] = (), start_ids: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        register_attention()
        name = type(model).__name__
        _refuse_other_state(model)
        self.inner = model.eval()
        self.end_ids, self.start_ids = end_ids, start_ids
        text = model.config.get_text_config()
        ids = torch.arange(_PROBE, device=model.device)[None] % text.vocab_size
        with torch.no_grad(), _refusing(name):
            expected = model(input_ids=ids, use_cache=False).logits
        if any(is_experts(m) or is_packed(m) for m in model.modules()):
            apply(model)  # others, as Llama 4 has them, and dense layers compute as they do
        model.set_attn_implementation(ATTENTION)
        self._experts = [m for m in model.modules() if is_experts(m)]
        probe = _Probe(ids[0])
        with torch.no_grad(), _refusing(name):
            found = model(
                input_ids=ids, position_ids=probe.positions[None], use_cache=False, pages=probe
            )
        self.rules = probe.rules(name)
        heads, size = probe.shape(name)
        error = (found.logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        if not error <= 0.05:  # types of few digits are as far apart by rounding
            raise ConfigError(
                f"{name}: its logits over our attention are off by {error:.1e} of the largest; it does not keep to transformers' "
                "attention interface; use a model that does"
            )
        self.config = DecoderShape(
            vocab_size=model.get_input_embeddings().num_embeddings,
            max_seq_len=text.max_position_embeddings,
            num_layers=len(self.rules),
            cache_heads=heads,
            cache_size=size,
            experts=tuple(int(one.num_experts) for one in self._experts),
        )
        self.eval()

    @property
    def embedding(self) -> nn.Module:
        """Its input embedding, whose type the cache has."""
        found: nn.Module = self.inner.get_input_embeddings()
        return found

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a sequence."""
        return self.config.max_seq_len

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""
        found: torch.device = self.inner.device
        return found

    def forward(
        self,
        ids_T: Tensor,
        *,
        context: AttentionContext,
        logit_rows_R: Tensor,
        capacity_factor: float | None = None,
        losses: bool = False,
    ) -> _Output:
        """Logits of some of the tokens of a step.

        Args:
            ids_T: (T,) int64 flat tokens of any sequences.
            context: their pages.
            logit_rows_R: (R,) int64 which of them get logits.
            capacity_factor: has no effect: transformers' models drop nothing.
            losses: has no effect.

        Returns:
            Logits (R, V), and the experts of every layer that ours compute.
        """
        chosen: list[_Choices] = []
        with _noting(self._experts, chosen):
            output = self.inner(
                input_ids=ids_T[None],
                position_ids=context.positions[None],
                use_cache=False,
                logits_to_keep=logit_rows_R,
                pages=_Pages(context, self.rules),
            )
        return _Output(output.logits[0], tuple(chosen))


class _Pages(NamedTuple):
    """What our attention is handed down the model: the step's pages, and how each layer looks at them."""

    context: AttentionContext
    rules: tuple[ScoreRule, ...]


@dataclass
class _Probe:
    """Takes the place of pages in the first pass, and notes how each layer attends."""

    ids_T: Tensor
    masks: dict[int, Callable[..., Tensor] | None] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: int = 0

    @property
    def positions(self) -> Tensor:
        """(T,) 0, 1, 2, ..."""
        return torch.arange(len(self.ids_T), device=self.ids_T.device)

    def rules(self, name: str) -> tuple[ScoreRule, ...]:
        """The window or chunk of each layer.

        Raises:
            ConfigError: a layer attends twice or not at all, or its mask is neither.
        """
        places = sorted(self.masks)
        if places != list(range(len(places))) or not places or self.calls != len(places):
            raise ConfigError(
                f"{name}: {self.calls} calls of attention by layers {places}; each layer must attend once; use a model that does"
            )
        return tuple(_rule_of(name, i, self.masks[i], self.windows[i]) for i in places)

    def shape(self, name: str) -> tuple[int, int]:
        """(heads of keys, largest size of one).

        Raises:
            ConfigError: layers differ.
        """
        shapes = set(self.shapes.values())
        if len(shapes) != 1:
            raise ConfigError(
                f"{name}: its layers have keys of different shapes {sorted(shapes)}; the engine has one cache for all; use another model"
            )
        heads, size, values = next(iter(shapes))
        return heads, max(size, values)


def _rule_of(
    name: str, layer: int, mask: Callable[..., Tensor] | None, window: int | None
) -> ScoreRule:
    """What a mask function says of a few far positions: everything before, a window, or chunks."""
    if mask is None:
        return ScoreRule(window=window)
    zero = torch.tensor(0)

    def first_seen(position: int) -> int:
        keys = torch.arange(position + 2)
        seen = mask(zero, zero, torch.tensor(position), keys).expand(position + 2)
        places = seen.nonzero()[:, 0]
        first = int(places[0])
        if len(places) != position + 1 - first:
            raise ConfigError(
                f"{name}: layer {layer} sees other keys than the last ones before a token; use a model with windows or chunks"
            )
        return first

    queries = [_FAR, _FAR - 7, _FAR - 12345, _FAR // 3]
    firsts = [first_seen(query) for query in queries]
    if not any(firsts):
        return ScoreRule(window=window)
    sizes = {query - first + 1 for query, first in zip(queries, firsts, strict=True)}
    if len(sizes) == 1:
        return ScoreRule(window=sizes.pop())
    chunk = math.gcd(*firsts)
    if all(query // chunk * chunk == first for query, first in zip(queries, firsts, strict=True)):
        return ScoreRule(chunk=chunk)
    raise ConfigError(
        f"{name}: layer {layer} has a mask that is neither a window nor a chunk; use another model"
    )


def register_attention() -> None:
    """Add our attention, and masks that are made where pages are known, to transformers' registries; again is no mistake."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


@dataclass(frozen=True)
class _MaskOf:
    """Stands for a mask: what decides which keys a query sees."""

    function: Callable[..., Tensor]


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> _MaskOf:
    return _MaskOf(mask_function)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pages: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: (1, H, T, d) queries and (1, h, T, d) keys -> (1, T, H, size of a value)."""
    if pages is None:
        raise ConfigError(
            f"{type(module).__name__}: was not handed the pages of the step; its model does not pass arguments on to attention"
        )
    layer, (H, T, d), values = module.layer_idx, query.shape[1:], value.shape[-1]
    q_THd, k_Thd, v_Thd = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = d**-0.5 if scaling is None else scaling
    if isinstance(pages, _Probe):
        pages.calls += 1
        pages.masks[layer] = getattr(attention_mask, "function", None)
        pages.windows[layer] = sliding_window
        pages.shapes[layer] = (key.shape[1], d, values)
        mask = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
        at = torch.arange(T, device=query.device)
        if pages.masks[layer] is not None:
            zero = torch.zeros((), dtype=torch.int64, device=query.device)
            mask = pages.masks[layer](zero, zero, at[:, None], at)  # type: ignore[misc]
        elif sliding_window is not None:
            mask = mask & (at > at[:, None] - sliding_window)
        rule = ScoreRule(softcap=softcap, sinks_H=s_aux)
        q = query * (scale * d**0.5)
        seen = Visible(T, is_causal=False, mask=mask.expand(1, 1, T, T))
        y = query_blocks.attention(q, key, value, seen, rule)
        return y.transpose(1, 2), None
    size = max(d, values)
    q_THd = q_THd * (scale * size**0.5)
    q_THd, k_Thd, v_Thd = (
        nn.functional.pad(t, (0, size - t.shape[-1])) for t in (q_THd, k_Thd, v_Thd)
    )
    rule = pages.rules[layer]
    if softcap is not None or s_aux is not None:
        rule = replace(rule, softcap=softcap, sinks_H=s_aux)
    y = pages.context.attend(layer, q_THd, k_Thd, v_Thd, arithmetic=DEFAULT_OPS, rule=rule)
    return y.view(1, T, H, size)[..., :values], None


@contextmanager
def _noting(experts: list[Any], chosen: list[_Choices]) -> Iterator[None]:
    """Note the expert ids of every call."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
        chosen.append(_Choices(ids))

    handles = [one.register_forward_pre_hook(note, with_kwargs=True) for one in experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_other_state(model: Any) -> None:
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())}
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    if other := sorted(kinds - known):
        raise ConfigError(
            f"{type(model).__name__}: has layers of {other[0]}, whose state is no keys and values; the engine serves attention only"
        )
    if getattr(model, "_is_stateful", False) or config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__}: keeps other state than keys and values; the engine serves attention only"
        )


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Whatever a strange model raises in the first pass becomes one line."""
    try:
        yield
    except (TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name}: cannot be run over pages ({str(error).splitlines()[0][:120]}); use a model that keeps to transformers' "
            "attention interface"
        ) from error


def open_decoder(
    folder: str | Path, *, device: str | None, dtype: torch.dtype | None
) -> tuple[TransformersDecoder, TextFormat]:
    """A folder as transformers saves it, opened by transformers' own class; nothing is downloaded and no code of the folder runs.

    Args:
        folder: with config.json, safetensors files and tokenizer.json.
        device: auto, cpu, cuda or cuda:N; None: auto.
        dtype: of the weights; None: that of the files.

    Raises:
        ConfigError: there is no such folder, transformers does not know the architecture, or the model cannot be served.
        CheckpointError: the tokenizer is missing or damaged.
    """
    path = expanded(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{folder}: has no config.json; give a folder as transformers saves one")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{folder}: transformers cannot open it ({str(error).splitlines()[0][:160]}); see what it needs"
        ) from error
    model.to(resolve_device(device or "auto"))
    ends = model.generation_config.eos_token_id
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    tokenizer = load_tokenizer(path / "tokenizer.json")
    decoder = TransformersDecoder(model, end_ids=ends, start_ids=hub_start(path))
    return decoder, text_format(tokenizer, path / "tokenizer.json", model=decoder)
