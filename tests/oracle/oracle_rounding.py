"""What rounding may do to each result of the layer: running error analysis of the whole layer, FP64 NumPy.

The layer once more, forward and backward, in numbers that know a bound of their error (`Rounded`). Wherever a
computation may store a number in the layer's type it is rounded to that (docs/numerics.md, section 1), and all that is
summed is summed in the wide type. Choices are the oracle's. The values that come out are the oracle's, too.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.oracle import weights_backward
from tests.oracle.oracle_losses import balance_loss_backward, loss_groups, z_loss_backward
from tests.oracle.oracle_mlp import FUNCTIONS, GATED_BY, MLP, mlp_of, second_branch, sigmoid
from tests.oracle.oracle_router import (
    COSINE_EPS,
    MAX_LOG_SCALE,
    Routed,
    load_backward,
    probability_of_choice,
    scores_backward,
)
from tests.oracle.oracle_types import Array, OracleInputs, OracleOptions, OracleOutput
from tests.oracle.rounded import (
    FUNCTION_ROUNDINGS,
    Rounded,
    softmax_backward_of,
    softmax_of,
)

STEEPEST_DENSITY = 0.25
"""Bound on the slope of the density of the normal distribution, which is 1 / sqrt(2 pi e)."""


@dataclass
class _Call:
    """A call, unit roundoffs of the layer's type, of the wide one and of autocast's casts, and the gradients so far.

    `dx` has what is added to the gradient of x, each in the layer's type.
    """

    inputs: OracleInputs
    options: OracleOptions
    output: OracleOutput
    low: float
    wide: float
    cast: float
    grads: dict[str, Rounded] = field(default_factory=dict)
    dx: list[Rounded] = field(default_factory=list)

    @property
    def routed(self) -> Routed:
        return self.output.tape["routed"]

    def exact(self, value: Array) -> Rounded:
        return Rounded.exact(np.asarray(value, dtype=np.float64), self.wide)

    def operand(self, value: Array) -> Rounded:
        """An operand of the dense arithmetic, which autocast casts."""
        return self.exact(value).to(self.cast)

    def param(self, name: str) -> Rounded:
        return self.exact(self.inputs.params[name])

    def add(self, numbers: list[Rounded]) -> Rounded:
        """A sum whose every partial sum may be rounded to the layer's type."""
        total = numbers[0]
        for number in numbers[1:]:
            total = (total + number).to(self.low)
        return total


def rounding_of_results(
    inputs: OracleInputs,
    options: OracleOptions,
    output: OracleOutput,
    dy_TD: Array,
    *,
    low: float,
    wide: float,
    cast: float = 0.0,
) -> dict[str, Rounded]:
    """Every result with a bound of the error of each element.

    Args:
        inputs: the call.
        options: the options in force in it.
        output: what `oracle_forward` gave.
        dy_TD: gradient of the output.
        low: unit roundoff of the layer's type.
        wide: unit roundoff of the type of sums, of the router and of the losses.
        cast: unit roundoff of the type to which autocast casts tokens, parameters and the output's gradient; 0: none.

    Returns:
        "y" and the gradients of "x" and of every parameter by name.
    """
    call = _Call(inputs, options, output, low, wide, cast)
    mask_T = output.tape["mask_T"]
    x_TD, dy_TD = (np.where(mask_T[:, None], v, 0.0) for v in (inputs.x_TD, dy_TD))
    logits_TE, cosine = _logits(call)
    final_TK = _final_weights(call, logits_TE)
    beside = _Beside(call, x_TD)
    dmoe_TD = beside.dmoe(dy_TD)
    moe, dfinal = _experts(call, x_TD, final_TK, dmoe_TD)
    y = beside.forward(moe)
    beside.backward(dy_TD, moe)
    if options.router != "hash":
        _router_backward(call, logits_TE, cosine, _dlogits(call, logits_TE, final_TK, dfinal))
    dx = call.add(call.dx)
    call.grads |= {"y": y * mask_T[:, None], "x": dx * mask_T[:, None]}
    return call.grads


def loss_scales(inputs: OracleInputs, options: OracleOptions, output: OracleOutput) -> dict[str, float]:
    """Sizes of what cancels in "aux_loss" and "z_loss".

    An error of a logit is one of the products in it; losses multiply it by their slope.
    """
    weight = inputs.params.get("router.proj.weight")
    x_TD = np.abs(output.tape["routed"].router_input_TD)
    logit = 1.0 if weight is None else float((x_TD @ np.abs(weight).T).max(initial=1.0))
    logit /= min(1.0, options.logit_temperature)
    aux_loss = output.aux_loss * logit
    if options.balance_loss == "importance_load":
        # A variance is a small difference of importances: its error is of first order in its root.
        aux_loss = (options.aux_loss_weight * output.aux_loss) ** 0.5 * logit
    z_loss = 2.0 * (options.z_loss_weight * output.z_loss) ** 0.5 * logit
    return {"aux_loss": aux_loss, "z_loss": z_loss}


