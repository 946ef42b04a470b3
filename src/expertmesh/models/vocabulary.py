"""Vocabulary changes of a language model: rows of its embedding and output projection are added or removed."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from expertmesh.config.values import WHOLE, Number, check_type, shown, type_of, wrong_type
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import LanguageModel
from expertmesh.moe.init import draw_seed, init_normal_
from expertmesh.moe.module_adapters import refuse_adapters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.text.tokenizer import tokens_to_add


def add_tokens(model: nn.Module, tokenizer: Tokenizer, tokens: Sequence[str], *, special: bool = False) -> int:
    """Add tokens to a tokenizer, and rows to its model if it has too few; on an error nothing is changed.

    Rows of new tokens are the mean of those with a token, so that a new one starts with about average probability
    (Hewitt 2021). Build the optimizer and spread the model afterwards. Every rank that has the whole embedding must
    call.

    Args:
        model: a GPT or an encoder-decoder of ours, tied or not; for `ExpertMeshForCausalLM` use
            `resize_token_embeddings`.
        tokenizer: the model's tokenizer; the tokens get the ids behind its own.
        tokens: texts of the tokens; added tokens of the tokenizer stay as they are, pieces of its vocabulary become
            added tokens with their ids.
        special: whether they are special tokens, which no text is encoded to and which decoding leaves out; else they
            are plain text, and every text that contains one is encoded with it.

    Returns:
        Number of new tokens.

    Raises:
        ConfigError: a token is not a string, is blank, or is a piece of the vocabulary for another text; or the model
            is no language model, spread over ranks, or wrapped.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> em.add_tokens(model, tokenizer, ["<think>", "</think>"])
        2
        >>> model.config.vocab_size >= tokenizer.get_vocab_size()
        True
    """
    fix = "give that of expertmesh.load()"
    check_type("tokenizer", tokenizer, Tokenizer, "a tokenizers.Tokenizer", fix)
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise wrong_type("tokens", tokens, "a list of texts", "give [...]")
    for token in tokens:
        if not isinstance(token, str) or not token.strip():
            raise ConfigError(f"tokens: {shown(token)} is no text, or empty; leave it out")
    made = tokens_to_add(tokenizer, dict.fromkeys(tokens), special=special, option="tokens")
    found, vocab = _resizable(model), tokenizer.get_vocab()
    first = max(vocab.values()) + 1
    used = min(first, found.vocab_size)
    rows = slice(first, first + sum(token.content not in vocab for token in made))
    if rows.stop > found.vocab_size:
        resize_vocabulary(found, rows.stop)
    tokenizer.add_tokens(made)
    for module in _tables(found).values():
        old_VD = module.weight.detach()[:used]
        module.weight.detach()[rows] = old_VD.to(accumulate_dtype(old_VD.dtype)).mean(0)
    return rows.stop - first


def resize_vocabulary(model: nn.Module, vocab_size: int, *, from_mean: bool = True) -> None:
    """Change the vocabulary size of a language model and its configuration, in place; on an error nothing is changed.

    Args:
        model: a GPT or an encoder-decoder of ours, whole, on any device.
        vocab_size: V; rows are added or removed at the end.
        from_mean: whether new rows are the mean of the old ones; else they are N(0, init_std^2).
    """
    found = _resizable(model)
    Number(1, fix="give a number", types=WHOLE).check("vocab_size", vocab_size)
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
    """The modules with a row per token, by name: one if the model is tied, else two."""
    output: Any = getattr(model, "output", None)
    return {"embedding": model.embedding} | ({} if output is None else {"output": output})


def _resizable(model: Any) -> LanguageModel:
    """The model, checked to be one of ours, not spread over ranks and not wrapped."""
    what = "a GPT or an encoder-decoder of expertmesh"
    fix = "for transformers' models use resize_token_embeddings"
    check_type("model", model, LanguageModel, what, fix)
    for name, module in _tables(model).items():
        refuse_adapters(module)
        weight = module._parameters.get("weight")
        if weight is None or hasattr(module, "_hf_hook"):
            raise ConfigError(
                f"{name} is {type_of(module)} that something else wraps; add tokens first, then wrap the model"
            )
        if type(weight.data) is not Tensor or getattr(model, "shared", None) is not None:
            raise ConfigError(f"{name} is spread over ranks already; add tokens first, then spread the model")
    result: LanguageModel = model
    return result


@torch.no_grad()
def _resized(weight: nn.Parameter, num_rows: int, *, seed: int, name: str, std: float | None) -> nn.Parameter:
    old_VD = weight.detach()
    kept = min(len(old_VD), num_rows)
    new_VD = old_VD.new_empty(num_rows, old_VD.shape[1])
    new_VD[:kept] = old_VD[:kept]
    if std is None:
        new_VD[kept:] = old_VD.to(accumulate_dtype(old_VD.dtype)).mean(0)
    else:
        init_normal_(new_VD[kept:], std=std, seed=seed, name=f"{name}.{kept}:{num_rows}", per_expert=False)
    return nn.Parameter(new_VD, requires_grad=weight.requires_grad)
