"""Conversion of Hugging Face hub checkpoints to and from this package's GPT: Mixtral, Qwen3-MoE, Qwen2-MoE, OLMoE,
GLM-4-MoE, Dots1, gpt-oss and DeepSeek.
"""

from expertmesh.checkpoints.hub.load_pretrained import load_pretrained
from expertmesh.integrations.hub.convert import Converted, convert
from expertmesh.integrations.hub.quantize import Quantized, quantize

__all__ = ["Converted", "Quantized", "convert", "load_pretrained", "quantize"]
