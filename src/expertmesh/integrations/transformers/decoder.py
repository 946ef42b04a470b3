"""Causal MoE models of transformers served by our engine: attention over its block tables, experts on our operators.

A model must use transformers' attention interface: each layer calls the registered attention function once with
queries, keys and values, and its mask is a sliding window or chunk of the causal mask. Both are detected when the model
is opened, by a few sequences whose logits must equal the model's own (`attention_check`). Models with other state
(Mamba, gated delta nets), or with other attention, are refused with the reason.
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
from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers.attention_check import (
    AttentionProbe,
    SeenTokens,
    cache_argument,
    compare_steps,
    own_logits,
)
from expertmesh.integrations.transformers.register import apply, is_experts, is_packed
from expertmesh.models.attention import AttentionContext
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.op_set import DEFAULT_OPS
from expertmesh.runs.precision import resolve_device
from expertmesh.text.format import TextFormat, hub_start, text_format
from expertmesh.text.tokenizer import load_tokenizer

ATTENTION = "expertmesh_pages"
"""Name of our attention in transformers' registries."""
_LENGTHS = ("max_position_embeddings", "max_seq_len")
"""Names in configurations of the maximum tokens of a sequence; transformers maps further ones to the first."""
_UNLIMITED = 4096
"""Number of positions that are checked of a model without a maximum."""


@dataclass(frozen=True)
class _Layers:
    """Expert options that the engine reads."""

    dropless_factor: float = math.inf
    max_capacity_factor: float | None = None
    router: str = "topk"


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a model, by the names that the engine reads."""

    vocab_size: int  # rows of the embedding
    max_seq_len: int  # maximum sequence length
    num_layers: int  # number of attention layers
    cache_heads: int  # number of key heads
    cache_size: int  # size of a key head
    experts: tuple[int, ...]  # number of experts of each layer that our operators compute
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

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("models/granite-3.0-1b-a400m-base")
        >>> engine = em.Engine(TransformersDecoder(model))
    """

    def __init__(
        self,
        model: Any,  # a loaded model; it is set to evaluation mode, and its attention and experts are switched to ours
        *,
        end_ids: tuple[int, ...] = (),  # end-of-text tokens
        start_ids: tuple[int, ...] | None = None,  # tokens before a prompt; None: the tokenizer's
        max_len: int | None = None,  # maximum tokens of a sequence; None: the model's
    ) -> None:
        super().__init__()
        register_attention()
        name = type(model).__name__
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise ConfigError(
                f"{name}: is no model of transformers; give one of AutoModelForCausalLM, or a folder to em.Engine"
            )
        _refuse_other_state(model)
        self.inner = model.eval()
        self._cache_argument = cache_argument(model)
        self.end_ids, self.start_ids = end_ids, start_ids
        longest = _longest(name, model.config.get_text_config(), max_len)
        with torch.no_grad(), _refusing(name):
            own = own_logits(model, longest or _UNLIMITED)
        if any(is_experts(m) or is_packed(m) for m in model.modules()):
            apply(model)  # other experts (Llama 4) and dense layers are not switched
        model.set_attn_implementation(ATTENTION)
        self._experts = [m for m in model.modules() if is_experts(m)]
        with torch.no_grad(), _refusing(name):
            probe = compare_steps(name, own, self._step)
        self.rules = probe.rules(name)
        heads, size = probe.shape(name)
        if longest is None:
            raise ConfigError(f"{name}: config.json names no most tokens of a sequence; give max_len")
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
        ids_T: Tensor,  # (T,) int64 flat tokens of any sequences
        *,
        context: AttentionContext,  # attention context with their block tables
        logit_rows_R: Tensor,  # (R,) int64 indices of the tokens that get logits
        capacity_factor: float | None = None,  # no effect: transformers' models are dropless
        losses: bool = False,  # no effect
    ) -> _Output:
        """Logits of selected tokens of a step.

        Returns:
            Logits (R, V), and the chosen experts of every layer that our operators compute.
        """
        chosen: list[_Choices] = []
        pages = _Pages(context, self.rules)
        with _noting(self._experts, chosen):
            logits_RV = self._step(ids_T, context.positions, logit_rows_R, pages)
        return _Output(logits_RV, tuple(chosen))

    def _step(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, pages: "_Pages | AttentionProbe") -> Tensor:
        """(R, V) logits of the model's forward pass with our attention."""
        logits_1RV: Tensor = self.inner(
            input_ids=ids_T[None],
            attention_mask=torch.ones_like(ids_T[None]),
            position_ids=positions_T[None],
            use_cache=False,
            logits_to_keep=rows_R,
            pages=pages,
            **{self._cache_argument: SeenTokens.of(positions_T)},
        ).logits
        return logits_1RV[0]


