/* Matrices of experts as torch stores them, and blocks of 32 of their rows as the products take them. */
#ifndef EXPERTMESH_WEIGHTS_H
#define EXPERTMESH_WEIGHTS_H

#include "vectors.h"

#define GROUP 16 /* rows of a tile */
#define STEP 32  /* columns of a tile; panels are padded with zeros to a multiple of it */

/* Matrices (experts, branches, rows, columns). Distances are in bytes; numbers of a row are adjacent. */
typedef struct {
    const char *numbers;
    int64_t of_expert, of_branch, of_row;
    const char *scales; /* INT8: one per row, applied to its sums; INT4: one per `group` columns, to the weights */
    int64_t scales_of_expert, scales_of_branch, scales_of_row;
    const char *bias; /* or NULL */
    int64_t bias_of_expert, bias_of_branch;
    int64_t kind, scale_kind, bias_kind, group, branches, rows, columns;
} Matrices;

/* Two groups of 16 rows: the same rows of gate and up, or 32 rows of a matrix with one branch. Rows that do not
 * exist are zeros. */
typedef struct {
    const char *group[2]; /* or NULL: pieces of columns are copied while they are multiplied */
    int64_t stride;
    const char *rows[2], *scales[2]; /* as they are stored */
    int64_t first[2], valid[2]; /* first row in its branch, number of rows that exist */
    float scale[2][GROUP], bias[2][GROUP];
} Block;

static inline float number(const char *at, int64_t kind, int64_t i) {
    return kind == BF16 ? wide(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}

static inline int64_t num_blocks(const Matrices *m) {
    /* the panel behind gate and up is padded to 32 columns, so that its last half block exists, too */
    return m->branches == 2 ? padded(m->rows, STEP) / GROUP : padded(m->rows, STEP) / STEP;
}

typedef float Floats8 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));

static inline Words8 rounded_to_bf16(Words8 bits) { return (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000; }

/* Stores the first `count` of eight numbers, which are no longer than the type. */
static inline void store_eight(Floats8 x, int64_t count, int64_t kind, char *to) {
    Halves8 halves = __builtin_convertvector((Words8)x >> 16, Halves8);
    if (count < 8 && kind == BF16) memcpy(to, &halves, (size_t)count * 2);
    else if (count < 8) memcpy(to, &x, (size_t)count * 4);
    else if (kind == BF16) memcpy(to, &halves, sizeof halves);
    else memcpy(to, &x, sizeof x);
}

static inline void widen_int8(const int8_t *from, int64_t count, int64_t to_kind, char *to) {
    int64_t i = 0, size = to_kind == BF16 ? 2 : 4;
#if defined(__AVX512BF16__)
    for (; to_kind == BF16 && i + 32 <= count; i += 32) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + i))));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + i + 16))));
        __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        memcpy(to + 2 * i, &both, 64);
    }
#endif
    const Words8 shifts = {24, 16, 8, 0, 24, 16, 8, 0};
    for (uint32_t w[2]; i + 8 <= count; i += 8) {
        memcpy(w, from + i, sizeof w);
        Ints8 q = (Ints8)((Words8){w[0], w[0], w[0], w[0], w[1], w[1], w[1], w[1]} << shifts) >> 24;
        store_eight(__builtin_convertvector(q, Floats8), 8, to_kind, to + i * size);
    }
    for (; i < count; i++) store_eight((Floats8){(float)from[i]}, 1, to_kind, to + i * size);
}

/* Eight weights of 4 bits; rounded where scale or result is BF16. */
static inline Floats8 of_nibbles(uint32_t word, float scale, int is_rounded) {
    const Words8 shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    Ints8 q = (Ints8)((((Words8){0} + word) >> shifts) & 15) - 8;
    Floats8 x = __builtin_convertvector(q, Floats8) * scale;
    return is_rounded ? (Floats8)rounded_to_bf16((Words8)x) : x;
}

/* One group of columns with its scale; the first of two numbers is in the low half of a byte, offset by 8. */
static inline void widen_int4(const uint8_t *from, int64_t count, float scale, int64_t scale_kind, int64_t to_kind,
                              char *to) {
    int64_t i = 0, size = to_kind == BF16 ? 2 : 4;
#if defined(__AVX512BF16__)
    if (to_kind == BF16) {
        /* a word picks by its low five bits, of which the fifth may be of the other number: the table stands there
         * twice */
        const __m512 numbers = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
        __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(numbers, _mm512_set1_ps(scale)));
        __m512i twice = _mm512_broadcast_i64x4(half);
        for (; i + 32 <= count; i += 32) {
            __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i / 2)));
            __m512i words = _mm512_or_si512(byte, _mm512_slli_epi32(byte, 12));
            _mm512_storeu_si512(to + 2 * i, _mm512_permutexvar_epi16(words, twice));
        }
    }
#endif
    int is_rounded = scale_kind == BF16 || to_kind == BF16;
    if (scale != scale) scale = __builtin_nanf("");
    for (uint32_t word; i + 8 <= count; i += 8) {
        memcpy(&word, from + i / 2, sizeof word);
        store_eight(of_nibbles(word, scale, is_rounded), 8, to_kind, to + i * size);
    }
    for (; i < count; i++)
        store_eight(of_nibbles(from[i / 2] >> (i % 2 ? 4 : 0), scale, is_rounded), 1, to_kind, to + i * size);
}

/* Columns of a row, from an even one on, which is in a group of columns, in the type of the products, with zeros
 * behind the last one. */
