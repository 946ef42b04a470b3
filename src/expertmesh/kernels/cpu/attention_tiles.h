/* A unit of the attention by AMX's tiles, for BF16: scores as S^T = K Q^T, so that keys are read as they lie and the
 * 16 lanes of a vector are 16 rows; weights, rounded to BF16, are turned into the left factor of Y += P V. One to 16
 * rows cost the same, so there is no other way for few rows, and a row has the same bits beside any others.
 */
#if defined(__AMX_BF16__)

#define HALF 16 /* rows of a tile */

/* Rows of queries become tiles: of 32 columns, each pair of columns of the 16 rows. */
static void pack_queries(const Plan *p, Unit *u, char *to) {
    for (int64_t half = 0; half * HALF < u->num_rows; half++)
        for (int64_t c = 0; c < p->q_width; c += COLUMNS, to += TILE_BYTES) {
            __m512i v[HALF];
            for (int r = 0; r < HALF; r++)
                v[r] = half * HALF + r < u->num_rows
                           ? _mm512_loadu_si512(u->q + ((half * HALF + r) * p->q_width + c) * 2)
                           : _mm512_setzero_si512();
            transpose(v);
            for (int r = 0; r < HALF; r++) _mm512_storeu_si512(to + r * 64, v[r]);
        }
}

/* Values of a block in tiles of 32 keys by 16 columns, two keys to a pair; those that no row sees are zeros. */
static void pack_values(const Plan *p, Unit *u, int now, int64_t block) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    int64_t size = p->call->value_dim;
    for (int n = 0; n < KEYS; n += 2)
        for (int64_t c = 0; c < p->y_width; c += COLUMNS) {
            uint32_t here = size - c >= COLUMNS ? 0xffffffff : (1u << (size - c)) - 1;
            __m512i v[2];
            for (int i = 0; i < 2; i++) {
                int seen = block + n + i >= u->low && block + n + i < u->high;
                v[i] = _mm512_maskz_loadu_epi16(seen ? here : 0, u->values[now][n + i] + c * 2);
            }
            char *to = u->v_copy + (c / HALF * 2 + n / COLUMNS) * TILE_BYTES + n % COLUMNS / 2 * 64;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(v[0], low, v[1]));
            _mm512_storeu_si512(to + 2 * TILE_BYTES, _mm512_permutex2var_epi16(v[0], high, v[1]));
        }
}

static int are_apart(const char *const *rows, int64_t distance) {
    for (int n = 1; n < HALF; n++)
        if (rows[n] - rows[n - 1] != distance) return 0;
    return 1;
}

