/* Experts of a mixture, and dense products, which are the second half of one expert: y_t = sum over its choices of s
 * W_out act(W_in x_t + b_in) + s b_out, the choices in order.
 *
 * Rows are the live choices, ordered by expert. They go through in chunks whose panels stay in the L2 cache; a chunk
 * has three phases with a barrier behind each: rows become a panel; blocks of w_in times all rows of an expert,
 * activated, become another; blocks of w_out times that are the outputs, which are added up at the end. A block
 * belongs to one thread, so an order of sums depends neither on the number of threads nor on the other rows.
 */
#include "dots.h"
#include "tiles.h"

#include "threads.h"

#include <stdlib.h>
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PANEL_BYTES (1 << 20) /* of a chunk, per thread */
#define ITEM_BYTES (1 << 17)  /* of weights that a thread takes at a time */
#define ITEMS_PER_THREAD 4    /* at least, if there are so many blocks */
#define FEW 4                 /* rows of an expert up to which a copied block waits for memory, not for products */
#define ALIGNMENT 64

typedef struct {
    int64_t first_span, num_spans, num_places;
} Chunk;

typedef struct {
    Work work;
    Span *spans;
    Chunk *chunks;
    int64_t num_rows, num_chunks, most_places;
    int64_t *taken; /* items of each phase that threads have taken */
    char *scratch;
    int64_t scratch_bytes; /* of each thread */
} Plan;

/* Orders the live slots by expert, stably: starts (E + 1), slots (R), and the row of each. Returns -1 if an id is out
 * of range. */
static int order_slots(Call *call, int64_t *starts, int32_t *slots, int32_t *row_of) {
    int64_t N = call->num_tokens * call->num_choices, E = call->num_experts;
    memset(starts, 0, (size_t)(E + 2) * sizeof *starts);
    call->least_id = call->most_id = N ? call->ids[0] : 0;
    for (int64_t i = 0; i < N; i++) {
        int64_t e = call->ids[i];
        if (e < call->least_id) call->least_id = e;
        if (e > call->most_id) call->most_id = e;
        if (e >= 0 && e < E) starts[e + 2]++;
    }
    if (call->least_id < 0 || call->most_id > E) return -1;
    for (int64_t e = 0; e < E; e++) starts[e + 2] += starts[e + 1];
    for (int64_t i = 0; i < N; i++) {
        if (call->ids[i] == E) continue;
        row_of[i] = (int32_t)starts[call->ids[i] + 1]++;
        slots[row_of[i]] = (int32_t)i;
    }
    return 0;
}

/* More for weights that are copied, once for each chunk: what the copy costs is worth more than the cache. */
static int64_t panel_bytes(const Matrices *m) { return m->kind < INT8 ? PANEL_BYTES : 2 * PANEL_BYTES; }

/* Rows of experts in chunks. An expert with more rows than a chunk holds is in several, and its weights are read for
 * each. */
static void make_chunks(Plan *p, const int64_t *starts) {
    const Call *call = p->work.call;
    int64_t unit = p->work.has_tiles ? GROUP : 1;
    int64_t bytes = (p->work.x_width + p->work.a_width) * size_of(p->work.x_kind);
    int64_t most = panel_bytes(&call->out) * call->num_threads / (bytes ? bytes : 1) / (2 * GROUP) * (2 * GROUP);
    if (most < 2 * GROUP) most = 2 * GROUP;
    Chunk *chunk = NULL;
    int64_t num_spans = 0;
    p->num_chunks = p->most_places = 0;
    for (int64_t e = 0; e < call->num_experts; e++)
        for (int64_t first = starts[e]; first < starts[e + 1];) {
            int64_t count = least(starts[e + 1] - first, most), places = padded(count, unit);
            if (!chunk || chunk->num_places + places > most) {
                chunk = &p->chunks[p->num_chunks++];
                *chunk = (Chunk){num_spans, 0, 0};
            }
            p->spans[num_spans++] = (Span){e, first, count, chunk->num_places};
            chunk->num_spans++, chunk->num_places += places;
            if (chunk->num_places > p->most_places) p->most_places = chunk->num_places;
            first += count;
        }
}

/* Blocks of an item, out of `num` blocks of so many bytes; none of a row that is repeated. */
static int64_t item_size(int64_t num, int64_t bytes, int64_t threads) {
    int64_t size = ITEM_BYTES / (bytes ? bytes : 1), most = num / (ITEMS_PER_THREAD * threads);
    size = least(size, most);
    return size < 1 ? 1 : size;
}