static inline void widen_columns(const Matrices *m, const char *row, const char *scales, int64_t first, int64_t group,
                                 int64_t count, int64_t kind, char *to) {
    int64_t size = kind == FP32 ? 4 : 2, last = least(first + count, m->columns);
    if (m->kind == INT8) widen_int8((const int8_t *)row + first, last - first, kind, to);
    else if (m->kind == INT4)
        for (int64_t c = first, end; c < last; c = end, group++) {
            float scale = number(scales, m->scale_kind, group);
            end = least((group + 1) * m->group, last);
            widen_int4((const uint8_t *)row + c / 2, end - c, scale, m->scale_kind, kind, to + (c - first) * size);
        }
    else memcpy(to, row + first * size, (size_t)((last - first) * size));
    memset(to + (last - first) * size, 0, (size_t)((first + count - last) * size));
}

/* Type of a block: dense numbers as they are, others as wide as the tokens. */
static inline int64_t block_kind(const Matrices *m, int64_t x_kind) { return m->kind <= BF16 ? m->kind : x_kind; }

/* Bytes from row to row of a copied block; off a power of two, at which rows would share cache sets. */
static inline int64_t copied_stride(const Matrices *m) { return padded(m->columns, STEP) * 4 + 64; }

static inline int is_stored_as_read(const Matrices *m) { return m->kind <= BF16 && m->columns % STEP == 0; }

static inline const char *row_of(const Matrices *m, int64_t expert, int64_t branch, int64_t row) {
    return m->numbers + expert * m->of_expert + branch * m->of_branch + row * m->of_row;
}

/* What is left to ask for of the block that will be taken next: two groups of rows, each one run of bytes, as memory
 * streams it. Lines are asked for a few at a time, all the while this block is computed: a burst would leave the
 * memory idle behind it. */
typedef struct {
    const char *at[2];
    int64_t left; /* lines of each group */
} Ahead;

static inline void look_ahead(Ahead *next, const Matrices *m, int64_t expert, int64_t i) {
    static const int halvings[] = {2, 1, 0, -1};
    int64_t bytes = halvings[m->kind] < 0 ? m->columns / 2 : m->columns << halvings[m->kind];
    for (int g = 0; g < 2; g++) {
        int64_t row = m->branches == 2 ? i * GROUP : (2 * i + g) * GROUP;
        next->at[g] = row_of(m, expert, m->branches == 2 ? g : 0, row);
    }
    next->left = GROUP * bytes / 64;
}

/* Lines of each group to ask for at each of so many points. */
static inline int64_t rate_of(const Ahead *next, int64_t points) {
    return points ? (next->left + points - 1) / points : 0;
}

static inline void prefetch(Ahead *next, int64_t lines) {
    if (!lines) return;
    lines = least(lines, next->left);
    next->left -= lines;
    for (; lines > 0; lines--) {
        __builtin_prefetch(next->at[0], 0, 2);
        __builtin_prefetch(next->at[1], 0, 2);
        next->at[0] += 64, next->at[1] += 64;
    }
}

/* Columns of a block from `first` on, copied to `to`. */
static inline void copy_columns(const Block *b, const Matrices *m, int64_t first, int64_t count, int64_t kind,
                                char *to, int64_t stride, Ahead *next, int64_t rate) {
    int64_t group = m->kind == INT4 ? first / m->group : 0;
    for (int g = 0; g < 2; g++)
        for (int64_t n = 0; n < GROUP; n++, to += stride) {
            prefetch(next, rate);
            if (n >= b->valid[g]) memset(to, 0, (size_t)(count * (kind == FP32 ? 4 : 2)));
            else {
                const char *row = b->rows[g] + n * m->of_row, *scales = b->scales[g] + n * m->scales_of_row;
                widen_columns(m, row, scales, first, group, count, kind, to);
            }
        }
}

/* Block i of an expert; copied to `scratch` unless its rows can be read where they lie, or `scratch` is NULL. */
static inline void take_block(Block *b, const Matrices *m, int64_t expert, int64_t i, int64_t x_kind, char *scratch,
                              Ahead *next, int64_t rate) {
    int64_t kind = block_kind(m, x_kind);
    for (int g = 0; g < 2; g++) {
        int64_t branch = m->branches == 2 ? g : 0, first = m->branches == 2 ? i * GROUP : (2 * i + g) * GROUP;
        int64_t valid = m->rows - first;
        valid = valid < 0 ? 0 : least(valid, GROUP);
        b->first[g] = first, b->valid[g] = valid;
        b->rows[g] = row_of(m, expert, branch, first);
        const char *scales = m->scales + expert * m->scales_of_expert + branch * m->scales_of_branch;
        b->scales[g] = scales + first * m->scales_of_row;
        for (int n = 0; n < GROUP; n++) {
            int is_int8 = m->kind == INT8 && n < valid;
            b->scale[g][n] = is_int8 ? number(b->scales[g] + n * m->scales_of_row, m->scale_kind, 0) : 1.0f;
        }
        const char *bias = m->bias + expert * m->bias_of_expert + branch * m->bias_of_branch;
        for (int n = 0; n < GROUP; n++)
            b->bias[g][n] = m->bias && n < valid ? number(bias, m->bias_kind, first + n) : 0.0f;
    }
    int is_read = is_stored_as_read(m) && b->valid[0] == GROUP && b->valid[1] == GROUP;
    b->stride = is_read ? m->of_row : copied_stride(m);
    for (int g = 0; g < 2; g++) b->group[g] = is_read ? b->rows[g] : scratch ? scratch + g * GROUP * b->stride : NULL;
    if (!is_read && scratch) copy_columns(b, m, 0, padded(m->columns, STEP), kind, scratch, b->stride, next, rate);
}

#endif
