/* Products by dot products: rows of x times rows of w, both along their columns, for every instruction set.
 *
 * A sum has one accumulator of LANES partial sums, columns ascending, and LANES accumulators are added up by one tree.
 * So the order of a sum does not depend on how many rows are multiplied together.
 */
#ifndef EXPERTMESH_DOTS_H
#define EXPERTMESH_DOTS_H

#include "work.h"

#define TOGETHER (LANES == 16 ? 4 : 2) /* rows of x at once */
#define ACROSS (LANES / TOGETHER)      /* rows of w at once, if there are so many of x; else LANES */

/* NAME(w, w_stride, x, x_stride, columns, many, out, ahead, ahead_stride): with `many` TOGETHER rows of x by ACROSS
 * of w, else one by LANES; out has 32 sums per row of x. AT_ONCE columns are read at a time. The next block is
 * prefetched at a rate per step. */
#define DOTS(NAME, X_SIZE, W_SIZE, AT_ONCE, VECTOR, READ_X, READ_W, ADD)                                               \
    static inline void NAME##_part(const char *w, int64_t w_stride, const char *x, int64_t x_stride, int64_t columns,  \
                                   const int rows, const int across, float *out, Ahead *next, int64_t rate) {          \
        Floats sum[LANES];                                                                                             \
        for (int i = 0; i < LANES; i++) sum[i] = all(0.0f);                                                            \
        for (int64_t c = 0; c < columns; c += AT_ONCE) {                                                               \
            VECTOR own[LANES], of_w;                                                                                   \
            prefetch(next, rate);                                                                                      \
            for (int r = 0; r < rows; r++) own[r] = READ_X(x + r * x_stride + c * X_SIZE);                             \
            for (int n = 0; n < across; n++) {                                                                         \
                of_w = READ_W(w + n * w_stride + c * W_SIZE);                                                          \
                for (int r = 0; r < rows; r++) sum[r * across + n] = ADD(of_w, own[r], sum[r * across + n]);           \
            }                                                                                                          \
        }                                                                                                              \
        float sums[LANES];                                                                                             \
        store(sums, sums_of(sum));                                                                                     \
        for (int r = 0; r < rows; r++) memcpy(out + r * 2 * GROUP, sums + r * across, sizeof(float) * across);         \
    }                                                                                                                  \
    __attribute__((noinline)) static void NAME(const char *w, int64_t w_stride, const char *x, int64_t x_stride,       \
                                               int64_t columns, int many, float *out, Ahead *next, int64_t rate) {     \
        int across = many ? ACROSS : LANES;                                                                            \
        for (int n = 0; n < GROUP; n += across) {                                                                      \
            const char *own = w + n * w_stride;                                                                        \
            if (many) NAME##_part(own, w_stride, x, x_stride, columns, TOGETHER, ACROSS, out + n, next, rate);         \
            else NAME##_part(own, w_stride, x, x_stride, columns, 1, LANES, out + n, next, rate);                      \
        }                                                                                                              \
    }

DOTS(dots_fp32, 4, 4, LANES, Floats, READ_FP32, READ_FP32, multiply_add)
DOTS(dots_mixed, 4, 2, LANES, Floats, READ_FP32, READ_BF16, multiply_add)
#if defined(__AVX512BF16__)
DOTS(dots_bf16, 2, 2, 32, Pairs, load_pairs, load_pairs, ADD_PAIRS)
#endif

/* Sums of a block with `rows` (1 or TOGETHER) places of a panel. */
static inline void dots_of_block(const Work *w, const Block *b, int64_t w_kind, const char *panel, int64_t width,
                                 int64_t place, int rows, float *out, Ahead *next) {
    int64_t stride = width * size_of(w->x_kind);
    const char *x = panel + place * stride;
    int64_t at_once = w->x_kind == BF16 ? 32 : LANES, parts = 2 * GROUP / (rows > 1 ? ACROSS : LANES);
    int64_t rate = rate_of(next, parts * (width / at_once));
    for (int g = 0; g < 2; g++) {
        float *to = out + g * GROUP;
        if (w_kind == FP32) dots_fp32(b->group[g], b->stride, x, stride, width, rows > 1, to, next, rate);
#if defined(__AVX512BF16__)
        else if (w->x_kind == BF16) dots_bf16(b->group[g], b->stride, x, stride, width, rows > 1, to, next, rate);
#endif
        else dots_mixed(b->group[g], b->stride, x, stride, width, rows > 1, to, next, rate);
    }
}

