/* Products by AMX's tiles: C^T = W X^T, for BF16 and for weights that are widened to it.
 *
 * The weight is the left factor, whose rows a tile reads as they are stored. The right factor is a panel of places,
 * 16 to a block, in pairs of columns: tile c of a block holds, for each pair of the columns 32 c to 32 c + 31, the
 * pair of each of the 16 places. One to 16 rows of x cost the same, so there is no other way for few rows. A sum
 * goes over columns ascending, 32 at a time.
 */
#ifndef EXPERTMESH_TILES_H
#define EXPERTMESH_TILES_H

#include "amx.h"
#include "work.h"

#if defined(__AMX_BF16__)

#define TILE_FLOATS (GROUP * GROUP)

#define PIECE 8   /* tiles of each row of a block that are copied at a time, and so stay in the L1 cache */
#define SHORT 4   /* the same where they are multiplied once */
#define PIECE_STRIDE (PIECE * 64 + 64)
#define PIECE_BYTES (2 * GROUP * PIECE_STRIDE)
#define MANY 128  /* rows of an expert from which it pays to copy weights that tiles can read where they lie */
#define ROUND 256 /* places whose sums wait for the next piece */
#define SUMS_BYTES (ROUND * 2 * GROUP * 4)

/* Bytes of a thread for sums and for the pieces of a block. */
static inline int64_t tiles_scratch(int64_t columns) {
    return SUMS_BYTES + padded(columns, PIECE * STEP) / (PIECE * STEP) * PIECE_BYTES;
}

static inline void start_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static inline void load_sums(const float *sums, int is_second) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + TILE_FLOATS, 64);
    if (!is_second) return;
    _tile_loadd(2, sums + 2 * TILE_FLOATS, 64);
    _tile_loadd(3, sums + 3 * TILE_FLOATS, 64);
}

static inline void store_sums(float *sums, int is_second) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE_FLOATS, 64);
    if (!is_second) return;
    _tile_stored(2, sums + 2 * TILE_FLOATS, 64);
    _tile_stored(3, sums + 3 * TILE_FLOATS, 64);
}

/* Adds products of two groups of rows with one block of places, or two, to sums[place block][group][row][place],
 * which are in tiles. */
static inline void multiply_tiles(const char *low, const char *high, int64_t stride, const char *x, const char *y,
                                  int64_t tiles, Ahead *next, int64_t rate) {
    for (int64_t c = 0; c < tiles; c++, low += 64, high += 64) {
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

static inline void transpose_floats(const float *from, float *to) {
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(from + i * 16);
    transpose(v);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 16, v[i]);
}

/* `count` rows of x as tiles, for the block of places from `place` on. */
static inline void tiles_pack(const Work *w, int64_t place, const char *const *rows, int64_t count) {
    int64_t D = w->call->in.columns, tiles = w->x_width / STEP;
    char *to = w->x_panel + place * w->x_width * 2;
    for (int64_t c = 0; c < tiles; c++, to += TILE_BYTES) {
        uint32_t here = D - c * STEP >= STEP ? 0xffffffff : (1u << (D - c * STEP)) - 1;
        __m512i v[16];
        for (int r = 0; r < GROUP; r++)
            v[r] = r < count ? _mm512_maskz_loadu_epi16(here, rows[r] + c * 64) : _mm512_setzero_si512();
        transpose(v);
        for (int r = 0; r < GROUP; r++) _mm512_storeu_si512(to + r * 64, v[r]);
    }
}

static inline void tiles_keep_hidden(const Work *w, const Span *span, int64_t place, const Block *b, int g,
                                     const float *h) {
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
            _mm512_storeu_si512(to + n * 32, paired(a[0], a[1]));
        }
    }
}

static inline void tiles_write(const Work *w, const Span *span, int64_t place, const Block *b, const float *sums,
                               Ahead *next, int64_t rate) {
    float rows[2 * TILE_FLOATS] __attribute__((aligned(64)));
    int64_t count = least(span->place + span->count - place, GROUP);
    for (int g = 0; g < 2; g++) transpose_floats(sums + g * TILE_FLOATS, rows + g * TILE_FLOATS);
    for (int64_t r = 0; r < count; r++) {
        prefetch(next, rate);
        write_outputs(w, span, place + r, b, rows + r * GROUP, rows + TILE_FLOATS + r * GROUP);
    }
}

/* All rows of a span times a block: of w_in, activated, or of w_out, written to the outputs.
 *
 * Rows are copied in pieces of columns, each of which all places of a round are multiplied by, so that of the two
 * factors only x comes out of the L2 cache. Few rows of an expert read dense weights where they lie, in one piece.
 */
static inline void tiles_multiply(const Work *w, const Span *span, const Block *b, char *scratch, Ahead *next,
                                  int is_in) {
    const Matrices *m = is_in ? &w->call->in : &w->call->out;
    const char *panel = is_in ? w->x_panel : w->a_panel, *low = b->group[0], *high = b->group[1];
    int64_t width = is_in ? w->x_width : w->a_width, tiles = width / STEP, stride = b->stride;
    int64_t end = span->place + padded(span->count, GROUP), num = (end - span->place) / GROUP;
    int is_copied = !low || span->count >= MANY, is_alone = num <= 2;
    int64_t piece = !is_copied ? tiles : is_alone ? SHORT : PIECE;
    int64_t copied_rate = is_copied && is_alone ? rate_of(next, (tiles + piece - 1) / piece * 2 * GROUP) : 0;
    int64_t rate = copied_rate ? 0 : rate_of(next, (num + 1) / 2 * tiles + num * GROUP);
    float *sums = (float *)scratch;
    for (int64_t first = span->place; first < end; first += ROUND) {
        int64_t last = least(first + ROUND, end);
        char *copy = scratch + SUMS_BYTES;
        for (int64_t c = 0; c < tiles; c += piece) {
            int64_t here = least(piece, tiles - c);
            if (is_copied) {
                if (first == span->place)
                    copy_columns(b, m, c * STEP, here * STEP, BF16, copy, PIECE_STRIDE, next, copied_rate);
                low = copy, high = copy + GROUP * PIECE_STRIDE, stride = PIECE_STRIDE;
                if (num * GROUP > ROUND) copy += PIECE_BYTES;
            }
            MEMORY_IS_WRITTEN;
            for (int64_t place = first; place < last; place += 2 * GROUP) {
                const char *x = panel + place * width * 2 + c * TILE_BYTES;
                int is_second = last - place > GROUP;
                float *own = sums + (place - first) * 2 * GROUP;
                if (c == 0) start_sums();
                else if (!is_alone) load_sums(own, is_second);
                multiply_tiles(low, high, stride, x, is_second ? x + GROUP * width * 2 : NULL, here, next, rate);
                if (!is_alone || c + here == tiles) store_sums(own, is_second);
            }
        }
        MEMORY_IS_WRITTEN;
        for (int64_t place = first; place < last; place += GROUP) {
            float *own = sums + (place - first) * 2 * GROUP;
            if (is_in) tiles_activate(w, span, place, b, own, next, rate);
            else tiles_write(w, span, place, b, own, next, rate);
        }
    }
}

#endif
#endif
