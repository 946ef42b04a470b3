"""Reinforcement learning with a verifier (`objective.name=grpo`): a step samples groups of answers, rewards them and
learns."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.base import expanded
from expertmesh.data.prompt_data import PromptData, PromptRecord
from expertmesh.engine.output import RequestOutput
from expertmesh.errors import ConfigError, Line, named
from expertmesh.models.family import REWARD
from expertmesh.models.gpt.answer_task import AnswerScores, AnswerTask, loss_once, once
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.replay import replaying
from expertmesh.models.task import (
    Batch,
    Begin,
    Data,
    Loss,
    Part,
    each_tensor,
    micro_batches,
    named_tensors,
)
from expertmesh.objectives import policy_gradient
from expertmesh.objectives.policy_gradient import Drawn
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.ranks import Ranks
from expertmesh.rl.batch import DrawnAnswer, batch_of_answers
from expertmesh.rl.kl_reference import Reference
from expertmesh.rl.rewards import (
    Answered,
    RewardFunction,
    check_columns,
    find_rewards,
    rewarded,
    total,
)
from expertmesh.rl.rollouts import roll_out, seed_of_row
from expertmesh.rl.whole_model import whole_model

SILENT_STEPS = 20
"""Steps in a row without a difference in rewards, after which a run is warned."""
_log = logging.getLogger("expertmesh.rl")
_VALUE = "value_"
_NAMED = ("log_", _VALUE, "applies_")
"""Beginnings of the names of sums that depend on the user's functions."""


