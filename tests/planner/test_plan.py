"""Plans: what is proposed fits and can be run, and every mistake is one line."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from tests.support.known_rows import known
from tests.support.patience import PATIENCE_S

import expertmesh as em
from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.cli import main as front
from expertmesh.cli.flags import parse_run_config
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.rank_layout import OURS, RankLayout, Workload
from expertmesh.costs.sizes import sizes_of_hub
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import recipe
from expertmesh.planner.configured import configured_layout
from expertmesh.planner.search import SAFE, Candidate, Problem, layouts
from expertmesh.planner.serve import serve_plan
from expertmesh.planner.why import why_not
from expertmesh.runs.run_dir import RunDir

PLANS = [
    ("gpt-1.3b-moe128", {"cluster": "a100-80x128"}),
    ("gpt-1.3b-prmoe", {"cluster": "h100x64"}),
    ("gpt-6.7b", {"cluster": "h100x16", "tokens_per_batch": 64 * 2048}),
    ("gpt-moe-1b", {"cluster": "a100-40x8", "goal": "memory"}),
    ("gpt-350m-moe128", {"cluster": "h800x32", "goal": "latency", "max_context": 1024}),
    ("gpt-moe-demo", {"cluster": "cpux2"}),
    ("gpt-moe-demo", {"cluster": "h100x1", "states": "bf16_moments"}),
    ("gpt-moe-demo", {"cluster": "h100x1", "states": "int8_moments"}),
]


@pytest.fixture(scope="module", params=PLANS, ids=[name for name, _ in PLANS])
def found(request):
    name, options = request.param
    return em.plan(name, **options)


def test_what_is_proposed_fits(found):
    problem = found.problem
    for candidate in found.candidates:
        assert candidate.memory.device_bytes <= problem.device_bytes
        assert candidate.memory.host_bytes <= problem.host_bytes
        tokens = candidate.layout.tokens_per_step(problem.work.seq_len)
        assert tokens == problem.batch * problem.work.seq_len
        assert candidate.layout.pp_degree == 1


def test_flags_make_the_layout(found):
    """The words to paste are words of the trainer, and mean the layout that was planned."""
    words = " ".join([found.model.words, *found.flags]).split()
    config = parse_run_config(words).config
    layout, parallel = found.best.layout, config.parallel
    assert config.train.batch_size * config.data.seq_len == layout.tokens_per_step(config.data.seq_len)
    assert config.train.samples_per_pass == layout.dp_degree * layout.micro_batch
    assert (parallel.tp_degree, parallel.dp_replicate_degree) == (
        layout.tp_degree,
        layout.dp_replicate_degree,
    )
    assert config.optim.state_dtype == OURS[found.problem.work.states]
    assert (parallel.zero_stage, parallel.offload) == (layout.zero_stage, layout.offload)
    assert config.train.activation_checkpointing == (layout.checkpointing == "full")
    assert config.model.moe.recompute_h == (layout.checkpointing == "experts")
    if config.model.moe.num_experts:
        assert parallel.route_degree == layout.route_degree
        assert parallel.all_to_all == layout.all_to_all
        assert parallel.overlap_degree == layout.overlap_degree
    num_ranks, work = layout.num_ranks, found.problem.work
    costs = gpt_costs(config, num_ranks=num_ranks, dtype=work.precision, on_gpu=work.on_gpu)
    assert costs.memory == found.best.memory


def test_the_front_is_undominated(found):
    front_ = found.front
    if found.goal == "throughput":
        assert front_[0].layout == found.best.layout
    for one in front_:
        for other in found.candidates:
            faster = other.seconds.total_s < one.seconds.total_s
            smaller = other.memory.device_bytes < 0.97 * one.memory.device_bytes
            assert not (faster and smaller)


def test_the_text_has_every_part(found):
    text = found.text()
    for part in ("tokens/s", "in all", "one choice changed:", "guessed:", "torchrun", "training "):
        assert part in text
    assert str(found) == text


def test_goals_do_what_they_say():
    of = {g: em.plan("gpt-1.3b-moe128", cluster="a100-40x64", goal=g).best for g in ("throughput", "memory")}
    assert of["memory"].memory.device_bytes < of["throughput"].memory.device_bytes
    assert of["memory"].seconds.total_s > of["throughput"].seconds.total_s


def test_neighbours_say_the_truth():
    found = em.plan("gpt-1.3b-moe128", cluster="a100-40x32")
    lines = why_not(found.best)
    assert len(lines) >= 6
    for line in lines:
        what, verdict = line.split(": ", 1)
        assert any(w in verdict for w in ("needs", "slower", "faster", "as fast")), line
        assert "faster" not in verdict or "offload" in what or "zero" in what, line


def test_a_pipeline_is_accepted_and_never_proposed():
    found = em.plan("deepseek-v3", cluster="h100x256", pp=4, vpp=8)
    assert {c.layout.pp_degree for c in found.candidates} == {4}
    assert found.flags == []
    assert "no pipeline" in found.text()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "quantization_config given"),
        ({"torch_dtype": "float32"}, "dtype float32"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"dtype": "bfloat16", "quantization_config": None}, None),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
        ({"num_nextn_predict_layers": 0}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, "layer_types not read"),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ],
)  # fmt: skip
def test_what_a_folder_says_of_itself_and_no_plan_counts_is_told(says, words, tmp_path):
    hub = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000, "num_attention_heads": 8}
    hub |= {"intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(hub | says))
    served = serve_plan(tmp_path, cluster="h100x1", batch=1, context=128)
    for guesses in (em.plan(tmp_path, cluster="h100x8").guesses, served.guesses):
        told = [guess for guess in guesses if guess.startswith("config.json's")]
        assert len(told) == (words is not None) and all(words in line for line in told)


def test_a_hub_folder_and_a_run_are_planned(tmp_path):
    hub = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000, "num_attention_heads": 8}
    hub |= {"intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(hub))
    for target in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        found = em.plan(target, cluster="h100x8")
        assert found.problem.sizes.dim == 512
        assert any("tokens per step" in guess for guess in found.guesses)
    run = recipe("gpt-moe-demo")
    assert em.plan(run, cluster="h100x1").problem.sizes == sizes_of(run.model)
    assert "torchrun" not in em.plan(run, cluster="h100x1").text()  # no words name it


SAVED = {
    "parallel.tp_degree": 2,
    "parallel.ep_degree": (4,),
    "parallel.overlap_degree": 2,
    "parallel.all_to_all": "hierarchical",
    "parallel.ranks_per_node": 2,
    "parallel.dispatch_dtype": "int8",
    "train.activation_checkpointing": True,
    "optim.state_dtype": "int8",
}


@pytest.mark.parametrize("saved_as", ["gpt-moe-demo", "two runs, merged"])
def test_the_folder_of_a_run_is_planned(tmp_path, saved_as):
    """As `RunDir` writes it; the words to paste begin a run of the same model in another folder."""
    run = recipe("gpt-moe-demo", SAVED | {"train.run_dir": str(tmp_path / "my run")})
    folder = RunDir(run.train.run_dir)
    with folder.locked():
        folder.write_description(run, recipe=saved_as, files={})
    for target in (folder.path, str(folder.config)):
        found = em.plan(target, cluster="h100x4")
        assert found.model.config == run
        words = parse_run_config(shlex.split(" ".join([found.model.words, *found.flags])))
        layout, config = found.best.layout, words.config
        assert config.model.updated({"moe.recompute_h": run.model.moe.recompute_h}) == run.model
        assert config.train.run_dir == f"{run.train.run_dir}-planned"
        assert configured_layout(config, 4) == layout
        assert config.optim.state_dtype == "int8"
        in_fp32 = em.plan(target, cluster="h100x4", states="ours")
        assert found.best.memory.device_bytes < in_fp32.best.memory.device_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"replicated_experts": 1, "parallel": {"shadow_experts": 1}},
        {"family": None},
        {"recipe": None},
        {"quantization_config": {"format": "int-quantized"}, "dtype": "bfloat16"},
    ],
    ids=["former names", "no family", "no recipe", "quantised"],
)
def test_older_and_quantised_runs_are_planned(tmp_path, change):
    run = recipe("gpt-moe-demo")
    values = {"recipe": "gpt-moe-demo", **run.model_dump(mode="json")}
    copies = change.pop("replicated_experts", 0)
    if copies:
        del values["parallel"]["replicated_experts"]
        change["parallel"] = values["parallel"] | change["parallel"]
        run = run.updated({"parallel.replicated_experts": copies})
    values = {key: value for key, value in (values | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert em.plan(tmp_path, cluster="h100x1").model.config == run


def test_a_model_of_ours_has_the_sizes_of_ours(tmp_path):
    """DeepSeek's latent attention, by our configuration and by what config.json says of its sizes."""
    hub = {
        "model_type": "deepseek_v3",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
    }
    hub |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
    }
    hub |= {
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "intermediate_size": 1024,
    }
    hub |= {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    }
    hub |= {
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(hub))
    ours, theirs = sizes_of(model_config(hub)), sizes_of_hub(hub)
    assert em.plan(tmp_path, cluster="h100x8").problem.sizes == ours
    assert theirs.num_parameters == pytest.approx(ours.num_parameters, rel=5e-3)
    assert theirs.training_flops(1024) == pytest.approx(ours.training_flops(1024), rel=1e-3)
    assert {b.cache_width for b in theirs.blocks} == {b.cache_width for b in ours.blocks}


