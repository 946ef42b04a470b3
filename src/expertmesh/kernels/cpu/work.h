/* A call of the experts, the chunk of rows that is being computed, and what a thread has of its own. */
#ifndef EXPERTMESH_WORK_H
#define EXPERTMESH_WORK_H

#include "activations.h"
#include "weights.h"

/* Arguments, as `library.py` writes them: 8 bytes each. */
typedef struct {
    Matrices in, out;       /* a dense product has no numbers of `in`, whose columns are those of x */
    const char *x;          /* (T, D) */
    char *y;                /* (T, D), of x's type */
    char *hidden;           /* (R, G * F) pre-activations in row order, of x's type; or NULL */
    const float *weights;   /* (T, K) */
    const int64_t *ids;     /* (T, K) in [0, E]; E is no expert */
    int64_t num_tokens, num_choices, num_experts, x_kind, inner, num_threads;
    int64_t least_id, most_id; /* result: the smallest and the largest id */
} Call;

/* Consecutive rows of one expert. */
typedef struct {
    int64_t expert, first, count; /* first row in the order by expert */
    int64_t place;                /* of the first row in the panels of its chunk, a multiple of 16 */
} Span;

typedef struct {
    const Call *call;
    int has_tiles;
    int64_t x_kind;           /* type of the panels */
    const int32_t *slots;     /* (R,) slot of each row, ordered by expert, then by slot */
    const Span *spans;        /* of this chunk */
    int64_t num_spans;
    char *x_panel, *a_panel;  /* rows of x, and of s * act(h), in the order of places */
    int64_t x_width, a_width; /* columns of the panels */
    float *weight_of;         /* routing weight of each place, 0 for none */
    const int32_t *row_of;    /* (T * K,) row of each live slot */
    char *outputs;            /* (R, stride) weighted outputs, rounded to x's type as between ranks */
    int64_t outputs_stride;   /* in numbers; off a power of two, at which rows would share cache sets */
} Work;

/* Row of a place. */
static inline int64_t row_at(const Span *span, int64_t place) { return span->first + place - span->place; }

/* Writes 32 outputs of a row. */
static inline void write_outputs(const Work *w, const Span *span, int64_t place, const Block *b, const float *low,
                                 const float *high) {
    int64_t at = row_at(span, place) * w->outputs_stride + b->first[0];
    Floats s = all(w->weight_of[place]);
    for (int g = 0; g < 2; g++)
        for (int n = 0; n < GROUP; n += LANES) {
            Floats y = load((g ? high : low) + n) * load(b->scale[g] + n);
            if (w->call->out.bias) y = multiply_add(s, load(b->bias[g] + n), y);
            if (w->call->x_kind == BF16) store_bf16((uint16_t *)w->outputs + at + g * GROUP + n, y);
            else store((float *)w->outputs + at + g * GROUP + n, y);
        }
}

/* Writes 16 pre-activations of a row, in the type of x. */
static inline void keep_hidden(const Work *w, const Span *span, int64_t place, const Block *b, int g, const float *h) {
    const Matrices *m = &w->call->in;
    int64_t F = m->rows, at = row_at(span, place) * m->branches * F + (m->branches == 2 ? g * F : 0) + b->first[g];
    for (int64_t n = 0; n < b->valid[g]; n++) {
        if (w->call->x_kind == BF16) ((uint16_t *)w->call->hidden)[at + n] = bf16(h[n]);
        else ((float *)w->call->hidden)[at + n] = h[n];
    }
}

#endif
