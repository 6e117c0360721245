/* Layers of networks on sequences: norm, linear layers, causal attention, GELU, the tied head, and the way back.
 *
 * A sequence goes through a whole layer before the next one does, so that what lies between stays in the caches. Nothing
 * depends on how many networks or sequences there are, nor does a result of one. */
#ifdef __AVX512F__
#define LANES 16
#endif
#include "sequence.h"

#include <math.h>

#include "activation.h"
#include "arena.h"

#define ROWS (LANES / 2)  /* of a tile; it has two vectors of columns */
#define QUERIES 16        /* whose attention weights are made at the same time */
#define ENTRY __attribute__((visibility("default")))

INLINE long whole(long count) { return (count + LANES - 1) / LANES * LANES; }
INLINE const float *of_net(const float *first, int64_t step, long net) { return first ? first + net * step : NULL; }
INLINE vec load_some(const float *p, long count) {
    vec v = splat(0);
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
}

/* Product [M, N] = A B of A [M, K], whose numbers are `down` and `along` apart, and B [K, N]. */
typedef struct {
    long M, N, K;
    const float *A;
    long down, along;
    const float *B;
    long B_step;
    float *C;
    long C_step;
    const float *bias; /* [N], or NULL */
    int add;           /* to what C holds */
} product_job;

INLINE void tile(const product_job *p, long row, long column, const long rows, const long vectors) {
    vec sum[ROWS][2];
    const float *A = p->A + row * p->down, *B = p->B + column;
    float *C = p->C + row * p->C_step + column;
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++)
            sum[r][v] = p->add ? load(C + r * p->C_step + v * LANES)
                               : p->bias ? load(p->bias + column + v * LANES) : splat(0);
    for (long k = 0; k < p->K; k++, B += p->B_step)
        for (long v = 0; v < vectors; v++) {
            vec b = load(B + v * LANES);
            for (long r = 0; r < rows; r++) sum[r][v] += splat(A[r * p->down + k * p->along]) * b;
        }
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++) store(C + r * p->C_step + v * LANES, sum[r][v]);
}

INLINE void columns_of(const product_job *p, long column, const long vectors) {
    long row = 0;
    for (; row + ROWS <= p->M; row += ROWS) tile(p, row, column, ROWS, vectors);
    for (; row < p->M; row++) tile(p, row, column, 1, vectors);
}

static void product(const product_job p) {
    long column = 0;
    for (; column + 2 * LANES <= p.N; column += 2 * LANES) columns_of(&p, column, 2);
    for (; column + LANES <= p.N; column += LANES) columns_of(&p, column, 1);
    for (; column < p.N; column++)
        for (long row = 0; row < p.M; row++) {
            float *at = p.C + row * p.C_step + column, sum = p.add ? *at : p.bias ? p.bias[column] : 0;
            for (long k = 0; k < p.K; k++) sum += p.A[row * p.down + k * p.along] * p.B[k * p.B_step + column];
            *at = sum;
        }
}

/* [M, N] = x [M, K] times a matrix [K, N] in rows of `step`, plus a bias or NULL. */
static void multiply(float *to, long to_step, const float *x, long x_step, const float *matrix, long step,
                     const float *bias, long M, long N, long K) {
    product((product_job){M, N, K, x, x_step, 1, matrix, step, to, to_step, bias, 0});
}

/* to [O, I] += y [M, O] transposed times x [M, I]. */
static void add_outer(float *to, long to_step, const float *y, long y_step, const float *x, long x_step, long O, long I,
                      long M) {
    product((product_job){O, I, M, y, 1, y_step, x, x_step, to, to_step, NULL, 1});
}

/* Rows [I, step] of a matrix [O, I], zeros in the columns added. */
static void transpose(float *to, long step, const float *from, long from_step, long O, long I) {
    for (long i = 0; i < I; i++) {
        for (long o = 0; o < O; o++) to[i * step + o] = from[o * from_step + i];
        zero(to + i * step + O, step - O);
    }
}

