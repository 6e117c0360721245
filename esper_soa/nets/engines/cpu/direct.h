/* Direct convolution, tap by tap, and the gradient of its weights.
 *
 * The numbers that a row of the kernel meets lie in k runs of I, or in one of k*I where pixels have no room for more, so
 * each output pixel is a few dot products. Tiles of pixels x vectors of output channels stay in registers. Every output
 * is summed in the same order whatever the tile, so results do not depend on the tiling.
 */
#ifndef ESPER_DIRECT_H
#define ESPER_DIRECT_H

#include "kernels.h"

/* The kernel and what it reads: constants where the caller's are. */
typedef struct {
    long I, k, step; /* step: floats between pixels */
    long stride;
} reach;

/* P pixels in a row x V vectors of channels. */
INLINE void conv_tile(const conv_job *job, const float *in, const float *weight, float *out, int P, int V, reach r) {
    long runs = r.step == r.I ? 1 : r.k, each = r.step == r.I ? r.k * r.I : r.I;
    vec sum[16];
#pragma GCC unroll 16
    for (int t = 0; t < P * V; t++) sum[t] = splat(0);
    for (long ky = 0; ky < r.k; ky++, in += job->in_line)
        for (long run = 0; run < runs; run++) {
            const float *from = in + run * r.step;
#pragma GCC unroll 2
            for (long j = 0; j < each; j++, weight += job->O, from++) {
                vec w[4];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) w[v] = load(weight + v * LANES);
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) {
                    vec x = splat(from[p * r.stride * r.step]);
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) sum[p * V + v] += x * w[v];
                }
            }
        }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + p * job->step + v * LANES, sum[p * V + v]);
}

/* P pixels in a row of a 3x3 kernel, or pairs half a row apart, x one vector: a number that was loaded serves the three
 * pixels that it is near. */
INLINE void conv_narrow_tile(const conv_job *job, const float *in, const float *weight, float *out, int P, reach r,
                             int each) {
    long half = job->W / 2;
    vec sum[16];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p] = splat(0);
    for (long ky = 0; ky < 3; ky++, in += job->in_line, weight += 3 * r.I * job->O)
        for (long i = 0; i < r.I; i++) {
            vec w[3];
#pragma GCC unroll 3
            for (int kx = 0; kx < 3; kx++) w[kx] = repeat_each(weight + (kx * r.I + i) * job->O, each);
#pragma GCC unroll 16
            for (int q = 0; q < P + 2; q++) {
                vec x = splat_each(in + q * r.step + i, half * r.step, each);
#pragma GCC unroll 3
                for (int kx = 0; kx < 3; kx++)
                    if (q - kx >= 0 && q - kx < P) sum[q - kx] += x * w[kx];
            }
        }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) store_each(out + p * job->step, half * job->step, sum[p], each);
}

#define TILES(P) for (; x + (P) <= W; x += (P)) TILE(P);

INLINE void conv_narrow_row(const conv_job *job, const float *in, const float *weight, float *out, reach r, int each) {
    long x = 0, W = job->W / each;
#define TILE(P) conv_narrow_tile(job, in + x * r.step, weight, out + x * job->step, P, r, each)
    for (; x + 21 <= W; x += 11) TILE(11);
    if (W - x == 10) TILES(10)
    TILES(8)
    TILES(4)
    TILES(1)
#undef TILE
}

/* A row of pixels for V vectors of channels, the widest tiles first. */
INLINE void conv_row(const conv_job *job, const float *in, const float *weight, float *out, int V, reach r) {
    long x = 0, W = job->W;
#define TILE(P) conv_tile(job, in + x * r.stride * r.step, weight, out + x * job->step, P, V, r)
    if (V == 1) {
        TILES(8)
    } else {
        for (; x + 6 <= W && W - x != 8; x += 6) TILE(6);
    }
    TILES(4)
    TILES(1)
#undef TILES
#undef TILE
}