WRONG = [
    (["nothing", "--cluster", "h100x8"], "no recipe, run or config.json"),
    (["gpt-1.3b-moe12", "--cluster", "h100x8"], "did you mean gpt-1.3b-moe128?"),
    (["gpt-moe-1b"], "--cluster: must be given"),
    ([], "no model given"),
    (["gpt-moe-1b", "--cluster", "h1000x8"], "did you mean h100?"),
    (["gpt-moe-1b", "--cluster", "h100x0"], "--cluster h100x0: num_gpus=0"),
    (["gpt-moe-1b", "--cluster", ""], "--cluster '': must not be empty"),
    (["gpt-moe-1b", "--cluster", "/"], "--cluster /: cannot be read (Is a directory)"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--page", "no/p.html"], "there is no folder no"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--tokens", "0"],
        "--tokens 0.0: must be a number from 1",
    ),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--tokens", "nan"],
        "--tokens nan: must be a finite number",
    ),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--tokens", "inf"],
        "--tokens inf: must be a finite number",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--tokens", "1e300"], "to 1,000,000,000,000,000,000;"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--imbalance", "inf"],
        "--imbalance inf: must be a finite number",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--pp", "0"], "--pp 0: must be a whole number from 1"),
    (["deepseek-v3", "--cluster", "h100x256", "--pp", "64"], "from 1 to 61;"),
    (["deepseek-v3", "--cluster", "h100x256", "--pp", "8", "--vpp", "8"], "use at most 7"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--tokens-per-batch", "0"], "a whole number from 1"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--tokens-per-batch", "3000"], "use 2048"),
    (
        ["gpt-moe-1b", "--cluster", "h100x64", "--tokens-per-batch", "6144"],
        "cannot be split over 64",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--max-context", "-1"], "a whole number from 1"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--pp", "3"], "must divide the 8 devices"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--vpp", "2"], "there is none; give --pp, too"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--imbalance", "0.5"], "must be a number from 1"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--set", "dim"],
        "--set dim: must be an option and its value",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--set", "model.dimm=8"], "dimm"),
    (["qwen3-30b", "--cluster", "h100x8", "--set", "model.dim=8"], "qwen3-30b"),
    (["gpt-moe-1b", "--cluster", "a100x8"], "did you mean a100-40 or a100-80?"),
    (["gpt-moe-1b", "--cluster", "rtx4090x8"], "did you mean rtx-4090?"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--tokens", "1X"],
        "--tokens 1X: must be a number, or one with k",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--max-context", "8.3k"], "--max-context"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--tp", "3"], "--tp 3: must divide the 8 devices"),
    (["gpt-moe-1b", "--cluster", "h100x16", "--tp", "16"], "keep within a node"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--ep", "5"], "--ep 5: must divide the 8 devices"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--zero", "4"],
        "--zero 4: must be a whole number from 1 to 3",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--micro-batch", "7"], "leave one of them out"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--precision", "int3"],
        "--precision int3: must be one of",
    ),
    (["gpt-moe-1b", "--cluster", "h100x8", "--stack", "new"], "--stack new: must be one of"),
    (["gpt-moe-1b", "--cluster", "h100x8", "--states", "magic"], "must be one of ours"),
    (
        ["gpt-moe-1b", "--cluster", "h100x8", "--goal", "fame"],
        "must be one of throughput, memory, latency",
    ),
    (["deepseek-v3", "--cluster", "h100x8"], "fits nowhere"),
    *known(
        [
            (
                ["translate-multi30k", "--cluster", "h100x8", "--max-context", "64"],
                "is the model's own",
            ),
            (
                ["translate-multi30k", "--cluster", "h100x8", "--finetune", "lora"],
                "cannot be fine-tuned",
            ),
            (
                [
                    "translate-twelve",
                    "--cluster",
                    "h100x8",
                    "--serve",
                    "--batch",
                    "1",
                    "--context",
                    "9",
                ],
                "decoders alone",
            ),
        ]
    ),
    (["--validate"], "run python -m benchmarks.planner in a clone"),
    (["gpt-moe-1b", "--claims"], "run python -m benchmarks.planner --claims in a clone"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(w) for w, _ in WRONG])