class _Rows:
    """One MLP on N rows: activations, their slopes by the pre-activations, and outputs."""

    def __init__(self, call: _Call, mlp: MLP, x_ND: Array) -> None:
        self.call, self.mlp, self.x = call, mlp, call.operand(x_ND)
        self.w_in, self.w_out = call.operand(mlp.w_in), call.operand(mlp.w_out)
        dim = x_ND.shape[1]
        h = self.w_in.product("gfd,nd->gnf", self.x, dim)
        h = (h if mlp.b_in is None else h + call.operand(mlp.b_in)[:, None]).to(call.low)
        function, slope = FUNCTIONS[GATED_BY.get(mlp.activation, mlp.activation)]
        act, act_slope = h[0].function(function, size=0.0), h[0].function(slope, size=1.0)
        self.slopes, self.a = [act_slope], act.to(call.low)
        if mlp.activation in GATED_BY:
            up, up_slope = (
                h[1].function(lambda z, i=i: second_branch(z, mlp.activation)[i], size=1.0) for i in range(2)
            )
            plain = mlp.activation != "clamped_swiglu"
            up = h[1] if plain else up
            self.slopes = [act_slope * up, act if plain else act * up_slope]
            self.a = (act * up).to(call.low)
        out = self.a.product("nf,df->nd", self.w_out, mlp.w_out.shape[1])
        self.out = (out if mlp.b_out is None else out + call.operand(mlp.b_out)).to(call.low)

    def da(self, dout: Rounded) -> Rounded:
        """Gradient of the activations."""
        return dout.product("nd,df->nf", self.w_out, self.mlp.w_out.shape[0], to=self.call.low)

    def backward(self, dout: Rounded) -> tuple[dict[str, Rounded], Rounded]:
        """Gradients of the parameters by their last names, and of x."""
        low, (num_rows, _), da = self.call.low, dout.value.shape, self.da(dout)
        dh = [(da * slope).to(low) for slope in self.slopes]
        grads = [dh_g.product("nf,nd->fd", self.x, num_rows, to=low) for dh_g in dh]
        found = {
            "w_in": _stack(grads),
            "w_out": dout.product("nd,nf->df", self.a, num_rows, to=low),
        }
        if self.mlp.b_in is not None:
            found["b_in"] = _stack([dh_g.sum(0, to=low) for dh_g in dh])
        if self.mlp.b_out is not None:
            found["b_out"] = dout.sum(0, to=low)
        hidden = self.mlp.w_out.shape[1]
        dx = [d.product("nf,fd->nd", self.w_in[g], hidden) for g, d in enumerate(dh)]
        return found, self.call.add(dx).to(low)


def _stack(numbers: list[Rounded], axis: int = 0) -> Rounded:
    values, errors = ([getattr(n, name) for n in numbers] for name in ("value", "error"))
    return Rounded(np.stack(values, axis), np.stack(errors, axis), numbers[0].unit)


def _experts(call: _Call, x_TD: Array, final_TK: Rounded, dmoe_TD: Rounded) -> tuple[Rounded, Rounded]:
    """Sum of the experts' outputs (T, D), and the gradients of the routing weights (T, K)."""
    T, K = final_TK.value.shape
    parts, dx, dfinal = (
        Rounded(np.zeros(shape), np.zeros(shape), call.wide)
        for shape in ((T, K, x_TD.shape[1]), (T, K, x_TD.shape[1]), (T, K))
    )
    grads: list[dict[str, Rounded]] = []
    for e in range(call.options.num_experts):
        t, k = np.nonzero((call.output.topk_expert_ids_TK == e) & call.output.kept_TK)
        rows = _Rows(call, mlp_of(dict(call.inputs.params), "experts.", call.options.activation, e), x_TD[t])
        weight_N1, dmoe_ND = final_TK[t, k][:, None], dmoe_TD[t]
        found, dx_ND = rows.backward((weight_N1 * dmoe_ND).to(call.low))
        grads.append(found)
        _put(parts, (t, k), (weight_N1 * rows.out).to(call.low))
        _put(dx, (t, k), dx_ND)
        _put(dfinal, (t, k), _weight_gradient(rows, dmoe_ND))
    for name in grads[0]:
        call.grads["experts." + name] = _stack([found[name] for found in grads])
    call.dx.append(dx.sum(1, to=call.low))
    return parts.sum(1, to=call.low), dfinal


