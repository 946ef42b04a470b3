"""What is recorded of each expert, and who gets the numbers of a run."""

import json
import math
from pathlib import Path

import pytest
import torch

import expertmesh as em
from expertmesh.moe.types import RoutingStats
from expertmesh.training.expert_use import RECORDS, is_recorded, use_of_experts
from expertmesh.training.loop import train
from expertmesh.training.routing_losses import POSITIONS, LoadCounter, Watched

NUM_EXPERTS = 3
# expert 3 is "no expert"; expert 1 has no row
CHOICES = [([0, 2], [0.75, 0.25]), ([2, 3], [0.5, 0.0]), ([3, 3], [0.0, 0.0]), ([2, 0], [0.6, 0.4])]


def stats_of(choices):
    ids_TK = torch.tensor([ids for ids, _ in choices])
    return RoutingStats(
        aux_loss=torch.zeros(()),
        z_loss=torch.zeros(()),
        num_tokens_per_expert_E=torch.bincount(ids_TK.flatten(), minlength=4)[:NUM_EXPERTS],
        num_dropped=torch.tensor(1),
        topk_expert_ids_TK=ids_TK,
        topk_weights_TK=torch.tensor([weights for _, weights in choices]),
        kept_expert_ids_TK=torch.where(torch.arange(len(ids_TK))[:, None] % 2 > 0, 3, ids_TK),
    )


def test_the_record_is_what_a_loop_over_tokens_finds():
    counter = LoadCounter()
    labels = "en", "de"
    for part, label in ((CHOICES[:2], 1), (CHOICES[2:], 0)):  # micro-batches of one sample each
        watched = Watched(1, num_labels=2, label_B=torch.tensor([label]))
        counter.add([stats_of(part)], watched)
    counts = [c.tolist() for c in counter.counts]
    sums = counter.watched[0].tolist()
    use = use_of_experts(counts, counter.num_dropped.tolist(), sums, labels)
    # the second token of each sample, at the middle of it, is dropped
    assert use.dropped_by_position == [[0.0] * (POSITIONS // 2) + [1.0] + [0.0] * (POSITIONS // 2 - 1)]
    assert use.counts_by_label == {"en": [[1, 0, 1]], "de": [[1, 0, 2]]}
    twice = use_of_experts(counts, counter.num_dropped.tolist(), sums, ("en", "en"))
    assert twice.counts_by_label == {"en": [[1, 0, 1]], "en (2)": [[1, 0, 2]]}
    weights = [[], [], [], []]
    entropies = []
    for ids, chosen in CHOICES:
        for expert, weight in zip(ids, chosen, strict=True):
            weights[expert].append(weight)
        if sum(chosen):
            shares = [weight / sum(chosen) for weight in chosen if weight]
            entropies.append(-sum(share * math.log(share) for share in shares))
    assert use.counts == [[2, 0, 3]] and use.dropped == [2]
    means = [round(sum(w) / len(w), 4) if w else 0.0 for w in weights[:NUM_EXPERTS]]
    assert use.confidence == [means]
    assert use.entropy == [round(sum(entropies) / len(entropies), 4)]


def test_a_step_that_diverged_has_a_record_of_plain_numbers():
    sums = [math.nan, 1.0, math.inf, 2.0, *[math.nan] * 2 * POSITIONS]
    use = use_of_experts([[1, 1]], [0], sums)
    assert use.confidence == [[0.0, 1.0]] and use.entropy == [0.0]


@pytest.mark.parametrize("num_steps", [1, 7, RECORDS, 3 * RECORDS + 1, 10**6])
def test_a_long_run_has_few_records(num_steps):
    stride = max(num_steps // RECORDS, 1)
    steps = [s for s in (*range(0, num_steps, stride), num_steps - 1) if is_recorded(s, num_steps)]
    assert len(set(steps)) <= 2 * RECORDS and num_steps - 1 in steps and 0 in steps


class Kept:
    """A tracker of a user's."""

    def __init__(self):
        self.lines, self.experts = [], []

    def write(self, values, experts):
        self.lines.append(dict(values))
        self.experts.append(experts)


def test_a_tracker_gets_every_step_and_a_resumed_run_has_one_record_of_each(tiny):
    mine = Kept()
    config = tiny()
    em.train(config.updated({"train.steps": 5}), trackers=[mine], quiet=True)
    em.train(config.updated({"train.resume": "auto"}), trackers=[mine], quiet=True)
    assert [line["step"] for line in mine.lines] == list(range(1, 9))
    assert sum("eval_loss" in line for line in mine.lines) == 3
    run = config.train.run_dir
    records = [json.loads(line) for line in Path(run, "experts.jsonl").read_text().splitlines()]
    assert [record.pop("step") for record in records] == list(range(1, 9))
    assert records == [use.named() for use in mine.experts]
    assert all(sum(layer) == 4 * 16 * 2 for record in records for layer in record["counts"])


def test_two_ranks_record_what_one_does(tiny, make_corpus, tmp_path, two_ranks, run_quietly):
    """Counts, sums of weights, drops by position and use by place of the text are those of the whole batch, whoever has
    the tokens."""
    places = [str(make_corpus(tmp_path / name, documents=9, seed=i)) for i, name in enumerate("ab")]
    changes = {"train.steps": 1, "train.batch_size": 16, "optim.warmup_steps": 1}
    changes |= {"data.path": tuple(places), "train.dtype": "float64"}
    changes |= {"model.moe.capacity_factor": 1.0, "model.moe.routing_group_size": 16}
    config = tiny(**changes)
    run_quietly(config)
    spread = config.updated({"train.run_dir": str(tmp_path / "spread"), "parallel.tp_degree": 2})
    two_ranks.run(_train, spread.model_dump_json())
    one, two = (
        json.loads((tmp_path / name / "experts.jsonl").read_text().splitlines()[0]) for name in ("run", "spread")
    )
    assert one == two
    assert list(one["counts_by_label"]) == places
    by_place = [sum(map(sum, layers)) for layers in one["counts_by_label"].values()]
    assert min(by_place) > 0 and sum(by_place) == sum(map(sum, one["counts"]))
    assert max(map(max, one["dropped_by_position"])) > 0


def _train(values):
    from rich.console import Console

    from expertmesh.models.gpt.config import GPTRunConfig

    train(GPTRunConfig.model_validate_json(values), console=Console(quiet=True))
