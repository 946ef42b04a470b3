/* Attention of the last queries of sequences to all their keys, which lie in pages: y = softmax(rule(q k / sqrt d)) v.
 *
 * Keys are taken in blocks of 64, counted from a sequence's first one. A row (a query of a head) has a running
 * maximum and running sums: of a block it adds first the exponentials, then the weighted values, keys ascending or
 * by tiles; a hidden key adds exact zeros. So the bits of a row depend on its own query and keys alone: neither on
 * other rows, nor on the pages, nor on the number of threads.
 */
#include "threads.h"
#include "amx.h"

#include <stdlib.h>

#define KEYS 64              /* of a block */
#define ROWS 32              /* most rows of a unit, which share their keys */
#define FEW 4                /* rows up to which values are widened where they are used, not once per block */
#define COLUMNS 32           /* a query is padded with zeros to a multiple */
#define ACROSS 4             /* vectors of values at once */
#define MOST_TOGETHER (LANES == 16 ? 4 : 2) /* rows at once */
#define THREAD_BYTES (1 << 17) /* of keys and values that are worth another thread */
#define LINE 64
#define INLINE static inline __attribute__((always_inline))

/* Arguments, as `attention_call.py` writes them. Distances are in bytes; numbers of a head are adjacent. */
typedef struct {
    const char *q, *k, *v;
    char *y;                 /* (T, H, value_dim), adjacent */
    const int64_t *starts;   /* (B + 1,) first query of each sequence, and T */
    const int64_t *num_keys; /* (B,) keys of each sequence, those of its queries included; 0: rows of zeros */
    const int64_t *table;    /* (B, table_width) pages */
    const int64_t *first;    /* (B,) place of a sequence's first key in its pages; or NULL: 0 */
    const char *mask;        /* bool by sequence, query, place: whether a key may be seen; or NULL */
    const float *sinks;      /* (H,) or NULL */
    int64_t q_of_token, q_of_head, k_of_page, k_of_slot, k_of_head, v_of_page, v_of_slot, v_of_head;
    int64_t mask_of_sequence, mask_of_query, table_width, page_size;
    int64_t num_sequences, num_heads, num_key_heads, key_dim, value_dim, kind;
    int64_t window, chunk; /* 0: none */
    int64_t num_threads;
    double scale, softcap; /* softcap 0: none */
} Call;

typedef struct {
    const Call *call;
    int64_t *units; /* (B + 1,) units of all sequences before */
    int64_t taken;
    char *scratch;
    int64_t scratch_bytes; /* of each thread */
    int64_t q_width, y_width;
    int has_pairs, has_tiles; /* whether BF16 is multiplied as it is, and by tiles */
} Plan;

/* Rows of a key head in one sequence, and what a thread has of its own. */
typedef struct {
    int64_t sequence, head, first_row, num_rows; /* rows are queries times heads, heads first */
    int64_t low, high;                           /* keys that any row sees */
    int64_t first_seen[ROWS], last_seen[ROWS];   /* [first, last) keys of each row, by position */
    float largest[ROWS], total[ROWS];
    const char *keys[2][KEYS], *values[2][KEYS]; /* rows of this block and of the next */
    char *q, *k_copy, *v_copy;
    float *scores, *y;
} Unit;

/* Products of `rows` queries and LANES / rows keys, each with one accumulator, whose lanes are added up by one tree. */
#define SCORES(NAME, X_SIZE, W_SIZE, AT_ONCE, VECTOR, READ_X, READ_W, ADD)                                             \
    INLINE void NAME(const char *const *keys, const char *q, int64_t stride, int64_t columns, const int rows,          \
                     float *to) {                                                                                      \
        const int across = LANES / rows;                                                                               \
        Floats sum[LANES];                                                                                             \
        for (int i = 0; i < LANES; i++) sum[i] = all(0.0f);                                                            \
        for (int64_t c = 0; c < columns; c += AT_ONCE) {                                                               \
            VECTOR own[MOST_TOGETHER], of_key;                                                                         \
            for (int r = 0; r < rows; r++) own[r] = READ_X(q + r * stride + c * X_SIZE);                               \
            for (int n = 0; n < across; n++) {                                                                         \
                of_key = READ_W(keys[n] + c * W_SIZE);                                                                 \
                for (int r = 0; r < rows; r++) sum[r * across + n] = ADD(of_key, own[r], sum[r * across + n]);         \
            }                                                                                                          \
        }                                                                                                              \
        float sums[LANES];                                                                                             \
        store(sums, sums_of(sum));                                                                                     \
        for (int r = 0; r < rows; r++) memcpy(to + r * KEYS, sums + r * across, sizeof(float) * across);               \
    }