def _put(into: Rounded, index: tuple[Array, Array], numbers: Rounded) -> None:
    into.value[index], into.error[index] = numbers.value, numbers.error


def _weight_gradient(rows: _Rows, dmoe_ND: Rounded) -> Rounded:
    """dmoe . output, or the gradient of the activations . the activations: whichever has the larger error."""
    by_output = rows.out.product("nd,nd->n", dmoe_ND, dmoe_ND.value.shape[1])
    by_activation = rows.da(dmoe_ND).product("nf,nf->n", rows.a, rows.a.value.shape[1])
    if rows.mlp.b_out is not None:
        by_activation = by_activation + dmoe_ND.product("nd,d->n", rows.mlp.b_out, len(rows.mlp.b_out))
    return Rounded(by_output.value, np.maximum(by_output.error, by_activation.error), by_output.unit)


class _Beside:
    """Residual mixture and shared experts."""

    def __init__(self, call: _Call, x_TD: Array) -> None:
        params, activation = dict(call.inputs.params), call.options.activation
        self.call, self.x = call, call.operand(x_TD)
        self.residual = self.shared = self.gate = None
        if "residual_mlp.w_in" in params:
            self.residual = _Rows(call, mlp_of(params, "residual_mlp.", activation), x_TD)
            self.ab_T2 = softmax_of(self._linear("residual_coefficient.weight", "residual_coefficient.bias"))
        if "shared_experts.w_in" in params:
            self.shared = _Rows(call, mlp_of(params, "shared_experts.", activation), x_TD)
            if "shared_gate.weight" in params:
                self.gate = self._linear("shared_gate.weight", None)

    def _linear(self, weight: str, bias: str | None) -> Rounded:
        params, operand = self.call.inputs.params, self.call.operand
        logits = self.x.product("td,cd->tc", operand(params[weight]), self.x.value.shape[1])
        return (logits if bias is None else logits + operand(params[bias])).to(self.call.low)

    def _linear_backward(self, dlogits: Rounded, weight: str, bias: str | None) -> None:
        dlogits, low = dlogits.to(self.call.low), self.call.low
        T, C = dlogits.value.shape
        self.call.grads[weight] = dlogits.product("tc,td->cd", self.x, T, to=low)
        if bias is not None:
            self.call.grads[bias] = dlogits.sum(0, to=low)
        weight_CD = self.call.operand(self.call.inputs.params[weight])
        self.call.dx.append(dlogits.product("tc,cd->td", weight_CD, C, to=low))

    def _share(self) -> Rounded:
        if self.gate is None:
            return self.call.exact(np.ones((1, 1)))
        return self.gate.function(sigmoid, size=0.0).to(self.call.low)

    def dmoe(self, dy_TD: Array) -> Rounded:
        """Gradient of the routed part."""
        dy = self.call.operand(dy_TD)
        if self.residual is None:
            return dy
        return (self.ab_T2[:, :1].to(self.call.low) * dy).to(self.call.low)

    def forward(self, moe: Rounded) -> Rounded:
        """y from the routed part."""
        low, parts = self.call.low, [moe]
        if self.residual is not None:
            ab = self.ab_T2.to(low)
            parts = [(ab[:, :1] * moe).to(low), (ab[:, 1:] * self.residual.out).to(low)]
        if self.shared is not None:
            parts.append((self._share() * self.shared.out).to(low))
        return self.call.add(parts)

    def backward(self, dy_TD: Array, moe: Rounded) -> None:
        """Gradients of the parameters and of x."""
        dy, low, D = self.call.operand(dy_TD), self.call.low, dy_TD.shape[1]
        if self.residual is not None:
            self._dense("residual_mlp.", self.residual, (self.ab_T2[:, 1:].to(low) * dy).to(low))
            parts = [part.product("td,td->t", dy, D, to=low) for part in (moe, self.residual.out)]
            dlogits = softmax_backward_of(self.ab_T2, _stack(parts, 1))
            self._linear_backward(dlogits, "residual_coefficient.weight", "residual_coefficient.bias")
        if self.shared is not None:
            self._dense("shared_experts.", self.shared, (self._share() * dy).to(low))
            if self.gate is not None:
                dshare = self.shared.out.product("td,td->t", dy, D, to=low)[:, None]
                slope = self.gate.function(lambda z: sigmoid(z) * sigmoid(-z), size=0.0)
                self._linear_backward(slope * dshare, "shared_gate.weight", None)

    def _dense(self, prefix: str, rows: _Rows, dout: Rounded) -> None:
        grads, dx = rows.backward(dout)
        self.call.grads |= {prefix + name: grad for name, grad in grads.items()}
        self.call.dx.append(dx)


