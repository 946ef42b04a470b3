"""Fine-tuning with adapters beside TRL and peft: `python -m benchmarks.finetune_peers FOLDER`."""
