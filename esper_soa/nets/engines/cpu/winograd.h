/* 3x3 convolutions of one padded image by F(2x2, 3x3): 16 products per channel pair and 2x2 outputs instead of 36.
 *
 * Y = A' [(G g G') * (B' d B)] A of a 4x4 patch d (S. Winograd, 1980; as in A. Lavin and S. Gray, "Fast Algorithms for
 * Convolutional Neural Networks", 2016); the gradient of the weights is G' [(A dY A') * (B' d B)] G. Images are worked
 * through in strips of tiles that stay in the caches. Every output is summed in the same order whatever the strips.
 */
#ifndef ESPER_WINOGRAD_H
#define ESPER_WINOGRAD_H

#include "kernels.h"

INLINE void patch_column(const float *in, long line, vec *to, long apart, int each) {
    vec a = load_each(in, apart, each), b = load_each(in + line, apart, each);
    vec c = load_each(in + 2 * line, apart, each), d = load_each(in + 3 * line, apart, each);
    to[0] = a - c, to[1] = b + c, to[2] = c - b, to[3] = b - d;
}

/* B' d B of a vector of channels of a line of `count` patches or pairs; a patch shares two columns with the next. */
INLINE void patch_line(const float *in, long line, long I, long count, float *to, int each) {
    long apart = 2 * count * I, row = I * each;
    vec col[4][4];
    patch_column(in, line, col[0], apart, each);
    patch_column(in + I, line, col[1], apart, each);
    for (long t = 0; t < count; t++, in += 2 * I, to += tile_step(row)) {
        patch_column(in + 2 * I, line, col[2], apart, each);
        patch_column(in + 3 * I, line, col[3], apart, each);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            store(to + (4 * r + 0) * row, col[0][r] - col[2][r]);
            store(to + (4 * r + 1) * row, col[1][r] + col[2][r]);
            store(to + (4 * r + 2) * row, col[2][r] - col[1][r]);
            store(to + (4 * r + 3) * row, col[1][r] - col[3][r]);
            col[0][r] = col[2][r];
            col[1][r] = col[3][r];
        }
    }
}

/* All patches of `lines` lines of tiles of a padded image [H + 2, W + 2, I]. */
INLINE void patches(const float *in, long W, long I, long lines, float *to, int each) {
    long line = (W + 2) * I, count = W / 2 / each;
    if (each == 1 && I % LANES) {
        KERNELS_8.patches(in, W, I, lines, to);
        return;
    }
    for (long y = 0; y < lines; y++, in += 2 * line, to += count * tile_step(I * each))
        for (long c = 0; c < I * each; c += LANES) patch_line(in + c / each, line, I, count, to + c, each);
}

/* The same for the wider kernels. */
static void common_patches(const float *in, long W, long I, long lines, float *to) {
    if (I == 8) patches(in, W, 8, lines, to, 1);
    else patches(in, W, I, lines, to, 1);
}

/* Products of P tiles or pairs at one frequency with V vectors of output channels: from [tile][16][I * each] to
 * [tile][16][V * LANES]. */
INLINE void product_tile(const float *in, const float *weight, long O, float *out, int P, int V, long I, int each) {
    vec sum[16];
#pragma GCC unroll 16
    for (int t = 0; t < P * V; t++) sum[t] = splat(0);
#pragma GCC unroll 2
    for (long i = 0; i < I; i++, weight += O, in += each) {
        vec w[2];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) w[v] = repeat_each(weight + v * LANES, each);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            vec x = splat_each(in + p * tile_step(I * each), 1, each);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sum[p * V + v] += x * w[v];
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) store(out + p * tile_step(V * LANES) + v * LANES, sum[p * V + v]);
}

INLINE void products(const float *in, const float *weight, long O, float *out, long tiles, int V, long I, int each) {
    for (long f = 0; f < FREQS; f++, in += I * each, weight += I * O, out += V * LANES) {
        long t = 0;
#define TILES(P) \
    for (; t + (P) <= tiles; t += (P)) \
        product_tile(in + t * tile_step(I * each), weight, O, out + t * tile_step(V * LANES), P, V, I, each);
        if (V == 1) {
            TILES(8)
        } else {
            TILES(6)
        }
        TILES(4)
        TILES(1)
#undef TILES
    }
}

/* A' m A of a vector of channels of a line of `count` tiles or pairs, [tile][16][C] to pixels. */
INLINE void tile_line(const float *in, long C, long count, float *out, long step, long line, int each) {
    long apart = 2 * count * step;
    for (long t = 0; t < count; t++, in += tile_step(C), out += 2 * step) {
        vec top[4], low[4];
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            vec a = load(in + s * C), b = load(in + (4 + s) * C), c = load(in + (8 + s) * C), d = load(in + (12 + s) * C);
            top[s] = (a + b) + c;
            low[s] = (b - c) - d;
        }
        store_each(out, apart, (top[0] + top[1]) + top[2], each);
        store_each(out + step, apart, (top[1] - top[2]) - top[3], each);
        store_each(out + line, apart, (low[0] + low[1]) + low[2], each);
        store_each(out + line + step, apart, (low[1] - low[2]) - low[3], each);
    }
}

/* Output channels o and on, V vectors of them, of a strip. */
INLINE void strip_outputs(const conv_job *job, const float *in, float *room, long y, long lines, long o, int V, long I,
                          int each) {
    long across = job->W / 2 / each, line = job->W * job->step;
    products(in, job->weight + o, job->O, room, lines * across, V, I, each);
    for (long r = 0; r < lines; r++)
        for (int v = 0; v < V; v++)
            tile_line(room + r * across * tile_step(V * LANES) + v * LANES, V * LANES, across,
                      job->out + 2 * (y + r) * line + o + v * LANES, job->step, line, each);
}

