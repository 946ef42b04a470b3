/* Operations along rows, of FP32 or BF16: norms, with the rotation of heads, softmax and sums. A row belongs to one
 * thread, and its order of sums depends on its width alone.
 */
#include "vectors.h"

#include "threads.h"

#define AT_ONCE 4              /* partial sums of LANES numbers */
#define FEWEST_SHARED (1 << 15) /* numbers from which threads share the rows */

enum { RMS_NORM, SOFTMAX, SUM };

/* Rows (tokens, outer, inner, width), as `rows_call.py` writes them: distances are in bytes, numbers of a row are
 * adjacent; y is contiguous.
 */
typedef struct {
    const char *x;
    char *y;
    const char *weight;      /* (width,), or NULL: no norm */
    const float *cos, *sin;  /* (positions, width / 2), or NULL: no rotation */
    int64_t operation, kind, weight_kind, tokens, outer, inner, width;
    int64_t of_token, of_outer, of_inner, positions, num_threads;
    double eps;
} Rows;

static inline Floats load_kind(const char *from, int64_t kind) {
    return kind == BF16 ? load_bf16((const uint16_t *)from) : load((const float *)from);
}

/* Numbers from `at` on, with `fill` behind the last one. */
static inline Floats take_some(const char *row, int64_t at, int64_t width, int64_t kind, float fill) {
    int64_t size = size_of(kind), left = width - at;
    if (left >= LANES) return load_kind(row + at * size, kind);
    char part[LANES * 4] = {0};
    memcpy(part, row + at * size, (size_t)(left * size));
    Floats v = load_kind(part, kind);
    for (int64_t i = left; i < LANES; i++) v[i] = fill;
    return v;
}

static inline void put_some(char *row, int64_t at, int64_t width, int64_t kind, Floats v) {
    int64_t size = size_of(kind), left = width - at;
    char part[LANES * 4];
    char *to = left >= LANES ? row + at * size : part;
    if (kind == BF16) store_bf16((uint16_t *)to, v);
    else store((float *)to, v);
    if (left < LANES) memcpy(row + at * size, part, (size_t)(left * size));
}

/* The sum of a row, or of its squares. */
static inline float sum_of_row(const char *row, int64_t width, int64_t kind, int of_squares) {
    Floats sum[AT_ONCE] = {{0}};
    for (int64_t c = 0; c < width; c += AT_ONCE * LANES)
        for (int i = 0; i < AT_ONCE && c + i * LANES < width; i++) {
            Floats v = take_some(row, c + i * LANES, width, kind, 0.0f);
            sum[i] = of_squares ? multiply_add(v, v, sum[i]) : sum[i] + v;
        }
    return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static inline Floats normed(const Rows *r, const char *row, int64_t at, int64_t end, float scale) {
    Floats v = take_some(row, at, end, r->kind, 0.0f);
    return r->weight ? v * all(scale) * take_some(r->weight, at, end, r->weight_kind, 0.0f) : v;
}

static void norm_row(const Rows *r, const char *row, char *y, int64_t token) {
    int64_t width = r->width, half = width / 2;
    float scale = 1.0f;
    if (r->weight) scale = 1.0f / __builtin_sqrtf(sum_of_row(row, width, r->kind, 1) / (float)width + (float)r->eps);
    if (!r->cos) {
        for (int64_t c = 0; c < width; c += LANES) put_some(y, c, width, r->kind, normed(r, row, c, width, scale));
        return;
    }
    const int64_t place = token % r->positions * half;
    const char *cos = (const char *)(r->cos + place), *sin = (const char *)(r->sin + place);
    int64_t size = size_of(r->kind), wide_size = size_of(r->weight_kind);
    Rows second = *r;
    if (r->weight) second.weight += half * wide_size;
    for (int64_t c = 0; c < half; c += LANES) {
        Floats a = normed(r, row, c, half, scale), b = normed(&second, row + half * size, c, half, scale);
        Floats to_x = take_some(cos, c, half, FP32, 0.0f), to_y = take_some(sin, c, half, FP32, 0.0f);
        put_some(y, c, half, r->kind, a * to_x - b * to_y);
        put_some(y + half * size, c, half, r->kind, b * to_x + a * to_y);
    }
}

/* A row of -inf alone gives zeros, as no choice is left; NaN fills its row. */
static void softmax_row(const char *row, float *y, int64_t width) {
    Floats most = all(-__builtin_inff());
    for (int64_t c = 0; c < width; c += LANES)
        most = larger_of(take_some(row, c, width, FP32, -__builtin_inff()), most);
    float largest = largest_of(most);
    if (largest == -__builtin_inff()) largest = 0.0f;
    for (int64_t c = 0; c < width; c += LANES) {
        Floats v = take_some(row, c, width, FP32, -__builtin_inff()) - all(largest);
        put_some((char *)y, c, width, FP32, choose(v < all(-104.0f), all(0.0f), exponential(v)));
    }
    float total = sum_of_row((const char *)y, width, FP32, 0);
    if (total < 1.17549435e-38f) total = 1.17549435e-38f;
    for (int64_t c = 0; c < width; c += LANES)
        put_some((char *)y, c, width, FP32, take_some((const char *)y, c, width, FP32, 0.0f) / all(total));
}

static void run_rows(void *given, int64_t thread, int64_t threads) {
    const Rows *r = given;
    int64_t each = r->outer * r->inner, num = r->tokens * each, size = size_of(r->kind);
    for (int64_t i = num * thread / threads; i < num * (thread + 1) / threads; i++) {
        int64_t token = i / each, rest = i % each;
        const char *row = r->x + token * r->of_token + rest / r->inner * r->of_outer + rest % r->inner * r->of_inner;
        if (r->operation == SUM) ((float *)r->y)[i] = sum_of_row(row, r->width, FP32, 0);
        else if (r->operation == SOFTMAX) softmax_row(row, (float *)r->y + i * r->width, r->width);
        else norm_row(r, row, r->y + i * r->width * size, token);
    }
}

/* Computes a call. */
void expertmesh_rows(Rows *call) {
    int64_t num = call->tokens * call->outer * call->inner * call->width;
    together(run_rows, call, num < FEWEST_SHARED ? 1 : call->num_threads);
}
