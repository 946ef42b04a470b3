"""Which part of which tensor of a hub checkpoint is which part of which tensor of our GPT."""

from collections.abc import Iterator
from typing import NamedTuple

from expertmesh.checkpoints.source import Box, whole_box
from expertmesh.models.gpt.config import ModelConfig


class Piece(NamedTuple):
    """A part of a tensor that both have.

    Attributes:
        ours: name in the state dict of our GPT.
        ours_at: where it lies there; sizes of one stand for dimensions that theirs lacks.
        theirs: name in the hub's files.
        theirs_at: where it lies there; as many elements in the same order.
        theirs_shape: of their whole tensor.
    """

    ours: str
    ours_at: Box
    theirs: str
    theirs_at: Box
    theirs_shape: tuple[int, ...]


def pieces(config: ModelConfig, model_type: str) -> Iterator[Piece]:
    """All parts of all tensors, each of theirs and of ours covered once; what is one tensor of ours comes in a row.

    Args:
        config: of the model.
        model_type: of the hub.
    """
    D, V = config.dim, config.vocab_size
    yield _whole("embedding.weight", "model.embed_tokens.weight", (V, D))
    for layer, num_experts in enumerate(config.experts_per_layer()):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        yield _whole(f"{ours}attention_norm.weight", f"{theirs}input_layernorm.weight", (D,))
        attention = _latent_attention if config.is_latent else _attention
        yield from attention(config, f"{ours}attention.", f"{theirs}self_attn.")
        yield _whole(f"{ours}ffn_norm.weight", f"{theirs}post_attention_layernorm.weight", (D,))
        if num_experts:
            yield from _moe(config, model_type, num_experts, f"{ours}moe.", theirs)
        else:
            yield from _mlp(f"{ours}ffn.", f"{theirs}mlp.", D, config.ffn_hidden_dim)
    yield _whole("final_norm.weight", "model.norm.weight", (D,))
    if not config.tie_embeddings:
        yield _whole("output.weight", "lm_head.weight", (V, D))


def _whole(ours: str, theirs: str, shape: tuple[int, ...]) -> Piece:
    return Piece(ours, whole_box(shape), theirs, whole_box(shape), shape)


def _turned(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Ranges (ours, theirs, length) of a head's dimensions.

    We turn pairs (i, i + d / 2) and leave the last of them as they are; they turn pairs (i, i + r / 2) of the first r
    dimensions and leave those behind. An attention score does not mind the order.
    """
    d = config.head_size
    turning, still = (round(d * f / 2) for f in (config.rope_fraction, 1 - config.rope_fraction))
    ranges = [(0, 0, turning), (d // 2, turning, turning)]
    behind = [(turning, 2 * turning, still), (d // 2 + turning, 2 * turning + still, still)]
    return ranges + behind if still else [(0, 0, d)]


def _attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Piece]:
    D, d, kv = config.dim, config.head_size, config.kv_heads
    group = config.num_heads // kv
    heads = {"q": kv * group, "k": kv, "v": kv}
    straight = [(0, 0, d)]
    for kind, tail in (("weight", (D,)), *([("bias", ())] if config.qkv_bias else [])):
        for head in range(kv):
            first = head * (group + 2)
            where = [("q", first + i, head * group + i) for i in range(group)]
            where += [("k", first + group, head), ("v", first + group + 1, head)]
            for name, our_head, their_head in where:
                for a, b, size in straight if name == "v" else _turned(config):
                    row, other = our_head * d + a, their_head * d + b
                    yield Piece(
                        f"{ours}qkv.{kind}",
                        (slice(row, row + size), *whole_box(tail)),
                        f"{theirs}{name}_proj.{kind}",
                        (slice(other, other + size), *whole_box(tail)),
                        (heads[name] * d, *tail),
                    )
    width = config.num_heads * d
    yield _whole(f"{ours}out.weight", f"{theirs}o_proj.weight", (D, width))
    if not config.qk_norm:
        return
    for name in ("q", "k"):
        if config.qk_norm_scope == "projection":
            yield _whole(
                f"{ours}{name}_norm.weight", f"{theirs}{name}_norm.weight", (heads[name] * d,)
            )
            continue
        for a, b, size in _turned(config):
            yield Piece(
                f"{ours}{name}_norm.weight",
                (slice(a, a + size),),
                f"{theirs}{name}_norm.weight",
                (slice(b, b + size),),
                (d,),
            )


def _latent_attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Piece]:
    D, H, sizes = config.dim, config.num_heads, config.latent
    assert sizes.kv_lora_rank is not None
    rank, small = sizes.kv_lora_rank, sizes.q_lora_rank
    q_name = "q_proj" if small is None else "q_b_proj"
    shapes = {
        "q_up": (q_name, (H * sizes.qk_head_dim, small or D)),
        "kv_down": ("kv_a_proj_with_mqa", (rank + sizes.qk_rope_head_dim, D)),
        "kv_norm": ("kv_a_layernorm", (rank,)),
        "kv_up": ("kv_b_proj", (H * (sizes.qk_nope_head_dim + sizes.v_head_dim), rank)),
        "out": ("o_proj", (D, H * sizes.v_head_dim)),
    }
    if small is not None:
        shapes |= {"q_down": ("q_a_proj", (small, D)), "q_norm": ("q_a_layernorm", (small,))}
    for name, (other, shape) in shapes.items():
        yield _whole(f"{ours}{name}.weight", f"{theirs}{other}.weight", shape)


def _moe(config: ModelConfig, model_type: str, E: int, ours: str, theirs: str) -> Iterator[Piece]:
    D, F = config.dim, config.moe.hidden_dim
    is_mixtral = model_type == "mixtral"
    theirs += "block_sparse_moe." if is_mixtral else "mlp."
    yield _whole(f"{ours}router.proj.weight", f"{theirs}gate.weight", (E, D))
    if config.moe.bias_update_rate:
        yield _whole(f"{ours}expert_bias_E", f"{theirs}gate.e_score_correction_bias", (E,))
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for e in range(E):
        for branch, name in enumerate((gate, up)):
            at = (slice(e, e + 1), slice(branch, branch + 1), *whole_box((F, D)))
            theirs_e = f"{theirs}experts.{e}.{name}.weight"
            yield Piece(f"{ours}experts.w_in", at, theirs_e, whole_box((F, D)), (F, D))
    for e in range(E):
        at = (slice(e, e + 1), *whole_box((D, F)))
        theirs_e = f"{theirs}experts.{e}.{down}.weight"
        yield Piece(f"{ours}experts.w_out", at, theirs_e, whole_box((D, F)), (D, F))
    if config.moe.num_shared_experts:
        gated = model_type == "qwen2_moe"
        hidden = config.moe.num_shared_experts * F
        if gated:
            hidden = config.moe.shared_hidden_dim or hidden
        name = "shared_expert." if gated else "shared_experts."
        yield from _mlp(f"{ours}shared_experts.", f"{theirs}{name}", D, hidden)
        if gated:
            yield _whole(f"{ours}shared_gate.weight", f"{theirs}shared_expert_gate.weight", (1, D))


def _mlp(ours: str, theirs: str, D: int, F: int) -> Iterator[Piece]:
    for branch, name in enumerate(("gate_proj", "up_proj")):
        at = (slice(branch, branch + 1), *whole_box((F, D)))
        yield Piece(f"{ours}w_in", at, f"{theirs}{name}.weight", whole_box((F, D)), (F, D))
    yield _whole(f"{ours}w_out", f"{theirs}down_proj.weight", (D, F))