class _Pages(NamedTuple):
    """Argument passed through the model to our attention: the step's context, and the score rule of each layer."""

    context: AttentionContext
    rules: tuple[ScoreRule, ...]


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
            f"{type(module).__name__}: was not handed the pages of the step; its model does not pass arguments on to "
            "attention"
        )
    layer, (H, T, d), values = module.layer_idx, query.shape[1:], value.shape[-1]
    scale = d**-0.5 if scaling is None else scaling
    # contiguous and of the queries' type, as transformers' own functions answer: models take views of it
    if isinstance(pages, AttentionProbe):
        y = pages.attend(
            layer,
            query * (scale * d**0.5),
            key,
            value,
            mask=getattr(attention_mask, "function", None),
            window=sliding_window,
            rule=ScoreRule(softcap=softcap, sinks_H=s_aux),
        )
        return y.transpose(1, 2).contiguous(), None
    size = max(d, values)
    q_THd, k_Thd, v_Thd = (
        nn.functional.pad(t[0].transpose(0, 1), (0, size - t.shape[-1]))
        for t in (query * (scale * size**0.5), key, value)
    )
    rule = pages.rules[layer]
    if softcap is not None or s_aux is not None:
        rule = replace(rule, softcap=softcap, sinks_H=s_aux)
    y = pages.context.attend(layer, q_THd, k_Thd, v_Thd, arithmetic=DEFAULT_OPS, rule=rule)
    return y.view(1, T, H, size)[..., :values].contiguous(), None


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
            f"{type(model).__name__}: has layers of {other[0]}, whose state is no keys and values; the engine serves "
            "attention only"
        )
    if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__}: keeps other state than keys and values; the engine serves attention only"
        )


def _longest(name: str, config: Any, max_len: int | None) -> int | None:
    """Maximum tokens of a sequence; None: the model has none, and none is given."""
    known = [getattr(config, option, None) for option in _LENGTHS]
    own: int | None = next((n for n in known if isinstance(n, int) and n > 0), None)
    if max_len is not None:
        fix = "give a number of tokens, or leave it out"
        Number(1, fix=fix, types=WHOLE).check("max_len", max_len)
    if max_len is not None and own is not None and max_len > own:
        raise ConfigError(
            "max_len",
            max_len,
            f"must be at most the model's max_position_embeddings={own}",
            "lower it, or leave it out",
        )
    longest = own if max_len is None else max_len
    if longest is None:
        return None
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(one for one in given.values() if isinstance(one, Mapping))):
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        original = rope.get("original_max_position_embeddings", own or longest)
        if longest > original:
            raise ConfigError(
                f"{name}: rope_type=longrope with sequences of {longest} tokens; transformers picks the factors of a "
                f"whole step by its last position, and neighbours would change an answer; give max_len={original}, or "
                "use another model"
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
            f"{name}: cannot be run over pages ({str(error).splitlines()[0][:120]}); use a model that keeps to "
            "transformers' attention interface"
        ) from error


def open_decoder(
    folder: str | Path,  # folder with config.json, safetensors files and tokenizer.json
    *,
    device: str | None,  # auto, cpu, cuda or cuda:N; None: auto
    dtype: torch.dtype | None,  # dtype of the weights; None: the files'
    max_len: int | None = None,  # maximum tokens of a sequence; None: the model's
) -> tuple[TransformersDecoder, TextFormat]:
    """Open a folder saved by transformers with transformers' own class; nothing is downloaded, and no code of the
    folder runs."""
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
