"""Other numbers of tokens for a language model: rows are added to its embedding and output projection, or taken away."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from expertmesh.config.base import shown
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import LanguageModel
from expertmesh.moe.init import draw_seed, init_normal_
from expertmesh.ops.dtypes import accumulate_dtype


def add_tokens(
    model: nn.Module, tokenizer: Tokenizer, tokens: Sequence[str], *, special: bool = False
) -> int:
    """Add tokens to a tokenizer, and rows to its model where it has too few; nothing is changed where this is refused.

    New rows are the mean of the others: a new token is first about as likely as a token is on average (Hewitt 2021). Build the optimiser
    afterwards, and spread the model afterwards; every rank that has the whole embedding calls.

    Args:
        model: a GPT or an encoder-decoder of ours, tied or not; `ExpertMeshForCausalLM` has `resize_token_embeddings`.
        tokenizer: of the model; gets the tokens, with the ids behind its own.
        tokens: texts; those that the tokenizer has already are left out.
        special: marks, which a text that quotes them does not become, and which no text shows; else a text that holds one becomes it.

    Returns:
        How many were new.

    Raises:
        ConfigError: a token is no text or empty, or the model is no language model, spread over ranks, or wrapped.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> em.add_tokens(model, tokenizer, ["<think>", "</think>"])
        2
        >>> model.config.vocab_size >= tokenizer.get_vocab_size()
        True
    """
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}; it must be a tokenizers.Tokenizer; give that of expertmesh.load()"
        )
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise ConfigError(
            f"tokens is a {type(tokens).__name__}; it must be a list of texts; give [...]"
        )
    for token in tokens:
        if not isinstance(token, str) or not token.strip():
            raise ConfigError(f"tokens: {shown(token)} is no text, or empty; leave it out")
    new = [token for token in dict.fromkeys(tokens) if tokenizer.token_to_id(token) is None]
    found = _resizable(model)
    size = tokenizer.get_vocab_size() + len(new)
    if size > found.vocab_size:
        resize_vocabulary(found, size)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in new])
    return len(new)


def resize_vocabulary(model: nn.Module, vocab_size: int, *, from_mean: bool = True) -> None:
    """Give a language model another number of tokens, in place, in its configuration as well; nothing is changed where it is refused.

    Args:
        model: a GPT or an encoder-decoder of ours, whole, on any device.
        vocab_size: V; rows are added at the end, or taken from there.
        from_mean: new rows are the mean of the old ones; else they are N(0, init_std^2).

    Raises:
        ConfigError: the size breaks a rule, or the model is no language model, spread over ranks, or wrapped.
    """
    found = _resizable(model)
    is_whole = isinstance(vocab_size, int) and not isinstance(vocab_size, bool)
    if not is_whole or vocab_size < 1:
        raise ConfigError(f"vocab_size={vocab_size!r}: must be whole and at least 1; give a number")
    if vocab_size == found.vocab_size:
        return
    config = found.config.updated({"vocab_size": vocab_size})
    seed = 0 if from_mean else draw_seed()
    made = {
        name: _resized(
            module.weight,
            vocab_size,
            seed=seed,
            name=name,
            std=None if from_mean else config.init_std,
        )
        for name, module in _tables(found).items()
    }
    for name, module in _tables(found).items():
        module.weight = made[name]
        setattr(module, "num_embeddings" if name == "embedding" else "out_features", vocab_size)
    found.config = config


def _tables(model: LanguageModel) -> dict[str, Any]:
    """The modules with a row per token; of a tied model there is one."""
    output: Any = getattr(model, "output", None)
    return {"embedding": model.embedding} | ({} if output is None else {"output": output})


def _resizable(model: Any) -> LanguageModel:
    """The model, if it is one of ours whose rows are all here and its own."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"model is a {type(model).__name__}; it must be a GPT or an encoder-decoder of expertmesh; for transformers' models use "
            "resize_token_embeddings"
        )
    for name, module in _tables(model).items():
        weight = module._parameters.get("weight")
        if weight is None or hasattr(module, "_hf_hook"):
            raise ConfigError(
                f"{name} is a {type(module).__name__} that something else wraps; add tokens first, then wrap the model"
            )
        if type(weight.data) is not Tensor or getattr(model, "shared", None) is not None:
            raise ConfigError(
                f"{name} is spread over ranks already; add tokens first, then spread the model"
            )
    return model


@torch.no_grad()
def _resized(
    weight: nn.Parameter, num_rows: int, *, seed: int, name: str, std: float | None
) -> nn.Parameter:
    old_VD = weight.detach()
    kept = min(len(old_VD), num_rows)
    new_VD = old_VD.new_empty(num_rows, old_VD.shape[1])
    new_VD[:kept] = old_VD[:kept]
    if std is None:
        new_VD[kept:] = old_VD.to(accumulate_dtype(old_VD.dtype)).mean(0)
    else:
        init_normal_(
            new_VD[kept:], std=std, seed=seed, name=f"{name}.{kept}:{num_rows}", per_expert=False
        )
    return nn.Parameter(new_VD, requires_grad=weight.requires_grad)
