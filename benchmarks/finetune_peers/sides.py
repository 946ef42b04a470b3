"""Both sides as their users call them: `expertmesh train`, and the trainers of TRL with adapters of peft.

    python -m benchmarks.finetune_peers.sides SIDE OBJECTIVE FOLDER

is a process that reports every step on standard output, and waits for a line on standard input before the next one.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.finetune_peers import work
from benchmarks.finetune_peers.work import Gate

OWN = {
    "sft": "",
    "dpo": f"--objective.name dpo --train.batch-size {work.ROWS // 2}",
    "grpo": f"--objective.name grpo --rl.group {work.GROUP} --rl.max-tokens {work.ANSWER}"
    f" --train.batch-size {work.PROMPTS}",
}
"""Options of an objective; SFT's are the rest."""


def ours(gate: Gate, objective: str, folder: Path, steps: int, more: str = "") -> None:
    """`expertmesh train`."""
    from expertmesh.cli.start_training import parse_and_begin, ready_to_train

    class Told:
        def write(self, values: Any, experts: Any) -> None:
            gate.between(values["loss"])

    run = tempfile.mkdtemp(dir=folder)
    words = f"""{folder}/model --data.path {folder}/{objective}.jsonl --data.completions text
        --data.seq-len {work.LENGTH} --data.cache-dir {folder}/cache --train.run-dir {run}/run --train.steps {steps}
        --train.device cpu --train.dtype bfloat16 --base.storage bfloat16 --adapter.kind lora
        --adapter.rank {work.RANK} --adapter.expert-rank {work.RANK} --adapter.alpha {work.ALPHA}
        --adapter.targets attention experts --train.eval-every {steps} --train.eval-batches 1
        --train.checkpoint-every {steps} --train.no-tensorboard --parallel.num-threads 1"""
    if objective != "grpo":
        words += f" --train.batch-size {work.ROWS}" if objective == "sft" else ""
    else:
        words += f" --reward.functions {folder}/rewards.py:early"
    parsed = parse_and_begin([*words.split(), *OWN[objective].split(), *more.split()])
    with ready_to_train(parsed.config):
        from expertmesh.training.loop import _Trainer, train

        one_step = _Trainer._one_step

        def first(self: Any, *given: Any) -> None:
            gate.ready()
            _Trainer._one_step = one_step  # type: ignore[method-assign]
            one_step(self, *given)

        _Trainer._one_step = first  # type: ignore[method-assign]
        train(parsed.config, recipe="none", family=parsed.family, trackers=[Told()])


def theirs(gate: Gate, objective: str, folder: Path, steps: int, experts: str) -> None:
    """TRL's trainer of the objective."""
    import datasets
    import torch
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, experts_implementation=experts)
    config, trainer_of, options, batch = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, {"max_length": work.LENGTH}, work.ROWS),
        "dpo": (
            trl.DPOConfig,
            trl.DPOTrainer,
            {"max_length": work.LENGTH, "precompute_ref_log_probs": True},
            work.ROWS // 2,
        ),
        "grpo": (
            trl.GRPOConfig,
            trl.GRPOTrainer,
            {"max_completion_length": work.ANSWER, "num_generations": work.GROUP},
            work.PROMPTS * work.GROUP,
        ),
    }[objective]
    args = config(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=batch,
        max_steps=steps,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )

    class Told(TrainerCallback):  # type: ignore[misc]
        loss: float | None = None

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 0:
                gate.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            gate.between(logs.get("loss"))

    records = work.records(objective, 200)
    if objective == "dpo":
        records = records[:40]  # whose reference is computed before the first step
    more = {"reward_funcs": [_reward(folder)]} if objective == "grpo" else {}
    trainer = trainer_of(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=work.RANK,
            lora_alpha=work.ALPHA,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
        callbacks=[Told()],
        **more,
    )
    trainer.train()


def _reward(folder: Path) -> Any:
    """The reward function of the folder."""
    spec = importlib.util.spec_from_file_location("rewards", folder / "rewards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.early


SIDES: dict[str, Any] = {
    "expertmesh": ours,
    "expertmesh, not exact": lambda *given: ours(*given, "--rl.no-exact"),
    "TRL, grouped_mm": lambda *given: theirs(*given, "grouped_mm"),
    "TRL, eager": lambda *given: theirs(*given, "eager"),
}
"""Systems; of transformers' experts `batched_mm` copies the matrices for each row, 9 MB each, and is left out."""


if __name__ == "__main__":
    side, objective, folder = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stdout = sys.stderr  # what libraries print is no report
    work.worker(SIDES[side], objective, Path(folder).absolute())
