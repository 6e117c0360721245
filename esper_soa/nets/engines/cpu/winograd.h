/* 3x3 convolutions of one padded image by F(m x m, 3x3): (m + 2)^2 products per channel pair and m x m outputs instead
 * of 9 m^2; m is 2 or 4, a constant in all that is called.
 *
 * Y = A' [(G g G') * (B' d B)] A of a patch d of m + 2 pixels a side (S. Winograd, 1980; as in A. Lavin and S. Gray,
 * "Fast Algorithms for Convolutional Neural Networks", 2016); the gradient of the weights is
 * G' [(A dY A') * (B' d B)] G. Images are worked through in strips of tiles that stay in the caches. Every output is
 * summed in the same order whatever the strips.
 */
#ifndef ESPER_WINOGRAD_H
#define ESPER_WINOGRAD_H

#include "kernels.h"

/* B' of a line of a patch, each number a vector. */
INLINE void patch_points(const vec *d, vec *to, int m) {
    if (m == 2) {
        to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
        return;
    }
    const float near = NEAR * NEAR, far = FAR * FAR;
    vec even = d[4] - far * d[2], odd = d[3] - far * d[1];
    to[0] = near * far * d[0] + (d[4] - (near + far) * d[2]);
    to[1] = even + NEAR * odd, to[2] = even - NEAR * odd;
    even = d[4] - near * d[2], odd = d[3] - near * d[1];
    to[3] = even + FAR * odd, to[4] = even - FAR * odd;
    to[5] = near * far * d[1] + (d[5] - (near + far) * d[3]);
}

INLINE void patch_column(const float *in, long line, vec *to, long apart, int each, int m) {
    vec d[LONGEST];
#pragma GCC unroll 6
    for (int r = 0; r < m + 2; r++) d[r] = load_each(in + r * line, apart, each);
    patch_points(d, to, m);
}

/* B' d B of a vector of channels of a line of `count` patches or pairs; a patch shares two columns with the next. */
INLINE void patch_line(const float *in, long line, long I, long count, float *to, int each, int m) {
    long apart = m * count * I, row = I * each;
    vec col[LONGEST][LONGEST];
    patch_column(in, line, col[0], apart, each, m);
    patch_column(in + I, line, col[1], apart, each, m);
    for (long t = 0; t < count; t++, in += m * I, to += tile_step(row, m)) {
#pragma GCC unroll 6
        for (int c = 2; c < m + 2; c++) patch_column(in + c * I, line, col[c], apart, each, m);
#pragma GCC unroll 6
        for (int r = 0; r < m + 2; r++) {
            vec d[LONGEST], points[LONGEST];
#pragma GCC unroll 6
            for (int c = 0; c < m + 2; c++) d[c] = col[c][r];
            patch_points(d, points, m);
#pragma GCC unroll 6
            for (int c = 0; c < m + 2; c++) store(to + ((m + 2) * r + c) * row, points[c]);
            col[0][r] = d[m], col[1][r] = d[m + 1];
        }
    }
}

/* All patches of `lines` lines of tiles of a padded image [H + 2, W + 2, I]. */
INLINE void patches(const float *in, long W, long I, long lines, float *to, int each, int m) {
    long line = (W + 2) * I, count = W / m / each;
    if (each == 1 && I % LANES) {
        KERNELS_8.patches(in, W, I, lines, to, m);
        return;
    }
    for (long y = 0; y < lines; y++, in += m * line, to += count * tile_step(I * each, m))
        for (long c = 0; c < I * each; c += LANES) patch_line(in + c / each, line, I, count, to + c, each, m);
}

/* The same for the wider kernels. */
static void common_patches(const float *in, long W, long I, long lines, float *to, int m) {
    if (I == 8 && m == 4) patches(in, W, 8, lines, to, 1, 4);
    else if (m == 4) patches(in, W, I, lines, to, 1, 4);
    else if (I == 8) patches(in, W, 8, lines, to, 1, 2);
    else patches(in, W, I, lines, to, 1, 2);
}

/* Products of P tiles or pairs at one frequency with V vectors of output channels: from [tile][F][I * each] to
 * [tile][F][V * LANES]. */
INLINE void product_tile(const float *in, const float *weight, long O, float *out, int P, int V, long I, int each,
                         int m) {
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
            vec x = splat_each(in + p * tile_step(I * each, m), 1, each);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sum[p * V + v] += x * w[v];
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) store(out + p * tile_step(V * LANES, m) + v * LANES, sum[p * V + v]);
}