INLINE float sum_of(vec v) {
    float sum = 0;
    for (long l = 0; l < LANES; l++) sum += v[l];
    return sum;
}

/* Sum of a[i] b[i]. */
INLINE float inner_product(const float *a, const float *b, long count) {
    vec sum = splat(0);
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(a + i) * load(b + i);
    if (i < count) sum += load_some(a + i, count - i) * load_some(b + i, count - i);
    return sum_of(sum);
}

INLINE float row_sum(const float *a, long count) {
    vec sum = splat(0);
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(a + i);
    if (i < count) sum += load_some(a + i, count - i);
    return sum_of(sum);
}

/* Largest number; NaNs are passed over but for the first. */
INLINE float largest(const float *a, long count) {
    float most = a[0];
    long i = 0;
    if (count >= LANES) {
        vec best = load(a);
        for (i = LANES; i + LANES <= count; i += LANES) best = choose(load(a + i) > best, load(a + i), best);
        for (long l = 0; l < LANES; l++) most = best[l] > most ? best[l] : most;
    }
    for (; i < count; i++) most = a[i] > most ? a[i] : most;
    return most;
}

/* to [count] += the sum of rows a [M, count], or of their products with the rows b. */
static void add_rows(float *to, const float *a, const float *b, long M, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec sum = load(to + i);
        for (long m = 0; m < M; m++) sum += load(a + m * count + i) * (b ? load(b + m * count + i) : splat(1));
        store(to + i, sum);
    }
    for (; i < count; i++)
        for (long m = 0; m < M; m++) to[i] += a[m * count + i] * (b ? b[m * count + i] : 1);
}

/* GELU of numbers, in whole vectors; where `grad` is there, it is multiplied by the derivative. */
static void gelu(float *to, const float *from, float *grad, long count) {
    for (long i = 0; i < count; i += LANES) {
        vec x = load(from + i), density, share = normal_share(x, &density);
        store(to + i, x * share);
        if (grad) store(grad + i, load(grad + i) * (share + x * density));
    }
}

/* Normalised rows [T, C] of x, and mean and 1 / deviation [T, 2] of each. */
static void normalise(float *to, float *statistics, const float *x, const float *scale, const float *shift, double eps,
                      long T, long C) {
    for (long t = 0; t < T; t++) {
        const float *from = x + t * C;
        float *at = to + t * C, mean = row_sum(from, C) / (float)C, spread;
        for (long c = 0; c < C; c++) at[c] = from[c] - mean;
        spread = 1.0f / sqrtf(inner_product(at, at, C) / (float)C + (float)eps);
        for (long c = 0; c < C; c++) at[c] = at[c] * spread * scale[c] + shift[c];
        statistics[2 * t] = mean;
        statistics[2 * t + 1] = spread;
    }
}

/* Adds the gradients of scale and shift, and that of x to grad_x; grad [T, C] is that of what the norm gave. */
static void normalise_back(float *grad_x, float *grad_scale, float *grad_shift, const float *grad, const float *x,
                           const float *statistics, const float *scale, float *own, long T, long C) {
    float *weighted = own + T * C;
    for (long t = 0; t < T; t++) {
        const float *from = x + t * C, *g = grad + t * C;
        float mean = statistics[2 * t], spread = statistics[2 * t + 1], *unit = own + t * C;
        for (long c = 0; c < C; c++) {
            unit[c] = (from[c] - mean) * spread;
            weighted[c] = g[c] * scale[c];
        }
        float first = row_sum(weighted, C) / (float)C, second = inner_product(weighted, unit, C) / (float)C;
        for (long c = 0; c < C; c++) grad_x[t * C + c] += spread * (weighted[c] - first - unit[c] * second);
    }
    add_rows(grad_scale, grad, own, T, C);
    add_rows(grad_shift, grad, NULL, T, C);
}

/* Rows [T] of a head's channels, so far apart. */
typedef struct {
    float *at;
    long step;
} rows;

/* What attention works on, a head after the other: rows of P, its channels D in whole vectors. Where these are the
 * same, rows are where they were before. */