/* Scores of all rows with 16 keys, [half][key][row]. */
INLINE void tile_scores(const Plan *p, Unit *u, const char *q, int now, int n, const int halves) {
    const char *keys = u->keys[now][n];
    int64_t stride = p->call->k_of_slot, tiles = p->q_width / COLUMNS;
    if (p->call->key_dim % COLUMNS || !are_apart(u->keys[now] + n, stride)) {
        stride = p->q_width * 2;
        for (int i = 0; i < HALF; i++)
            for (int64_t c = 0; c < p->q_width; c += COLUMNS) {
                int64_t size = p->call->key_dim - c;
                uint32_t here = size >= COLUMNS ? 0xffffffff : (1u << size) - 1;
                _mm512_storeu_si512(u->k_copy + i * stride + c * 2,
                                    _mm512_maskz_loadu_epi16(here, u->keys[now][n + i] + c * 2));
            }
        keys = u->k_copy;
    }
    MEMORY_IS_WRITTEN;
    _tile_zero(0);
    if (halves == 2) _tile_zero(1);
    for (int64_t c = 0; c < tiles; c++) {
        _tile_loadd(4, keys + c * 64, stride);
        _tile_loadd(6, q + c * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (halves == 2) {
            _tile_loadd(7, q + (tiles + c) * TILE_BYTES, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, u->scores + n * HALF, 64);
    if (halves == 2) _tile_stored(1, u->scores + (KEYS + n) * HALF, 64);
}

/* Weights of 16 rows and 64 keys become tiles, in the scores' place; adds them up as `sum_of` does. */
INLINE Floats tile_weights(float *s, Floats scale, Floats now, const int is_whole) {
    Floats sums[LANES];
    char *to = (char *)s;
    for (int part = 0; part < KEYS; part += COLUMNS, to += TILE_BYTES) {
        __m512i pairs[HALF];
        for (int n = 0; n < COLUMNS; n += 2) {
            Floats weight[2];
            for (int i = 0; i < 2; i++) {
                Floats x = load(s + (part + n + i) * HALF);
                weight[i] = exponential((is_whole ? x * scale : x) - now);
                if (!is_whole) weight[i] = choose(x != all(-__builtin_inff()), weight[i], all(0.0f));
                int at = (n + i) % LANES;
                sums[at] = part + n + i < LANES ? weight[i] : sums[at] + weight[i];
            }
            pairs[n / 2] = paired(weight[0], weight[1]);
        }
        transpose(pairs);
        for (int r = 0; r < HALF; r++) _mm512_storeu_si512(to + r * 64, pairs[r]);
    }
    for (int apart = LANES / 2; apart; apart /= 2)
        for (int i = 0; i < apart; i++) sums[i] = sums[i] + sums[i + apart];
    return sums[0];
}

/* Scores of 16 rows, some of whose keys may be hidden, under the rule. */
static void tile_rule(const Plan *p, Unit *u, int64_t half, int64_t block, Ints first, Ints last) {
    const Call *call = p->call;
    float *s = u->scores + half * KEYS * HALF;
    Floats hidden = all(-__builtin_inff()), scale = all((float)call->scale), cap = all((float)call->softcap);
    int has_cap = call->softcap > 0;
    for (int n = 0; n < KEYS; n++) {
        Floats x = load(s + n * HALF) * scale;
        if (has_cap) x = cap * hyperbolic_tangent(x / cap);
        store(s + n * HALF, choose((first <= n) & (last > n), x, hidden));
    }
    if (!call->mask) return;
    for (int64_t r = 0; r < HALF && half * HALF + r < u->num_rows; r++) {
        int64_t query = (u->first_row + half * HALF + r) / (call->num_heads / call->num_key_heads);
        const char *mask = call->mask + u->sequence * call->mask_of_sequence + query * call->mask_of_query + block;
        if (call->first) mask += call->first[u->sequence];
        for (int n = 0; n < last[r]; n++)
            if (!mask[n]) s[n * HALF + r] = -__builtin_inff();
    }
}

/* Scores of 16 rows become the weights' tiles; sums so far are put on the scale of the new maximum. */
static void tile_weigh(const Plan *p, Unit *u, int64_t half, int64_t block) {
    const Call *call = p->call;
    float *s = u->scores + half * KEYS * HALF, factors[HALF];
    int64_t first_row = half * HALF;
    int32_t first[HALF], last[HALF];
    int is_whole = !call->mask && !(call->softcap > 0);
    for (int r = 0; r < HALF; r++) {
        int64_t a = u->first_seen[first_row + r] - block, b = u->last_seen[first_row + r] - block;
        first[r] = (int32_t)(a < 0 ? 0 : least(a, KEYS)), last[r] = (int32_t)(b < 0 ? 0 : least(b, KEYS));
        if (first_row + r < u->num_rows && (a > 0 || b < KEYS)) is_whole = 0;
    }
    if (!is_whole) {
        Ints from, to;
        memcpy(&from, first, sizeof from), memcpy(&to, last, sizeof to);
        tile_rule(p, u, half, block, from, to);
    }
    Floats hidden = all(-__builtin_inff()), before = load(u->largest + first_row), scale = all((float)call->scale);
    Floats most[4];
    for (int i = 0; i < 4; i++) most[i] = hidden;
    for (int n = 0; n < KEYS; n += 4)
        for (int i = 0; i < 4; i++) most[i] = larger_of(load(s + (n + i) * HALF), most[i]);
    Floats found = larger_of(larger_of(most[0], most[1]), larger_of(most[2], most[3]));
    if (is_whole) found = found * scale;
    found = larger_of(found, before);
    Floats now = choose(found == hidden, all(0.0f), found);
    Floats factor = choose(before == hidden, all(0.0f), exponential(before - now));
    Floats sum = is_whole ? tile_weights(s, scale, now, 1) : tile_weights(s, scale, now, 0);
    store(u->total + first_row, load(u->total + first_row) * factor + sum);
    store(u->largest + first_row, found), store(factors, factor);
    for (int r = 0; r < HALF && first_row + r < u->num_rows; r++) {
        float *y = u->y + (first_row + r) * p->y_width;
        if (factors[r] == 1.0f) continue;
        for (int64_t c = 0; c < p->y_width; c += LANES) store(y + c, load(y + c) * all(factors[r]));
    }
}

/* The same of one row, whose lanes are keys: less work where a tile has few rows. */
static void tile_weigh_row(const Plan *p, Unit *u, int64_t row, int64_t block, char *tiles) {
    float scores[KEYS];
    const Call *call = p->call;
    for (int n = 0; n < KEYS; n++) scores[n] = u->scores[n * HALF + row];
    float before = u->largest[row], now = score_row(call, u, row, block, scores);
    float factor = before == -__builtin_inff() ? 0.0f : exponential(all(before - now))[0];
    Floats sum = all(0.0f), hidden = all(-__builtin_inff()), weights[KEYS / LANES];
    for (int n = 0; n < KEYS / LANES; n++) {
        Floats x = load(scores + n * LANES);
        weights[n] = choose(x != hidden, exponential(x - all(now)), all(0.0f));
        sum = n ? sum + weights[n] : weights[n];
    }
    for (int n = 0; n < KEYS / LANES; n += 2)
        _mm512_storeu_si512(tiles + n / 2 * TILE_BYTES + row * 64,
                            (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[n + 1], (__m512)weights[n]));
    u->total[row] = u->total[row] * factor + sum_of(sum);
    float *y = u->y + row * p->y_width;
    if (factor != 1.0f)
        for (int64_t c = 0; c < p->y_width; c += LANES) store(y + c, load(y + c) * all(factor));
}

/* Adds the weighted values of a block. */
INLINE void tile_values(const Plan *p, Unit *u, const char *weights, const int halves) {
    int64_t stride = p->y_width * (int64_t)sizeof(float);
    const char *later = weights + KEYS * HALF * sizeof(float), *values = u->v_copy;
    MEMORY_IS_WRITTEN;
    for (int64_t c = 0; c < p->y_width; c += HALF, values += 2 * TILE_BYTES) {
        _tile_loadd(0, u->y + c, stride);
        if (halves == 2) _tile_loadd(1, u->y + HALF * p->y_width + c, stride);
        for (int i = 0; i < 2; i++) {
            _tile_loadd(6, values + i * TILE_BYTES, 64);
            _tile_loadd(4, weights + i * TILE_BYTES, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (halves == 2) {
                _tile_loadd(5, later + i * TILE_BYTES, 64);
                _tile_dpbf16ps(1, 5, 6);
            }
        }
        _tile_stored(0, u->y + c, stride);
        if (halves == 2) _tile_stored(1, u->y + HALF * p->y_width + c, stride);
    }
}

static void run_unit_by_tiles(const Plan *p, Unit *u) {
    begin_unit(p, u);
    char *q = u->q + ROWS * p->q_width * 2;
    pack_queries(p, u, q);
    for (int64_t r = u->num_rows; r < ROWS; r++) {
        u->first_seen[r] = u->last_seen[r] = 0, u->largest[r] = -__builtin_inff(), u->total[r] = 0.0f;
        memset(u->y + r * p->y_width, 0, (size_t)p->y_width * sizeof(float));
    }
    int now = 0;
    int64_t block = u->low / KEYS * KEYS;
    find_rows(p->call, u, block, 0);
    for (; block < u->high; block += KEYS, now = !now) {
        int64_t ahead = find_rows(p->call, u, block + KEYS, !now);
        for (int n = 0; n < KEYS; n += HALF) {
            for (int i = n; i < n + HALF && i < ahead && u->num_rows <= HALF; i++) {
                prefetch(u->keys[!now][i], p->call->key_dim * 2);
                prefetch(u->values[!now][i], p->call->value_dim * 2);
            }
            if (u->num_rows > HALF) tile_scores(p, u, q, now, n, 2);
            else tile_scores(p, u, q, now, n, 1);
        }
        MEMORY_IS_WRITTEN;
        char *few = (char *)(u->scores + KEYS * HALF);
        if (u->num_rows > FEW)
            for (int64_t half = 0; half * HALF < u->num_rows; half++) tile_weigh(p, u, half, block);
        else
            for (int64_t row = 0; row < u->num_rows; row++) tile_weigh_row(p, u, row, block, few);
        pack_values(p, u, now, block);
        if (u->num_rows > HALF) tile_values(p, u, (char *)u->scores, 2);
        else tile_values(p, u, u->num_rows > FEW ? (char *)u->scores : few, 1);
        MEMORY_IS_WRITTEN;
    }
    end_unit(p, u);
}

#endif