class PolicyTask(AnswerTask):
    """Groups of answers that the model itself writes; prompts are the samples, and rewards say what is learned."""

    measures_items = False
    metric = REWARD
    data: PromptData
    rewards: Sequence[RewardFunction]
    reference: Reference | None = None

    def __init__(self, config: GPTRunConfig) -> None:
        super().__init__(config)
        self.num_updates = config.rl.updates
        self.silent_steps = 0

    def prepare(self) -> PromptData:
        """Prompts of the data, and reward functions, whose digests are part of the data's key."""
        config, rl = self.config, self.config.rl
        begin = config.train.init_from
        forbidden = None if begin is None else expanded(begin)
        self.rewards = find_rewards(config.reward.functions, forbidden=forbidden)
        room = config.data.seq_len - rl.max_tokens
        if room < 1:
            raise ConfigError(
                "rl.max_tokens",
                rl.max_tokens,
                f"leaves no room for a prompt in {named('data.seq_len')}, {config.data.seq_len}",
                "lower it",
            )
        seed, vocab_size = config.train.seed, config.model.vocab_size
        self.data = PromptData(config.data, vocab_size=vocab_size, seed=seed, room=room)
        check_columns(self.rewards, {name for one in self.data.prompts for name in one.columns})
        told = [self.data.key, *(f"{one.name} {one.weight} {one.digest}" for one in self.rewards)]
        self.data.key = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
        return self.data

    def begin(self, model: nn.Module, data: Data, begin: Begin) -> None:
        """Open the reference, if the loss has one."""
        if self.config.rl.kl_beta:
            self.reference = Reference(self.config, model, begin.ranks)

    def enrich(self, model: nn.Module, batch: Batch, step: int, ranks: Ranks) -> Batch:
        """Answers to the step's prompts as tensors, see `batch_of_answers`; every rank samples and rewards its own
        part."""
        rl, numbers = self.config.rl, batch["prompt"].tolist()
        rows = ranks.rows(0, len(numbers))
        logged: dict[str, list[float]] = {}
        with whole_model(model, self.builder, ranks) as own:
            answer = partial(self._answers, own, numbers, rows, step, logged)
            everything = ranks.gather((ranks.on_all(answer), logged))[:: ranks.tp_degree]
            answers = [one for drawn, _ in everything for one in drawn]
            dtype = accumulate_dtype(next(model.parameters()).dtype)
            how = {"num_updates": self.num_updates, "multiple": ranks.tp_degree}
            found = batch_of_answers(answers, rl, dtype=dtype, **how)
        if not rl.exact:
            old = found[2]["old"] = self._logprobs(model, found, step, ranks)
            gap = (old - found[2]["sampled"]).where(found[2]["counts"], 0.0)
            found[2]["mismatch_max"] = _once(float(gap.abs().max()), len(numbers))
        if ranks.is_leader:
            self._tell_silence(found[2]["reward"])
        if self.reference is not None:
            own_choice = {name: x for name, x in found[2].items() if name != "experts"}
            with self.reference.of(model) as other:
                scored = self._logprobs(other, (*found[:2], own_choice), step, ranks)
            found[2]["reference"] = scored
        self.samples = [self._shown(one) for one in answers[: rl.group]]
        shape = len(numbers), rl.group
        for name, values in self._each_value([one.values for one in answers]).items():
            found[2][name] = torch.tensor(values, dtype=torch.float64).view(shape)
        for name, values in _merged(logged for _, logged in everything).items():
            found[2][f"log_{name}"] = _once(sum(values) / len(values), len(numbers))
        return found

    def _tell_silence(self, reward_BG: Tensor) -> None:
        """Warn where steps in a row had nothing to learn from, as the answers to each prompt had equal rewards."""
        is_silent = bool(policy_gradient.equal_groups(reward_BG).all())
        self.silent_steps = self.silent_steps + 1 if is_silent else 0
        if self.silent_steps == SILENT_STEPS:
            _log.warning(
                Line(
                    f"the answers to every prompt had equal rewards in {SILENT_STEPS} steps in a row, which teach "
                    f"nothing: look at {named('reward.functions')} and at samples ({named('train.sample_every')}), or "
                    f"raise {named('rl.group')}"
                )
            )

    def _answers(
        self,
        model: Any,
        numbers: Sequence[int],
        rows: slice,
        step: int,
        logged: dict[str, list[float]],
    ) -> list[DrawnAnswer]:
        """Sampled and rewarded answers of this rank."""
        mine = range(rows.start, rows.stop)
        prompts = [self.data.prompts[numbers[row]] for row in mine]
        seeds = [seed_of_row(self.config.train.seed, step, row) for row in mine]
        outputs = self._rolled_out(model, prompts, seeds)

        def log(name: str, value: float) -> None:
            logged.setdefault(name, []).append(float(value))

        each = [prompt for prompt in prompts for _ in range(self.config.rl.group)]
        texts, values, rewards = self._rewarded(outputs, each, step, log)
        return [
            DrawnAnswer.of(output, reward=reward, text=text, values={name: values[name][i] for name in values})
            for i, (output, text, reward) in enumerate(zip(outputs, texts, rewards, strict=True))
        ]

    def _shown(self, one: DrawnAnswer) -> dict[str, Any]:
        """An answer of the first group, for samples.jsonl."""
        prompt = self.data.tokenizer.decode(list(one.prompt_ids), skip_special_tokens=False)
        return {"prompt": prompt, "text": one.text, "reward": one.reward, **one.values}

    def _each_value(self, values: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
        """Values of answers by every function where there are several, 0 and not counted where one does not apply."""
        found = {}
        for one in self.rewards if len(self.rewards) > 1 else ():
            own = [value[one.name] for value in values]
            found[f"{_VALUE}{one.name}"] = [value or 0.0 for value in own]
            found[f"applies_{one.name}"] = [float(value is not None) for value in own]
        return found

    def _rolled_out(
        self, model: Any, prompts: Sequence[PromptRecord], seeds: Sequence[int] | None
    ) -> list[RequestOutput]:
        ids = [prompt.ids for prompt in prompts]
        return roll_out(model, ids, self.config.rl, ends=self.data.ends, seeds=seeds)

    def _rewarded(
        self, outputs: Sequence[RequestOutput], prompts: Sequence[PromptRecord], step: int, log: Any
    ) -> tuple[list[str], dict[str, list[float | None]], list[float]]:
        """Texts of answers, values of every reward function, and rewards; `prompts` has the prompt of each answer."""
        texts = [self._text(output) for output in outputs]
        if not outputs:
            return [], {}, []
        names = {name: None for prompt in prompts for name in prompt.columns}
        answered = Answered(
            prompts=[prompt.given for prompt in prompts],
            completions=[
                [{"role": "assistant", "content": text}] if prompt.is_talk else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            completion_ids=[output.token_ids for output in outputs],
            columns={name: [prompt.columns.get(name) for prompt in prompts] for name in names},
            where=[prompt.where for prompt in prompts],
            state=SimpleNamespace(global_step=step, max_steps=self.config.train.steps),
        )
        timeout = self.config.reward.timeout
        values = rewarded(self.rewards, answered, timeout=timeout, log=log)
        return texts, values, total(self.rewards, values, answered)

    def _text(self, output: RequestOutput) -> str:
        """Text of an answer without the token that ended it; other special tokens stay."""
        ids = list(output.token_ids)
        if ids and ids[-1] in self.data.ends:
            ids.pop()
        text: str = self.data.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def cut(self, batch: Batch) -> Batch:
        """Answers cut to the longest one, replayed experts with them."""
        found = super().cut(batch)
        if (more := named_tensors(found)) and "experts" in more:
            S = found[0].shape[2]
            found = (*found[:2], {**more, "experts": more["experts"][:, :, :S].contiguous()})
        return found

    def num_items(self, batch: Batch) -> int:
        """Number of learned tokens, or of answers with one, as `rl.average` says; 1 if nothing is learned."""
        counts = named_tensors(batch)["counts"]
        num_answers = int(counts.any(-1).sum())
        return max(1, policy_gradient.num_items(int(counts.sum()), num_answers, self.config.rl))

    def progress_items(self, batch: Batch) -> int:
        """Number of tokens of answers."""
        return int(named_tensors(batch)["drawn"].sum())

    def _logprobs(self, model: nn.Module, batch: Batch, step: int, ranks: Ranks) -> Tensor:
        """(B, G, S) log-probabilities of learned tokens that a training pass computes, on the CPU."""
        old = torch.zeros_like(batch[2]["sampled"])
        device, size = next(model.parameters()).device, self.config.train.samples_per_pass
        for rows, mine in micro_batches(self, batch, size, ranks):
            there = each_tensor(mine, lambda x: x.to(device))
            found = self._scored(model, there, Part(step, rows, ranks))
            at_BGS = found.at_positions(found.logprobs_R)
            old[rows, :, : at_BGS.shape[2]] = at_BGS.cpu()
        old = old * ranks.counted
        return ranks.sum_(old.to(ranks.device), what="log-probabilities").to(old.device)

    def _scored(self, model: nn.Module, batch: Batch, part: Part) -> AnswerScores:
        """Scores, with the experts that rollouts chose where they are replayed."""
        experts = named_tensors(batch).get("experts")
        replay: Any = nullcontext()
        if experts is not None:
            flat = part.positions(experts.flatten(0, 1)).flatten(0, 1).long()
            nums = [num for num in self.config.model.experts_per_layer() if num]
            each = (flat[:, layer].contiguous() for layer in range(flat.shape[1]))
            replay = replaying(model, [ids.where(ids >= 0, num) for ids, num in zip(each, nums, strict=True)])
        with replay:
            return self.scores(model, batch, part)

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Loss of the policy, see `policy_losses`; in exact mode the first update's log-probabilities are compared to
        the bit."""
        rl, more = self.config.rl, named_tensors(batch)
        num_learned = int(more["counts"].sum())
        part = Part(part.step, part.rows, part.ranks, num_learned)
        found = self._scored(model, batch, part)
        logprob_R = found.logprobs_R
        at_R = found.rows_R
        old_R, sampled_R = (more[name].flatten()[at_R] for name in ("old", "sampled"))
        mismatch: Tensor | float = 0.0
        if not rl.exact:
            mismatch = more["mismatch_max"].sum()
        elif bool(more["is_first"].all()):
            mismatch = self._checked_gap(logprob_R.detach(), sampled_R, found, batch)
        drawn = Drawn(
            old_R,
            found.answers,
            more["advantage"].flatten(),
            more["counts"].sum(2).flatten().clamp(min=1).to(logprob_R),
        )
        loss_R = policy_gradient.policy_losses(logprob_R, drawn, rl)
        if rl.correction != "none":
            loss_R = loss_R * policy_gradient.corrections(old_R, sampled_R, drawn, rl)
        kl_R = None
        if "reference" in more:
            kl_R = policy_gradient.kl_estimates(logprob_R, more["reference"].flatten()[at_R])
        loss_R = policy_gradient.with_penalties(loss_R, found.entropies_R, kl_R, rl)
        clipped = policy_gradient.is_clipped(logprob_R.detach(), drawn, rl).sum()
        entropy = found.entropies_R.detach().sum()
        total = policy_gradient.summed(loss_R, drawn, rl)
        sums = self._sums(more) | {
            "policy": total.detach(),
            "learned": float(num_learned),
            "clipped": clipped,
            "entropy": entropy,
            "mismatch_max": mismatch,
        }
        if kl_R is not None:
            sums["kl"] = kl_R.detach().sum()
        return loss_once(Loss(total, found.stats, sums), part.ranks)

    def _checked_gap(self, logprob_R: Tensor, sampled_R: Tensor, found: AnswerScores, batch: Batch) -> Tensor:
        """Largest difference between log-probabilities of training and of rollouts; ConfigError unless it is 0."""
        gap_R = (logprob_R - sampled_R).abs()
        differs_R = gap_R > 0
        if not bool(differs_R.any()):
            return gap_R.sum()
        row = int(gap_R.argmax())
        place = int(found.rows_R[row]) % found.shape[2]
        raise ConfigError(
            f"{named('rl.exact', True)}: {int(differs_R.sum())} of {len(gap_R)} tokens have other log-probabilities "
            "in training than"
            f" in rollouts; the largest difference is {float(gap_R[row]):.3g} (token "
            f"{int(batch[1].flatten()[found.rows_R[row]])} at position"
            f" {place + 1} of answer {int(found.answers[row])}); use {named('rl.exact', False)}, and report it"
        )

    def _sums(self, more: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        """Sums over prompts: rewards, lengths, mismatch, and the measures of the user's functions."""
        reward, drawn = more["reward"], more["drawn"]
        gap = (more["old"] - more["sampled"]).where(more["counts"], 0.0)
        sums: dict[str, Tensor | float] = {
            "items": float(reward.numel()),
            "prompts": float(len(reward)),
            "reward": reward.sum(),
            "reward_std": reward.std(1).sum(),
            "equal_groups": policy_gradient.equal_groups(reward).sum(),
            "tokens": drawn.sum(),
            "cut": more["is_cut"].sum(),
            "mismatch_k3": (gap.exp() - 1 - gap).sum(),
        }
        return sums | {name: x.sum() for name, x in more.items() if name.startswith(_NAMED)}

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of rewards of one greedy answer to each validation prompt."""
        prompts = [self.data.prompts[number] for number in batch["prompt"].tolist()]
        with whole_model(model, self.builder, part.ranks) as own:
            outputs = part.ranks.on_all(partial(self._rolled_out, own, prompts, None))
        _, values, rewards = self._rewarded(outputs, prompts, part.step, lambda name, value: None)
        found: dict[str, Tensor | float] = {
            "items": float(len(prompts)),
            "prompts": float(len(prompts)),
            "reward": float(sum(rewards)),
            "tokens": float(sum(len(one.token_ids) for one in outputs)),
            "cut": float(sum(one.finish_reason == "length" for one in outputs)),
        }
        each = [{name: values[name][i] for name in values} for i in range(len(outputs))]
        found |= {name: sum(column) for name, column in self._each_value(each).items()}
        return once(found, part.ranks)

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means per answer, per group and per token; the loss of an evaluation is the negative reward."""
        items, tokens = sums["items"], sums["tokens"]
        found = {
            "reward": sums["reward"] / items,
            "length": tokens / items,
            "cut": sums["cut"] / items,
        }
        for name in sums:
            if name.startswith(_VALUE):
                of = name.removeprefix(_VALUE)
                found[f"reward_{of}"] = sums[name] / (sums[f"applies_{of}"] or math.nan)
        if "policy" not in sums:
            return {"loss": -found["reward"], **found}
        learned = sums["learned"] or 1.0
        found |= {name: sums[name] / sums["prompts"] for name in ("reward_std", "equal_groups")}
        found |= {name: sums[name] / learned for name in ("entropy", "clipped", "kl") if name in sums}
        found |= {
            "mismatch_max": sums["mismatch_max"],
            "mismatch_k3": sums["mismatch_k3"] / learned,
        }
        logged = {name: value for name, value in sums.items() if name.startswith("log_")}
        return found | {name.removeprefix("log_"): value for name, value in logged.items()}


def _once(value: float, size: int) -> Tensor:
    """(size,) FP64 whose sum is the value: a number of the whole batch, however it is cut."""
    found = torch.zeros(size, dtype=torch.float64)
    found[0] = value
    return found


def _merged(all_logged: Any) -> dict[str, list[float]]:
    """Measures that functions logged on all ranks."""
    found: dict[str, list[float]] = {}
    for logged in all_logged:
        for name, values in logged.items():
            found.setdefault(name, []).extend(values)
    return found
