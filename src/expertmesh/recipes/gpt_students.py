"""PR-MoE and Mixture-of-Students for two CPU cores: a pyramid-residual teacher of 8 layers, and its student of 7."""

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.config.run import DistillConfig
from expertmesh.recipes.gpt_demo import gpt_moe_demo

_UNTIL = 0.7


def gpt_prmoe_demo() -> GPTRunConfig:
    """The demo as pyramid-residual MoE: 8 layers, 16, 16, 16 and 32 experts in every other one, top-1 beside a dense MLP."""
    return _demo("gpt-prmoe-demo", num_layers=8, num_experts=(16, 16, 16, 32))


def gpt_mos_demo() -> GPTRunConfig:
    """Its Mixture-of-Students: 7 layers, taught by runs/gpt-prmoe-demo for the first 70% of the steps."""
    config = _demo("gpt-mos-demo", num_layers=7, num_experts=(16, 16, 32))
    distill = DistillConfig(teacher="runs/gpt-prmoe-demo", until=_UNTIL)
    return config.model_copy(update={"distill": distill})


def _demo(name: str, *, num_layers: int, num_experts: tuple[int, ...]) -> GPTRunConfig:
    return gpt_moe_demo().updated(
        {
            "model.num_layers": num_layers,
            "model.moe_every": 2,
            "model.ffn_hidden_dim": 128,
            "model.moe.num_experts": num_experts,
            "model.moe.top_k": 1,
            "model.moe.hidden_dim": 128,
            "model.moe.weight_scale": 1.0,
            "model.moe.residual": True,
            "train.run_dir": f"runs/{name}",
        }
    )
