"""JSON-constrained answers: masks of allowed next tokens from a schema, with llguidance (extra `json`)."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.checks import params_of
from expertmesh.engine.guided_calls import GuidedCalls
from expertmesh.engine.schema_check import SchemaCheck
from expertmesh.engine.schema_reading import MOST_CHARACTERS, read_schema
from expertmesh.engine.schema_trial import (
    TOO_LARGE,
    TRIAL,
    is_given_up,
    matcher_of,
    matcher_of_grammar,
)
from expertmesh.errors import ConfigError
from expertmesh.text.stream import TextStream

_MOST_KEPT = 64
"""Maximum number of compiled schemas to keep."""
PROBLEM = "json_schema: "
"""Beginning of the error of an answer whose schema cannot be kept."""
_OWN = "x-guidance"  # llguidance's keyword that overrides its options
_Check = Callable[[str], str | None]
_BEFORE = "\x02"  # no token crosses this character


class JsonRule:
    """Rule of one answer. Every call gets all tokens so far, so answers may be rolled back.

    Args:
        matcher: llguidance matcher at its start, owned by this rule.
        tokens: bytes of each of V tokens.
        end_ids: end tokens.
        check: reason why a whole answer does not validate, or None.

    Attributes:
        end_ids: end tokens.
    """

    def __init__(
        self,
        matcher: Any,
        *,
        tokens: Seq[bytes],
        end_ids: Iterable[int],
        check: _Check,
    ) -> None:
        self._matcher, self._tokens, self._check = matcher, tokens, check
        self.end_ids = frozenset(end_ids)
        self._wrong: str | None = None  # reason why an answer may not end after `_seen`
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
            self._found_V = (bits & 1).bool().flatten()[: len(self._tokens)]
            self._forbid_wrong_end(self._found_V)
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
        reason = self._wrong or "no token of this vocabulary goes on"
        reason = TOO_LARGE if is_given_up(self._matcher) else reason
        return f"{PROBLEM}cannot be kept any further ({reason}); give another JSON schema"

    def _forbid_wrong_end(self, found_V: Tensor) -> None:
        """Forbid end tokens where the answer is whole and does not validate, whatever the compiler says."""
        ends = list(self.end_ids)
        self._wrong = None
        if found_V[ends].any():
            text = b"".join(self._tokens[i] for i in self._seen).decode(errors="replace")
            self._wrong = self._check(text)
            if self._wrong is not None:
                found_V[ends] = False

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


class CompiledSchema(dict[str, Any]):
    """JSON schema, or calls that must be, that is compiled; pickled and copied it is what was given alone.

    Args:
        schema: the schema.
        make: makes the rule of an answer.
        owner: the compiler.
    """

    def __init__(
        self, schema: Mapping[str, Any], make: Callable[[], JsonRule], owner: "JsonRules"
    ) -> None:
        super().__init__(schema)
        self._given = schema if isinstance(schema, GuidedCalls) else dict(schema)
        self._make, self.owner, self._lock = make, owner, Lock()

    def rule(self) -> JsonRule:
        """Rule at the start of an answer."""
        with self._lock:
            return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        """The given mapping alone."""
        return _same, (self._given,)


def _same(given: Any) -> Any:
    return given


class JsonRules:
    """Compiler of JSON schemas; thread-safe. A schema that takes long holds up nobody who knows his already.

    Args:
        tokenizer: tokenizer of the model; None: every schema is an error.
        vocab_size: V, at least the tokenizer's.
        end_ids: end tokens.

    Attributes:
        trial: the process that tries schemas first.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self.trial = tokenizer, vocab_size, TRIAL
        self._ends = sorted(end_ids)
        self._words: tuple[Any, Seq[bytes]] | None = None
        self._kept: OrderedDict[str, CompiledSchema] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def ready(self, params: SamplingParams | None) -> SamplingParams:
        """Checked parameters (`params_of`), whose schema is compiled (`compiled`)."""
        params = params_of(params)
        schema = params.json_schema
        if schema is None or (isinstance(schema, CompiledSchema) and schema.owner is self):
            return params
        return params.model_copy(update={"json_schema": self.compiled(schema)})

    def known(self, schema: Mapping[str, Any]) -> CompiledSchema | None:
        """The compiled schema, if it was compiled lately; never waits for one that is being compiled.

        Raises:
            ConfigError: there is no tokenizer, or llguidance is not installed; the schema is too large, or no JSON.
        """
        if self._tokenizer is None:
            raise ConfigError("json_schema: is about text, and the engine has no tokenizer")
        if find_spec("llguidance") is None:
            raise ConfigError(
                "json_schema: needs llguidance; install it with: pip install 'expertmesh[json]'"
            )
        text = _key(schema)
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
            return self._kept.get(text)

    def compiled(self, schema: Mapping[str, Any]) -> CompiledSchema:
        """A schema that is ready for answers, tried in another process first (`SchemaTrial`).

        Raises:
            ConfigError: see `known`; or the schema is invalid, takes too long, or has unsupported keywords.
        """
        found = self.known(schema)
        if found is not None:
            return found
        text = _key(schema)
        try:
            read = read_schema(json.loads(_text(schema)))
            rewritten = json.dumps(read.schema)
            if (problem := self.trial.problem(rewritten)) is not None:
                raise ValueError(problem)
            tokenizer, tokens = self._of_model()
            check: _Check = SchemaCheck(
                _text(schema), read.anchors, _Patterns(read.patterns)
            ).problem
            if isinstance(schema, GuidedCalls):
                grammar = schema.grammar(lambda one: read_schema(one).schema, self._specials)
                matcher, check = matcher_of_grammar(grammar, tokenizer), _of_list(schema, check)
            else:
                matcher = matcher_of(rewritten, tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refused(_line(str(error))) from None

        def make() -> JsonRule:
            own = matcher.deep_copy()
            return JsonRule(own, tokens=tokens, end_ids=self._ends, check=check)

        if (said := make().problem([])) is not None:
            raise ConfigError(said)
        found = CompiledSchema(schema, make, self)
        with self._lock:
            self._kept[text] = found
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    @property
    def _specials(self) -> dict[str, int]:
        assert self._tokenizer is not None
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {one.content: i for i, one in added if one.special}

    def _of_model(self) -> tuple[Any, Seq[bytes]]:
        """llguidance's tokenizer of the model, and the bytes of its tokens."""
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        with self._making:
            if self._words is None:
                words: Any = _Words(self._tokenizer, self._vocab_size, self._ends)
                made = LLTokenizer(words, n_vocab=self._vocab_size, eos_token=self._ends)
                self._words = made, words.tokens
            return self._words


class _Patterns:
    """Whether regular expressions are found in texts, by llguidance: Python's take exponential time.

    Args:
        patterns: what the compiler reads, by what the schema has.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        from llguidance import LLTokenizer

        bytes_ = LLTokenizer("byte")
        self._matchers = {
            given: matcher_of(json.dumps({"type": "string", "pattern": one}), bytes_)
            for given, one in patterns.items()
        }

    def __call__(self, pattern: str, text: str) -> bool:
        """Whether a regular expression is found in a text."""
        matcher = self._matchers[pattern].deep_copy()
        data = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f").encode()
        fits = matcher.validate_tokens(list(data)) == len(data)
        return bool(fits and matcher.consume_tokens(list(data)) and matcher.is_accepting())


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


def _of_list(calls: GuidedCalls, check: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Check of an answer, by the list of its calls."""
    return lambda answer: check(calls.listed(answer))


def _key(schema: Mapping[str, Any]) -> str:
    return _text(schema) + (schema.key if isinstance(schema, GuidedCalls) else "")


def _text(schema: Mapping[str, Any]) -> str:
    try:
        text = json.dumps({n: v for n, v in schema.items() if n != _OWN}, allow_nan=False)
    except RecursionError:
        raise _refused("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refused(_line(str(error))) from None
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    return text


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{PROBLEM}cannot be kept ({reason}); give another JSON schema")


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