static void fill_panel(const Work *w, int64_t thread, int64_t threads) {
    int64_t turn = 0, of_row = w->call->in.columns * size_of(w->call->x_kind);
    for (int64_t i = 0; i < w->num_spans; i++) {
        const Span *span = &w->spans[i];
        for (int64_t place = span->place; place < span->place + span->count; place += GROUP, turn++) {
            if (turn % threads != thread) continue;
            int64_t count = least(span->place + span->count - place, GROUP);
            const int32_t *slots = w->slots + row_at(span, place);
            const char *rows[GROUP];
            for (int64_t r = 0; r < count; r++) {
                rows[r] = w->call->x + slots[r] / w->call->num_choices * of_row;
                w->weight_of[place + r] = w->call->weights[slots[r]];
            }
#if defined(__AMX_BF16__)
            if (w->has_tiles) {
                for (int64_t r = count; r < GROUP; r++) w->weight_of[place + r] = 0.0f;
                tiles_pack(w, place, rows, count);
                continue;
            }
#endif
            dots_pack(w, place, rows, count);
        }
    }
}

static inline void multiply(const Work *w, const Span *span, const Block *b, char *scratch, Ahead *next, int is_in) {
#if defined(__AMX_BF16__)
    if (w->has_tiles) {
        tiles_multiply(w, span, b, scratch, next, is_in);
        return;
    }
#endif
    if (is_in) dots_in(w, span, b, next);
    else dots_out(w, span, b, next);
}

/* Takes items of blocks, of all spans in a row, until there are none. Not inlined, as that takes the compiler twice the
 * time. */
__attribute__((noinline)) static void multiply_blocks(const Work *w, int64_t *taken, int64_t threads, char *scratch,
                                                      int is_in) {
    const Matrices *m = is_in ? &w->call->in : &w->call->out;
    int64_t blocks = num_blocks(m), num = blocks * w->num_spans;
    int64_t size = item_size(num, 2 * GROUP * m->of_row, threads);
    Block block;
    Ahead ahead = {0};
    for (int64_t item = take(taken); item * size < num;) {
        int64_t later = take(taken);
        int64_t last = least(item * size + size, num);
        for (int64_t at = item * size; at < last; at++) {
            int64_t soon = at + 1 < last ? at + 1 : later * size;
            ahead.left = 0;
            if (soon < num) look_ahead(&ahead, m, w->spans[soon / blocks].expert, soon % blocks);
            const Span *span = &w->spans[at / blocks];
            char *copy = w->has_tiles ? NULL : scratch; /* tiles copy in pieces */
            int64_t rate = span->count <= FEW ? rate_of(&ahead, 2 * GROUP) : 0;
            take_block(&block, m, span->expert, at % blocks, w->call->x_kind, copy, &ahead, rate);
            multiply(w, span, &block, scratch, &ahead, is_in);
        }
        item = later;
    }
}

/* Adds up the outputs of each token, its choices in order. */
static void add_choices(const Work *w, int64_t first, int64_t last, float *sums) {
    const Call *call = w->call;
    int64_t D = call->out.rows, K = call->num_choices, width = padded(D, 2 * GROUP);
    for (int64_t t = first; t < last; t++) {
        memset(sums, 0, (size_t)width * sizeof(float));
        for (int64_t slot = t * K; slot < t * K + K; slot++) {
            if (call->ids[slot] == call->num_experts) continue;
            for (int64_t d = 0; d < width; d += LANES) {
                int64_t at = w->row_of[slot] * w->outputs_stride + d;
                Floats y = call->x_kind == BF16 ? READ_BF16(w->outputs + 2 * at) : READ_FP32(w->outputs + 4 * at);
                store(sums + d, load(sums + d) + y);
            }
        }
        if (call->x_kind == FP32) {
            memcpy(call->y + t * D * 4, sums, (size_t)D * 4);
            continue;
        }
        uint16_t *to = (uint16_t *)call->y + t * D, narrow[LANES];
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) store_bf16(to + d, load(sums + d));
        store_bf16(narrow, load(sums + (d < width ? d : 0)));
        memcpy(to + d, narrow, (size_t)(D - d) * 2);
    }
}

