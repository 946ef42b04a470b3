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

enum { FP32, BF16, INT8, INT4 }; /* stored types */

static inline int64_t size_of(int64_t kind) { return kind == FP32 ? 4 : 2; }
static inline int64_t padded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

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

/* The larger and the smaller of two numbers; b where one is NaN. */
static inline Floats larger_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

static inline Floats smaller_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

static inline Floats at_most(Floats x, float limit) { return smaller_of(all(limit), x); }
static inline Floats at_least(Floats x, float limit) { return larger_of(all(limit), x); }

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

/* tanh x = t / (t + 2) with t = e^(2 |x|) - 1, whose polynomial has no 1 to cancel. */
static inline Floats hyperbolic_tangent(Floats x) {
    static const float terms[7] = {1.0f, 0.5f, 1.0f / 6.0f, 1.0f / 24.0f, 1.0f / 120.0f, 1.0f / 720.0f, 1.0f / 5040.0f};
    const Floats magic = all(12582912.0f);
    Floats twice = at_most(choose(x < all(0.0f), -x, x) * all(2.0f), 40.0f);
    Floats shifted = multiply_add(twice, all(1.44269504f), magic);
    Floats n = shifted - magic;
    Floats r = multiply_add(n, all(-0.693145752f), twice), p = all(terms[6]);
    r = multiply_add(n, all(-1.42860677e-6f), r);
    for (int i = 5; i >= 0; i--) p = multiply_add(p, r, all(terms[i]));
    Floats power = (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
    Floats t = multiply_add(p * r, power, power - all(1.0f)), y = t / (t + all(2.0f));
    return choose(x < all(0.0f), -y, y);
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

static inline float largest_of(Floats v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* The sum of the lanes, by halves. */
static inline float sum_of(Floats v) {
#if LANES == 16
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif LANES == 8
    __m256 h = (__m256)v;
#endif
#if LANES >= 8
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return q[0] + q[1];
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* The sums of the lanes of LANES vectors, one in each lane. */
static inline Floats sums_of(const Floats *v) {
#if LANES == 16
    __m512 t[4];
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1], c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
        __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        t[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    }
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x88), _mm512_shuffle_f32x4(t[2], t[3], 0xdd));
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#elif LANES == 8
    __m256 t[2];
    for (int i = 0; i < 2; i++) {
        __m256 a = (__m256)v[4 * i], b = (__m256)v[4 * i + 1], c = (__m256)v[4 * i + 2], d = (__m256)v[4 * i + 3];
        __m256d ab = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        __m256d cd = (__m256d)_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        t[i] = _mm256_add_ps((__m256)_mm256_unpacklo_pd(ab, cd), (__m256)_mm256_unpackhi_pd(ab, cd));
    }
    return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(t[0], t[1], 0x20), _mm256_permute2f128_ps(t[0], t[1], 0x31));
#else
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
    return out;
#endif
}

/* How a vector of each stored type is read, and how products of BF16 pairs are added. */
#define READ_FP32(from) load((const float *)(from))
#define READ_BF16(from) load_bf16((const uint16_t *)(from))
#if defined(__AVX512BF16__)
typedef __m512bh Pairs;
static inline Pairs load_pairs(const char *from) {
    Pairs v;
    memcpy(&v, from, sizeof v);
    return v;
}
#define ADD_PAIRS(w, x, sum) ((Floats)_mm512_dpbf16_ps((__m512)(sum), w, x))
#endif

#endif
