"""Checks of the engine's inputs before any computation: models, prompts and weights."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.config.values import (
    WHOLE,
    Number,
    check_type,
    is_number,
    plain,
    quoted,
    type_of,
    wrong_type,
)
from expertmesh.engine.request import SamplingParams, for_prompts, token_ids_of
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import EncoderDecoder
from expertmesh.ops.check import check_dense, wrong_dtype, wrong_shape


def why_not(model: Any) -> str | None:
    """Reason in one line why the engine does not support a model; None: it does."""
    wanted = ("end_ids", "vocab_size", "max_seq_len", "device", "config")
    has_all = all(hasattr(model, name) for name in wanted) and hasattr(model.config, "moe")
    if not has_all or isinstance(model, EncoderDecoder):
        return f"model is {type_of(model)}: the engine serves a GPT; give one, as em.load does"
    if not any(model.config.experts_per_layer()):
        return None
    bound = model.config.moe.max_capacity_factor
    if bound is not None:
        return (
            f"max_capacity_factor={bound}: dropped tokens would depend on the rest of the batch; serve a model "
            "without a bound"
        )
    if model.config.moe.router == "expert_choice":
        return (
            "router=expert_choice: its experts choose among all tokens of a step, later ones included; serve "
            "another router"
        )
    return None


def check_model(model: Any, config: EngineConfig, *, is_alone: bool = True) -> None:
    """Raise ConfigError unless the engine supports the model, in one process or over ranks."""
    if is_alone and config.enable_eplb:
        raise ConfigError(
            "enable_eplb",
            True,
            "is about several processes, and this is one",
            "leave it out, or start several with torchrun and parallel=",
        )
    if problem := why_not(model):
        raise ConfigError(problem)
    check_mode(model)
    if config.max_len is not None and config.max_len > model.max_seq_len:
        raise ConfigError(
            "max_len",
            config.max_len,
            f"must be at most the model's max_seq_len={model.max_seq_len}",
            "lower it, or leave it out",
        )
    if config.deterministic and not model.config.batch_invariant:
        raise ConfigError(
            "deterministic=True: the model computes by the order of its batch; build it with batch_invariant=True"
        )


def check_no_folder(config: EngineConfig) -> None:
    """Raise ConfigError if a model object is given with options for folders."""
    for name in ("device", "dtype", "expert_slots", "implementation"):
        if getattr(config, name) != EngineConfig.model_fields[name].default:
            raise ConfigError(
                name,
                getattr(config, name),
                "is for a folder; this is a model",
                "move the model with model.to(...)",
            )


def check_mode(model: Any) -> None:
    """Raise ConfigError if the model is in training mode."""
    if model.training:
        raise ConfigError("the model is in training mode: dropout and router noise would be active; call model.eval()")


def check_dtype_kept(model: Any, dtype: torch.dtype) -> None:
    """Raise ConfigError if the model's weights are no longer of the dtype for which an engine was made."""
    if (now := model.embedding.weight.dtype) != dtype:
        raise ConfigError(f"the model's weights are {now} now, and were {dtype} for this engine; make another engine")