SCORES(scores_fp32, 4, 4, LANES, Floats, READ_FP32, READ_FP32, multiply_add)
SCORES(scores_mixed, 4, 2, LANES, Floats, READ_FP32, READ_BF16, multiply_add)
#if defined(__AVX512BF16__)
SCORES(scores_pairs, 2, 2, 32, Pairs, load_pairs, load_pairs, ADD_PAIRS)
#endif

INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

/* Scores of `rows` rows with the block's keys; the rows of the next block are prefetched meanwhile, if there is one. */
INLINE void scores_of(const Plan *p, Unit *u, int64_t row, const int rows, int now, int64_t ahead) {
    const Call *call = p->call;
    int64_t size = p->has_pairs ? 2 : 4, stride = p->q_width * size;
    int64_t columns = p->has_pairs ? p->q_width : padded(call->key_dim, LANES);
    int64_t bytes = size_of(call->kind);
    const char *q = u->q + row * stride;
    for (int n = 0; n < KEYS; n += LANES / rows) {
        const char *const *keys = u->keys[now] + n;
        float *to = u->scores + row * KEYS + n;
        for (int i = n; i < n + LANES / rows && i < ahead; i++) {
            prefetch(u->keys[!now][i], call->key_dim * bytes);
            prefetch(u->values[!now][i], call->value_dim * bytes);
        }
        if (call->kind == FP32) scores_fp32(keys, q, stride, columns, rows, to);
#if defined(__AVX512BF16__)
        else if (p->has_pairs) scores_pairs(keys, q, stride, columns, rows, to);
#endif
        else scores_mixed(keys, q, stride, columns, rows, to);
    }
}

/* Scores of a row and a block under the rule, -inf for hidden keys. Returns the row's new maximum, 0 if it has seen
 * no key. */
static float score_row(const Call *call, Unit *u, int64_t row, int64_t block, float *s) {
    int32_t first = (int32_t)(u->first_seen[row] > block ? least(u->first_seen[row] - block, KEYS) : 0);
    int32_t last = (int32_t)(u->last_seen[row] > block ? least(u->last_seen[row] - block, KEYS) : 0);
    char allowed[KEYS] = {0};
    if (call->mask) {
        int64_t query = (u->first_row + row) / (call->num_heads / call->num_key_heads);
        const char *mask = call->mask + u->sequence * call->mask_of_sequence + query * call->mask_of_query + block;
        memcpy(allowed, mask + (call->first ? call->first[u->sequence] : 0), (size_t)last);
    }
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Floats most = all(-__builtin_inff());
    for (int n = 0; n < KEYS; n += LANES) {
        Floats x = load(s + n) * all((float)call->scale);
        if (call->softcap > 0) x = all((float)call->softcap) * hyperbolic_tangent(x / all((float)call->softcap));
        Ints seen = (lane + n >= first) & (lane + n < last);
        if (call->mask) {
            Bytes own;
            memcpy(&own, allowed + n, sizeof own);
            seen &= __builtin_convertvector(own, Ints) != 0;
        }
        x = choose(seen, x, all(-__builtin_inff()));
        most = larger_of(x, most);
        store(s + n, x);
    }
    float now = largest_of(most);
    if (now > u->largest[row]) u->largest[row] = now;
    return u->largest[row] == -__builtin_inff() ? 0.0f : u->largest[row];
}

/* Scores of a row and a block become weights; its sums so far are put on the scale of the new maximum. */
static void weigh(const Plan *p, Unit *u, int64_t row, int64_t block) {
    float *s = u->scores + row * KEYS, before = u->largest[row], now = score_row(p->call, u, row, block, s);
    if (u->largest[row] > before) {
        float factor = exponential(all(before - now))[0];
        u->total[row] *= factor;
        float *y = u->y + row * p->y_width;
        for (int64_t c = 0; c < p->y_width; c += LANES) store(y + c, load(y + c) * all(factor));
    }
    Floats sum = all(0.0f), hidden = all(-__builtin_inff());
    for (int n = 0; n < KEYS; n += LANES) {
        Floats x = load(s + n), weight = choose(x != hidden, exponential(x - all(now)), all(0.0f));
        sum = sum + weight;
        store(s + n, weight);
    }
    u->total[row] += sum_of(sum);
}

