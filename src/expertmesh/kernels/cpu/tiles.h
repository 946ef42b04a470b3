/* Products by AMX's tiles: C^T = W X^T, for BF16 and for weights that are widened to it.
 *
 * The weight is the left factor, whose rows a tile reads as they are stored. The right factor is a panel of places, 16 to a block, in
 * pairs of columns: tile c of a block holds, for each pair of the columns 32 c to 32 c + 31, the pair of each of the 16 places. One
 * to 16 rows of x cost the same, so there is no other way for few rows. A sum goes over columns ascending, 32 at a time.
 */
#ifndef EXPERTMESH_TILES_H
#define EXPERTMESH_TILES_H

#include "amx.h"
#include "work.h"

#if defined(__AMX_BF16__)

#define TILE_FLOATS (GROUP * GROUP)

#define PIECE 4 /* tiles of each row of a block that are copied at a time, and so stay in the L1 cache */
#define PIECE_STRIDE (PIECE * 64 + 64)

/* Sums of a block with one block of places, or two, whose second one's sums lie behind the first one's: out[place block][group][row][place]. */
static inline void multiply_tiles(const Block *b, const Matrices *m, const char *x, const char *y, int64_t tiles, float *out,
                                  Ahead *next, int64_t rate) {
    char copy[2 * GROUP * PIECE_STRIDE] __attribute__((aligned(64)));
    int64_t copied_rate = b->group[0] ? 0 : rate_of(next, (tiles + PIECE - 1) / PIECE * 2 * GROUP);
    if (copied_rate) rate = 0;
    MEMORY_IS_WRITTEN;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < tiles;) {
        const char *low = b->group[0], *high = b->group[1];
        int64_t stride = b->stride, end = tiles;
        if (low) low += c * 64, high += c * 64;
        else {
            end = least(c + PIECE, tiles);
            low = copy, high = copy + GROUP * PIECE_STRIDE, stride = PIECE_STRIDE;
            copy_columns(b, m, c * STEP, (end - c) * STEP, BF16, copy, stride, next, copied_rate);
            MEMORY_IS_WRITTEN;
        }
        for (; c < end; c++, low += 64, high += 64) {
            _tile_loadd(4, low, stride);
            _tile_loadd(6, x + c * TILE_BYTES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, high, stride);
            _tile_dpbf16ps(1, 5, 6);
            if (y) {
                _tile_loadd(7, y + c * TILE_BYTES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            prefetch(next, rate);
        }
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + TILE_FLOATS, 64);
    if (!y) return;
    _tile_stored(2, out + 2 * TILE_FLOATS, 64);
    _tile_stored(3, out + 3 * TILE_FLOATS, 64);
}

static inline void transpose_floats(const float *from, float *to) {
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(from + i * 16);
    transpose(v);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 16, v[i]);
}

/* Rows of x as tiles, for the blocks of places from `first` to `last`. */
static inline void tiles_pack(const Work *w, int64_t first, int64_t last) {
    int64_t D = w->call->in.columns, tiles = w->x_width / STEP;
    for (int64_t place = first; place < last; place += GROUP) {
        char *to = w->x_panel + place * w->x_width * 2;
        for (int64_t c = 0; c < tiles; c++) {
            uint32_t here = D - c * STEP >= STEP ? 0xffffffff : (1u << (D - c * STEP)) - 1;
            __m512i v[16];
            for (int r = 0; r < GROUP; r++) {
                int32_t slot = w->slot_of[place + r];
                const uint16_t *row = (const uint16_t *)w->call->x + (slot < 0 ? 0 : slot / w->call->num_choices) * D;
                v[r] = _mm512_maskz_loadu_epi16(slot < 0 ? 0 : here, row + c * STEP);
            }
            transpose(v);
            for (int r = 0; r < GROUP; r++) _mm512_storeu_si512(to + c * TILE_BYTES + r * 64, v[r]);
        }
    }
}

