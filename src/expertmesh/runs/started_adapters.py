"""Adapters that a run begins with (`adapter.init_from`): the factors of a run's checkpoint or of a folder of peft, at
the run's own rank and scale, and the rows of tokens beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.grown_rows import TrainedTokens, is_token_rows, token_rows_of, trained_tokens
from expertmesh.checkpoints.hub.load_pretrained import is_hub_folder
from expertmesh.checkpoints.merged_adapters import factor_prefix, is_factor, read_factor_pairs
from expertmesh.checkpoints.peft_folder import CONFIG, Factors, read_adapter_files, read_factors, without_token_rows
from expertmesh.checkpoints.source import Stored
from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.config.base import expanded
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.moe.module_adapters import Adapter
from expertmesh.runs.base_record import digest_of, read_record
from expertmesh.runs.run_dir import TOKENIZER, Run, RunDir, find_model, load_run
from expertmesh.spec.adapter_targets import check_targets, rank_of
from expertmesh.text.new_tokens import named_tokens, token_texts

_OPTION = "adapter.init_from"


class _Known(NamedTuple):
    """Adapters of a folder: factors by the names of the adapted parameters, and the folder and digest of their base, if
    they are known."""

    factors: dict[str, Factors]
    tokens: TrainedTokens
    base: Path | None
    digest: str | None


class StartedFactors:
    """Factors of a run's new adapters, the first directions of which are loaded ones, and loaded rows of its tokens; a
    `TensorSource`.

    W + s B A stays as loaded: the second factors take the ratio of the scales, and are zero in new directions. A
    parameter without a loaded adapter has a new one.
    """

    def __init__(self, config: RunConfig, base: Run) -> None:
        assert config.adapter.init_from is not None
        if not isinstance(base.config.model, ModelConfig):
            rule = f"is for GPTs, and {base.path} is of family {base.family.name}"
            raise ConfigError(_OPTION, config.adapter.init_from, rule, "leave it out")
        self.path, self._config = expanded(config.adapter.init_from), config
        self._spec = gpt_spec(base.config.model)
        names = check_targets(config.adapter, self._spec)
        found = _read(self.path, base.config.model)
        _check_base(found, base, where=self.path)
        _check_tokens(found, config, base, where=self.path)
        self._known = {name: self._fitting(name, own, is_target=name in names) for name, own in found.factors.items()}
        self._rows = {token_rows_of(table): rows for table, rows in found.tokens.rows.items()}
        self.tensors: Mapping[str, Stored] = {
            f"{factor_prefix(name)}.{which}": Stored(tuple(factor.shape), factor.dtype)
            for name in names
            for which, factor in self._fresh(name, "meta").named_parameters()
        } | {name: Stored(tuple(rows.shape), rows.dtype) for name, rows in self._rows.items()}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part of a factor or of rows; see `TensorSource.read`."""
        if name in self._rows:
            into.copy_(self._rows[name][box])
            return
        prefix, _, which = name.rpartition(".")
        if self._last[0] != prefix:
            self._last = prefix, self._made(prefix.replace(".adapters.", "."))
        into.copy_(self._last[1][which][box])

    def _fresh(self, name: str, device: str) -> Adapter:
        """The new adapter of a parameter, without values."""
        one, options = self._spec.by_name[name], self._config.adapter
        rank = rank_of(options, one, self._spec)
        return Adapter(
            one.shape,
            num_experts=one.shape[0] if one.is_expert else None,
            rank=rank,
            scaling=options.scaling(rank),
            shared=options.shared,
            device=device,
            dtype=torch.float32,
        )

    @torch.no_grad()
    def _made(self, name: str) -> dict[str, Tensor]:
        """Factors of a parameter's adapter, as the model names them."""
        adapter = self._fresh(name, "cpu")
        adapter.reset(self._config.train.seed, name)
        if (own := self._known.get(name)) is not None:
            a_erK, b_eNr = adapter.factors()  # views
            r = own.a_erK.shape[1]
            a_erK[:, :r] = own.a_erK
            b_eNr[:, :, :r] = own.b_eNr * (own.scaling / adapter.scaling)
        return {"a": adapter.a.detach(), "b": adapter.b.detach()}

    def _fitting(self, name: str, own: Factors, *, is_target: bool) -> Factors:
        """The loaded factors of a parameter, one for all experts where the run has one for all."""
        options, one = self._config.adapter, self._spec.by_name[name]
        if not is_target:
            rule = f"has an adapter on {name}, which is none of {named('adapter.targets', ' '.join(options.targets))}"
            raise ConfigError(_OPTION, self.path, rule, "add it to the targets")
        rank, loaded = rank_of(options, one, self._spec), own.a_erK.shape[1]
        if loaded > rank:
            option = "adapter.expert_rank" if one.is_expert else "adapter.rank"
            rule = f"is below {loaded}, the rank of {self.path} on {name}"
            raise ConfigError(option, rank, rule, f"use at least {loaded}")
        if not (one.is_expert and options.shared):
            return own
        if any((factor != factor[:1]).any() for factor in own[:2]):
            rule = f"has an adapter for each expert of {name}, and {named('adapter.shared', True)} has one for all"
            raise ConfigError(_OPTION, self.path, rule, f"leave {named('adapter.shared')} out")
        return own._replace(a_erK=own.a_erK[:1], b_eNr=own.b_eNr[:1])