/* Adds the weighted values of keys first ... last - 1 of a block in `vectors` vectors of columns, for `rows` rows. */
INLINE void add_columns(const char *const *values, int64_t kind, int64_t column, const float *weights, int first,
                        int last, float *y, int64_t width, const int rows, const int vectors) {
    Floats sum[MOST_TOGETHER * ACROSS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) sum[r * ACROSS + i] = load(y + r * width + column + i * LANES);
    for (int n = first; n < last; n++) {
        Floats v[ACROSS];
        for (int i = 0; i < vectors; i++) {
            int64_t at = column + i * LANES;
            v[i] = kind == BF16 ? load_bf16((const uint16_t *)values[n] + at) : load((const float *)values[n] + at);
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++)
                sum[r * ACROSS + i] = multiply_add(all(weights[r * KEYS + n]), v[i], sum[r * ACROSS + i]);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) store(y + r * width + column + i * LANES, sum[r * ACROSS + i]);
}

INLINE void add_values_of(const Plan *p, Unit *u, int64_t row, const int rows, int now, int64_t block, const int kind) {
    int64_t first = KEYS, last = 0, c = 0, width = p->y_width;
    for (int r = 0; r < rows; r++) {
        first = least(first, u->first_seen[row + r] - block);
        last = u->last_seen[row + r] - block > last ? u->last_seen[row + r] - block : last;
    }
    first = first < 0 ? 0 : first, last = least(last, KEYS);
    const float *weights = u->scores + row * KEYS;
    float *y = u->y + row * width;
    for (; c + ACROSS * LANES <= width; c += ACROSS * LANES)
        add_columns(u->values[now], kind, c, weights, (int)first, (int)last, y, width, rows, ACROSS);
    for (; c < width; c += LANES)
        add_columns(u->values[now], kind, c, weights, (int)first, (int)last, y, width, rows, 1);
}

INLINE void add_values(const Plan *p, Unit *u, int64_t row, const int rows, int now, int64_t block, int64_t kind) {
    if (kind == BF16) add_values_of(p, u, row, rows, now, block, BF16);
    else add_values_of(p, u, row, rows, now, block, FP32);
}

/* Rows of the keys and values of a block; behind the last key they are the last key's, whose weight is 0. Returns
 * their number. */
static int64_t find_rows(const Call *call, Unit *u, int64_t block, int which) {
    int64_t count = least(u->high - block, KEYS);
    if (count <= 0) return 0;
    int64_t place = block + (call->first ? call->first[u->sequence] : 0);
    const int64_t *pages = call->table + u->sequence * call->table_width;
    int64_t page = place / call->page_size, slot = place % call->page_size;
    for (int n = 0; n < KEYS; n++) {
        if (n < count) {
            const char *k = call->k + u->head * call->k_of_head, *v = call->v + u->head * call->v_of_head;
            u->keys[which][n] = k + pages[page] * call->k_of_page + slot * call->k_of_slot;
            u->values[which][n] = v + pages[page] * call->v_of_page + slot * call->v_of_slot;
            if (++slot == call->page_size) page++, slot = 0;
        } else {
            u->keys[which][n] = u->keys[which][count - 1];
            u->values[which][n] = u->values[which][count - 1];
        }
    }
    return count;
}

/* Copies a block's keys with zeros behind, where their size is no multiple of a vector's. */
static void pad_keys(const Plan *p, Unit *u, int now, int64_t count) {
    int64_t bytes = p->call->key_dim * size_of(p->call->kind), stride = p->q_width * size_of(p->call->kind);
    for (int n = 0; n < KEYS; n++) {
        char *to = u->k_copy + least(n, count - 1) * stride;
        if (n < count) {
            memcpy(to, u->keys[now][n], (size_t)bytes);
            memset(to + bytes, 0, (size_t)(stride - bytes));
        }
        u->keys[now][n] = to;
    }
}

