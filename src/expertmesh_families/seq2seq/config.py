"""Options of an encoder-decoder, and the complete configuration of its training on parallel text."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError, expanded
from expertmesh.config.fields import Spelling
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import Activation
from expertmesh.config.run import RunConfig, check_encoding
from expertmesh.errors import ConfigError, named

_BYTES_AND_MARKS = 258
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(_[A-Za-z0-9]+)*")
"""Code of a language, which is the ending of its files: en, zh_Hans_CN. A dash is not part of a code, because it joins
pairs."""

_OF_TRAINING = ("dropout", "label_smoothing")
_OF_LENGTH = ("max_source_len", "max_seq_len")
"""Options of the model that its weights do not fix; lengths only if positions are rotary."""


def begun_with(config: "Seq2SeqRunConfig", other: "Seq2SeqRunConfig") -> "Seq2SeqRunConfig":
    """The configuration with the model and the tokenizer of the run in train.init_from, but its own lengths and
    dropout."""
    where = expanded(config.train.init_from or ".")
    given, its_own = config.data.encode_with, str(where / "tokenizer.json")
    if given is not None and expanded(given).resolve() != Path(its_own).resolve():
        raise ConfigError(
            "data.encode_with",
            given,
            f"{named('train.init_from', where)} brings the tokenizer that its weights know",
            "leave it out",
        )
    own = _OF_TRAINING + (_OF_LENGTH if other.model.positions == "rotary" else ())
    model = other.model.model_dump() | {name: getattr(config.model, name) for name in own}
    return config.updated({"model": model, "data.encode_with": its_own})


class Seq2SeqConfig(Config):
    """An encoder-decoder: RMSNorm, rotary positions, a deep encoder, a shallow decoder, MoE in every n-th layer of
    both."""

    vocab_size: int = Field(default=8192, gt=0)
    """Vocabulary size (V), shared by all languages."""
    max_source_len: int = Field(default=128, gt=2)
    """Maximum source length in tokens, two special tokens included."""
    max_seq_len: int = Field(default=128, gt=1)
    """Maximum target length in tokens, one special token included."""
    dim: int = Field(default=256, gt=0)
    """Model width (D)."""
    num_encoder_layers: int = Field(default=4, gt=0)
    """Layers of the encoder, which reads the source."""
    num_decoder_layers: int = Field(default=2, gt=0)
    """Layers of the decoder, which generates the target."""
    num_heads: int = Field(default=4, gt=0)
    """Number of attention heads (H)."""
    ffn_hidden_dim: int = Field(default=1024, gt=0)
    """Hidden size of the dense feed-forward layers, and of the residual MLP of a residual MoE layer."""
    activation: Activation = "relu"
    """Activation of experts and dense feed-forward layers."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout rate of the embeddings and of each layer's outputs."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Label smoothing: probability mass spread over all tokens."""
    tie_embeddings: bool = True
    """Whether both embeddings and the output projection share a matrix."""
    positions: Literal["rotary", "untied"] = "rotary"
    """Position encoding: relative (rotary, RoPE), or absolute with separate projections, added to the attention logits
    (untied, TUPE)."""
    rope_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary (relative) position embedding of self-attention."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    moe_every: int = Field(default=2, gt=0)
    """Interval of MoE layers in encoder and decoder (1: all layers; 2: layers 1, 3, 5, ..., counted from 0)."""
    moe: MoEConfig = MoEConfig(top_k=1, hidden_dim=1024)
    """The mixture-of-experts layers."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values of target tokens: the decoder's."""
        return self.num_decoder_layers

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as heads."""
        return self.num_heads

    @property
    def is_latent(self) -> bool:
        """Whether a cache stores one vector per token, which is key and value: never."""
        return False

    @property
    def cache_heads(self) -> int:
        """Key heads per token in a cache."""
        return self.kv_heads

    @property
    def cache_size(self) -> int:
        """Size of a key head in a cache."""
        return self.head_size

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.dim // self.num_heads

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts on both sides; 0 for a dense model."""
        if not self.moe.num_experts:
            return 0
        return self.num_encoder_layers // self.moe_every + self.num_decoder_layers // self.moe_every

    def experts_per_layer(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Number of experts of every layer of the encoder and of the decoder; 0 where the feed-forward is dense."""
        counts = self.moe.num_experts
        if len(counts) == 1:
            counts = counts * self.num_moe_layers
        left = list(counts)
        sides = []
        for num_layers in (self.num_encoder_layers, self.num_decoder_layers):
            is_moe = [i % self.moe_every == self.moe_every - 1 for i in range(num_layers)]
            sides.append(tuple(left.pop(0) if here and left else 0 for here in is_moe))
        return sides[0], sides[1]

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            self.dim % (2 * self.num_heads) == 0,
            "num_heads",
            f"must divide dim, {self.dim}, into heads of an even size",
            "choose a divisor of dim / 2",
        )
        self.require(
            self.vocab_size >= _BYTES_AND_MARKS,
            "vocab_size",
            f"must be at least {_BYTES_AND_MARKS}: the 256 bytes, the end of a text and the mask",
            "raise it",
        )
        if self.positions == "untied":
            self.refuse_idle("rope_base", "has no effect with positions=untied", "leave it out")
        given = len(self.moe.num_experts)
        self.require(
            not given or self.num_moe_layers,
            "moe_every",
            f"must be at most the larger number of layers, {max(self.num_encoder_layers, self.num_decoder_layers)}",
            "lower it, or give no moe.num_experts for a dense model",
        )
        self.require(
            given in (0, 1, self.num_moe_layers),
            "moe.num_experts",
            f"must have one entry, or one per MoE layer ({self.num_moe_layers}, the encoder's first), has {given}",
            "add or remove entries",
        )
        return self


class ParallelTextConfig(Config):
    """Parallel text in several languages, and the tasks that are learned from it."""

    path: Annotated[tuple[str, ...], Spelling("PATH")] = ()
    """Folders with a file per split and language, SPLIT.LANG, also .gz or .zst; lines of the same number are
    translations (blank: missing)."""
    encoding: Annotated[str | None, Spelling("NAME")] = None
    """Text encoding by its Python name (latin-1, cp1252, utf-16-le); a byte-order mark takes precedence; none:
    UTF-8."""
    languages: Annotated[tuple[str, ...], Spelling("LANG")] = ()
    """Languages to use; none: all that the folders have."""
    pairs: Annotated[tuple[str, ...], Spelling("FROM-TO")] = ()
    """Directions to learn, such as en-de; none: from every language to every other."""
    without_pairs: Annotated[tuple[str, ...], Spelling("FROM-TO")] = ()
    """Zero-shot directions: evaluated, but not trained."""
    train_split: Annotated[str, Spelling("NAME")] = "train"
    """Name of the files to train on."""
    validation_split: Annotated[str, Spelling("NAME")] = "val"
    """Name of the files to evaluate on."""
    temperature: float = Field(default=1.0, ge=1)
    """Sampling temperature of directions: probability proportional to (number of examples)^(1 / temperature)."""
    denoising: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the samples that denoise text of one language instead of translating."""
    noise_fraction: float = Field(default=0.35, gt=0, lt=1)
    """Fraction of tokens that are masked in denoising."""
    mean_span: float = Field(default=3.0, ge=1, le=500)
    """Mean length of a masked span in tokens (Poisson); a span is replaced by one mask token."""
    permute_sentences: bool = True
    """Whether denoising also shuffles sentences."""
    neighbours: int = Field(default=64, gt=0)
    """Number of consecutive samples of similar length, which reduces padding; best equal to the batch size."""
    encode_with: Annotated[str | None, Spelling("FILE")] = None
    """tokenizer.json of a run, with its vocabulary and languages; set by train.init_from; none: a tokenizer is trained
    on the text."""
    cache_dir: Annotated[str | None, Spelling("DIR")] = None
    """Folder for tokenizers and tokens; none: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_encoding("encoding", self.encoding)
        self.require_once("path", "languages", "pairs", "without_pairs")
        for code in self.languages:
            if LANGUAGE.fullmatch(code) is None:
                raise FieldError(
                    "languages",
                    code,
                    "must be codes as en, de, zh_Hans",
                    "use the endings of the files, renamed if need be",
                )
        for name in ("pairs", "without_pairs"):
            for pair in getattr(self, name):
                codes = pair.split("-")
                if len(codes) != 2 or codes[0] == codes[1] or not all(map(LANGUAGE.fullmatch, codes)):
                    raise FieldError(
                        name,
                        pair,
                        "must be two different languages with a dash between",
                        "write it as en-de",
                    )
        if not self.denoising:
            for name in ("noise_fraction", "mean_span", "permute_sentences"):
                fix = f"leave it out, or give {named('data.denoising')}"
                self.refuse_idle(name, "has no effect without denoising", fix)
        return self


class Seq2SeqRunConfig(RunConfig):
    """Complete configuration of a training run of an encoder-decoder."""

    family: str = "seq2seq"
    """Family of the model: seq2seq, or module:name of your own."""
    model: Seq2SeqConfig = Seq2SeqConfig()
    data: ParallelTextConfig = ParallelTextConfig()