static inline void tiles_keep_hidden(const Work *w, const Span *span, int64_t place, const Block *b, int g, const float *h) {
    float rows[TILE_FLOATS];
    transpose_floats(h, rows);
    for (int r = 0; r < GROUP && place + r < span->place + span->count; r++)
        keep_hidden(w, span, place + r, b, g, rows + r * GROUP);
}

/* Activates the sums of a block of places; two columns become the pairs of the second product's tiles. */
static inline void tiles_activate(const Work *w, const Span *span, int64_t place, const Block *b, float *h,
                                  Ahead *next, int64_t rate) {
    const Matrices *m = &w->call->in;
    int inner = (int)w->call->inner;
    int is_plain = m->kind != INT8 && !m->bias;
    for (int g = 0; g < 2; g++) {
        float *own = h + g * TILE_FLOATS;
        if (!is_plain)
            for (int n = 0; n < GROUP; n++)
                store(own + n * 16, load(own + n * 16) * all(b->scale[g][n]) + all(b->bias[g][n]));
        if (w->call->hidden) tiles_keep_hidden(w, span, place, b, g, own);
    }
    Floats s = load(w->weight_of + place);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                           4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int g = 0; g < 2 / m->branches; g++) {
        float *own = h + g * TILE_FLOATS;
        int64_t column = b->first[g];
        char *to = w->a_panel + place * w->a_width * 2 + column / STEP * TILE_BYTES + column % STEP * 32;
        for (int n = 0; n < GROUP; n += 2) {
            prefetch(next, rate * m->branches);
            Floats a[2];
            for (int i = 0; i < 2; i++) {
                a[i] = pointwise(inner, load(own + (n + i) * 16));
                if (m->branches == 2) a[i] = a[i] * second_branch(inner, load(own + TILE_FLOATS + (n + i) * 16));
                a[i] = n + i < b->valid[g] ? a[i] * s : all(0.0f);
            }
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)a[1], (__m512)a[0]);
            _mm512_storeu_si512(to + n * 32, _mm512_permutexvar_epi16(pairs, (__m512i)both));
        }
    }
}

static inline void tiles_write(const Work *w, int64_t place, const Block *b, const float *sums, Ahead *next, int64_t rate) {
    float rows[TILE_FLOATS];
    for (int g = 0; g < 2; g++) {
        if (!b->valid[g]) continue;
        transpose_floats(sums + g * TILE_FLOATS, rows);
        for (int r = 0; r < GROUP; r++) {
            if (r % 2) prefetch(next, rate);
            write_outputs(w, place + r, b, g, rows + r * GROUP);
        }
    }
}

/* All rows of a span times a block: of w_in, activated, or of w_out, written to the outputs. */
static inline void tiles_multiply(const Work *w, const Span *span, const Block *b, Ahead *next, int is_in) {
    float sums[4 * TILE_FLOATS] __attribute__((aligned(64)));
    const char *panel = is_in ? w->x_panel : w->a_panel;
    int64_t width = is_in ? w->x_width : w->a_width, end = span->place + padded(span->count, GROUP);
    int64_t num = (end - span->place) / GROUP, rate = rate_of(next, (num + 1) / 2 * (width / STEP) + num * GROUP);
    for (int64_t place = span->place; place < end;) {
        const char *x = panel + place * width * 2;
        int blocks = end - place > GROUP ? 2 : 1;
        const Matrices *m = is_in ? &w->call->in : &w->call->out;
        multiply_tiles(b, m, x, blocks == 2 ? x + GROUP * width * 2 : NULL, width / STEP, sums, next, rate);
        for (int i = 0; i < blocks; i++, place += GROUP) {
            float *own = sums + i * 2 * TILE_FLOATS;
            if (is_in) tiles_activate(w, span, place, b, own, next, rate);
            else tiles_write(w, place, b, own, next, rate);
        }
    }
}

#endif
#endif
