"""What Muon takes and what is decayed goes by modules and shapes, whatever the names are."""

import pytest
import torch
import transformers
from tests.support.known_rows import known
from torch import nn

from expertmesh.config.run import OptimConfig
from expertmesh.errors import ConfigError
from expertmesh.models.registry import FAMILIES, find_family
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.learning import learn_as
from expertmesh.training.optim import build_optimizer
from expertmesh.training.param_groups import DECAYED, parameter_roles, summary

V, D, S, E = 40, 8, 12, 3
OLD_EDGES = frozenset(
    [
        "output",
        "head",
        "lm_head",
        "classifier",
        "patches",
        "router",
        "shared_gate",
        "residual_coefficient",
    ]
)


def by_names(model):
    """(decayed, Muon) of each parameter of our own families, by the names that they have."""
    modules = dict(model.named_modules())
    found = {}
    for name, p in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        kind = type(modules[path]).__name__
        leaves = {"GroupedExperts": ("w_in", "w_out"), "DenseMLP": ("w_in", "w_out")}.get(kind)
        leaves = ("weight",) if leaves is None and isinstance(modules[path], nn.Linear) else leaves
        is_inside = OLD_EDGES.isdisjoint(path.split(".")) and "embedding" not in path
        is_decayed = p.ndim >= 2 and leaf not in ("bias", "b_in", "b_out")
        found[name] = (
            is_decayed and "embedding" not in name,
            leaf in (leaves or ()) and is_inside,
        )
    return found


MOE = {"num_experts": (4,), "num_shared_experts": 1, "shared_gate": True, "bias": True}
OF_GPT = [
    {},
    {"model.tie_embeddings": False, "model.moe": MOE},
    {"model.moe": {"num_experts": (4,), "router": "cosine", "cosine_dim": 8, "residual": True}},
    {"model.moe": {"num_experts": ()}},
]
RECIPES = {n: make for f in FAMILIES.values() for n, make in f.find_recipes().items()}
OWN = [(name, {}) for name in RECIPES] + [("gpt-moe-test", options) for options in OF_GPT]
OWN += known(
    [
        ("translate-multi30k", {"model.tie_embeddings": False, "model.positions": "untied"}),
        ("swin-mnist", {"model.moe.router": "cosine"}),
    ]
)


@pytest.mark.parametrize(("recipe", "options"), OWN, ids=str)
def test_our_own_families_keep_their_roles(recipe, options):
    config = RECIPES[recipe]().updated(options)
    task = find_family(config.family).open_task(config)
    model = task.builder.build(device="meta", dtype=torch.float32)
    roles = parameter_roles(model)
    now = {name: (role in DECAYED, role == "matrix") for name, role in roles.items()}
    assert now == by_names(model) and list(now) == [n for n, _ in model.named_parameters()]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm((S, D))
        self.attend = nn.MultiheadAttention(D, 2, add_bias_kv=True)
        self.mix = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(1, 1, D))


class Fused(nn.Module):
    """Experts as transformers has them, with biases."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(E, 10, D))
        self.up_bias = nn.Parameter(torch.zeros(E, 10))
        self.down = nn.Parameter(torch.zeros(E, D, 5))


class Router(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(E, D))
        self.bias = nn.Parameter(torch.zeros(E)) if bias else None


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose, self.choose_too = Router(False), Router(True)
        self.score = nn.Linear(D, E)
        self.sigmoid = nn.Linear(D, 1)
        self.them = Fused()


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.many = nn.ModuleList(nn.Linear(D, D) for _ in range(E))


class Parallel(nn.Module):
    """A linear map of somebody's own."""

    def __init__(self, rows, bias=True):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(rows, D))
        self.b = nn.Parameter(torch.zeros(rows))


class Strange(nn.Module):
    """A language model whose names say nothing, or the wrong thing."""

    def __init__(self):
        super().__init__()
        self.unembed = nn.Linear(D, V)
        self.wte = nn.Embedding(V, D)
        self.bag = nn.EmbeddingBag(V, D)
        self.pos = nn.Parameter(torch.zeros(S, D))
        self.cls = nn.Parameter(torch.zeros(1, 1, D))
        self.grid = nn.Parameter(torch.zeros(1, 3, 4, D))
        self.projection = nn.Parameter(torch.zeros(D, D))
        self.stem = nn.Conv2d(3, D, 2)
        self.rnn = nn.GRU(D, D)
        self.body = nn.ModuleList([Block(), Block()])
        self.embedding_of_nothing = Parallel(7)
        self.experts = Mixture()
        self.others = Lists()
        self.head = nn.Linear(D, D)


