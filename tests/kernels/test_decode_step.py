"""A padded decode step as a GPU would compute it, traced on tensors without values: what is launched, nothing waited
for, all built."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from tests.support.aot import TARGETS
from tests.support.launches import as_on, recorded_launches
from tests.support.waits import waits
from torch._library.custom_ops import OPDEFS

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.captured import captured_sizes
from expertmesh.engine.drawing import SamplingNumbers
from expertmesh.engine.kv_cache import PagedCache
from expertmesh.engine.runner import Runner
from expertmesh.engine.step_tensors import BatchChunk, Padding, StepBatch, step_tensors
from expertmesh.kernels import (
    attention_over_pages,
    combine,
    moe_forward,
    permute,
    quantized_products,
    route_metadata,
    split_product,
    split_rows,
    topk,
)
from expertmesh.kernels.tiles import SHARED_BYTES
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.ops import backend
from expertmesh.ops.attention import paged_triton

KERNELS = (
    attention_over_pages,
    combine,
    moe_forward,
    permute,
    quantized_products,
    route_metadata,
    split_product,
    split_rows,
    topk,
)
MODELS = {"usual": {}, "exact": {"batch_invariant": True}}
META = torch.device("meta")


def traced(options, num, *, target="sm_90"):
    """Output, launches and waits of a step of `num` sequences, padding included."""
    config = ModelConfig(
        vocab_size=512,
        max_seq_len=1024,
        dim=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        moe={"num_experts": (8,), "hidden_dim": 96, "top_k": 2},
        **options,
    )
    model = GPT(config, device=META, dtype=torch.bfloat16).eval()
    sizes = {"num_blocks": 64, "block_size": 16, "device": META, "dtype": torch.bfloat16}
    runner = Runner(model, PagedCache(config, has_spare=True, **sizes))
    params = [SamplingParams(temperature=0.7, top_p=0.9)]
    drawing = SamplingNumbers.of(params, seeds=[1], answers=[0], positions=[9], num_rows=num)
    batch = StepBatch((BatchChunk([4], 8, [1, 0]),), (0,))
    padding = Padding(64, num, 1024)
    step = step_tensors(batch, 16, META, drawing=drawing, padding=padding)
    with ExitStack() as stack:
        for module in (backend, paged_triton):
            stack.enter_context(mock.patch.object(module, "runs_triton", lambda device: True))
        for name, op in list(OPDEFS.items()):  # what operators do on a GPU, instead of their shapes
            if name.startswith("expertmesh::"):
                stack.enter_context(mock.patch.object(op, "_abstract_fn", op._init_fn))
        stack.enter_context(as_on(target))
        launches = stack.enter_context(recorded_launches(*KERNELS))
        watch = stack.enter_context(waits())
        found = runner._forward(step)
    return found, launches, watch.found


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_nothing_waits_and_sizes_are_fixed(options):
    """A tensor on "meta" has no values: a size that depended on one, or a number that the host read, would be an
    error."""
    seen = []
    for num in captured_sizes(24):
        found, launches, waited = traced(options, num)
        assert found.logits_RV.shape == (num, 512)
        assert found.drawn_3R.shape == (3, num)
        assert [ids.shape for ids in found.ids_of_layers] == [(num, 2)] * 2
        assert waited == []
        seen.append([one.name for one in launches])
    assert seen[0].count("attend") == 2
    assert seen[0].count("sum_rows") == 2
    for names in seen:
        assert [n for n in names if n != "merge_parts"] == [n for n in seen[0] if n != "merge_parts"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_built(target, options):
    launches = {one.key: one for one in traced(options, 8, target=target)[1]}
    for launch in launches.values():
        made = launch.build(target)
        assert made.spill_bytes == 0
        assert made.shared_bytes <= SHARED_BYTES[target]
