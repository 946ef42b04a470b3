"""Speed-ups that Tutel and DeepSpeed-MoE claim, and the model's ratios for them, over the one-hot dispatch of 2021.

A claim with published settings gets a ratio; a claim without gets settings that would make it true.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from expertmesh.costs.communication import TokenLoad, travel_seconds
from expertmesh.costs.hardware import find_cluster, network_of
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.sizes import LayerSizes, ModelSizes, sizes_of_hub, spec_of_layers
from expertmesh.costs.step_time import Efficiency, raw_step, route_of, step_seconds
from expertmesh.planner.published import published_models
from expertmesh.planner.serving_layout import Serving

OLD = Workload(1024, precision="float16", stack="2021", states="fairseq", merges=False, one_hot=True)
"""Baseline of the claims: fairseq of 2021 in FP16, with one-hot dispatch."""
TUTEL = replace(OLD, one_hot=False)
"""`OLD` with sparse dispatch, the claimed improvement."""


@dataclass(frozen=True)
class Claim:
    """A published ratio.

    Attributes:
        name: the claim in words.
        claimed: the claimed ratio.
        found: the model's ratio; None: its settings are not published.
        assumed: settings that the source leaves open, or that would make the claim true.
    """

    name: str
    claimed: float
    found: float | None
    assumed: str


def layer(dim: int, hidden_dim: int, num_experts: int, top_k: int) -> ModelSizes:
    """Sizes of a model that is one layer of two-matrix experts."""
    block = LayerSizes(
        count=1,
        attention_elements=0,
        score_width=0,
        kept_width=0,
        cache_width=0,
        cache_heads=1,
        window=None,
        dense_hidden=0,
        dense_elements=0,
        num_experts=num_experts,
        rows_per_token=top_k,
        hidden_dim=hidden_dim,
        num_matrices=2,
        dense_parameters=dim * num_experts,
        expert_parameters=2 * dim * hidden_dim,
    )
    return ModelSizes(dim, 0, spec_of_layers(dim, 0, [block]), (block,))


def layer_ratio(tokens: int, *, gpus: int, dim: int, hidden_dim: int, per_gpu: int, top_k: int) -> float:
    """Time of a layer with one-hot dispatch and flat all-to-all over sparse dispatch and the faster all-to-all,
    A100-80."""
    cluster = find_cluster(f"a100-80x{gpus}")
    sizes = layer(dim, hidden_dim, per_gpu * gpus, top_k)
    flat = RankLayout(gpus, route_degree=gpus, zero_stage=1)
    seconds = []
    for work in (OLD, TUTEL):
        kinds = (flat,) if work.one_hot else (flat, replace(flat, all_to_all="hierarchical"))
        times = []
        for layout in kinds:
            raw = raw_step(sizes, layout, replace(work, seq_len=tokens), cluster)
            found = step_seconds(raw, Efficiency())
            times.append(found.total_s - found.optimizer_s - found.zero_s)
        seconds.append(min(times))
    return seconds[0] / seconds[1]


def model_ratio(gpus: int, batch: int) -> float:
    """Time of a step of the 1.1T family, an expert per layer and GPU, with one-hot dispatch over sparse dispatch."""
    cluster = find_cluster(f"a100-80x{gpus}")
    sizes = sizes_of_hub(FAIRSEQ | {"num_experts": gpus})
    layout = RankLayout(gpus, route_degree=gpus, checkpointing="full", micro_batch=batch)
    old, new = (step_seconds(raw_step(sizes, layout, work, cluster), Efficiency()).total_s for work in (OLD, TUTEL))
    return old / new


FAIRSEQ = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 51200,
    "num_attention_heads": 32,
    "intermediate_size": 16384,
    "hidden_act": "gelu_plain",
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "tie_word_embeddings": True,
}


def exchange_ratio(tokens: float, gpus: int = 2048, dim: int = 2048) -> float:
    """Time of the flat over the hierarchical all-to-all, top-2 tokens without merging, A100-80, FP16."""
    cluster = find_cluster(f"a100-80x{gpus}")
    route, network = route_of(gpus, 1, cluster.node_size), network_of(cluster)
    load = replace(TokenLoad.even(tokens, 2, 2 * gpus), merges=False)
    flat, two_levels = (
        travel_seconds(kind, route, load, network, dim=dim, element_bytes=2) for kind in ("flat", "hierarchical")
    )
    return flat / two_levels


def solved(ratio: Callable[[float], float], wanted: float, low: float, high: float) -> float | None:
    """The argument at which a monotonic ratio has a value, between `low` and `high`; None: there is none."""
    rises = ratio(high) > ratio(low)
    ends = (ratio(low), ratio(high))
    if not min(ends) <= wanted <= max(ends):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        if (ratio(middle) < wanted) == rises:
            low = middle
        else:
            high = middle
    return low


def claims() -> list[Claim]:
    """All claims: layers, models, all-to-all, pipelining, switching, SwinV2-MoE."""
    found = []
    for gpus, claimed in ((16, 4.96), (128, 3.11), (2048, 5.75)):
        ratio = layer_ratio(16384, gpus=gpus, dim=2048, hidden_dim=2048, per_gpu=2, top_k=2)
        found.append(
            Claim(
                f"Tutel figure 14, a layer on {gpus} GPUs",
                claimed,
                ratio,
                "FP16; 16,384 tokens per GPU",
            )
        )
    for gpus, claimed in ((8, 8.49), (512, 2.75)):

        def of_layer(tokens: float, gpus: int = gpus) -> float:
            return layer_ratio(round(tokens), gpus=gpus, dim=2048, hidden_dim=2048, per_gpu=2, top_k=2)

        tokens = solved(of_layer, claimed, 256, 2**20)
        said = (
            f"nowhere: {of_layer(256):.1f} with 256 tokens per GPU, {of_layer(2**20):.0f} with a million"
            if tokens is None
            else f"true with {tokens:,.0f} tokens per GPU"
        )
        found.append(
            Claim(
                f"Tutel blog, a layer on {gpus} GPUs",
                claimed,
                None,
                f"{said} (D = F = 2,048, FP16)",
            )
        )
    for gpus, claimed in ((8, 2.31), (512, 1.40)):
        found.append(
            Claim(
                f"Tutel blog, 1.1T family on {gpus} GPUs",
                claimed,
                model_ratio(gpus, 24),
                "24 sequences of 1,024 per GPU in one pass",
            )
        )
        found.append(
            Claim(
                f"the same at half the batch, {gpus} GPUs",
                claimed,
                model_ratio(gpus, 12),
                "12 sequences per GPU",
            )
        )
    tokens = solved(exchange_ratio, 20.7, 1, 2**20)
    most = exchange_ratio(1)
    said = (
        f"at most {most:.1f} by messages' latency, with a token per GPU: needs congestion that is not modelled"
        if tokens is None
        else f"true with {tokens:,.0f} tokens per GPU (D = 2,048)"
    )
    found.append(Claim("Tutel, 2DH all-to-all on 2,048 GPUs", 20.7, None, said))
    for claimed in (2.56, 5.93):
        tokens = solved(lambda t: exchange_ratio(t, 512), claimed, 1, 2**20)
        said = "nowhere" if tokens is None else f"with {tokens:,.0f} tokens per GPU (D = 2,048)"
        found.append(
            Claim(
                "Tutel, all-to-all on 512 GPUs",
                claimed,
                None,
                f"flat over hierarchical is so {said}; the tuning of NUMA and routes is not modelled",
            )
        )
    found.append(
        Claim(
            "Tutel, pipelining",
            2.0,
            None,
            "the bound: true where exchange takes as long as experts, all of it hidden",
        )
    )
    found.append(Claim("Tutel, switching parallelism", 1.74, None, _switching()))
    found.append(_swin("training", 1.55, 3))
    found.append(_swin("inference", 2.11, 1))
    return found + _deepspeed()


def _deepspeed() -> list[Claim]:
    """DeepSpeed-MoE's claims: beside a dense model of equal quality, 256 A100; and beside PyTorch of 2022."""
    mixture, dense = published_models()["gpt-1t-moe128"], published_models()["gpt-6.7b"]
    cluster, one = find_cluster("a100-40x256"), find_cluster("a100-40x32")
    wide = dense_of(mixture.dim, 175e9)
    fast = Serving(mixture, cluster, 32, 1024, 8, 256)
    slow = Serving(wide, one, 32, 1024, 8, 8)
    per_device = (slow.token_s * one.num_gpus) / (fast.token_s * cluster.num_gpus)
    assumed = "32 sequences; 1T on 256 GPUs, a dense 175B of the same width on 32"
    large = replace(fast, overheads=replace(fast.overheads, eager_s=5.5e-4))
    old = "0.55 ms of launches per layer in place of 0.12; 7.3 needs a baseline slower still"
    training = replace(OLD, seq_len=2048, one_hot=False, states="deepspeed")
    times = []
    for sizes, layout in (
        (
            published_models()["gpt-1.3b-moe128"],
            RankLayout(128, route_degree=128, zero_stage=1, micro_batch=4),
        ),
        (dense, RankLayout(128, tp_degree=8, zero_stage=1, micro_batch=8, accumulation=8)),
    ):
        raw = raw_step(sizes, layout, training, find_cluster("a100-40x128"))
        tokens = layout.tokens_per_step(training.seq_len)
        times.append(step_seconds(raw, Efficiency()).total_s / tokens)
    return [
        Claim(
            "DeepSpeed-MoE, faster than a dense model of equal quality",
            4.5,
            slow.token_s / fast.token_s,
            assumed,
        ),
        Claim("the same, cheaper (device seconds per token)", 9.0, per_device, assumed),
        Claim("DeepSpeed-MoE, latency over PyTorch of 2022", 7.3, large.token_s / fast.token_s, old),
        Claim(
            "DeepSpeed-MoE, training of 1.3B with 128 experts over dense 6.7B",
            5.0,
            times[1] / times[0],
            "128 A100-40, FP16",
        ),
    ]


