"""Names of TRL, peft, axolotl and unsloth for options of fine-tuning, for the hint at an unknown name. Never imports
torch.

`docs/migrate-finetuning.md` is the table for readers; its test asks for every name of it.
"""

from collections.abc import Collection

from expertmesh.errors import named

_SAME: dict[str, str] = {
    "adapter.alpha": "lora_alpha",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.dropout": "lora_dropout",
    "adapter.expert_rank": "rank_pattern",
    "adapter.rslora": "use_rslora peft_use_rslora",
    "adapter.targets": "target_modules target_parameters lora_target_modules lora_target_parameters"
    " lora_target_linear layers_to_transform",
    "base.storage": "load_in_4bit load_in_8bit quantize_moe_experts",
    "data.column": "dataset_text_field",
    "data.pack": "packing sample_packing",
    "data.path": "datasets train_dataset dataset_name",
    "data.seq_len": "max_length max_seq_length sequence_len",
    "data.validation_fraction": "val_set_size",
    "objective.beta": "beta rl_beta dpo_beta",
    "objective.gamma": "simpo_gamma",
    "objective.loss": "loss_type",
    "objective.sft_weight": "cpo_alpha rpo_alpha",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.grad_clip": "max_grad_norm",
    "optim.lr": "learning_rate",
    "optim.min_lr_ratio": "cosine_min_lr_ratio",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "parallel.ep_degree": "expert_parallel_size",
    "reward.functions": "reward_funcs",
    "rl.clip_high": "epsilon_high",
    "rl.clip_low": "epsilon epsilon_low",
    "rl.correction": "vllm_importance_sampling_mode vllm_importance_sampling_correction",
    "rl.correction_cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "rl.dual_clip": "delta",
    "rl.group": "num_generations",
    "rl.mask_cut": "mask_truncated_completions",
    "rl.max_tokens": "max_completion_length",
    "rl.ratio": "importance_sampling_level",
    "rl.scale": "scale_rewards",
    "rl.updates": "steps_per_generation",
    "tokens.add": "trainable_token_indices added_tokens_overrides new_tokens",
    "train.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing",
    "train.best_by": "metric_for_best_model",
    "train.checkpoint_every": "save_steps",
    "train.device": "use_cpu",
    "train.dtype": "bf16 fp16",
    "train.epochs": "num_train_epochs num_epochs",
    "train.eval_every": "eval_steps",
    "train.keep_last": "save_total_limit",
    "train.log_every": "logging_steps",
    "train.micro_batch_size": "per_device_train_batch_size",
    "train.patience": "early_stopping_patience",
    "train.resume": "resume_from_checkpoint",
    "train.run_dir": "output_dir",
    "train.sample_every": "log_completions",
    "train.seed": "random_state data_seed",
    "train.steps": "max_steps",
    "train.trackers": "report_to wandb_project",
}
PEER_OPTIONS = {theirs: ours for ours, names in _SAME.items() for theirs in names.split()}
"""Our options by the names of others, without sections."""

_ALWAYS_ANSWERS = "leave it out: the assistant's tokens and their ends are learned, always"
_DRAWN = "leave it out: answers are drawn at temperature 1 from all tokens, those of the policy that learns"
_ENGINE = "leave it out: answers are drawn by the engine in the same process"
_ROWS = f"use {named('tokens.add')}: rows of these tokens learn beside adapters"
_WORD = "write the folder as the first word, in the place of a recipe"
ABSENT = {
    "assistant_only_loss": _ALWAYS_ANSWERS,
    "base_model": _WORD,
    "bias": "leave it out: biases are frozen under adapters",
    "chat_template": "leave it out: the template is the folder's",
    "completion_only_loss": "give prompt and completion, whose completion alone is learned",
    "f_divergence_type": "leave it out: the divergence is the reverse KL",
    "flash_attention": "leave it out: attention takes the best kernel that is there",
    "full_finetuning": f"leave {named('adapter.kind')} out, and all weights learn",
    "generation_batch_size": f"use {named('train.batch_size')}, the prompts of a step, with {named('rl.group')} "
    "answers each",
    "init_lora_weights": "leave it out: A is drawn from N(0, 1 / columns), and B is 0",
    "load_best_model_at_end": "leave it out: the best checkpoint is kept, and opened by generate and convert",
    "lora_modules_to_save": _ROWS,
    "modules_to_save": _ROWS,
    "loftq_config": "leave it out: B is 0 at first, over a rounded base as well",
    "lora_target_experts": f"use {named('adapter.targets', 'experts')}",
    "model_name": _WORD,
    "model_name_or_path": _WORD,
    "neftune_noise_alpha": "leave it out: embeddings get no noise",
    "num_iterations": "leave it out: each answer is learned from once",
    "precompute_ref_log_probs": "leave it out: the reference scores all pairs once, before the first step",
    "reward_weights": f"write the weight behind the function, {named('reward.functions', 'FILE.py:NAME:0.5')}",
    "router_aux_loss_coef": "leave it out: the folder's weight holds where routers learn, and none under adapters",
    "sync_ref_model": "leave it out: the reference is the model as the run begins",
    "temperature": _DRAWN,
    "top_p": _DRAWN,
    "min_p": _DRAWN,
    "repetition_penalty": _DRAWN,
    "train_on_inputs": _ALWAYS_ANSWERS,
    "use_dora": f"leave it out: adapters are LoRA; {named('adapter.rslora')} changes their scale",
    "use_vllm": _ENGINE,
    "vllm_gpu_memory_utilization": _ENGINE,
    "vllm_mode": _ENGINE,
}
"""Names of others that have no option here, and what to do."""


def how_without(name: str, names: Collection[str]) -> str | None:
    """Fix for the name of an option that others have and training has not; None: the name is none of these, or no run
    is configured."""
    return ABSENT.get(name.rsplit(".", 1)[-1]) if "adapter.kind" in names else None
