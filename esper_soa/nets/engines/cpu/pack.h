/* Weights [O, I, k, k] of one network as the convolutions read them, and their gradient on its way back.
 *
 * Packed weights are [F, I, P], P = O in whole vectors: F = k*k taps, or the 16 products of winograd.h where that takes
 * the images, which reads I in whole vectors too. What belongs to channels added is zero.
 */
#ifndef ESPER_PACK_H
#define ESPER_PACK_H

#include "conv.h"

/* G g G' of a 3x3 kernel. */
INLINE void to_products(const float *g, float *to) {
    float half[4][3];
    for (int x = 0; x < 3; x++) {
        float ends = g[x] + g[6 + x];
        half[0][x] = g[x];
        half[1][x] = 0.5f * (ends + g[3 + x]);
        half[2][x] = 0.5f * (ends - g[3 + x]);
        half[3][x] = g[6 + x];
    }
    for (int r = 0; r < 4; r++) {
        float ends = half[r][0] + half[r][2];
        to[4 * r] = half[r][0];
        to[4 * r + 1] = 0.5f * (ends + half[r][1]);
        to[4 * r + 2] = 0.5f * (ends - half[r][1]);
        to[4 * r + 3] = half[r][2];
    }
}

/* G' m G: the gradient of a 3x3 kernel from that of its products. */
INLINE void from_products(const float *m, float *to) {
    float half[3][4];
    for (int s = 0; s < 4; s++) {
        float sum = 0.5f * (m[4 + s] + m[8 + s]);
        half[0][s] = m[s] + sum;
        half[1][s] = 0.5f * (m[4 + s] - m[8 + s]);
        half[2][s] = sum + m[12 + s];
    }
    for (int r = 0; r < 3; r++) {
        float sum = 0.5f * (half[r][1] + half[r][2]);
        to[3 * r] = half[r][0] + sum;
        to[3 * r + 1] = 0.5f * (half[r][1] - half[r][2]);
        to[3 * r + 2] = sum + half[r][3];
    }
}

/* Spread the packed form of one channel pair's kernel over `to`, `gap` floats apart; `turn` by half a turn. */
INLINE void pack_kernel(float *to, long gap, const float *kernel, long k, int tiles, int turn) {
    long taps = k * k;
    if (!tiles) {
        for (long tap = 0; tap < taps; tap++) to[tap * gap] = kernel[turn ? taps - 1 - tap : tap];
        return;
    }
    float turned[9], packed[FREQS];
    for (int tap = 0; tap < 9; tap++) turned[tap] = kernel[turn ? 8 - tap : tap];
    to_products(turned, packed);
    for (int f = 0; f < FREQS; f++) to[f * gap] = packed[f];
}

/* For the forward pass: [F, I, P]; `to` is zeroed. */
static inline void pack_forward(float *to, const float *weight, long O, long I, long k, int tiles) {
    long P = round_up(O), gap = read_channels(I, tiles) * P;
    for (long o = 0; o < O; o++)
        for (long i = 0; i < I; i++, weight += k * k) pack_kernel(to + i * P + o, gap, weight, k, tiles, 0);
}

/* For the gradient of the input: [F, O, Q], kernels turned round, channels swapped, Q = I in whole vectors. */
static inline void pack_backward(float *to, const float *weight, long O, long I, long k, int tiles) {
    long Q = round_up(I), gap = read_channels(O, tiles) * Q;
    for (long o = 0; o < O; o++)
        for (long i = 0; i < I; i++, weight += k * k) pack_kernel(to + o * Q + i, gap, weight, k, tiles, 1);
}

/* Packed sum [F, I, P] -> gradient [O, I, k, k]. */
static inline void unpack_gradient(float *to, const float *sum, long O, long I, long k, int tiles) {
    long gap = read_channels(I, tiles) * round_up(O);
    for (long o = 0; o < O; o++)
        for (long i = 0; i < I; i++, to += k * k) {
            const float *from = sum + i * round_up(O) + o;
            if (!tiles) {
                for (long tap = 0; tap < k * k; tap++) to[tap] = from[tap * gap];
                continue;
            }
            float products[FREQS];
            for (int f = 0; f < FREQS; f++) products[f] = from[f * gap];
            from_products(products, to);
        }
}

#endif