@dataclass(frozen=True)
class _Cosine:
    """W x (T, C), its unit vectors, those of the embeddings (E, C), and the factor on their products."""

    z: Rounded
    units: Rounded
    experts: Rounded
    scale: float


def _unit(v_NC: Rounded) -> Rounded:
    return v_NC * _per_norm(v_NC)


def _per_norm(v_NC: Rounded) -> Rounded:
    """(N, 1) one over the length."""
    norm_N1 = np.maximum(np.sqrt((v_NC.value**2).sum(1, keepdims=True)), COSINE_EPS)
    moved_N1 = (np.abs(v_NC.value) * v_NC.error).sum(1, keepdims=True) / norm_N1
    return Rounded(1.0 / norm_N1, moved_N1 / norm_N1**2, v_NC.unit).to(FUNCTION_ROUNDINGS * v_NC.unit)


def _router_input(call: _Call) -> Rounded:
    return call.exact(call.routed.router_input_TD).to(call.wide)


def _logits(call: _Call) -> tuple[Rounded, _Cosine | None]:
    """Clean logits (T, E) after the temperature."""
    if call.options.router == "hash":
        return call.exact(call.routed.logits_TE), None
    x = _router_input(call)
    out = x.product("td,cd->tc", call.param("router.proj.weight"), x.value.shape[1], to=call.wide)
    cosine = None
    if call.options.router == "cosine":
        scale = math.exp(min(float(call.inputs.params["router.log_scale"].item()), MAX_LOG_SCALE))
        experts = _unit(call.param("router.expert_embeddings"))
        cosine = _Cosine(out, _unit(out), experts, scale)
        products = cosine.units.product("tc,ec->te", experts, out.value.shape[1])
        out = (products * scale).to(FUNCTION_ROUNDINGS * call.wide)
    return (out * (1.0 / call.options.logit_temperature)).to(call.wide), cosine


def _doubt(call: _Call, logits: Rounded) -> Array:
    """(T, 1) what the errors of a token's logits do to its scores and to their ratios, relatively."""
    worst_T1 = logits.error.max(axis=1, initial=0.0, keepdims=True)
    return 2.0 * worst_T1 + FUNCTION_ROUNDINGS * call.wide


def _final_weights(call: _Call, logits: Rounded) -> Rounded:
    value = call.output.tape["final_TK"]
    return Rounded(value, np.abs(value) * _doubt(call, logits), call.wide)


def _dlogits(call: _Call, logits: Rounded, final: Rounded, dfinal: Rounded) -> Rounded:
    """Gradients of the clean logits: from the routing weights, whose common part cancels, and from the losses."""
    routed, options, output = call.routed, call.options, call.output
    aux = options.aux_loss_weight
    dp_TE, dload_TE = balance_loss_backward(routed, output.tape["mask_T"], options, aux)
    nothing_TK, doubt_T1 = np.zeros_like(dfinal.value), 3.0 * _doubt(call, logits)
    value = scores_backward(routed, nothing_TK, dp_TE, options)
    value += load_backward(call.inputs, routed, dload_TE, options)
    value += z_loss_backward(routed, output.tape["mask_T"], options, options.z_loss_weight)
    error = _loss_errors(call, logits, np.abs(dp_TE), np.abs(dload_TE), doubt_T1)
    if call.inputs.weights_TK is not None:
        return Rounded(value, error, call.wide)
    factor_TK = np.broadcast_to(call.inputs.output_factor_TK, nothing_TK.shape)
    for k in range(nothing_TK.shape[1]):
        only_TK = nothing_TK.copy()
        only_TK[:, k] = factor_TK[:, k]
        draw_TK = weights_backward(routed.raw_TK, only_TK, output.kept_TK, call.inputs, options)
        slope_TE = scores_backward(routed, draw_TK, np.zeros_like(dp_TE), options)
        value += slope_TE * dfinal.value[:, [k]]
        error += np.abs(slope_TE) * dfinal.error[:, [k]]
    direct_TK = np.abs(final.value * dfinal.value)
    mean_T = direct_TK.sum(1)
    size_TE = 2.0 * mean_T[:, None] * routed.probabilities_TE
    total_T = np.maximum(np.abs(final.value).sum(1), COSINE_EPS)
    for t, k in np.argwhere(output.kept_TK):
        share = abs(final.value[t, k]) / total_T[t]
        size_TE[t, output.topk_expert_ids_TK[t, k]] += direct_TK[t, k] + mean_T[t] * share
    return Rounded(value, error + doubt_T1 * size_TE, call.wide)