def test_a_mistake_is_one_line(words, said, capsys):
    assert front.main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens_per_batch": "4096"}, "tokens_per_batch='4096': must be a whole number from 1"),
        ({"tokens_per_batch": 2**60}, "must be a whole number from 1 to 68,719,476,736; leave it"),
        ({"max_context": 2048.0}, "max_context=2048.0: must be a whole number"),
        ({"imbalance": "a"}, "imbalance='a': must be a number from 1"),
        ({"imbalance": True}, "imbalance=True: must be a number"),
        ({"tokens": True}, "tokens=True: must be a number"),
        ({"tokens": 10**400}, "must be a number from 1 to"),
        ({"pp": 2.0}, "pp=2.0: must be a whole number"),
        ({"vpp": None}, "vpp=None: must be a whole number"),
        ({"states": ["ours"]}, "states=['ours']: must be one of"),
        ({"goal": None}, "goal=None: must be one of"),
        ({"measured": 3}, "measured=3: must be a file"),
        ({"cluster": 8}, "cluster=8: must be a name like h100x64"),
        ({"cluster": "h100x" + "9" * 5000}, "cluster=h100x999"),
        ({"cluster": "a\0b"}, "must be text without NUL"),
        ({"model": 5}, "model=5: must be a recipe's"),
        ({"model": "x" * 5000}, "no recipe, run or config.json"),
        ({"model": ""}, "'': must not be empty"),
    ],
    ids=lambda of: next(iter(of)) if isinstance(of, dict) else "",
)
def test_an_argument_of_a_wrong_type_or_size_is_one_line(change, said):
    given = {"model": "gpt-moe-1b", "cluster": "h100x8"} | change
    with pytest.raises(em.ConfigError) as caught:
        em.plan(given.pop("model"), **given)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700  # the longest lists all known models