INLINE void products(const float *in, const float *weight, long O, float *out, long tiles, int V, long I, int each,
                     int m) {
    for (long f = 0; f < freqs(m); f++, in += I * each, weight += I * O, out += V * LANES) {
        long t = 0;
#define TILES(P) \
    for (; t + (P) <= tiles; t += (P)) \
        product_tile(in + t * tile_step(I * each, m), weight, O, out + t * tile_step(V * LANES, m), P, V, I, each, m);
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

/* A' of a line of products, each number a vector. */
INLINE void tile_points(const vec *d, vec *to, int m) {
    if (m == 2) {
        to[0] = (d[0] + d[1]) + d[2], to[1] = (d[1] - d[2]) - d[3];
        return;
    }
    vec near = d[1] + d[2], far = d[3] + d[4], nearer = NEAR * (d[1] - d[2]), farther = FAR * (d[3] - d[4]);
    to[0] = (d[0] + near) + far;
    to[1] = nearer + farther;
    to[2] = NEAR * NEAR * near + FAR * FAR * far;
    to[3] = d[5] + (NEAR * NEAR * nearer + FAR * FAR * farther);
}

/* A' p A of a vector of channels of a line of `count` tiles or pairs, products p [tile][F][C] to pixels. */
INLINE void tile_line(const float *in, long C, long count, float *out, long step, long line, int each, int m) {
    long apart = m * count * step;
    for (long t = 0; t < count; t++, in += tile_step(C, m), out += m * step) {
        vec half[LONGEST][LONGEST];
#pragma GCC unroll 6
        for (int c = 0; c < m + 2; c++) {
            vec d[LONGEST];
#pragma GCC unroll 6
            for (int r = 0; r < m + 2; r++) d[r] = load(in + ((m + 2) * r + c) * C);
            tile_points(d, half[c], m);
        }
#pragma GCC unroll 4
        for (int r = 0; r < m; r++) {
            vec d[LONGEST], pixels[LONGEST];
#pragma GCC unroll 6
            for (int c = 0; c < m + 2; c++) d[c] = half[c][r];
            tile_points(d, pixels, m);
#pragma GCC unroll 4
            for (int c = 0; c < m; c++) store_each(out + r * line + c * step, apart, pixels[c], each);
        }
    }
}

/* Output channels o and on, V vectors of them, of a strip. */
INLINE void strip_outputs(const conv_job *job, const float *in, float *room, long y, long lines, long o, int V, long I,
                          int each, int m) {
    long across = job->W / m / each, line = job->W * job->step, row = across * tile_step(V * LANES, m);
    products(in, job->weight + o, job->O, room, job->images * lines * across, V, I, each, m);
    for (long i = 0; i < job->images; i++)
        for (long r = 0; r < lines; r++, room += row)
            for (int v = 0; v < V; v++)
                tile_line(room + v * LANES, V * LANES, across,
                          job->out + i * job->out_image + m * (y + r) * line + o + v * LANES, job->step, line, each, m);
}

INLINE void tiles_with(const conv_job *job, long I, int each, int m) {
    long largest = strip_lines(job->W, m), W = job->W;
    float *out = job->room + largest * (W / m) * tile_step(I, m);
    for (long y = 0; y < job->H / m; y += largest) {
        long lines = job->H / m - y < largest ? job->H / m - y : largest, o = 0;
        for (long i = 0; i < job->images; i++)
            patches(job->in + i * job->in_image + m * y * (W + 2) * I, W, I, lines,
                    job->room + i * lines * (W / m / each) * tile_step(I * each, m), each, m);
        for (; o + 2 * LANES <= job->O; o += 2 * LANES) strip_outputs(job, job->room, out, y, lines, o, 2, I, 1, m);
        if (o < job->O) strip_outputs(job, job->room, out, y, lines, o, 1, I, each, m);
    }
}

/* Common channel counts have code of their own. */
static void conv_by_tiles(const conv_job *job) {
    if (job->tiles == 2) {
        if (each_of(job->O) == 2) tiles_with(job, job->I, 2, 2);
        else tiles_with(job, job->I, 1, 2);
    } else if (each_of(job->O) == 2 && job->I == 8) tiles_with(job, 8, 2, 4);
    else if (each_of(job->O) == 2 && job->I == 16) tiles_with(job, 16, 2, 4);
    else if (each_of(job->O) == 2) tiles_with(job, job->I, 2, 4);
    else if (job->I == 8) tiles_with(job, 8, 1, 4);
    else if (job->I == 16) tiles_with(job, 16, 1, 4);
    else if (job->I == 32) tiles_with(job, 32, 1, 4);
    else if (job->I == 64) tiles_with(job, 64, 1, 4);
    else tiles_with(job, job->I, 1, 4);
}

/* A of a line of a tile's gradient, each number a vector. */
INLINE void gradient_points(const vec *d, vec *to, int m) {
    if (m == 2) {
        to[0] = d[0], to[1] = d[0] + d[1], to[2] = d[0] - d[1], to[3] = -d[1];
        return;
    }
    vec even = d[0] + NEAR * NEAR * d[2], odd = NEAR * (d[1] + NEAR * NEAR * d[3]);
    to[0] = d[0], to[1] = even + odd, to[2] = even - odd;
    even = d[0] + FAR * FAR * d[2], odd = FAR * (d[1] + FAR * FAR * d[3]);
    to[3] = even + odd, to[4] = even - odd, to[5] = d[3];
}

/* A dY A' of a vector of channels of a line of `count` tiles: pixels to [tile][F][O * each]. */
INLINE void gradient_line(const float *grad, long step, long line, long O, long count, float *to, int each, int m) {
    long row = O * each;
    for (long t = 0; t < count; t++, grad += m * step, to += tile_step(row, m)) {
        vec col[LONGEST][LONGEST];
#pragma GCC unroll 4
        for (int c = 0; c < m; c++) {
            vec d[LONGEST];
#pragma GCC unroll 4
            for (int r = 0; r < m; r++) d[r] = repeat_each(grad + r * line + c * step, each);
            gradient_points(d, col[c], m);
        }
#pragma GCC unroll 6
        for (int r = 0; r < m + 2; r++) {
            vec d[LONGEST], points[LONGEST];
#pragma GCC unroll 4
            for (int c = 0; c < m; c++) d[c] = col[c][r];
            gradient_points(d, points, m);
#pragma GCC unroll 6
            for (int c = 0; c < m + 2; c++) store(to + ((m + 2) * r + c) * row, points[c]);
        }
    }
}

/* J input channels x V vectors of output channels at F frequencies, summed over the tiles of a strip. */
INLINE void wgrad_products(const float *in, const float *grad, float *sum, long tiles, int F, int J, int V, long I,
                           long O, int each, int m) {
    int parts = J / each * V;
    vec part[16];
#pragma GCC unroll 16
    for (int t = 0; t < F * parts; t++) part[t] = splat(0);
#pragma GCC unroll 2
    for (long t = 0; t < tiles; t++, in += tile_step(I, m), grad += tile_step(O * each, m))
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

INLINE void wgrad_strip(const wgrad_job *job, const float *in, const float *grad, long tiles, long I, long O, int each,
                        int m) {
    for (long f = 0; f < freqs(m) && each == 2; f += 4)
        for (long i = 0; i < I; i += 8)
            wgrad_products(in + f * I + i, grad + 2 * f * O, job->sum + (f * I + i) * O, tiles, 4, 8, 1, I, O, 2, m);
    for (long f = 0; f < freqs(m) && each == 1; f++) {
        float *sum = job->sum + f * I * O;
        long o = 0;
        for (; o + 2 * LANES <= O; o += 2 * LANES)
            for (long i = 0; i < I; i += 4)
                wgrad_products(in + f * I + i, grad + f * O + o, sum + i * O + o, tiles, 1, 4, 2, I, O, 1, m);
        if (o < O)
            for (long i = 0; i < I; i += 8)
                wgrad_products(in + f * I + i, grad + f * O + o, sum + i * O + o, tiles, 1, 8, 1, I, O, 1, m);
    }
}

INLINE void wgrad_with(const wgrad_job *job, long I, long O, int each, int m) {
    long largest = strip_lines(job->W, m), across = job->W / m;
    float *grads = job->room + largest * across * tile_step(I, m);
    for (long y = 0; y < job->H / m; y += largest) {
        long lines = job->H / m - y < largest ? job->H / m - y : largest;
        for (long i = 0; i < job->images; i++) {
            patches(job->in + i * job->in_image + m * y * (job->W + 2) * I, job->W, I, lines,
                    job->room + i * lines * across * tile_step(I, m), 1, m);
            for (long r = 0; r < lines; r++)
                for (long c = 0; c < O; c += LANES)
                    gradient_line(job->out + i * job->out_image + m * (y + r) * job->line + c, job->step, job->line, O,
                                  across, grads + (i * lines + r) * across * tile_step(O * each, m) + c, each, m);
        }
        wgrad_strip(job, job->room, grads, job->images * lines * across, I, O, each, m);
    }
}

/* As conv_by_tiles. */
static void wgrad_by_tiles(const wgrad_job *job) {
    if (job->tiles == 2) {
        if (job->O == 8) wgrad_with(job, job->I, 8, each_of(8), 2);
        else wgrad_with(job, job->I, job->O, 1, 2);
    } else if (job->I == 8 && job->O == 8) wgrad_with(job, 8, 8, each_of(8), 4);
    else if (job->O == 8) wgrad_with(job, job->I, 8, each_of(8), 4);
    else if (job->I == 8 && job->O == 16) wgrad_with(job, 8, 16, 1, 4);
    else if (job->I == 16 && job->O == 16) wgrad_with(job, 16, 16, 1, 4);
    else if (job->I == 16 && job->O == 32) wgrad_with(job, 16, 32, 1, 4);
    else if (job->I == 32 && job->O == 32) wgrad_with(job, 32, 32, 1, 4);
    else wgrad_with(job, job->I, job->O, 1, 4);
}

#endif