def prompts_of(prompts: Any) -> list[Any]:
    """List of prompts from a batch or a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    # an array or a tensor of no dimension is an Iterable, too
    is_scalar = getattr(prompts, "ndim", 1) == 0
    if is_scalar or not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        what = "a text, a list of token ids, or a list of these"
        raise wrong_type("prompts", prompts, what, "give that")
    many = list(prompts)
    return [many] if many and all(is_number(plain(one), WHOLE) for one in many) else many


def ids_of_prompts(given: Any, vocab_size: int, *, what: str = "prompt") -> list[list[int]]:
    """Checked prompts of token ids, from one or several, as lists or arrays."""
    found = [token_ids_of(one, what=what) for one in prompts_of(given)]
    check_prompts(found, vocab_size, what=what)
    return found


def one_for_each(what: str, given: Any, count: int) -> list[Any]:
    """Argument per prompt, from one for all (also a string) or one for each."""
    is_one = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    if is_one or getattr(given, "ndim", 1) == 0:
        return [given] * count
    each = list(given)
    if len(each) != count:
        raise ConfigError(f"{what}: {len(each)} for {count} prompts; give one for each, or one for all")
    return each


def params_for_each(given: Any, count: int) -> list[SamplingParams]:
    """Parameters per prompt, from one for all, which draw independently, or one for each, which keep their seeds."""
    if isinstance(given, SamplingParams):
        return for_prompts([given] * count)
    return [params_of(one) for one in one_for_each("params", given, count)]


def params_of(params: Any) -> SamplingParams:
    """Checked parameters of a request; None: `SamplingParams()`."""
    params = SamplingParams() if params is None else params
    check_type("params", params, SamplingParams, "a SamplingParams", "give SamplingParams(...)")
    return params


def check_ids(ids: Iterable[Any], vocab_size: int, *, what: str) -> None:
    """Raise ConfigError unless all are token ids of the model; `what` is their name in the message."""
    fix = "give ids of this model's tokenizer"
    token_id = Number(0, vocab_size - 1, fix, types=WHOLE)
    for i in ids:
        if not token_id.holds(i):
            raise ConfigError(f"{what}: token id {quoted(i)}: {token_id.rule}; {fix}")


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, *, what: str) -> None:
    """Raise ConfigError if there are no prompts, one is empty, or an id is invalid; `what` is a prompt's name in the
    message."""
    if not prompts:
        raise ConfigError(f"{what}s=[]: there is nothing to continue; give at least one {what}")
    for prompt in prompts:
        if not len(prompt):
            raise ConfigError(f"{what}='': is empty; give at least one token")
        check_ids(prompt, vocab_size, what=what)


def check_asked(
    ids: list[int],  # token ids of the prompt
    params: SamplingParams,  # parameters of the request
    vocab_size: int,  # V
    *,
    has_text: bool,  # whether the engine has a tokenizer
    end_ids: Set[int] = frozenset(),  # end tokens of the request
) -> None:
    """Check ids of a prompt and its parameters."""
    check_prompts([ids], vocab_size, what="prompt")
    check_ids(params.stop_token_ids, vocab_size, what="stop_token_ids")
    check_ids(params.logit_bias, vocab_size, what="logit_bias")
    check_ids(params.kept_special_ids, vocab_size, what="kept_special_ids")
    if params.min_tokens and params.guide is None and len(end_ids) >= vocab_size:
        raise ConfigError(
            "min_tokens",
            params.min_tokens,
            f"all {vocab_size} tokens of the model are end tokens, and no other is left",
            "give fewer stop_token_ids",
        )
    if params.stop and not has_text:
        raise ConfigError("stop: is text, and the engine has no tokenizer; use stop_token_ids")


def room_for(model: Any, prompt: Sequence[int], max_tokens: int | None, limit: tuple[int, str] | None = None) -> int:
    """Maximum number of tokens of an answer. `limit`: maximum length, with its name; None: the model's."""
    max_len, name = limit or (model.max_seq_len, f"the model's max_seq_len={model.max_seq_len}")
    left = max_len - len(prompt)
    if left < 1:
        raise ConfigError(f"prompt of {len(prompt)} tokens: must be shorter than {name}; shorten the prompt")
    if max_tokens is None:
        return left
    Number(1, fix="ask for a token or more", types=WHOLE).check("max_tokens", max_tokens)
    if max_tokens > left:
        raise ConfigError(
            "max_tokens",
            max_tokens,
            f"with a prompt of {len(prompt)} tokens it passes {name}",
            f"ask for at most {left}",
        )
    return max_tokens


def named_limit(max_len: int, model: Any, config: EngineConfig) -> tuple[int, str] | None:
    """An engine's limit for `room_for`."""
    if max_len < (config.max_len or model.max_seq_len):
        return max_len, f"{max_len} tokens, as the cache holds {max_len - 1} tokens (num_blocks)"
    return (max_len, f"max_len={max_len}") if max_len < model.max_seq_len else None


def check_text(prompt: str) -> None:
    """Raise ConfigError if a text has lone surrogates, which no tokenizer accepts."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ConfigError(
            f"prompt: {ascii(prompt)[:60]} is no text (it holds half a character, or bytes that are not UTF-8); give "
            "text in UTF-8"
        )


def _is_like(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether a tensor of one dtype may be copied into another: equal dtypes, or both floating with two bytes or
    more."""
    return given == own or all(d.is_floating_point and d.itemsize > 1 for d in (given, own))


def check_state(state: Any, own: Mapping[str, Tensor]) -> None:
    """Check that weights fit a model. `own`: the model's `state_dict()`."""
    check_type("state", state, Mapping, "tensors by name", "give model.state_dict()")
    for name, tensor in state.items():
        if name not in own:
            raise ConfigError(f"{name}: the model has no such tensor; give those of its state_dict()")
        check_type(name, tensor, Tensor, "a tensor", "give a tensor")
        if hasattr(tensor, "full_tensor"):  # a DTensor
            raise ConfigError(f"{name}: is sharded; give tensor.full_tensor()")
        check_dense(name, tensor)
        if tensor.is_meta:
            raise ConfigError(f"{name} is on meta, without numbers; give a tensor on a device")
        if not _is_like(tensor.dtype, own[name].dtype):
            fix = "convert it, and quantise new weights into a folder (expertmesh quantize) for another engine"
            raise wrong_dtype(name, tensor, f"{own[name].dtype} as the model's", fix)
        if own[name].shape != tensor.shape:
            rule = f"{tuple(own[name].shape)} as the model's"
            raise wrong_shape(name, tensor, rule, "give weights of this model")