/* Copies a block's values as FP32, with zeros behind. */
static void widen_values(const Plan *p, Unit *u, int now, int64_t count) {
    const Call *call = p->call;
    for (int n = 0; n < KEYS; n++) {
        float *to = (float *)u->v_copy + least(n, count - 1) * p->y_width;
        if (n < count) {
            const char *from = u->values[now][n];
            int64_t c = 0;
            for (; c + LANES <= call->value_dim; c += LANES)
                store(to + c, call->kind == BF16 ? READ_BF16(from + 2 * c) : READ_FP32(from + 4 * c));
            for (; c < call->value_dim; c++)
                to[c] = call->kind == BF16 ? wide(((const uint16_t *)from)[c]) : ((const float *)from)[c];
            for (; c < p->y_width; c++) to[c] = 0.0f;
        }
        u->values[now][n] = (const char *)to;
    }
}

static void begin_unit(const Plan *p, Unit *u) {
    const Call *call = p->call;
    int64_t group = call->num_heads / call->num_key_heads, start = call->starts[u->sequence];
    int64_t count = call->starts[u->sequence + 1] - start, keys = call->num_keys[u->sequence];
    u->low = keys, u->high = 0;
    for (int64_t r = 0; r < u->num_rows; r++) {
        int64_t query = (u->first_row + r) / group, head = u->head * group + (u->first_row + r) % group;
        int64_t position = keys - count + query, first = 0;
        if (call->window && position - call->window + 1 > first) first = position - call->window + 1;
        if (call->chunk && position / call->chunk * call->chunk > first) first = position / call->chunk * call->chunk;
        u->first_seen[r] = first, u->last_seen[r] = position < 0 ? 0 : position + 1;
        u->low = least(u->low, first);
        u->high = u->last_seen[r] > u->high ? u->last_seen[r] : u->high;
        u->largest[r] = call->sinks ? call->sinks[head] : -__builtin_inff();
        u->total[r] = call->sinks ? 1.0f : 0.0f;
        if (!keys) continue;
        const char *from = call->q + (start + query) * call->q_of_token + head * call->q_of_head;
        char *to = u->q + r * p->q_width * (p->has_pairs ? 2 : 4);
        memset(to, 0, (size_t)(p->q_width * (p->has_pairs ? 2 : 4)));
        if (p->has_pairs || call->kind == FP32) memcpy(to, from, (size_t)(call->key_dim * size_of(call->kind)));
        else for (int64_t c = 0; c < call->key_dim; c++) ((float *)to)[c] = wide(((const uint16_t *)from)[c]);
    }
    memset(u->y, 0, (size_t)(u->num_rows * p->y_width) * sizeof(float));
}

static void end_unit(const Plan *p, const Unit *u) {
    const Call *call = p->call;
    int64_t group = call->num_heads / call->num_key_heads, start = call->starts[u->sequence];
    for (int64_t r = 0; r < u->num_rows; r++) {
        int64_t query = (u->first_row + r) / group, head = u->head * group + (u->first_row + r) % group;
        char *to = call->y + ((start + query) * call->num_heads + head) * call->value_dim * size_of(call->kind);
        float *y = u->y + r * p->y_width;
        Floats total = all(u->total[r] == 0.0f ? 1.0f : u->total[r]);
        for (int64_t c = 0; c < call->value_dim; c += LANES) {
            Floats own = load(y + c) / total;
            uint16_t narrow[LANES];
            store(y + c, own), store_bf16(narrow, own);
            size_t numbers = (size_t)least(call->value_dim - c, LANES);
            if (call->kind == BF16) memcpy(to + c * 2, narrow, numbers * 2);
            else memcpy(to + c * 4, y + c, numbers * 4);
        }
    }
}

