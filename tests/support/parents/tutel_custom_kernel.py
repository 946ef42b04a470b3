"""The loops of Tutel's C++ module for CPUs, in plain PyTorch, so that its Python runs without a build."""

import torch

torch.ops.load_library = lambda _: None
_ops = torch.library.Library("tutel_ops", "DEF")
_ops.define(
    "scatter_sample_ids(Tensor experts, Tensor places, Tensor out, int capacity, int tokens, bool top) -> Tensor"
)


def scatter_sample_ids(experts, places, out, capacity, tokens, top):
    slot = torch.arange(experts.numel())
    experts, places, out = experts.flatten().long(), places.flatten().long(), out.clone()
    kept = places < capacity
    came = slot // tokens if top else slot % tokens
    out[experts[kept], places[kept]] = came[kept].to(out.dtype)
    return out


_ops.impl("scatter_sample_ids", scatter_sample_ids, "CPU")


def put_pg_storage(*_):
    return None


def invoke_cpu_fp32(inputs, extra, kind):
    first, expert_N, place_N, *_ = inputs
    capacity = extra[-1]
    kept_N = (place_N < capacity) & (expert_N >= 0)
    row_N = (expert_N * capacity + place_N).long()[kept_N]
    tokens, rows = (x.view(-1, x.shape[-1]) for x in inputs[3:])
    if kind == 2:  # gradients of the weights
        first.zero_()
        first[kept_N] = (tokens[kept_N] * rows[row_N]).sum(1)
        return
    weight_N = first.reshape(len(first), -1)[: len(kept_N), :1][kept_N]
    if kind == 0:  # tokens to rows
        rows[row_N] = weight_N * tokens[kept_N]
    else:  # rows to tokens
        tokens.zero_()
        tokens[kept_N] = weight_N * rows[row_N]


invoke_cpu_fp64 = invoke_cpu_fp32