def _loss_errors(call: _Call, logits: Rounded, dp_TE: Array, dload_TE: Array, doubt_T1: Array) -> Array:
    """(T, E), of the logits' gradients from the losses; dp, dload: absolute values of those of what the losses read."""
    routed, options, mask_T = call.routed, call.options, call.output.tape["mask_T"]
    p_TE, errors_TE = routed.probabilities_TE, np.zeros_like(dp_TE)
    if not mask_T.any():
        return errors_TE
    if options.balance_loss == "importance_load":
        # Half a squared variation has a gradient that is a difference of terms below 2 / mean.
        for valid, share in loss_groups(mask_T, options):
            weight = 2.0 * options.aux_loss_weight * share
            dp_TE[valid] += weight / p_TE[valid].sum(0).mean()
            if routed.load_TE is not None and routed.load_TE[valid].any():
                dload_TE[valid] += weight / routed.load_TE[valid].sum(0).mean()
    worst = doubt_T1.max(initial=0.0)  # importances have the errors of other tokens
    errors_TE += worst * p_TE * (dp_TE + (p_TE * dp_TE).sum(1, keepdims=True))
    z_TE = z_loss_backward(routed, mask_T, options, options.z_loss_weight)
    # The slope of the square of log sum exp is the softmax times twice that.
    moved_T1 = 2.0 * options.z_loss_weight / mask_T.sum() * logits.error.max(1, keepdims=True)
    errors_TE += doubt_T1 * np.abs(z_TE) + moved_T1 * mask_T[:, None]
    if routed.load_TE is not None and call.inputs.noise_TE is not None:
        for t, logits_E in enumerate(routed.logits_TE):
            noisy_E, std = logits_E + call.inputs.noise_TE[t], options.router_noise_std
            _, slope_E, rivals = probability_of_choice(logits_E, noisy_E, options)
            moved = STEEPEST_DENSITY * 2.0 * logits.error[t].max() / std**2
            from_load_E = dload_TE[t] * (worst * (1.0 + slope_E) + moved)
            errors_TE[t] += from_load_E
            np.add.at(errors_TE[t], rivals, from_load_E)
    return errors_TE


def _router_backward(call: _Call, logits: Rounded, cosine: _Cosine | None, dlogits: Rounded) -> None:
    """Gradients of the router's parameters and of x."""
    x, options = _router_input(call), call.options
    T, E = logits.value.shape
    dout = dlogits * (1.0 / options.logit_temperature)
    if cosine is not None:
        dcosine = (dout * cosine.scale).to(FUNCTION_ROUNDINGS * call.wide)
        products = cosine.units.product("tc,ec->te", cosine.experts, cosine.z.value.shape[1])
        dscale = (dcosine * products).sum(1).sum(0)
        log_scale = call.inputs.params["router.log_scale"]
        is_free = float(log_scale.item()) < MAX_LOG_SCALE
        dscale = dscale * (1.0 if is_free else 0.0)
        call.grads["router.log_scale"] = Rounded(
            np.full(log_scale.shape, dscale.value),
            np.full(log_scale.shape, dscale.error),
            call.wide,
        )
        embeddings = call.param("router.expert_embeddings")
        dexperts = dcosine.product("te,tc->ec", cosine.units, T)
        call.grads["router.expert_embeddings"] = _unit_backward(embeddings, cosine.experts, dexperts)
        dunits = dcosine.product("te,ec->tc", cosine.experts, E)
        dout = _unit_backward(cosine.z, cosine.units, dunits)
    weight = call.param("router.proj.weight")
    call.grads["router.proj.weight"] = dout.product("tc,td->cd", x, T)
    dx = dout.product("tc,cd->td", weight, weight.value.shape[0])
    factor_TD = call.inputs.input_factor_TD
    call.dx.append((dx if factor_TD is None else dx * factor_TD).to(call.low))


def _unit_backward(v_NC: Rounded, unit_NC: Rounded, dunit_NC: Rounded) -> Rounded:
    along_N1 = unit_NC.product("nc,nc->n", dunit_NC, unit_NC.value.shape[1])[:, None]
    is_long_N1 = np.sqrt((v_NC.value**2).sum(1, keepdims=True)) > COSINE_EPS
    return (dunit_NC + -(unit_NC * along_N1) * is_long_N1) * _per_norm(v_NC)