INLINE void conv_with(const conv_job *job, reach r, int each) {
    long o = 0, line = r.stride * job->in_line;
    for (; o + 2 * LANES <= job->O; o += 2 * LANES)
        for (long y = 0; y < job->H; y++)
            conv_row(job, job->in + y * line, job->weight + o, job->out + y * job->W * job->step + o, 2, r);
    for (long y = 0; y < job->H && o < job->O; y++) {
        float *out = job->out + y * job->W * job->step + o;
        if (r.k == 3 && r.stride == 1) conv_narrow_row(job, job->in + y * line, job->weight + o, out, r, each);
        else conv_row(job, job->in + y * line, job->weight + o, out, 1, r);
    }
}

/* Images of three colours, pointwise kernels and pixels without room for more have code of their own. */
static void conv_by_taps(const conv_job *job) {
    long I = job->I, step = job->in_step;
    if (job->stride != 1) conv_with(job, (reach){I, job->k, step, job->stride}, 1);
    else if (each_of(job->O) == 2) conv_with(job, (reach){3, 3, 3, 1}, 2);
    else if (job->k == 3 && I == 3 && step == 3) conv_with(job, (reach){3, 3, 3, 1}, 1);
    else if (job->k == 1 && I == 3 && step == 3) conv_with(job, (reach){3, 1, 3, 1}, 1);
    else if (job->k == 1 && step == LANES) conv_with(job, (reach){I, 1, LANES, 1}, 1);
    else if (job->k == 1) conv_with(job, (reach){I, 1, step, 1}, 1);
    else if (step == I) conv_with(job, (reach){I, job->k, I, 1}, 1);
    else conv_with(job, (reach){I, job->k, step, 1}, 1);
}

/* J numbers of each of K input rows x V vectors of output channels, over all pixels. */
INLINE void wgrad_tile(const wgrad_job *job, const float *in, const float *out, float *sum, int K, int J, int V,
                       int each) {
    int parts = (J + each - 1) / each * V;
    long line = job->in_line, down = job->stride * line, right = job->stride * job->in_step;
    vec part[16];
#pragma GCC unroll 16
    for (int t = 0; t < K * parts; t++) part[t] = splat(0);
    for (long y = 0; y < job->H; y++, in += down, out += job->line) {
        const float *from = in, *grad = out;
#pragma GCC unroll 2
        for (long x = 0; x < job->W; x++, from += right, grad += job->step) {
            vec g[2];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) g[v] = repeat_each(grad + v * LANES, each);
#pragma GCC unroll 3
            for (int ky = 0; ky < K; ky++) add_products(part + ky * parts, from + ky * line, g, J, V, each);
        }
    }
#pragma GCC unroll 3
    for (int ky = 0; ky < K; ky++) add_tile(sum + ky * job->k * job->I * job->O, part + ky * parts, J, V, job->O, each);
}

/* The `rows` numbers from `in` on, whose sums begin at `sum`. */
INLINE void wgrad_run(const wgrad_job *job, const float *in, float *sum, long rows, long o, int V) {
    const float *out = job->out + o;
    long j = 0;
#define TILES(J) for (; j + (J) <= rows; j += (J)) wgrad_tile(job, in + j, out, sum + j * job->O, 1, J, V, 1);
    if (V == 1) {
        TILES(12)
        TILES(9)
    }
    TILES(6)
    TILES(3)
    TILES(1)
#undef TILES
}

INLINE void wgrad_rows(const wgrad_job *job, long ky, long o, int V) {
    const float *in = job->in + ky * job->in_line;
    float *sum = job->sum + ky * job->k * job->I * job->O + o;
    if (job->in_step == job->I) wgrad_run(job, in, sum, job->k * job->I, o, V);
    else
        for (long kx = 0; kx < job->k; kx++)
            wgrad_run(job, in + kx * job->in_step, sum + kx * job->I * job->O, job->I, o, V);
}

static void wgrad_by_taps(const wgrad_job *job) {
    if (each_of(job->O) == 2) {
        wgrad_tile(job, job->in, job->out, job->sum, 3, 9, 1, 2);
        return;
    }
    for (long o = 0; o < job->O; o += 2 * LANES)
        for (long ky = 0; ky < job->k; ky++)
            if (o + 2 * LANES <= job->O) wgrad_rows(job, ky, o, 2);
            else wgrad_rows(job, ky, o, 1);
}

#endif