def _read(folder: Path, model: ModelConfig) -> _Known:
    """Adapters of a folder of peft, or of the newest undamaged checkpoint of a run."""
    if (folder / CONFIG).is_file():
        files, tokens = without_token_rows(read_adapter_files(folder), model)
        named_base = files.values.get("base_model_name_or_path")
        base = expanded(named_base) if isinstance(named_base, str) else None
        is_here = base is not None and base.is_dir()
        return _Known(read_factors(files, model), tokens, base if is_here else None, None)
    if is_hub_folder(folder) or not RunDir(folder).config.is_file():
        rule = f"holds neither a run nor {CONFIG}"
        raise ConfigError(_OPTION, folder, rule, "give a run with adapters, or a folder of peft")
    checkpoint = load_run(folder).checkpoint
    if (record := read_record(checkpoint)) is None:
        rule = "has no adapters, all of its weights learned"
        raise ConfigError(_OPTION, folder, rule, "give it in the place of the recipe")
    learned = Checkpoint(checkpoint, prefix="model.")
    if more := [name for name in learned.tensors if not (is_factor(name) or is_token_rows(name))]:
        rule = f"its {more[0]} has learned beside its adapters"
        fix = "give it in the place of the recipe, where its adapters are merged"
        raise ConfigError(_OPTION, folder, rule, fix)
    found = {}
    for name, (a, b) in read_factor_pairs(learned).items():
        a_erK, b_eNr = (a[None], b[None]) if a.ndim == 2 else (a, b)
        scaling = record.config.scaling(a_erK.shape[1])
        found[name] = Factors(a_erK, b_eNr.flatten(1, -2), scaling)
    return _Known(found, trained_tokens(learned, record.grown), record.path, digest_of(record.weights))


def _check_base(found: _Known, base: Run, *, where: Path) -> None:
    """Refuse adapters of another base, where it is known."""
    if found.base is None:
        return
    digest = found.digest or _digest(find_model(found.base))
    if digest != _digest(base):
        rule = f"its adapters are for {found.base}, whose weights are not those of {base.path}"
        raise ConfigError(_OPTION, where, rule, f"train on {found.base}")


def _check_tokens(found: _Known, config: RunConfig, base: Run, *, where: Path) -> None:
    """Refuse rows of other tokens than the run's own."""
    if not found.tokens.ids:
        return
    assert isinstance(config, GPTRunConfig)
    own, file = base.path / TOKENIZER, where / TOKENIZER
    texts = token_texts(file if file.is_file() else own, tuple(found.tokens.ids))
    added = named_tokens(own, config.tokens)
    if dict(zip(texts, found.tokens.ids, strict=True)) != added.ids:
        adds = " ".join(config.tokens.add) or "none"
        rule = f"has rows of the tokens {' '.join(texts)}, and this run adds {adds}"
        raise ConfigError(_OPTION, where, rule, "give " + " ".join(named("tokens.add", text) for text in texts))
    if file.is_file() and (others := named_tokens(file, config.tokens).special - added.special):
        rule = f"{' '.join(sorted(others))} is special in {where}"
        raise ConfigError("tokens.special", config.tokens.special, rule, f"give {named('tokens.special', True)}")


def _digest(run: Run) -> str:
    weights = run.weights or next(reversed(list_checkpoints(RunDir(run.path).checkpoints)), None)
    return "" if weights is None else digest_of(weights)