typedef struct {
    long T, C, D, P, S; /* S: T in whole vectors */
    float scale;
    rows query, key, value, out, grad_out, grad_query, grad_key, grad_value;
    float *keys, *values, *weights, *gradients; /* [P, S] transposed, twice; [QUERIES, S] */
    float *packed[8];
} attention;

static void take_attention(attention *a, arena *room, long T, long C, long heads) {
    a->T = T, a->C = C, a->D = C / heads, a->P = whole(a->D), a->S = whole(T);
    a->scale = 1.0f / sqrtf((float)a->D);
    for (long i = 0; i < 8; i++) a->packed[i] = take_floats(room, T * a->P);
    a->keys = take_floats(room, a->P * a->S);
    a->values = take_floats(room, a->P * a->S);
    a->weights = take_floats(room, QUERIES * a->S);
    a->gradients = take_floats(room, QUERIES * a->S);
}

/* Columns of a head in rows of `step`: where they are, or packed. */
static rows head_rows(attention *a, long place, const float *first, long step, int reads) {
    if (a->D == a->P) return (rows){(float *)first, step};
    float *to = a->packed[place];
    for (long t = 0; t < a->T && reads; t++) {
        memcpy(to + t * a->P, first + t * step, (size_t)a->D * sizeof(float));
        zero(to + t * a->P + a->D, a->P - a->D);
    }
    return (rows){to, a->P};
}

/* Rows that were packed, back into their columns. */
static void put_rows(const attention *a, float *first, long step, rows from) {
    if (from.at == first) return;
    for (long t = 0; t < a->T; t++) memcpy(first + t * step, from.at + t * from.step, (size_t)a->D * sizeof(float));
}

static void clear_rows(const attention *a, rows r) {
    for (long t = 0; t < a->T; t++) zero(r.at + t * r.step, a->P);
}

static void find_head(attention *a, const float *mixed, long head) {
    const float *first = mixed + head * a->D;
    a->query = head_rows(a, 0, first, 3 * a->C, 1);
    a->key = head_rows(a, 1, first + a->C, 3 * a->C, 1);
    a->value = head_rows(a, 2, first + 2 * a->C, 3 * a->C, 1);
    transpose(a->keys, a->S, a->key.at, a->key.step, a->T, a->P);
}

/* Products of queries from `from` on with keys up to theirs, in rows of S; their number. */
static long scores(attention *a, long from) {
    long M = a->T - from < QUERIES ? a->T - from : QUERIES;
    const rows q = a->query;
    multiply(a->weights, a->S, q.at + from * q.step, q.step, a->keys, a->S, NULL, M, whole(from + M), a->D);
    return M;
}

/* Rows [T, C] of attention of rows [T, 3 C]; sums [heads, T]. */
static void attend(attention *a, float *to, float *sums, const float *mixed, long heads) {
    for (long head = 0; head < heads; head++) {
        find_head(a, mixed, head);
        rows out = head_rows(a, 3, to + head * a->D, a->C, 0), value = a->value;
        for (long from = 0, M; from < a->T; from += M) {
            M = scores(a, from);
            long N = whole(from + M);
            for (long m = 0; m < M; m++) {
                long count = from + m + 1;
                float *row = a->weights + m * a->S, most = largest(row, count);
                for (long j = 0; j < count; j += LANES)
                    store(row + j, exponential((load(row + j) - splat(most)) * splat(a->scale)));
                zero(row + count, N - count);
                float sum = row_sum(row, N);
                for (long j = 0; j < N; j += LANES) store(row + j, load(row + j) * splat(1 / sum));
                sums[head * a->T + from + m] = most * a->scale + logf(sum);
            }
            multiply(out.at + from * out.step, out.step, a->weights, a->S, value.at, value.step, NULL, M, a->P, from + M);
        }
        put_rows(a, to + head * a->D, a->C, out);
    }
}