static void run_unit(const Plan *p, Unit *u) {
    const Call *call = p->call;
    begin_unit(p, u);
    int pads = p->has_pairs ? call->key_dim % COLUMNS != 0 : call->key_dim % LANES != 0;
    int widens = call->value_dim % LANES != 0 || (call->kind == BF16 && u->num_rows > FEW), now = 0;
    int64_t block = u->low / KEYS * KEYS, count = find_rows(call, u, block, 0);
    for (; block < u->high; block += KEYS, now = !now) {
        int64_t ahead = find_rows(call, u, block + KEYS, !now), row = 0;
        if (pads) pad_keys(p, u, now, count);
        if (widens) widen_values(p, u, now, count);
        count = ahead;
        for (; row + MOST_TOGETHER <= u->num_rows; row += MOST_TOGETHER, ahead = 0)
            scores_of(p, u, row, MOST_TOGETHER, now, ahead);
        for (; row + 2 <= u->num_rows; row += 2, ahead = 0) scores_of(p, u, row, 2, now, ahead);
        for (; row < u->num_rows; row++, ahead = 0) scores_of(p, u, row, 1, now, ahead);
        for (row = 0; row < u->num_rows; row++) weigh(p, u, row, block);
        int64_t kind = widens ? FP32 : call->kind;
        for (row = 0; row + MOST_TOGETHER <= u->num_rows; row += MOST_TOGETHER)
            add_values(p, u, row, MOST_TOGETHER, now, block, kind);
        for (; row + 2 <= u->num_rows; row += 2) add_values(p, u, row, 2, now, block, kind);
        for (; row < u->num_rows; row++) add_values(p, u, row, 1, now, block, kind);
    }
    end_unit(p, u);
}

#include "attention_tiles.h"

static int64_t units_per_head(const Call *call, int64_t sequence) {
    int64_t rows = (call->starts[sequence + 1] - call->starts[sequence]) * (call->num_heads / call->num_key_heads);
    return (rows + ROWS - 1) / ROWS;
}

static void run_units(void *plan, int64_t thread, int64_t threads) {
    (void)threads;
    Plan *p = plan;
    const Call *call = p->call;
    char *at = p->scratch + thread * p->scratch_bytes;
    Unit unit, *u = &unit;
    u->scores = (float *)at, at += ROWS * KEYS * sizeof(float);
    u->y = (float *)at, at += ROWS * p->y_width * sizeof(float);
    u->v_copy = at, at += KEYS * p->y_width * sizeof(float);
    u->q = at, at += ROWS * p->q_width * sizeof(float);
    u->k_copy = at;
    int64_t sequence = 0, num = p->units[call->num_sequences];
#if defined(__AMX_BF16__)
    if (p->has_tiles) configure_tiles();
#endif
    for (int64_t i = take(&p->taken); i < num; i = take(&p->taken)) {
        while (p->units[sequence + 1] <= i) sequence++;
        int64_t each = units_per_head(call, sequence), own = i - p->units[sequence];
        int64_t rows = (call->starts[sequence + 1] - call->starts[sequence]) * (call->num_heads / call->num_key_heads);
        u->sequence = sequence, u->head = own / each, u->first_row = own % each * ROWS;
        u->num_rows = least(rows - u->first_row, ROWS);
#if defined(__AMX_BF16__)
        if (p->has_tiles) {
            run_unit_by_tiles(p, u);
            continue;
        }
#endif
        run_unit(p, u);
    }
#if defined(__AMX_BF16__)
    if (p->has_tiles) _tile_release();
#endif
}

/* Computes a call: 0; -2: no memory. */
int expertmesh_attention(const Call *call) {
    int64_t B = call->num_sequences, threads, bytes = 0;
    Plan plan = {.call = call}, *p = &plan;
    p->units = malloc((size_t)(B + 1) * sizeof *p->units);
    if (!p->units) return -2;
    p->units[0] = 0;
    for (int64_t b = 0; b < B; b++) {
        int64_t units = call->num_key_heads * units_per_head(call, b);
        p->units[b + 1] = p->units[b] + units;
        bytes += units * call->num_keys[b] * (call->key_dim + call->value_dim) * size_of(call->kind);
    }
    threads = least(least(call->num_threads, p->units[B]), 1 + bytes / THREAD_BYTES);
#if defined(__AVX512BF16__)
    p->has_pairs = call->kind == BF16;
#endif
#if defined(__AMX_BF16__)
    p->has_tiles = p->has_pairs;
#endif
    p->q_width = padded(call->key_dim, COLUMNS), p->y_width = padded(call->value_dim, p->has_tiles ? COLUMNS : LANES);
    p->scratch_bytes = (int64_t)sizeof(float) * ((ROWS + KEYS) * (p->q_width + p->y_width) + ROWS * KEYS);
    p->scratch_bytes = padded(p->scratch_bytes, LINE);
    p->scratch = aligned_alloc(LINE, (size_t)(p->scratch_bytes * (threads > 0 ? threads : 1)));
    int found = p->scratch ? 0 : -2;
    if (!found) together(run_units, p, threads);
    free(p->scratch), free(p->units);
    return found;
}
