"""JSON-constrained answers: masks of allowed next tokens from a schema, with llguidance (extra `json`)."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.text.stream import TextStream

_MOST_KEPT = 64
"""Maximum number of compiled schemas to keep."""
_OPTIONS: Any = {
    "lenient": False,  # an unsupported keyword is an error, not ignored
    "coerce_one_of": False,
    # bounded: otherwise a model could write whitespace forever
    "whitespace_pattern": r"\n[ ]{0,32}|[ ]?",
}
_OWN = "x-guidance"  # llguidance's keyword that overrides these options
_BEFORE = "\x02"  # no token crosses this character


class JsonRule:
    """Rule of one answer. Every call gets all tokens so far, so answers may be rolled back.

    Args:
        matcher: llguidance matcher at its start, owned by this rule.
        vocab_size: V.
        end_ids: end tokens.

    Attributes:
        end_ids: end tokens.
    """

    def __init__(self, matcher: Any, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.end_ids = frozenset(end_ids)
        self._seen: list[int] = []
        self._found_V: Tensor | None = None  # allowed tokens after `_seen`

    def allowed(self, ids: Seq[int], *, may_end: bool = True) -> Tensor | None:
        """Tokens that may follow.

        Args:
            ids: token ids of the answer so far.
            may_end: False: mask end tokens, unless nothing else is allowed.

        Returns:
            (V,) bool with at least one True; None: the answer has left the schema (as wrong draft tokens do).
        """
        if not self._follow(ids):
            return None
        if self._found_V is None:
            data = bytearray(self._matcher.compute_bitmask())
            bits = torch.frombuffer(data, dtype=torch.uint8)[:, None] >> torch.arange(8)
            self._found_V = (bits & 1).bool().flatten()[: self._vocab_size]
        found_V = self._found_V
        if not may_end:
            others_V = found_V.clone()
            others_V[list(self.end_ids)] = False
            found_V = others_V if others_V.any() else found_V
        return found_V if found_V.any() else None

    def problem(self, ids: Seq[int]) -> str | None:
        """Reason why no token can follow a valid answer; None: one can."""
        if self.allowed(ids) is not None:
            return None
        reason = _line(self._matcher.get_error()) or "no token of this vocabulary goes on"
        return f"the schema cannot be kept any further ({reason})"

    def _follow(self, ids: Seq[int]) -> bool:
        """Move the matcher to the end of some tokens; returns whether they fit the schema."""
        same = 0
        for old, new in zip(self._seen, ids, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self._seen):
            self._matcher.rollback(len(self._seen) - same)
            del self._seen[same:]
            self._found_V = None
        more = list(ids[same:])
        if more and self._matcher.validate_tokens(more) < len(more):
            return False
        if more and not self._matcher.consume_tokens(more):
            return False
        if more:
            self._seen += more
            self._found_V = None
        return not self._matcher.is_error()


class JsonRules:
    """Compiler of JSON schemas to rules; thread-safe.

    Args:
        tokenizer: tokenizer of the model; None is an error.
        vocab_size: V, at least the tokenizer's.
        end_ids: end tokens.

    Raises:
        ConfigError: there is no tokenizer, or llguidance is not installed.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        if tokenizer is None:
            raise ConfigError("json_schema: is about text, and the engine has no tokenizer")
        if find_spec("llguidance") is None:
            raise ConfigError(
                "json_schema: needs llguidance; install it with: pip install 'expertmesh[json]'"
            )
        from llguidance import LLTokenizer

        self._vocab_size, self._ends = vocab_size, sorted(end_ids)
        words: Any = _Words(tokenizer, vocab_size, self._ends)
        self._tokenizer = LLTokenizer(words, n_vocab=vocab_size, eos_token=self._ends)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def rule(self, schema: Mapping[str, Any]) -> JsonRule:
        """Rule of a schema, at the start of an answer.

        Raises:
            ConfigError: the schema is invalid, or has unsupported keywords.
        """
        from llguidance import LLMatcher

        text = _text({name: value for name, value in schema.items() if name != _OWN})
        with self._lock:
            matcher = self._kept.pop(text, None)
            if matcher is None:
                try:
                    grammar = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
                    problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
                    matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
                except ValueError as error:  # half a character, or more than 128 levels
                    raise _refused(_line(str(error))) from None
                problem = problem or matcher.get_error()
                if problem:
                    raise _refused(_line(problem))
            self._kept[text] = matcher
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            own = matcher.deep_copy()
        return JsonRule(own, vocab_size=self._vocab_size, end_ids=self._ends)


class _Words:
    """Tokenizer wrapper for llguidance, with the bytes of every token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        stream = TextStream(tokenizer)
        self._tokenizer, self.eos_token_id = tokenizer, end_ids[0]
        self.tokens = [stream.bytes_of(token_id) for token_id in range(vocab_size)]
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_token_ids = sorted({i for i, one in added if one.special} | {*end_ids})
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that follows other text: SentencePiece adds a space at the start of a text."""
        before, ids = self._encode(_BEFORE), self._encode(_BEFORE + text)
        ids = ids[len(before) :]
        if b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return self._longest(text.encode())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _longest(self, left: bytes) -> list[int]:
        """Greedy longest-match tokens of some bytes; stops where no token matches."""
        found = []
        while left:
            fits = (i for i in range(len(self.tokens)) if i not in self._special)
            fits = (i for i in fits if self.tokens[i] and left.startswith(self.tokens[i]))
            best = max(fits, key=lambda i: len(self.tokens[i]), default=None)
            if best is None:
                break
            found.append(best)
            left = left[len(self.tokens[best]) :]
        return found


def _text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise _refused("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refused(_line(str(error))) from None


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"json_schema: cannot be kept ({reason}); give another JSON schema")


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
