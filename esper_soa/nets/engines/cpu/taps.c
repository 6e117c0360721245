/* Direct convolution, tap by tap, and the gradient of its weights.
 *
 * The k*I numbers that a row of the kernel meets are contiguous, so each output pixel is k dot products. Tiles of pixels
 * x vectors of output channels stay in registers. Every output is summed in the same order whatever the tile, so results
 * do not depend on the tiling.
 */
#include "conv.h"

/* P pixels in a row x V vectors of channels. I and k are constants where the caller's are. */
INLINE void conv_tile(const conv_job *job, const float *in, const float *weight, float *out, int P, int V, long I, long k) {
    v8 sum[16];
#pragma GCC unroll 16
    for (int t = 0; t < P * V; t++) sum[t] = splat(0);
    for (long ky = 0; ky < k; ky++, in += (job->W + k - 1) * I) {
        const float *from = in;
#pragma GCC unroll 2
        for (long j = 0; j < k * I; j++, weight += job->O, from++) {
            v8 w[4];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) w[v] = load(weight + v * LANES);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) {
                v8 x = splat(from[p * I]);
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

/* P pixels in a row of a 3x3 kernel x one vector: a number that was loaded serves the three pixels that it is near. */
INLINE void conv_narrow_tile(const conv_job *job, const float *in, const float *weight, float *out, int P, long I) {
    v8 sum[16];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p] = splat(0);
    for (long ky = 0; ky < 3; ky++, in += (job->W + 2) * I, weight += 3 * I * job->O)
        for (long i = 0; i < I; i++) {
            v8 w[3];
#pragma GCC unroll 3
            for (int kx = 0; kx < 3; kx++) w[kx] = load(weight + (kx * I + i) * job->O);
#pragma GCC unroll 16
            for (int q = 0; q < P + 2; q++) {
                v8 x = splat(in[q * I + i]);
#pragma GCC unroll 3
                for (int kx = 0; kx < 3; kx++)
                    if (q - kx >= 0 && q - kx < P) sum[q - kx] += x * w[kx];
            }
        }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) store(out + p * job->step, sum[p]);
}

INLINE void conv_narrow_row(const conv_job *job, const float *in, const float *weight, float *out, long I) {
    long x = 0;
#define TILES(P) for (; x + (P) <= job->W; x += (P)) conv_narrow_tile(job, in + x * I, weight, out + x * job->step, P, I);
    for (; x + 21 <= job->W; x += 11) conv_narrow_tile(job, in + x * I, weight, out + x * job->step, 11, I);
    if (job->W - x == 10) TILES(10)
    TILES(8)
    TILES(4)
    TILES(1)
#undef TILES
}

/* A row of pixels for V vectors of channels, the widest tiles first. */
INLINE void conv_row(const conv_job *job, const float *in, const float *weight, float *out, int V, long I, long k) {
    long x = 0;
#define TILES(P) for (; x + (P) <= job->W; x += (P)) conv_tile(job, in + x * I, weight, out + x * job->step, P, V, I, k);
    if (V == 1) {
        TILES(8)
    } else {
        for (; x + 6 <= job->W && job->W - x != 8; x += 6)
            conv_tile(job, in + x * I, weight, out + x * job->step, 6, V, I, k);
    }
    TILES(4)
    TILES(1)
#undef TILES
}

INLINE void conv_with(const conv_job *job, long I, long k) {
    long o = 0, line = (job->W + k - 1) * I;
    for (; o + 2 * LANES <= job->O; o += 2 * LANES)
        for (long y = 0; y < job->H; y++)
            conv_row(job, job->in + y * line, job->weight + o, job->out + y * job->W * job->step + o, 2, I, k);
    for (long y = 0; y < job->H && o < job->O; y++)
        if (k == 3) conv_narrow_row(job, job->in + y * line, job->weight + o, job->out + y * job->W * job->step + o, I);
        else conv_row(job, job->in + y * line, job->weight + o, job->out + y * job->W * job->step + o, 1, I, k);
}

/* Images of three colours and pointwise kernels have code of their own. */
void conv_by_taps(const conv_job *job) {
    if (job->k == 3 && job->I == 3) conv_with(job, 3, 3);
    else if (job->k == 1) conv_with(job, job->I, 1);
    else conv_with(job, job->I, job->k);
}

/* J numbers of the input row x V vectors of output channels, over all pixels. */
INLINE void wgrad_tile(const wgrad_job *job, const float *in, const float *out, float *sum, int J, int V) {
    v8 part[16];
#pragma GCC unroll 16
    for (int t = 0; t < J * V; t++) part[t] = splat(0);
    for (long y = 0; y < job->H; y++, in += (job->W + job->k - 1) * job->I, out += job->line) {
        const float *from = in, *grad = out;
#pragma GCC unroll 2
        for (long x = 0; x < job->W; x++, from += job->I, grad += job->step) {
            v8 g[2];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) g[v] = load(grad + v * LANES);
#pragma GCC unroll 16
            for (int j = 0; j < J; j++) {
                v8 value = splat(from[j]);
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) part[j * V + v] += value * g[v];
            }
        }
    }
    add_tile(sum, part, J, V, job->O);
}

INLINE void wgrad_rows(const wgrad_job *job, long ky, long o, int V) {
    const float *in = job->in + ky * (job->W + job->k - 1) * job->I, *out = job->out + o;
    float *sum = job->sum + ky * job->k * job->I * job->O + o;
    long rows = job->k * job->I, j = 0;
#define TILES(J) for (; j + (J) <= rows; j += (J)) wgrad_tile(job, in + j, out, sum + j * job->O, J, V);
    if (V == 1) {
        TILES(12)
        TILES(9)
    }
    TILES(6)
    TILES(3)
    TILES(1)
#undef TILES
}

void wgrad_by_taps(const wgrad_job *job) {
    long o = 0;
    for (; o + 2 * LANES <= job->O; o += 2 * LANES)
        for (long ky = 0; ky < job->k; ky++) wgrad_rows(job, ky, o, 2);
    if (o < job->O)
        for (long ky = 0; ky < job->k; ky++) wgrad_rows(job, ky, o, 1);
}