def dense_of(dim: int, num_parameters: float) -> ModelSizes:
    """Sizes of a dense GPT of a width, as deep as its parameters ask for."""
    values = FAIRSEQ | {
        "hidden_size": dim,
        "intermediate_size": 4 * dim,
        "num_attention_heads": dim // 128,
    }
    values = {key: value for key, value in values.items() if "expert" not in key and "sparse" not in key}
    return sizes_of_hub(values | {"num_hidden_layers": round(num_parameters / (12 * dim * dim))})


def _switching() -> str:
    """The capacity factor, in words, at which gathering weights is faster than sending tokens by the claimed ratio."""
    cluster = find_cluster("a100-80x64")
    sizes = layer(2048, 2048, 16, 2)

    def ratio(factor: float) -> float:
        work = replace(TUTEL, seq_len=64, capacity_factor=factor)
        times = []
        for route in (64, 1):
            raw = raw_step(sizes, RankLayout(64, route_degree=route, zero_stage=2), work, cluster)
            times.append(step_seconds(raw, Efficiency(hidden=0.0)).total_s)
        return times[0] / times[1]

    factor = solved(ratio, 1.74, 0.25, 4096)
    if factor is None:
        return "nowhere between capacity factors .25 and 4,096 on 64 GPUs"
    tokens = factor * 64
    return (
        f"true with {tokens:,.0f} tokens per GPU and more on 64 GPUs (E = 16, D = F = 2,048): experts gathered in "
        "place of tokens sent"
    )