def test_numbers_of_numpy_are_numbers():
    given = {"tokens_per_batch": np.int64(2**19), "tokens": np.float32(2**30), "pp": np.int8(1)}
    found = em.plan("gpt-moe-1b", cluster="h100x8", imbalance=np.int32(2), **given)
    assert found.model.train_tokens == 2**30
    assert (type(found.problem.batch), found.problem.work.imbalance) == (int, 2)


@pytest.mark.parametrize("kind", ["mixtral", "another"])
@pytest.mark.parametrize("change", [{"hidden_size": -64}, {"num_attention_heads": "8"}, {"num_experts_per_tok": 9}])
def test_an_impossible_size_is_named_as_the_hub_does(kind, change, tmp_path, capsys):
    hub = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000, "num_attention_heads": 8}
    hub |= {"intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(hub | {"model_type": kind} | change))
    assert front.main(["plan", str(tmp_path), "--cluster", "h100x8"]) == 2
    printed = capsys.readouterr()
    ((name, value),) = change.items()
    assert f"config.json has {name}={value!r}: must be " in printed.err
    assert printed.out == "" and printed.err.count("\n") == 1


def test_what_fits_nowhere_says_what_would(capsys):
    assert front.main(["plan", "deepseek-v3", "--cluster", "h100x16"]) == 2
    said = capsys.readouterr().err
    remedy = said.rpartition("it would fit on ")[2].split()[0]
    assert int(remedy) > 16
    assert em.plan("deepseek-v3", cluster=f"h100x{remedy}", tokens_per_batch=4096 * int(remedy)).candidates


HYBRIDS = {
    "nemotron_h": ({"hybrid_override_pattern": "MEM*EM", "mamba_num_heads": 64}, "Mamba"),
    "jamba": ({"attn_layer_period": 8, "mamba_d_state": 16}, "Mamba"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"] * 2}, "linear_attention"),
    "qwen3_5_moe": ({"text_config": {"linear_num_key_heads": 16}}, "linear attention"),
    "deepseek_v32": ({"index_topk": 2048, "index_n_heads": 64}, "sparse attention"),
    "bert": ({"architectures": ["BertForMaskedLM"]}, "encoder"),
    "distilbert": ({}, "encoder"),
    "t5": ({"is_encoder_decoder": True}, "encoder"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "falcon_h1": ({"mamba_d_ssm": 1, "mamba_expand": 2}, "Mamba"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"]}, "recurrent"),
    "gemma3n": ({"altup_num_inputs": 4}, "per-layer"),
    "minimax": ({"attn_type_list": [0, 1]}, "linear attention"),
    "nemotron-nas": ({"block_configs": [{}]}, "differ in size"),
}
HUB = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_what_no_plan_counts_is_refused_by_name(kind, tmp_path):
    change, said = HYBRIDS[kind]
    (tmp_path / "config.json").write_text(json.dumps(HUB | {"model_type": kind} | change))
    for plan in (
        lambda: em.plan(tmp_path, cluster="h100x8"),
        lambda: serve_plan(tmp_path, cluster="h100x1", batch=1, context=128),
    ):
        with pytest.raises(em.ConfigError, match=said) as caught:
            plan()
        assert "config.json has" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "plain",
    [
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64},
        {"mamba_d_state": None, "is_encoder_decoder": False, "index_topk": 0},
        {"vision_config": {"hidden_size": 64}},
    ],
)
def test_what_is_counted_is_not_refused(plain, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB | plain))
    found = em.plan(tmp_path, cluster="h100x8")
    assert any("vision_config" in guess for guess in found.guesses) == ("vision_config" in plain)


@pytest.mark.parametrize("cluster", ["h100x24", "h100x40", "h100x56", "h100x72", "h100x96", "gb200x72", "gb300x144"])
def test_a_guessed_batch_is_one_that_the_ranks_divide(cluster):
    found = em.plan("qwen3-30b", cluster=cluster)
    assert found.problem.batch % found.problem.cluster.num_gpus == 0


@pytest.mark.parametrize("states", ["megatron", "megatron_bf16_gradients", "deepspeed"])
def test_states_that_shard_no_weights_have_one_stage(states):
    found = em.plan("qwen3-30b", cluster="h100x64", states=states)
    assert {c.layout.zero_stage for c in found.candidates} == {1}
    assert not any(line.startswith("zero-stage") for line in why_not(found.best))


def test_chosen_degrees_are_priced():
    given = {"tp": 2, "ep": 4, "zero": 2, "micro_batch": 2}
    found = em.plan("qwen3-30b", cluster="h100x64", **given, precision="float8", stack="fused")
    for one in found.candidates:
        layout = one.layout
        assert (layout.tp_degree, layout.route_degree) == (2, 4)
        assert (layout.zero_stage, layout.micro_batch) == (2, 2)
    assert (found.problem.work.precision, found.problem.work.stack) == ("float8", "fused")
    assert found.flags == [] and found.command == ""
    usual = em.plan("qwen3-30b", cluster="h100x64", **given)
    assert usual.flags and usual.best.seconds.total_s > found.best.seconds.total_s


def test_a_full_device_is_marked_and_a_safer_plan_given():
    seen = 0
    for name, cluster in (
        ("qwen3-30b", "h100x8"),
        ("gpt-1.1t", "a100-40x512"),
        ("mixtral-8x7b", "h100x8"),
    ):
        found = em.plan(name, cluster=cluster)
        assert (f"above {100 * SAFE:.0f} %" in found.text()) == (found.best.filled > SAFE)
        if found.safer is not None:
            seen += 1
            assert found.safer.filled <= SAFE < found.best.filled
            assert found.safer.seconds.total_s >= found.best.seconds.total_s
    assert seen


def test_json_has_what_the_table_has(capsys):
    words = [
        "plan",
        "gpt-moe-1b",
        "--cluster",
        "h100x8",
        "--json",
        "--tokens",
        "2B",
        "--max-context",
        "1k",
    ]
    assert front.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    plan = em.plan("gpt-moe-1b", cluster="h100x8", tokens=2e9, max_context=1024)
    assert found["training_tokens"] == 2e9 and found["workload"]["seq_len"] == 1024
    assert found["best"]["device_bytes"] == plan.best.memory.device_bytes
    assert found["best"]["step_s"] == plan.best.seconds.total_s
    assert found["command"] == plan.command and found["guesses"] == list(plan.guesses)
    assert sum(found["best"]["time_s"].values()) == pytest.approx(found["best"]["step_s"])


def test_options_of_a_recipe_are_set(capsys):
    words = "plan gpt-400b --cluster a100-80x256 --json --tokens-per-batch 1M --set model.moe.num_experts=64"
    assert front.main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert 200e9 < found["parameters"] < 210e9 and found["tokens_per_step"] == 2**20


def test_a_plan_needs_no_torch():
    code = "import sys, expertmesh as em\nprint(em.plan('gpt-moe-1b', cluster='h100x8').text())\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout


def test_more_devices_are_never_planned_slower():
    """Each search contains the layouts of a smaller cluster by its copies, so that tokens per second can only grow."""
    rates = [
        em.plan("gpt-1.3b-moe128", cluster=f"h100x{n}", tokens_per_batch=2**23).best.tokens_per_s
        for n in (8, 32, 128, 512)
    ]
    assert rates == sorted(rates)


def test_layouts_are_of_the_cluster():
    sizes = sizes_of(recipe("gpt-350m-prmoe").model)
    problem = Problem(sizes, find_cluster("h100x64"), Workload(2048), 512, None)
    for layout in layouts(problem):
        assert isinstance(layout, RankLayout)
        assert layout.dp_degree * layout.tp_degree == 64
        assert Candidate(problem, layout).layout.shard_degree >= 1