static inline void store_in_panel(const Work *w, char *panel, int64_t width, int64_t place, int64_t column, Floats v) {
    int64_t at = place * width + column;
    if (w->x_kind == BF16) store_bf16((uint16_t *)panel + at, v);
    else store((float *)panel + at, v);
}

/* 16 activated columns of a place, from its 32 sums. */
static inline void dots_activate(const Work *w, const Span *span, int64_t place, const Block *b, float *h) {
    const Matrices *m = &w->call->in;
    Floats s = all(w->weight_of[place]);
    for (int g = 0; g < 2; g++) {
        for (int n = 0; n < GROUP; n += LANES) {
            float *at = h + g * GROUP + n;
            store(at, load(at) * load(b->scale[g] + n) + load(b->bias[g] + n));
        }
        if (w->call->hidden) keep_hidden(w, span, place, b, g, h + g * GROUP);
    }
    for (int g = 0; g < 2 / m->branches; g++) {
        float *own = h + g * GROUP;
        for (int n = 0; n < GROUP; n += LANES) {
            Floats a = pointwise(w->call->inner, load(own + n));
            if (m->branches == 2) a = a * second_branch(w->call->inner, load(own + GROUP + n));
            store(own + n, a * s);
        }
        for (int64_t n = b->valid[g]; n < GROUP; n++) own[n] = 0.0f;
        for (int n = 0; n < GROUP; n += LANES)
            store_in_panel(w, w->a_panel, w->a_width, place, b->first[g] + n, load(own + n));
    }
}

/* All rows of a span times a block of w_in, activated. */
static inline void dots_in(const Work *w, const Span *span, const Block *b, Ahead *next) {
    float h[4 * 2 * GROUP];
    int64_t kind = block_kind(&w->call->in, w->call->x_kind);
    for (int64_t r = 0; r < span->count;) {
        int rows = span->count - r >= TOGETHER ? TOGETHER : 1;
        dots_of_block(w, b, kind, w->x_panel, w->x_width, span->place + r, rows, h, next);
        for (int i = 0; i < rows; i++) dots_activate(w, span, span->place + r + i, b, h + i * 2 * GROUP);
        r += rows;
    }
}

/* All rows of a span times a block of w_out, written to the outputs. */
static inline void dots_out(const Work *w, const Span *span, const Block *b, Ahead *next) {
    float y[4 * 2 * GROUP];
    int64_t kind = block_kind(&w->call->out, w->call->x_kind);
    for (int64_t r = 0; r < span->count;) {
        int rows = span->count - r >= TOGETHER ? TOGETHER : 1;
        dots_of_block(w, b, kind, w->a_panel, w->a_width, span->place + r, rows, y, next);
        for (int i = 0; i < rows; i++) {
            const float *own = y + i * 2 * GROUP;
            write_outputs(w, span, span->place + r + i, b, own, own + GROUP);
        }
        r += rows;
    }
}

/* Rows of x at `count` places from `place` on, with zeros behind each. */
static inline void dots_pack(const Work *w, int64_t place, const char *const *rows, int64_t count) {
    int64_t D = w->call->in.columns, size = size_of(w->x_kind);
    for (int64_t r = 0; r < count; r++) {
        char *to = w->x_panel + (place + r) * w->x_width * size;
        if (w->x_kind == w->call->x_kind) memcpy(to, rows[r], (size_t)(D * size));
        else for (int64_t c = 0; c < D; c++) ((float *)to)[c] = wide(((const uint16_t *)rows[r])[c]);
        memset(to + D * size, 0, (size_t)((w->x_width - D) * size));
    }
}

#endif
