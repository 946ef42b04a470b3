"""Folders of low-rank adapters in peft's format, with drawn factors, for tests that need no peft."""

import copy
import json

import torch
from safetensors.torch import save_file

from expertmesh.ops.experts.call import TokenAdapters, stack_adapters

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def shapes_of(config, modules, parameters):
    """(rows, columns, experts) of each module of transformers that gets an adapter, by its name."""
    d, H, kv = config.head_size, config.num_heads, config.kv_heads
    attention = {
        "q_proj": (H * d, config.dim),
        "k_proj": (kv * d, config.dim),
        "v_proj": (kv * d, config.dim),
        "o_proj": (config.dim, H * d),
    }
    found = {}
    for layer, count in enumerate(config.experts_per_layer()):
        place = f"model.layers.{layer}"
        for name in modules:
            if name in attention:
                found[f"{place}.self_attn.{name}"] = (*attention[name], 1)
        if count:
            rows = {"gate_up_proj": 2 * config.moe.hidden_dim, "down_proj": config.dim}
            columns = {"gate_up_proj": config.dim, "down_proj": config.moe.hidden_dim}
            for name in parameters:
                inner = ".base_layer" if name == EXPERTS[0] and len(parameters) == 2 else ""
                key = f"{place}.mlp.experts{inner}"
                found[key] = (rows[name], columns[name], count)
    return found


def of_runs(num_tokens, runs):
    """Adapters of tokens: (first, stop, adapter of w_in, adapter of w_out) of each run of tokens that has some."""
    slots = [-1] * num_tokens
    for slot, (first, stop, *_) in enumerate(runs):
        slots[first:stop] = [slot] * (stop - first)
    on_in, on_out = (stack_adapters([run[which] for run in runs]) for which in (2, 3))
    return TokenAdapters.of_slots(slots, torch.device("cpu"))._replace(on_in=on_in, on_out=on_out)


def make_adapter(place, config, *, seed, rank=2, alpha=4, modules=ATTENTION, parameters=EXPERTS, size=0.3, **more):
    """Write a folder, and return it.

    Args:
        place: a folder that does not exist yet.
        config: of the model.
        seed: of the factors.
        rank: r.
        alpha: s r.
        modules: of attention.
        parameters: of experts.
        size: standard deviation of all factors.
        **more: of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns, count) in shapes_of(config, modules, parameters).items():
        for factor, shape in (("A", (rank * count, columns)), ("B", (rows, rank * count))):
            key = f"base_model.model.{name}.lora_{factor}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * size
    place.mkdir(parents=True)
    save_file(tensors, place / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "target_parameters": [f"mlp.experts.{name}" for name in parameters],
    }
    (place / "adapter_config.json").write_text(json.dumps(values | more))
    return place


def merged(model, low_ranks):
    """A copy of a model with W + s B A in the place of W, in FP64 on the way.

    Args:
        model: a GPT.
        low_ranks: what is added, by path of the module and name of the parameter; see `LoadedAdapter`.
    """
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for path, both in low_ranks.items():
            for name, low in both.items():
                weight = whole.get_parameter(f"{path}.{name}")
                more = low.scaling * (low.b_ENr.double() @ low.a_ErK.double())
                total = weight.double() + more.view(weight.shape)
                weight.copy_(total)
    return whole
