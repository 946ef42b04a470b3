"""`train --deepspeed ds.json`: what it says becomes options, each by name; what has no counterpart is refused by
name."""

import json

import pytest

from expertmesh.cli.deepspeed_file import options_of_deepspeed, read_deepspeed_file
from expertmesh.cli.flags import parse_run_config
from expertmesh.errors import ConfigError

ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.999], "eps": 1e-7, "weight_decay": 0.01}}  # fmt: skip
READ = [
    # DeepSpeed's, ranks, ours
    ({"train_batch_size": 32}, 1, {"train.batch_size": 32, "train.gradient_accumulation_steps": 1}),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 2)
    + ({"train.batch_size": 16, "train.gradient_accumulation_steps": 2},),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2)
    + ({"train.batch_size": 32, "train.gradient_accumulation_steps": 4},),
    ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 1, {}),
    ({"optimizer": ADAM}, 1)
    + (
        {"optim.name": "adamw", "optim.lr": 1e-4, "optim.beta1": 0.8, "optim.beta2": 0.999}
        | {"optim.eps": 1e-7, "optim.weight_decay": 0.01},
    ),
    ({"optimizer": {"type": "Muon", "params": {"lr": "auto", "momentum": 0.9}}}, 1)
    + ({"optim.name": "muon", "optim.momentum": 0.9},),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}}, 1)  # noqa: E501
    + ({"optim.schedule": "constant", "optim.warmup_steps": 9, "optim.lr": 1e-3},),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90, "warmup_type": "linear"}}}, 1)
    + ({"optim.schedule": "linear", "optim.min_lr_ratio": 0.0, "optim.schedule_steps": 90},),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.2}}}, 1)
    + ({"optim.schedule": "cosine", "optim.min_lr_ratio": 0.2},),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, 1, {"train.dtype": "bfloat16"}),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, 1, {"train.dtype": "float16"}),
    ({"gradient_clipping": 0.5}, 1, {"optim.grad_clip": 0.5}),
    ({"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"}}, 2)
    + ({"parallel.zero_stage": 2},),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 2)
    + ({"parallel.zero_stage": 3, "parallel.offload": True},),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "cpu_offload": False}}, 1)
    + ({"parallel.zero_stage": 2, "parallel.offload": True},),
    ({"zero_optimization": {"stage": 0}}, 4, {"parallel.dp_replicate_degree": 4}),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}, 2)
    + ({"parallel.ep_degree": (2,)},),
    ({"tensor_parallel": {"autotp_size": 2}}, 2, {"parallel.tp_degree": 2}),
    ({"wandb": {"enabled": True}, "tensorboard": {"enabled": False}}, 1, {"train.trackers": ("wandb",)}),
    ({"steps_per_print": 10, "wall_clock_breakdown": True}, 1, {"train.log_every": 10}),
]  # fmt: skip
REFUSED = [
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type=OneBitAdam "),
    ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad=True"),
    ({"scheduler": {"type": "OneCycle"}}, "scheduler.type=OneCycle "),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "warmup_type=log "),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1}}}, "scheduler.params.warmup_min_ratio=0.1"),  # noqa: E501
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device=nvme "),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights=True"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2, "load_balance_coeff": 0.1}}, "expert_parallel.load_balance_coeff=0.1"),  # noqa: E501
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning="),
    ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop="),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size=2"),
    ({"gradient_clipping": 0}, "gradient_clipping=0"),
    ({"amp": {"enabled": True}}, "amp="),
    ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag=2"),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow="),
    ({"zero_optimization": 2}, "zero_optimization=2: must be an object"),
    ({"zero_optimization": {"offload_param": "cpu"}}, "zero_optimization.offload_param=cpu: must be an object"),
    ({"bf16": True}, "bf16=True: must be an object"),
    ({"optimizer": "AdamW"}, "optimizer=AdamW: must be an object"),
    ({"optimizer": {"params": [1]}}, "optimizer.params="),
    ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas=0.9: must be two numbers"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping=1.0: must be a number"),
    ({"steps_per_print": 0.5}, "steps_per_print=0.5: must be an integer"),
    ({"train_batch_size": "8"}, "train_batch_size=8: must be an integer"),
    ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu=0: must be an integer of at least 1"),
    ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "train_batch_size=30"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "ranks", "expected"), READ)
def test_what_is_read(given, ranks, expected):
    assert options_of_deepspeed(given, num_ranks=ranks) == expected


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_is_refused(given, words, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as error:
        read_deepspeed_file(str(file))
    message = str(error.value)
    assert message.startswith(f"--deepspeed {file}: ") and words in message and ";" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_files_that_are_none(text, tmp_path):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"^--deepspeed {file}: "):
        read_deepspeed_file(str(file))


def test_words_and_files_take_precedence(tmp_path):
    """Every option that a file sets is one of the recipe's, with a value that it takes."""
    ds, ours = tmp_path / "ds.json", tmp_path / "run.yaml"
    sections = [given for given, ranks, _ in READ if ranks == 1 and "Muon" not in str(given)]
    whole = {name: value for given in sections for name, value in given.items() if name != "fp16"}
    ds.write_text(
        json.dumps(whole | {"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}})
    )
    ours.write_text("optim: {lr: 0.5, beta1: 0.7}")
    words = ["gpt-moe-demo", "--deepspeed", str(ds), "--config", str(ours), "--optim.beta1", "0.6"]
    config = parse_run_config(words).config
    assert (config.optim.beta1, config.optim.lr, config.optim.beta2) == (0.6, 0.5, 0.999)
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == (8, 2)
    assert (config.train.dtype, config.optim.grad_clip) == ("bfloat16", 0.5)


def test_what_has_no_effect_is_told_once(caplog):
    options_of_deepspeed(
        {"aio": {"block_size": 1}, "zero_optimization": {"stage": 1, "overlap_comm": True}},
        num_ranks=1,
    )
    (record,) = caplog.records
    assert record.getMessage().endswith("no effect here: aio, zero_optimization.overlap_comm")
