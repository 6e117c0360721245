/* Same-padded convolution of one image of one network, and the gradient of its weights.
 *
 * An image is [H + 2p, W + 2p, I] with a zero border. There are two ways: tap by tap (direct.h), and 3x3 kernels by
 * tiles of 2x2 outputs (winograd.h). `by_tiles` picks, for the forms of packed weights as well (pack.h).
 */
#ifndef ESPER_CONV_H
#define ESPER_CONV_H

#include "pair.h"

#define FREQS 16 /* products per channel pair and tile */

/* One image's convolution: what is read, where it goes. Weights are packed (pack.h), O in whole vectors. */
typedef struct {
    const float *in;     /* padded image, in_step floats a pixel */
    const float *weight; /* packed */
    float *out;          /* first pixel, first channel */
    long H, W, I, O, k;
    long in_step, step; /* floats between pixels of the input and of the output */
    float *room; /* scratch */
} conv_job;

/* The gradient of the weights from one image: packed sum += padded input (x) gradient of the output. */
typedef struct {
    const float *in;  /* padded image, as in the forward pass */
    const float *out; /* gradient of the output: first pixel, first channel */
    float *sum;
    long H, W, I, O, k;
    long in_step, step, line; /* floats between pixels of `in`, and between pixels and lines of `out` */
    float *room;              /* scratch */
} wgrad_job;

/* part += J numbers from `in` on, `each` in a vector, x V vectors. An odd last one fills both halves. */
INLINE void add_products(vec *part, const float *in, const vec *g, int J, int V, int each) {
#pragma GCC unroll 16
    for (int j = 0; j * each < J; j++) {
        vec value = splat_each(in + j * each, j * each + 1 < J, each);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) part[j * V + v] += value * g[v];
    }
}

/* Add a register tile of J input channels x V vectors of output channels to a packed sum whose rows have O floats. */
INLINE void add_tile(float *sum, const vec *part, int J, int V, long O, int each) {
#pragma GCC unroll 16
    for (int j = 0; j * each < J; j++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            float *to = sum + j * each * O + v * LANES;
            long apart = j * each + 1 < J ? O : 0;
            store_each(to, apart, load_each(to, apart, each) + part[j * V + v], each);
        }
}

/* Whether a convolution of images with I channels goes by tiles: they have to be whole, and vectors well filled. */
INLINE int by_tiles(long H, long W, long I, long k) { return k == 3 && I > WHOLE / 2 && H % 2 == 0 && W % 2 == 0; }
/* Whether the kernels by pairs (pair.h) take it: 3x3 ones of images of three colours or by tiles, halves of lines. */
INLINE int in_pairs(long H, long W, long I, long k, long in_step) {
    return W % 4 == 0 && ((k == 3 && I == 3 && in_step == 3) || by_tiles(H, W, I, k));
}
/* Channels that it reads: by tiles those that fill vectors too. */
INLINE long read_channels(long I, int tiles) { return tiles ? round_up(I) : I; }

#define STRIP 16 /* tiles of a strip, where lines allow */
#define GAP 16   /* floats between tiles, so that they do not meet in one set of the cache */

INLINE long strip_lines(long W) { return W / 2 < STRIP ? STRIP / (W / 2) : 1; }
INLINE long tile_step(long channels) { return FREQS * channels + GAP; }

/* Floats of scratch for images of H x W with up to `channels` channels on either side. */
INLINE long tiles_room(long H, long W, long channels) {
    return H % 2 || W % 2 ? 0 : 2 * strip_lines(W) * (W / 2) * tile_step(channels > WHOLE ? channels : 2 * WHOLE);
}

#endif