def _swin(kind: str, claimed: float, passes: int) -> Claim:
    """Claim on SwinV2-B's third stage (D = 512, F = 2,048, 32 experts, top-1), solved for the tokens that make it
    true."""
    peak = find_cluster("a100-80x1").device.flops_per_s("float16")
    e = Efficiency()

    def ratio(tokens: float) -> float:
        one = layer_ratio(round(tokens), gpus=32, dim=512, hidden_dim=2048, per_gpu=1, top_k=1)
        rest = passes * 2 * tokens * 12 * 512 * 512 / (e.dense * e.old * peak)
        old = one_layer_s(round(tokens))
        return (old * one + rest) / (old + rest)

    def one_layer_s(tokens: int) -> float:
        sizes = layer(512, 2048, 32, 1)
        raw = raw_step(
            sizes,
            RankLayout(32, route_degree=32, zero_stage=1),
            replace(TUTEL, seq_len=tokens),
            find_cluster("a100-80x32"),
        )
        return step_seconds(raw, e).total_s * passes / 3

    tokens = solved(ratio, claimed, 64, 2**20)
    said = "nowhere" if tokens is None else f"with {tokens:,.0f} tokens per GPU in the third stage"
    return Claim(
        f"Tutel, SwinV2-MoE-B, {kind}",
        claimed,
        None,
        f"true {said}; the batch is not published",
    )