INLINE void tiles_with(const conv_job *job, long I, int each) {
    long largest = strip_lines(job->W);
    float *out = job->room + largest * (job->W / 2) * tile_step(I);
    for (long y = 0; y < job->H / 2; y += largest) {
        long lines = job->H / 2 - y < largest ? job->H / 2 - y : largest, o = 0;
        patches(job->in + 2 * y * (job->W + 2) * I, job->W, I, lines, job->room, each);
        for (; o + 2 * LANES <= job->O; o += 2 * LANES) strip_outputs(job, job->room, out, y, lines, o, 2, I, 1);
        if (o < job->O) strip_outputs(job, job->room, out, y, lines, o, 1, I, each);
    }
}

/* Common channel counts have code of their own. */
static void conv_by_tiles(const conv_job *job) {
    if (each_of(job->O) == 2 && job->I == 8) tiles_with(job, 8, 2);
    else if (each_of(job->O) == 2 && job->I == 16) tiles_with(job, 16, 2);
    else if (each_of(job->O) == 2) tiles_with(job, job->I, 2);
    else if (job->I == 8) tiles_with(job, 8, 1);
    else if (job->I == 16) tiles_with(job, 16, 1);
    else if (job->I == 32) tiles_with(job, 32, 1);
    else if (job->I == 64) tiles_with(job, 64, 1);
    else tiles_with(job, job->I, 1);
}

/* A dY A' of a vector of channels of a line of `count` tiles: pixels to [tile][16][O * each]. */
INLINE void gradient_line(const float *grad, long step, long line, long O, long count, float *to, int each) {
    long row = O * each;
    for (long t = 0; t < count; t++, grad += 2 * step, to += tile_step(row)) {
        vec a = repeat_each(grad, each), b = repeat_each(grad + step, each);
        vec c = repeat_each(grad + line, each), d = repeat_each(grad + line + step, each);
        vec left[4] = {a, a + c, a - c, -c}, right[4] = {b, b + d, b - d, -d};
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            store(to + (4 * r + 0) * row, left[r]);
            store(to + (4 * r + 1) * row, left[r] + right[r]);
            store(to + (4 * r + 2) * row, left[r] - right[r]);
            store(to + (4 * r + 3) * row, -right[r]);
        }
    }
}

/* J input channels x V vectors of output channels at F frequencies, summed over the tiles of a strip. */
INLINE void wgrad_products(const float *in, const float *grad, float *sum, long tiles, int F, int J, int V, long I,
                           long O, int each) {
    int parts = J / each * V;
    vec part[16];
#pragma GCC unroll 16
    for (int t = 0; t < F * parts; t++) part[t] = splat(0);
#pragma GCC unroll 2
    for (long t = 0; t < tiles; t++, in += tile_step(I), grad += tile_step(O * each))
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
            vec g[2];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) g[v] = load(grad + f * O * each + v * LANES);
            add_products(part + f * parts, in + f * I, g, J, V, each);
        }
#pragma GCC unroll 4
    for (int f = 0; f < F; f++) add_tile(sum + f * I * O, part + f * parts, J, V, O, each);
}

INLINE void wgrad_strip(const wgrad_job *job, const float *in, const float *grad, long tiles, long I, long O, int each) {
    for (long f = 0; f < FREQS && each == 2; f += 4)
        for (long i = 0; i < I; i += 8)
            wgrad_products(in + f * I + i, grad + 2 * f * O, job->sum + (f * I + i) * O, tiles, 4, 8, 1, I, O, 2);
    for (long f = 0; f < FREQS && each == 1; f++) {
        float *sum = job->sum + f * I * O;
        long o = 0;
        for (; o + 2 * LANES <= O; o += 2 * LANES)
            for (long i = 0; i < I; i += 4)
                wgrad_products(in + f * I + i, grad + f * O + o, sum + i * O + o, tiles, 1, 4, 2, I, O, 1);
        if (o < O)
            for (long i = 0; i < I; i += 8)
                wgrad_products(in + f * I + i, grad + f * O + o, sum + i * O + o, tiles, 1, 8, 1, I, O, 1);
    }
}

INLINE void wgrad_with(const wgrad_job *job, long I, long O, int each) {
    long largest = strip_lines(job->W), across = job->W / 2;
    float *grads = job->room + largest * across * tile_step(I);
    for (long y = 0; y < job->H / 2; y += largest) {
        long lines = job->H / 2 - y < largest ? job->H / 2 - y : largest;
        patches(job->in + 2 * y * (job->W + 2) * I, job->W, I, lines, job->room, 1);
        for (long r = 0; r < lines; r++)
            for (long c = 0; c < O; c += LANES)
                gradient_line(job->out + 2 * (y + r) * job->line + c, job->step, job->line, O, across,
                              grads + r * across * tile_step(O * each) + c, each);
        wgrad_strip(job, job->room, grads, lines * across, I, O, each);
    }
}

/* As conv_by_tiles. */
static void wgrad_by_tiles(const wgrad_job *job) {
    if (job->I == 8 && job->O == 8) wgrad_with(job, 8, 8, each_of(8));
    else if (job->O == 8) wgrad_with(job, job->I, 8, each_of(8));
    else if (job->I == 8 && job->O == 16) wgrad_with(job, 8, 16, 1);
    else if (job->I == 16 && job->O == 16) wgrad_with(job, 16, 16, 1);
    else if (job->I == 16 && job->O == 32) wgrad_with(job, 16, 32, 1);
    else if (job->I == 32 && job->O == 32) wgrad_with(job, 32, 32, 1);
    else wgrad_with(job, job->I, job->O, 1);
}

#endif
