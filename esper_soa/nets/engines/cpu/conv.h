/* Convolution of one image of one network, and the gradient of its weights.
 *
 * An image is read with its zero border; H and W are those of the output. There are two ways: tap by tap (direct.h), and 3x3 kernels by
 * tiles of outputs (winograd.h). `tile_side` picks, for the forms of packed weights as well (pack.h).
 */
#ifndef ESPER_CONV_H
#define ESPER_CONV_H

#include "pair.h"

/* One image's convolution: what is read, where it goes. Weights are packed (pack.h), O in whole vectors. */
typedef struct {
    const float *in;     /* padded image, in_step floats a pixel */
    const float *weight; /* packed */
    float *out;          /* first pixel, first channel */
    long H, W, I, O, k;
    long in_step, step; /* floats between pixels of the input and of the output */
    long in_line, stride; /* floats between lines of the input; its pixels between those of two outputs */
    int tiles, depthwise; /* see tile_side and depth.h */
    long images, in_image, out_image; /* by tiles: images of a strip, and floats between those of input and output */
    float *room; /* scratch */
} conv_job;

/* The gradient of the weights from one image: packed sum += padded input (x) gradient of the output. */
typedef struct {
    const float *in;  /* padded image, as in the forward pass */
    const float *out; /* gradient of the output: first pixel, first channel */
    float *sum;
    long H, W, I, O, k;
    long in_step, step, line; /* floats between pixels of `in`, and between pixels and lines of `out` */
    long in_line, stride;     /* as above */
    int tiles, depthwise;
    long images, in_image, out_image;
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

/* Outputs of a tile a side (winograd.h), for images with I channels: 4, or 2 where pairs of such would not fill a line;
 * 0 where a convolution goes tap by tap, as tiles have to be whole and vectors well filled. */
INLINE int tile_side(long H, long W, long I, long k) {
    if (k != 3 || I <= WHOLE / 2 || (H | W) % 2) return 0;
    return (H | W) % 8 ? 2 : 4;
}
/* Whether the kernels by pairs (pair.h) take it: 3x3 ones of images of three colours or by tiles, halves of lines. */
INLINE int in_pairs(long W, long k, long in_step, long stride, int tiles) {
    return W % 4 == 0 && ((k == 3 && in_step == 3 && stride == 1) || tiles);
}
/* Channels that it reads: by tiles those that fill vectors too. */
INLINE long read_channels(long I, int tiles) { return tiles ? round_up(I) : I; }

/* Points of F(4x4, 3x3) beside 0 and infinity: these and their negatives. Errors are a third of those by 1 and 2. */
#define NEAR 0.75f
#define FAR 1.5f
#define LONGEST 6 /* pixels of a patch a side */
#define STRIP 16  /* tiles of a strip, where lines allow */
#define GAP 16    /* floats between tiles, so that they do not meet in one set of the cache */

INLINE long freqs(int m) { return (m + 2) * (m + 2); } /* products per channel pair and tile */
INLINE long strip_lines(long W, int m) { return W / m < STRIP ? STRIP / (W / m) : 1; }
INLINE long tile_step(long channels, int m) { return freqs(m) * channels + GAP; }

/* Floats of scratch for images of H x W with up to `channels` channels on either side. */
INLINE long tiles_room(long H, long W, long channels) {
    long most = 0, wide = channels > WHOLE ? channels : 2 * WHOLE;
    for (int m = 2; m <= tile_side(H, W, wide, 3); m += 2) {
        long floats = 2 * strip_lines(W, m) * (W / m) * tile_step(wide, m);
        most = floats > most ? floats : most;
    }
    return most;
}

#endif
