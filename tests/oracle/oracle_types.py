"""What goes into and comes out of the FP64 oracle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class OracleOptions:
    """The layer's options that change its mathematics, with the names of `expertmesh.MoELayer`.

    `capacity_factor` and `drop_policy` are those in force: the caller has chosen between training and evaluation.
    """

    num_experts: int
    top_k: int
    router: str = "topk"
    score_function: str = "softmax"
    normalize_weights: str = "auto"
    weight_scale: float = 1.0
    router_noise: str = "none"
    router_noise_std: float = 1.0
    logit_temperature: float = 1.0
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    group_score: str = "top2_sum"
    capacity_factor: float | None = None
    min_capacity: int = 4
    max_capacity_factor: float | None = None
    drop_policy: str = "first"
    routing_group_size: int | None = None
    activation: str = "swiglu"
    balance_loss: str = "switch"
    balance_loss_scope: str = "group"
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.0


@dataclass(frozen=True)
class OracleInputs:
    """One call. Randomness is given: the oracle draws nothing.

    Attributes:
        x_TD: tokens.
        params: FP64 arrays under the names of `MoELayer.state_dict()`.
        token_mask_T: True for real tokens; None: all are.
        expert_ids_TK: replayed choice (or that of a hash table); None: the router chooses.
        weights_TK: replayed routing weights; None: from the scores.
        expert_bias_E: added to the scores for the choice only.
        noise_TE: added to the logits for the choice, already scaled.
        input_factor_TD: jitter and dropout, as the factor on the router's input.
        output_factor_TK: expert output masking, as the factor on the outputs of the experts.
        keys_TK: for drop policy "random": rows with the smaller keys stay.
    """

    x_TD: Array
    params: Mapping[str, Array]
    token_mask_T: Array | None = None
    expert_ids_TK: Array | None = None
    weights_TK: Array | None = None
    expert_bias_E: Array | None = None
    noise_TE: Array | None = None
    input_factor_TD: Array | None = None
    output_factor_TK: Array | float = 1.0
    keys_TK: Array | None = None


@dataclass(frozen=True)
class OracleOutput:
    """What one call gives; compare with the layer's output and `RoutingStats`."""

    y_TD: Array
    aux_loss: float
    z_loss: float
    num_tokens_per_expert_E: Array
    num_dropped: int
    topk_expert_ids_TK: Array
    topk_weights_TK: Array
    kept_TK: Array
    scores_TE: Array
    logits_TE: Array
    margin: float
    """Smallest gap between a chosen and a rejected score (or queue key): choices with a larger gap than rounding are
    robust."""
    tape: dict = field(repr=False, default_factory=dict)
