/* Vectors of floats, as wide as the instruction set has them: LANES of them in a `Floats`.
 *
 * The instruction set is the one the file is compiled for. Products are added by `multiply_add`, which is one rounding
 * where the processor has it; nothing else is fused (-ffp-contract=off), so that every copy of a formula gives the same
 * bits. Comparisons leave NaN as it is.
 */
#ifndef EXPERTMESH_VECTORS_H
#define EXPERTMESH_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

static inline Floats load(const float *from) {
    Floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, Floats v) { memcpy(to, &v, sizeof v); }

static inline Floats all(float x) { return (Floats){0} + x; }

static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline Floats choose(Ints where, Floats yes, Floats no) {
    return (Floats)((where & (Ints)yes) | (~where & (Ints)no));
}

static inline Floats at_most(Floats x, float limit) { return choose(x > all(limit), all(limit), x); }
static inline Floats at_least(Floats x, float limit) { return choose(x < all(limit), all(limit), x); }

/* e^x: x = n log 2 + r with |r| <= log 2 / 2, a polynomial for e^r, and 2^n in two factors, as n may be beyond 127. */
static inline Floats exponential(Floats x) {
    x = at_least(at_most(x, 104.0f), -104.0f);
    const Floats magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    Floats shifted = multiply_add(x, all(1.44269504f), magic);
    Floats n = shifted - magic;
    Floats r = multiply_add(n, all(-0.693145752f), x);
    r = multiply_add(n, all(-1.42860677e-6f), r);
    Floats p = all(1.0f / 720.0f);
    p = multiply_add(p, r, all(1.0f / 120.0f));
    p = multiply_add(p, r, all(1.0f / 24.0f));
    p = multiply_add(p, r, all(1.0f / 6.0f));
    p = multiply_add(p, r, all(0.5f));
    p = multiply_add(p, r, all(1.0f));
    p = multiply_add(p, r, all(1.0f));
    Ints exponent = (Ints)shifted - (Ints)magic;
    Ints half = exponent >> 1;
    Floats low = (Floats)((half + 127) << 23), high = (Floats)((exponent - half + 127) << 23);
    return p * low * high;
}

/* Numbers of the two stored types, widened. */
static inline float wide(uint16_t bits) {
    uint32_t both = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &both, 4);
    return x;
}

static inline uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline Floats load_bf16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    Ints v;
    for (int i = 0; i < LANES; i++) v[i] = (int32_t)((uint32_t)from[i] << 16);
    return (Floats)v;
#endif
}

static inline void store_bf16(uint16_t *to, Floats v) {
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &narrow, sizeof narrow);
#else
    for (int i = 0; i < LANES; i++) to[i] = bf16(v[i]);
#endif
}

#endif
