"""Converted models answer as transformers' `generate` does; a batch answers as its sequences do alone, but where
rounding decides."""

import copy

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, VOCAB, gpt
from tests.oracle.numerics import assert_two_times, max_error, two_times_bound

from expertmesh.checkpoints.hub.load_pretrained import load_pretrained
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _qwen():
    own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    config = transformers.Qwen3MoeConfig(**SIZES, **own, norm_topk_prob=True, experts_implementation="eager")
    return transformers.Qwen3MoeForCausalLM(config)


def _mixtral():
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    return transformers.MixtralForCausalLM(config)


FAMILIES = {"qwen3_moe": _qwen, "mixtral": _mixtral}
PENALTIES = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.7},
    "bigger": {"repetition_penalty": 3.0},
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES, scope="module")
def both(request, tmp_path_factory):
    torch.manual_seed(0)
    theirs = request.param().eval()
    theirs.generation_config.eos_token_id = None
    folder = tmp_path_factory.mktemp("hub")
    theirs.save_pretrained(folder)
    return theirs, load_pretrained(folder).eval()


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("how", [{}, {"token_budget": 5, "block_size": 4}], ids=["whole", "cut"])
def test_tokens_and_logprobs_are_those_of_transformers(both, penalty, how):
    theirs, ours = both
    assert next(theirs.parameters()).dtype == next(ours.parameters()).dtype == torch.float32
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True, **penalty)
    for output in Engine(ours, **how).generate(PROMPTS, params):
        ids = torch.tensor([output.prompt_ids])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **penalty,
        )
        tokens = expected.sequences[0, ids.shape[1] :]
        assert list(output.token_ids) == tokens.tolist()
        rows = torch.cat(expected.logits).log_softmax(-1)
        wanted = rows.gather(1, tokens[:, None])[:, 0]
        with torch.no_grad():
            wide = copy.deepcopy(theirs).double()(expected.sequences).logits[0].log_softmax(-1)
        oracle = wide[ids.shape[1] - 1 : -1].gather(1, tokens[:, None])[:, 0]
        found = torch.tensor([one.logprob for one in output.logprobs])
        # a logprob is the difference of two numbers as large as those of the whole row
        assert_two_times(found, wanted, oracle, what="logprobs", scale=float(wide.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "shared"])
def test_a_batch_chooses_other_tokens_only_where_rounding_decides(router, dtype):
    """The first token that differs has a rival whose logit is, in FP64, within what the two-times rule allows of
    rounding."""
    model = gpt(dtype, moe=ROUTERS[router])
    wide = copy.deepcopy(model).double()
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [[5 + i, 6, (7 * i) % VOCAB, 3] for i in range(16)]
    together = Engine(model).generate(prompts, params)
    alone = [Engine(model, max_sequences=1).generate([p], params)[0] for p in prompts]
    for a, b in zip(together, alone, strict=True):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
        place = next((i for i, (x, y) in pairs if x != y), None)
        if place is None:
            continue
        ids = torch.tensor([[*a.prompt_ids, *a.token_ids[:place]]])
        with torch.no_grad():
            plain, oracle = (m(ids).logits_BSV[0, -1] for m in (model, wide))
        gap = abs(float(oracle[a.token_ids[place]] - oracle[b.token_ids[place]]))
        assert gap <= 2 * two_times_bound(plain, oracle), f"token {place} of {ids.tolist()}"
        assert max_error(plain, oracle) > 0
