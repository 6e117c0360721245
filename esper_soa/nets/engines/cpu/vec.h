/* Vectors and padded images.
 *
 * All between the layers of a network is [H, W, P] of an image, P the channels rounded up to whole vectors, with zeros
 * in the channels added. Included by all that
 * computes.
 */
#ifndef ESPER_VEC_H
#define ESPER_VEC_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Floats in a vector. Channels are whole vectors of WHOLE floats in memory; a file that is compiled with more LANES
 * takes layers whose channels fill those too. A lane is a channel, so LANES do not change what is computed. */
#ifndef LANES
#define LANES 8
#endif
#define WHOLE 8
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t bytes_loose __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vec load(const float *p) { return *(const vec_loose *)p; }
INLINE void store(float *p, vec v) { *(vec_loose *)p = v; }
#if LANES == 16
INLINE vec splat(float f) { return (vec){f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f}; }
#else
INLINE vec splat(float f) { return (vec){f, f, f, f, f, f, f, f}; }
#endif
/* Lanes of v where mask is all ones, else zero. */
INLINE vec keep(ints mask, vec v) { return (vec)((ints)v & mask); }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE ints choose_int(ints mask, int yes, ints no) { return (mask & yes) | (no & ~mask); }
/* ReLU as torch has it: NaN stays NaN. */
INLINE vec relu(vec v) { return keep(~(v <= splat(0)), v); }

INLINE long round_up(long count) { return (count + WHOLE - 1) / WHOLE * WHOLE; }

INLINE void zero(float *at, long count) { memset(at, 0, (size_t)count * sizeof(float)); }

/* An image [H, W, step] into the middle of a zeroed one with `pad` pixels around. */
INLINE void pad_image(float *to, long pad, const float *from, long H, long W, long step) {
    for (long y = 0; y < H; y++)
        memcpy(to + ((y + pad) * (W + 2 * pad) + pad) * step, from + y * W * step, (size_t)(W * step) * sizeof(float));
}

/* One value per channel, `channels` of them, into a zero-padded row. */
INLINE void pad_row(float *to, const float *from, long channels) {
    memcpy(to, from, (size_t)channels * sizeof(float));
    memset(to + channels, 0, (size_t)(round_up(channels) - channels) * sizeof(float));
}

#endif