/* Gradient [T, 3 C] of the rows that `attend` was given; grad and out [T, C] of what it gave. */
static void attend_back(attention *a, float *to, const float *grad, const float *out, const float *sums,
                        const float *mixed, long heads) {
    long C = a->C, step = 3 * C;
    for (long head = 0; head < heads; head++) {
        find_head(a, mixed, head);
        transpose(a->values, a->S, a->value.at, a->value.step, a->T, a->P);
        float *first = to + head * a->D;
        rows g = head_rows(a, 4, grad + head * a->D, C, 1), q = a->query, k = a->key;
        rows grad_query = head_rows(a, 5, first, step, 0), grad_key = head_rows(a, 6, first + C, step, 0);
        rows grad_value = head_rows(a, 7, first + 2 * C, step, 0);
        clear_rows(a, grad_key);
        clear_rows(a, grad_value);
        for (long from = 0, M; from < a->T; from += M) {
            M = scores(a, from);
            long N = whole(from + M);
            multiply(a->gradients, a->S, g.at + from * g.step, g.step, a->values, a->S, NULL, M, N, a->D);
            for (long m = 0; m < M; m++) {
                long at = from + m;
                float *row = a->weights + m * a->S, *back = a->gradients + m * a->S;
                float along = inner_product(grad + at * C + head * a->D, out + at * C + head * a->D, a->D);
                for (long j = 0; j < N; j += LANES)
                    store(row + j, exponential(load(row + j) * splat(a->scale) - splat(sums[head * a->T + at])));
                zero(row + at + 1, N - at - 1);
                for (long j = 0; j < N; j += LANES)
                    store(back + j, load(row + j) * (load(back + j) - splat(along)) * splat(a->scale));
            }
            multiply(grad_query.at + from * grad_query.step, grad_query.step, a->gradients, a->S, k.at, k.step, NULL, M,
                     a->P, from + M);
            add_outer(grad_key.at, grad_key.step, a->gradients, a->S, q.at + from * q.step, q.step, from + M, a->P, M);
            add_outer(grad_value.at, grad_value.step, a->weights, a->S, g.at + from * g.step, g.step, from + M, a->P, M);
        }
        put_rows(a, first, step, grad_query);
        put_rows(a, first + C, step, grad_key);
        put_rows(a, first + 2 * C, step, grad_value);
    }
}

/* Scratch of a block, for one network. */
typedef struct {
    float *x, *normed, *middle, *grad, *grad_inner, *grad_middle, *grad_normed, *grad_x, *own, *first, *last;
    attention attention;
} block_work;

static void take_block(block_work *w, arena *room, const sequence_block *b) {
    long T = b->length, C = b->width, I = b->inner, M = b->heads ? C : I;
    float **parts[] = {&w->x, &w->normed, &w->grad, &w->grad_normed, &w->grad_x};
    for (long i = 0; i < 5; i++) *parts[i] = take_floats(room, T * C);
    w->grad_inner = take_floats(room, T * I);
    w->middle = take_floats(room, whole(T * M)), w->grad_middle = take_floats(room, whole(T * M));
    w->own = take_floats(room, T * C + C);
    w->first = take_floats(room, C * I), w->last = take_floats(room, M * C);
    if (b->heads) take_attention(&w->attention, room, T, C, b->heads);
}

/* Rows [T, C] of one network and sequence, out of [B, T, n, C] or back. */
static void read_rows(float *to, const float *from, long nets, long net, long sample, long T, long C) {
    for (long t = 0; t < T; t++)
        memcpy(to + t * C, from + ((sample * T + t) * nets + net) * C, (size_t)C * sizeof(float));
}
static void write_rows(float *to, const float *from, long nets, long net, long sample, long T, long C) {
    for (long t = 0; t < T; t++)
        memcpy(to + ((sample * T + t) * nets + net) * C, from + t * C, (size_t)C * sizeof(float));
}

