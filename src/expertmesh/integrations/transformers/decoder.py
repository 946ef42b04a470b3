"""Causal MoE models of transformers served by our engine: attention over its block tables, experts on our operators.

A model must use transformers' attention interface: each layer calls the registered attention function once with
queries, keys and values, and its mask is a sliding window or chunk of the causal mask. Both are detected when the model
is opened, by a forward pass of a few tokens whose logits must equal the model's own. Models with other state (Mamba,
gated delta nets), or with other attention, are refused with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping
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
"""Name of our attention in transformers' registries."""
_PROBE = 12
"""Number of tokens of the detecting pass."""
_FAR = 1 << 20
"""Position at which mask functions are evaluated."""


@dataclass(frozen=True)
class _Layers:
    """Expert options that the engine reads."""

    dropless_factor: float = math.inf
    max_capacity_factor: float | None = None
    router: str = "topk"


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a model, by the names that the engine reads.

    Attributes:
        vocab_size: rows of the embedding.
        max_seq_len: maximum sequence length.
        num_layers: number of attention layers.
        cache_heads: number of key heads.
        cache_size: size of a key head.
        experts: number of experts of each layer that our operators compute.
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
        """Elements of the KV cache per token and layer."""
        return 2 * self.cache_heads * self.cache_size

    def experts_per_layer(self) -> tuple[int, ...]:
        """Number of experts of each MoE layer."""
        return self.experts


class _Choices(NamedTuple):
    """Experts chosen in a layer."""

    topk_expert_ids_TK: Tensor


class _Output(NamedTuple):
    logits_BSV: Tensor
    stats: tuple[_Choices, ...]


class TransformersDecoder(nn.Module):
    """Causal model of transformers with the part of our GPT's interface that the engine uses.

    Args:
        model: a loaded model; it is set to evaluation mode, and its attention and experts are switched to ours.
        end_ids: end-of-text tokens.
        start_ids: tokens before a prompt; None: the tokenizer's.
        max_len: maximum tokens of a sequence; None: the model's.

    Raises:
        ConfigError: the model cannot be served, with the reason.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("models/granite-3.0-1b-a400m-base")
        >>> engine = em.Engine(TransformersDecoder(model))
    """

    def __init__(
        self,
        model: Any,
        *,
        end_ids: tuple[int, ...] = (),
        start_ids: tuple[int, ...] | None = None,
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        register_attention()
        name = type(model).__name__
        _refuse_other_state(model)
        self.inner = model.eval()
        self.end_ids, self.start_ids = end_ids, start_ids
        text = model.config.get_text_config()
        longest = _longest(name, text, max_len)
        ids = torch.arange(_PROBE, device=model.device)[None] % text.vocab_size
        with torch.no_grad(), _refusing(name):
            expected = model(input_ids=ids, use_cache=False).logits
        if any(is_experts(m) or is_packed(m) for m in model.modules()):
            apply(model)  # other experts (Llama 4) and dense layers are not switched
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
        if not error <= 0.05:  # low-precision dtypes differ this much by rounding
            raise ConfigError(
                f"{name}: its logits over our attention are off by {error:.1e} of the largest; it does not keep to transformers' "
                "attention interface; use a model that does"
            )
        self.config = DecoderShape(
            vocab_size=model.get_input_embeddings().num_embeddings,
            max_seq_len=longest,
            num_layers=len(self.rules),
            cache_heads=heads,
            cache_size=size,
            experts=tuple(int(one.num_experts) for one in self._experts),
        )
        self.eval()

    @property
    def embedding(self) -> nn.Module:
        """Input embedding; the KV cache has its dtype."""
        found: nn.Module = self.inner.get_input_embeddings()
        return found

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.config.max_seq_len

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
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
        """Logits of selected tokens of a step.

        Args:
            ids_T: (T,) int64 flat tokens of any sequences.
            context: attention context with their block tables.
            logit_rows_R: (R,) int64 indices of the tokens that get logits.
            capacity_factor: no effect: transformers' models are dropless.
            losses: no effect.

        Returns:
            Logits (R, V), and the chosen experts of every layer that our operators compute.
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
    """Argument passed through the model to our attention: the step's context, and the score rule of each layer."""

    context: AttentionContext
    rules: tuple[ScoreRule, ...]


@dataclass
class _Probe:
    """Argument passed instead of `_Pages` in the detecting pass; records how each layer attends."""

    ids_T: Tensor
    masks: dict[int, Callable[..., Tensor] | None] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: int = 0

    @property
    def positions(self) -> Tensor:
        """(T,) positions 0, 1, 2, ..."""
        return torch.arange(len(self.ids_T), device=self.ids_T.device)

    def rules(self, name: str) -> tuple[ScoreRule, ...]:
        """Window or chunk of each layer.

        Raises:
            ConfigError: a layer attends twice or never, or its mask is neither a window nor a chunk.
        """
        places = sorted(self.masks)
        if places != list(range(len(places))) or not places or self.calls != len(places):
            raise ConfigError(
                f"{name}: {self.calls} calls of attention by layers {places}; each layer must attend once; use a model that does"
            )
        return tuple(_rule_of(name, i, self.masks[i], self.windows[i]) for i in places)

    def shape(self, name: str) -> tuple[int, int]:
        """Number of key heads, and the largest size of a key or value head.

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
    """Score rule (full, window, or chunks) of a mask function, from its values at a few far positions."""
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
    """Register our attention, and a mask function for it, with transformers; repeated calls are allowed."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


@dataclass(frozen=True)
class _MaskOf:
    """Mask function in the place of a mask."""

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
    """Attention function for transformers: (1, H, T, d) queries and (1, h, T, d) keys -> (1, T, H, size of a value)."""
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
    """Context that records the expert ids of every call."""

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


def _longest(name: str, config: Any, max_len: int | None) -> int:
    """Maximum tokens of a sequence; ConfigError if rotary positions of one would depend on what else is in a step."""
    longest: int = config.max_position_embeddings
    if max_len is not None and max_len > longest:
        raise ConfigError(
            "max_len",
            max_len,
            f"must be at most the model's max_position_embeddings={longest}",
            "lower it, or leave it out",
        )
    longest = longest if max_len is None else max_len
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(one for one in given.values() if isinstance(one, Mapping))):
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if longest > original:
            raise ConfigError(
                f"{name}: rope_type=longrope with sequences of {longest} tokens; transformers picks the factors of a whole step by its "
                f"last position, and neighbours would change an answer; give max_len={original}, or use another model"
            )
    return longest


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Context that turns errors of an unsupported model in the detecting pass into ConfigError."""
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
    folder: str | Path,
    *,
    device: str | None,
    dtype: torch.dtype | None,
    max_len: int | None = None,
) -> tuple[TransformersDecoder, TextFormat]:
    """Open a folder saved by transformers with transformers' own class; nothing is downloaded, and no code of the
    folder runs.

    Args:
        folder: folder with config.json, safetensors files and tokenizer.json.
        device: auto, cpu, cuda or cuda:N; None: auto.
        dtype: dtype of the weights; None: the files'.
        max_len: maximum tokens of a sequence; None: the model's.

    Raises:
        ConfigError: the folder does not exist, transformers does not know the architecture, or the model cannot be
            served.
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
    decoder = TransformersDecoder(model, end_ids=ends, start_ids=hub_start(path), max_len=max_len)
    return decoder, text_format(tokenizer, path / "tokenizer.json", model=decoder)
