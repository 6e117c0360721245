/* Weights [O, I, k, k] of one network as the convolutions read them, and their gradient on its way back.
 *
 * Packed weights are [F, I, P], P = O in whole vectors: F = k*k taps, or the products of winograd.h where that takes the
 * images, which reads I in whole vectors too. What belongs to channels added is zero.
 */
#ifndef ESPER_PACK_H
#define ESPER_PACK_H

#include "conv.h"

/* The same number of WHOLE kernels, one of each. */
typedef float kernel_vec __attribute__((vector_size(4 * WHOLE)));
typedef float kernel_vec_loose __attribute__((vector_size(4 * WHOLE), aligned(4), may_alias));

/* G of three numbers, `gap` apart. */
INLINE void kernel_points(const kernel_vec *g, long gap, kernel_vec *to, int m) {
    kernel_vec a = g[0], b = g[gap], c = g[2 * gap];
    if (m == 2) {
        to[0] = a, to[1] = 0.5f * ((a + c) + b), to[2] = 0.5f * ((a + c) - b), to[3] = c;
        return;
    }
    const float near = NEAR * NEAR, far = FAR * FAR;
    const float first = 1 / (2 * near * (near - far)), second = 1 / (2 * far * (far - near));
    kernel_vec near_even = a + near * c, far_even = a + far * c;
    to[0] = 1 / (near * far) * a;
    to[1] = first * (near_even + NEAR * b), to[2] = first * (near_even - NEAR * b);
    to[3] = second * (far_even + FAR * b), to[4] = second * (far_even - FAR * b);
    to[5] = c;
}

/* G g G' of 3x3 kernels. */
INLINE void to_products(const kernel_vec *g, kernel_vec *to, int m) {
    kernel_vec half[3][LONGEST];
    for (int x = 0; x < 3; x++) kernel_points(g + x, 3, half[x], m);
    for (int r = 0; r < m + 2; r++) kernel_points(half[0] + r, LONGEST, to + (m + 2) * r, m);
}

/* G' of m + 2 numbers, `gap` apart, to three. */
INLINE void gradient_of_points(const kernel_vec *p, long gap, kernel_vec *to, int m) {
    kernel_vec near_sum = p[gap] + p[2 * gap], near_gap = p[gap] - p[2 * gap];
    if (m == 2) {
        to[0] = p[0] + 0.5f * near_sum, to[1] = 0.5f * near_gap, to[2] = 0.5f * near_sum + p[3 * gap];
        return;
    }
    const float near = NEAR * NEAR, far = FAR * FAR;
    const float first = 1 / (2 * near * (near - far)), second = 1 / (2 * far * (far - near));
    kernel_vec far_sum = p[3 * gap] + p[4 * gap], far_gap = p[3 * gap] - p[4 * gap];
    to[0] = 1 / (near * far) * p[0] + (first * near_sum + second * far_sum);
    to[1] = NEAR * first * near_gap + FAR * second * far_gap;
    to[2] = p[5 * gap] + (near * first * near_sum + far * second * far_sum);
}

/* G' p G: the gradient of 3x3 kernels from that of their products. */
INLINE void from_products(const kernel_vec *p, kernel_vec *to, int m) {
    kernel_vec half[LONGEST][3];
    for (int c = 0; c < m + 2; c++) gradient_of_points(p + c, m + 2, half[c], m);
    for (int r = 0; r < 3; r++) gradient_of_points(half[0] + r, 3, to + 3 * r, m);
}

INLINE long packed_taps(long k, int tiles) { return tiles ? freqs(tiles) : k * k; }

/* A number of the first `count` of kernels that lie `apart` floats apart, zero for the others. */
INLINE kernel_vec gather_kernels(const float *from, long apart, long count) {
    kernel_vec found = {0};
    for (int l = 0; l < WHOLE && l < count; l++) found[l] = from[l * apart];
    return found;
}

/* Packed form [F, R, C in whole vectors] of the kernels of channels r and c, that begin at weight + r * by_r + c * by_c;
 * `turn` by half a turn. `to` is zeroed. */
INLINE void pack(float *to, const float *weight, long R, long C, long by_r, long by_c, long k, int tiles, int turn) {
    long taps = k * k, gap = read_channels(R, tiles) * round_up(C);
    for (long r = 0; r < R; r++)
        for (long c = 0; c < C; c += WHOLE) {
            const float *from = weight + r * by_r + c * by_c;
            kernel_vec_loose *at = (void *)(to + r * round_up(C) + c);
            kernel_vec g[9], packed[LONGEST * LONGEST];
            for (long tap = 0; tap < taps; tap++) {
                kernel_vec number = gather_kernels(from + (turn ? taps - 1 - tap : tap), by_c, C - c);
                if (tiles) g[tap] = number;
                else at[tap * gap / WHOLE] = number;
            }
            if (tiles == 2) to_products(g, packed, 2);
            else if (tiles) to_products(g, packed, 4);
            for (long f = 0; f < packed_taps(k, tiles) && tiles; f++) at[f * gap / WHOLE] = packed[f];
        }
}

/* For the forward pass: [F, I, P]. */
static inline void pack_forward(float *to, const float *weight, long O, long I, long k, int tiles) {
    pack(to, weight, I, O, k * k, I * k * k, k, tiles, 0);
}

/* For the gradient of the input: [F, O, Q], kernels turned round, channels swapped, Q = I in whole vectors. */
static inline void pack_backward(float *to, const float *weight, long O, long I, long k, int tiles) {
    pack(to, weight, O, I, I * k * k, k * k, k, tiles, 1);
}

/* Of a depthwise convolution, weights [C, 1, k, k]: [k * k, P], by half a turn where `turn`. `to` is zeroed. */
static inline void pack_depth(float *to, const float *weight, long C, long k, int turn) {
    long taps = k * k;
    for (long c = 0; c < C; c++)
        for (long tap = 0; tap < taps; tap++) to[tap * round_up(C) + c] = weight[c * taps + (turn ? taps - 1 - tap : tap)];
}

/* Packed sum [F, I, P] -> gradient [O, I, k, k]. */
static inline void unpack_gradient(float *to, const float *sum, long O, long I, long k, int tiles) {
    long taps = k * k, gap = read_channels(I, tiles) * round_up(O);
    for (long o = 0; o < O; o += WHOLE)
        for (long i = 0; i < I; i++) {
            const kernel_vec_loose *from = (const void *)(sum + i * round_up(O) + o);
            kernel_vec g[9], packed[LONGEST * LONGEST];
            for (long f = 0; f < packed_taps(k, tiles) && tiles; f++) packed[f] = from[f * gap / WHOLE];
            if (tiles == 2) from_products(packed, g, 2);
            else if (tiles) from_products(packed, g, 4);
            for (long tap = 0; tap < taps; tap++)
                for (int l = 0; l < WHOLE && o + l < O; l++)
                    to[((o + l) * I + i) * taps + tap] = tiles ? g[tap][l] : from[tap * gap / WHOLE][l];
        }
}

#endif