static void block_forward(const sequence_block *b, block_work *w, const float *const p[TENSORS], long net, long sample) {
    long T = b->length, C = b->width, I = b->inner, M = b->heads ? C : I, number = b->saves ? net * b->batch + sample : 0;
    float *hidden = b->hidden + number * T * I, *middle = w->middle;
    const float *x = w->x;
    read_rows(w->x, b->x, b->nets, net, sample, T, C);
    if (b->normed) {
        normalise(w->normed, b->statistics + number * T * 2, x, p[SCALE], p[SHIFT], b->eps, T, C);
        x = w->normed;
    }
    multiply(hidden, I, x, C, w->first, I, p[BIAS], T, I, C);
    if (b->heads) {
        middle = b->mixed + number * T * C;
        attend(&w->attention, middle, b->sums + number * b->heads * T, hidden, b->heads);
    } else if (b->gelu) {
        gelu(middle, hidden, NULL, T * I);
    } else {
        middle = hidden;
    }
    multiply(w->grad, C, middle, M, w->last, C, p[LAST_BIAS], T, C, M);
    for (long i = 0; i < T * C; i++) w->grad[i] += w->x[i];
    write_rows(b->out, w->grad, b->nets, net, sample, T, C);
}

static void block_backward(const sequence_block *b, block_work *w, const float *const p[TENSORS],
                           float *const g[TENSORS], long net, long sample) {
    long T = b->length, C = b->width, I = b->inner, M = b->heads ? C : I, number = net * b->batch + sample;
    const float *hidden = b->hidden + number * T * I, *middle = b->heads ? b->mixed + number * T * C : hidden;
    const float *x = w->x;
    float *statistics = b->statistics + number * T * 2;
    read_rows(w->x, b->x, b->nets, net, sample, T, C);
    read_rows(w->grad, b->grad_out, b->nets, net, sample, T, C);
    if (b->normed) {
        normalise(w->normed, statistics, x, p[SCALE], p[SHIFT], b->eps, T, C);
        x = w->normed;
    }
    multiply(w->grad_middle, M, w->grad, C, p[LAST_WEIGHT], M, NULL, T, M, C);
    float *grad_inner = w->grad_middle;
    if (b->heads) {
        grad_inner = w->grad_inner;
        attend_back(&w->attention, grad_inner, w->grad_middle, middle, b->sums + number * b->heads * T, hidden, b->heads);
    } else if (b->gelu) {
        gelu(w->middle, hidden, grad_inner, T * I);
        middle = w->middle;
    }
    add_outer(g[LAST_WEIGHT], M, w->grad, C, middle, M, C, M, T);
    add_outer(g[WEIGHT], C, grad_inner, I, x, C, I, C, T);
    if (p[BIAS]) {
        add_rows(g[LAST_BIAS], w->grad, NULL, T, C);
        add_rows(g[BIAS], grad_inner, NULL, T, I);
    }
    multiply(w->grad_normed, C, grad_inner, I, p[WEIGHT], C, NULL, T, C, I);
    memcpy(w->grad_x, w->grad, (size_t)(T * C) * sizeof(float));
    if (b->normed)
        normalise_back(w->grad_x, g[SCALE], g[SHIFT], w->grad_normed, w->x, statistics, p[SCALE], w->own, T, C);
    else
        for (long i = 0; i < T * C; i++) w->grad_x[i] += w->grad_normed[i];
    write_rows(b->grad_x, w->grad_x, b->nets, net, sample, T, C);
}

/* All networks and sequences, forward or, where there is a gradient to go back with, backward; 1 without memory. */
ENTRY int sequence_block_pass(const sequence_block *b) {
    long C = b->width, I = b->inner, M = b->heads ? C : I;
    arena room = {NULL, 0};
    block_work w;
    take_block(&w, &room, b);
    void *taken;
    char *memory = get_memory(room.used, &taken);
    if (!memory) return 1;
    room = (arena){memory, 0};
    take_block(&w, &room, b);
    for (long net = 0; net < b->nets; net++) {
        const float *p[TENSORS];
        float *g[TENSORS];
        const long sizes[TENSORS] = {C, C, I * C, I, C * M, C};
        for (long i = 0; i < TENSORS; i++) {
            p[i] = of_net(b->parameters[i], b->steps[i], net);
            g[i] = b->gradients[i] ? b->gradients[i] + net * sizes[i] : NULL;
        }
        if (!b->grad_out) {
            transpose(w.first, I, p[WEIGHT], C, I, C);
            transpose(w.last, C, p[LAST_WEIGHT], M, C, M);
        }
        for (long sample = 0; sample < b->batch; sample++)
            if (b->grad_out)
                block_backward(b, &w, p, g, net, sample);
            else
                block_forward(b, &w, p, net, sample);
    }
    free(taken);
    return 0;
}

