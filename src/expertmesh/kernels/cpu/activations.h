/* Activations of the experts, FP32, as `expertmesh.ops.activation` defines them. */
#ifndef EXPERTMESH_ACTIVATIONS_H
#define EXPERTMESH_ACTIVATIONS_H

#include "vectors.h"

enum { SILU, GELU, RELU, RELU2, CLAMPED_SILU };

#define CLAMP_LIMIT 7.0f
#define CLAMP_SLOPE 1.702f

/* 1 + erf(x / sqrt 2). With z = |x| / sqrt 2: erf(z) = z P(z^2) up to 1, erfc(z) = exp(-z^2) Q(1 / (1 + z / 2)) from
 * there on; P and Q are least-squares fits of the relative error, below 1e-8.
 */
static inline Floats one_plus_erf(Floats x) {
    static const float near[8] = {1.12837923f, -0.376126379f, 0.112837821f, -0.0268654004f,
                                  0.00522094546f, -0.000848283002f, 0.00011256957f, -9.6415406e-6f};
    static const float far[9] = {-5.6494091e-6f, 0.282238901f, 0.280563682f, 0.255518347f, 0.148831755f,
                                 0.125936806f, -0.00282863853f, -0.164098039f, 0.0742034316f};
    Floats z = choose(x < all(0.0f), -x, x) * all(0.707106781f), square = z * z;
    Floats p = all(near[7]), q = all(far[8]), t = all(1.0f) / multiply_add(z, all(0.5f), all(1.0f));
    for (int i = 6; i >= 0; i--) p = multiply_add(p, square, all(near[i]));
    for (int i = 7; i >= 0; i--) q = multiply_add(q, t, all(far[i]));
    Floats tail = exponential(-square) * q, erf = z * p;
    Floats above = choose(z > all(1.0f), all(2.0f) - tail, all(1.0f) + erf);
    Floats below = choose(z > all(1.0f), tail, all(1.0f) - erf);
    return choose(x < all(0.0f), below, above);
}

static inline Floats pointwise(int inner, Floats h) {
    switch (inner) {
    case SILU:
        return h / (all(1.0f) + exponential(-h));
    case GELU:
        return all(0.5f) * h * one_plus_erf(h);
    case CLAMPED_SILU:
        h = at_most(h, CLAMP_LIMIT);
        return h / (all(1.0f) + exponential(all(-CLAMP_SLOPE) * h));
    default:
        h = at_least(h, 0.0f);
        return inner == RELU2 ? h * h : h;
    }
}

/* The factor of the second branch of a gated activation. */
static inline Floats second_branch(int inner, Floats up) {
    return inner == CLAMPED_SILU ? at_least(at_most(up, CLAMP_LIMIT), -CLAMP_LIMIT) + all(1.0f) : up;
}

#endif