EXPECTED = {
    "unembed.weight": "edge",
    "wte.weight": "table",
    "bag.weight": "table",
    "pos": "table",
    "cls": "table",
    "grid": "table",
    "projection": "edge",
    "stem.weight": "edge",
    "rnn.weight_ih_l0": "edge",
    "body.1.norm_1.weight": "vector",
    "body.1.attend.in_proj_weight": "matrix",
    "body.1.attend.bias_k": "table",
    "body.1.attend.out_proj.weight": "matrix",
    "body.1.mix.weight": "matrix",
    "body.1.mix.bias": "vector",
    "body.1.scale": "table",
    "embedding_of_nothing.w": "matrix",
    "experts.choose.weight": "edge",
    "experts.choose_too.weight": "edge",
    "experts.score.weight": "edge",
    "experts.sigmoid.weight": "edge",
    "experts.them.up": "matrix",
    "experts.them.up_bias": "vector",
    "experts.them.down": "matrix",
    "others.gate.weight": "edge",
    "others.many.1.weight": "matrix",
    "head.weight": "matrix",
}


@pytest.mark.parametrize(("name", "role"), EXPECTED.items())
def test_modules_and_shapes_decide(name, role):
    assert parameter_roles(Strange())[name] == role


def small(kind, config, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(config(**sizes | options))


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=S, n_embd=D, n_layer=1, n_head=2)
    )


def mixtral():
    options = {"intermediate_size": 16, "num_local_experts": E, "num_key_value_heads": 2}
    return small(transformers.MixtralForCausalLM, transformers.MixtralConfig, **options)


def vit():
    options = {"intermediate_size": 16, "image_size": 8, "patch_size": 4}
    return small(transformers.ViTForImageClassification, transformers.ViTConfig, **options)


def own_experts():
    torch.manual_seed(0)
    experts = MoELayer(dim=D, hidden_dim=D, num_experts=E, top_k=1, experts=lambda i: nn.Linear(D, D))
    return nn.Sequential(nn.Linear(D, D), experts, nn.Linear(D, 5))


MODELS = {
    gpt2: (
        {"transformer.wte.weight": "table", "transformer.wpe.weight": "table"},
        {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"},
    ),
    mixtral: (
        {"model.embed_tokens.weight": "table", "lm_head.weight": "edge"},
        {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    ),
    vit: (
        {
            "vit.embeddings.cls_token": "table",
            "vit.embeddings.position_embeddings": "table",
            "vit.embeddings.patch_embeddings.projection.weight": "edge",
            "classifier.weight": "edge",
        },
        None,
    ),
    own_experts: (
        {"0.weight": "matrix", "1.experts.0.weight": "matrix", "2.weight": "edge"},
        None,
    ),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_models_of_others(make):
    roles = parameter_roles(make())
    some, matrices = MODELS[make]
    assert {name: roles[name] for name in some} == some
    found = {name for name, role in roles.items() if role == "matrix"}
    if matrices is not None:
        ends = {end for name in found for end in matrices if name.endswith(end)}
        assert ends == matrices and all(name.endswith(tuple(matrices)) for name in found)


def test_a_tied_head_is_a_table_and_one_linear_map_a_matrix():
    model = Strange()
    model.unembed.weight = model.wte.weight
    roles = parameter_roles(model)
    assert "wte.weight" not in roles and roles["unembed.weight"] == "table"
    assert parameter_roles(nn.Linear(3, 4)) == {"weight": "matrix", "bias": "vector"}


def test_a_module_says_what_its_parameters_are():
    model = Strange()
    learn_as(model.body, "table")
    learn_as(model.body[1].mix, "edge")
    roles = parameter_roles(model)
    assert roles["body.0.mix.weight"] == roles["body.1.attend.in_proj_weight"] == "table"
    assert (roles["body.1.mix.weight"], roles["body.1.mix.bias"]) == ("edge", "vector")
    with pytest.raises(ConfigError, match="role=head: must be one of table, edge, matrix"):
        learn_as(model, "head")


def test_optimizers_take_what_the_summary_says():
    model = mixtral()
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = build_optimizer(model, OptimConfig(name="muon", weight_decay=0.5)).param_groups
    taken = [len(g["params"]) for g in groups if g["is_matrix"]]
    decayed = sum(len(g["params"]) for g in groups if g["weight_decay"])
    rest = len(learned) - decayed
    said = summary(model, muon=True)
    assert said.startswith(f"Muon: {sum(taken)} of {decayed} matrices; AdamW: {decayed - sum(taken)} ")
    assert said.endswith(f"1 table and {rest - 1} vectors, not decayed")
    assert summary(model, muon=False).startswith(f"AdamW: {decayed} matrices; 1 table")
