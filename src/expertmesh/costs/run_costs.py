"""`RunCosts`: parameters, operations and memory of a training run, from its configuration alone."""

from dataclasses import dataclass

from expertmesh.config.cluster import Precision
from expertmesh.config.run import RunConfig
from expertmesh.costs.memory import PeakMemory, Trained, peak_memory
from expertmesh.costs.rank_layout import RankLayout, Workload, layout_of, workload_of
from expertmesh.costs.sizes import Activations
from expertmesh.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run."""

    parameters: int  # number of parameters
    active: int  # number of parameters that one item (a token, an image) uses
    num_items: int  # items of all steps
    flops_per_item: int  # operations of training on one item
    memory: PeakMemory  # peak memory of the rank that has most
    adapters: str = ""  # description of its adapters; empty: there are none


@dataclass(frozen=True)
class SampleSizes:
    """A model of which no more is known than its parameters and what a sample keeps."""

    spec: ModelSpec  # its parameters
    elements: int  # elements that a sample keeps for the backward pass

    def activations(self, layout: RankLayout, work: Workload) -> Activations:
        """Activations of a rank; ranks of tensor parallelism share a sample."""
        samples = layout.micro_batch / layout.tp_degree
        return Activations(kept=samples * self.elements * work.element_bytes)


def memory_of(
    model: Trained,
    config: RunConfig,
    *,
    num_ranks: int,  # number of ranks of the world
    dtype: Precision,  # compute dtype
    on_gpu: bool,  # whether the ranks compute on GPUs
    seq_len: int = 1,  # tokens of a sequence; 1: samples are none
    recomputes_h: bool = False,  # whether the experts' hidden rows are recomputed
) -> PeakMemory:
    """Peak memory of a run on ranks that its degrees fit."""
    layout = layout_of(config, num_ranks, experts=model.spec.num_experts, recomputes_h=recomputes_h)
    return peak_memory(model, layout, workload_of(config.optim, seq_len, dtype, on_gpu=on_gpu))