static void run_plan(void *plan, int64_t thread, int64_t threads) {
    const Plan *p = plan;
    Work work = p->work, *w = &work;
    char *scratch = p->scratch + thread * p->scratch_bytes;
#if defined(__AMX_BF16__)
    if (w->has_tiles) configure_tiles();
#endif
    for (int64_t c = 0; c < p->num_chunks; c++) {
        const Chunk *chunk = &p->chunks[c];
        w->spans = p->spans + chunk->first_span, w->num_spans = chunk->num_spans;
        fill_panel(w, thread, threads);
        meet(threads);
        if (w->call->in.numbers) {
            multiply_blocks(w, &p->taken[2 * c], threads, scratch, 1);
            meet(threads);
        }
        multiply_blocks(w, &p->taken[2 * c + 1], threads, scratch, 0);
        meet(threads);
    }
#if defined(__AMX_BF16__)
    if (w->has_tiles) _tile_release();
#endif
    int64_t T = w->call->num_tokens;
    add_choices(w, T * thread / threads, T * (thread + 1) / threads, (float *)scratch);
}

/* Whether the kernel of the system lets this process use tiles; asked once. */
int expertmesh_grants_tiles(void) {
#if defined(__AMX_BF16__)
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* One allocation in parts, each aligned. */
typedef struct {
    char *at;
    int64_t used;
} Arena;

static void *part(Arena *a, int64_t bytes) {
    void *found = a->at ? a->at + a->used : NULL;
    a->used += padded(bytes, ALIGNMENT);
    return found;
}

static void lay_out(Plan *p, Arena *a) {
    Work *w = &p->work;
    int64_t size = size_of(w->x_kind);
    w->weight_of = part(a, (p->most_places + GROUP) * sizeof *w->weight_of);
    w->x_panel = part(a, p->most_places * w->x_width * size);
    w->a_panel = w->call->in.numbers ? part(a, p->most_places * w->a_width * size) : w->x_panel;
    w->outputs = part(a, p->num_rows * w->outputs_stride * size_of(w->call->x_kind));
    p->taken = part(a, (2 * p->num_chunks + 2) * sizeof *p->taken);
    p->scratch = part(a, p->scratch_bytes * w->call->num_threads);
}

/* Computes a call: 0; -1: an id is out of range; -2: no memory. Tiles must have been granted where they are compiled
 * in. */
int expertmesh_experts(Call *call) {
    Plan plan = {.work = {.call = call}}, *p = &plan;
    Work *w = &p->work;
    int64_t N = call->num_tokens * call->num_choices, E = call->num_experts;
    int64_t most_spans = least(N, E) + N / (2 * GROUP) + 1;
    Arena lists = {0};
    for (int pass = 0; pass < 2; pass++) {
        if (pass) lists.at = aligned_alloc(ALIGNMENT, (size_t)lists.used);
        if (pass && !lists.at) return -2;
        lists.used = 0;
        w->slots = part(&lists, N * sizeof(int32_t));
        w->row_of = part(&lists, N * sizeof(int32_t));
        p->spans = part(&lists, most_spans * sizeof(Span));
        p->chunks = part(&lists, most_spans * sizeof(Chunk));
        part(&lists, (E + 2) * sizeof(int64_t));
    }
    int64_t *starts = (int64_t *)(lists.at + lists.used - padded((E + 2) * (int64_t)sizeof(int64_t), ALIGNMENT));
    int problem = order_slots(call, starts, (int32_t *)w->slots, (int32_t *)w->row_of);
    if (problem) {
        free(lists.at);
        return problem;
    }
    w->x_kind = call->x_kind;
#if defined(__AMX_BF16__)
    w->has_tiles = call->x_kind == BF16;
#endif
#if !defined(__AVX512BF16__)
    w->x_kind = FP32;
#endif
    w->x_width = padded(call->in.columns, STEP), w->a_width = padded(call->out.columns, STEP);
    int64_t width = padded(call->out.rows, 2 * GROUP);
    w->outputs_stride = width + 2 * GROUP, p->num_rows = starts[E];
    int64_t stride = larger(copied_stride(&call->in), copied_stride(&call->out));
    p->scratch_bytes = padded(larger(2 * GROUP * stride, width * 4), ALIGNMENT);
#if defined(__AMX_BF16__)
    p->scratch_bytes = larger(p->scratch_bytes, tiles_scratch(larger(w->x_width, w->a_width)));
#endif
    make_chunks(p, starts);
    Arena arena = {0};
    lay_out(p, &arena);
    arena.at = aligned_alloc(ALIGNMENT, (size_t)larger(arena.used, ALIGNMENT));
    if (!arena.at) {
        free(lists.at);
        return -2;
    }
    arena.used = 0;
    lay_out(p, &arena);
    memset(p->taken, 0, (size_t)(2 * p->num_chunks + 2) * sizeof *p->taken);
    together(run_plan, p, call->num_threads);
    free(arena.at);
    free(lists.at);
    return 0;
}