typedef struct {
    float *x, *normed, *statistics, *logits, *columns, *grad, *grad_x, *own;
} head_work;

static void take_head(head_work *w, arena *room, const sequence_head *h) {
    long T = h->length, C = h->width, P = whole(h->tokens);
    float **parts[] = {&w->x, &w->normed, &w->grad, &w->grad_x};
    for (long i = 0; i < 4; i++) *parts[i] = take_floats(room, T * C);
    w->statistics = take_floats(room, 2 * T);
    w->logits = take_floats(room, T * P);
    w->columns = take_floats(room, C * P);
    w->own = take_floats(room, T * C + C);
}

/* Loss of a row of logits [P], which become their gradient; the label's is right if it is the first of the largest. */
static double cross_entropy(float *row, long tokens, long P, int64_t label, uint8_t *correct) {
    for (long j = tokens; j < P; j++) row[j] = -1e30f;
    float most = largest(row, tokens), wanted = label < 0 ? 0 : row[label];
    *correct = label >= 0 && wanted == most;
    for (long j = 0; *correct && j < label; j++) *correct = row[j] < most;
    if (label < 0) {
        zero(row, P);
        return 0;
    }
    for (long j = 0; j < P; j += LANES) store(row + j, exponential(load(row + j) - splat(most)));
    float sum = row_sum(row, P);
    for (long j = 0; j < P; j += LANES) store(row + j, load(row + j) * splat(1 / sum));
    row[label] -= 1;
    return (double)most + log((double)sum) - (double)wanted;
}

static void head_sequence(const sequence_head *h, head_work *w, const float *const p[3], long net, long sample) {
    long T = h->length, C = h->width, V = h->tokens, P = whole(V), first = (net * h->batch + sample) * T;
    read_rows(w->x, h->x, h->nets, net, sample, T, C);
    normalise(w->normed, w->statistics, w->x, p[0], p[1], h->eps, T, C);
    multiply(w->logits, P, w->normed, C, w->columns, P, NULL, T, P, C);
    for (long t = 0; t < T; t++)
        h->loss[net] += cross_entropy(w->logits + t * P, V, P, h->labels[first + t], h->correct + first + t);
    if (!h->grad_x) return;
    multiply(w->grad, C, w->logits, P, p[2], C, NULL, T, C, V);
    add_outer(h->grad_table + net * V * C, C, w->logits, P, w->normed, C, V, C, T);
    zero(w->grad_x, T * C);
    normalise_back(w->grad_x, h->grad_scale + net * C, h->grad_shift + net * C, w->grad, w->x, w->statistics, p[0],
                   w->own, T, C);
    write_rows(h->grad_x, w->grad_x, h->nets, net, sample, T, C);
}

/* Losses and right answers of all networks, and gradients where they are wanted; 1 without memory. */
ENTRY int sequence_head_pass(const sequence_head *h) {
    arena room = {NULL, 0};
    head_work w;
    take_head(&w, &room, h);
    void *taken;
    char *memory = get_memory(room.used, &taken);
    if (!memory) return 1;
    room = (arena){memory, 0};
    take_head(&w, &room, h);
    for (long net = 0; net < h->nets; net++) {
        const float *p[] = {of_net(h->scale, h->steps[0], net), of_net(h->shift, h->steps[1], net),
                            of_net(h->table, h->steps[2], net)};
        transpose(w.columns, whole(h->tokens), p[2], h->width, h->tokens, h->width);
        for (long sample = 0; sample < h->batch; sample++) head_sequence(h, &w, p, net, sample);
    }
    free(taken);
    return 0;
}
