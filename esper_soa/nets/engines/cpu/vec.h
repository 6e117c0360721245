/* Vectors of 8 floats, scratch memory and padded images.
 *
 * All between the layers of a network is [H, W, P] of an image, P the channels rounded up to whole vectors, with zeros
 * in the channels added. Included by conv.h, head.c and, through those, by all that computes.
 */
#ifndef ESPER_VEC_H
#define ESPER_VEC_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint8_t b8 __attribute__((vector_size(8)));
typedef uint8_t b8u __attribute__((vector_size(8), aligned(1), may_alias));

INLINE v8 load(const float *p) { return *(const v8u *)p; }
INLINE void store(float *p, v8 v) { *(v8u *)p = v; }
INLINE v8 splat(float f) { return (v8){f, f, f, f, f, f, f, f}; }
/* Lanes of v where mask is all ones, else zero. */
INLINE v8 keep(i8 mask, v8 v) { return (v8)((i8)v & mask); }
INLINE v8 choose(i8 mask, v8 yes, v8 no) { return (v8)(((i8)yes & mask) | ((i8)no & ~mask)); }
INLINE i8 choose_int(i8 mask, int yes, i8 no) { return (mask & yes) | (no & ~mask); }
/* ReLU as torch has it: NaN stays NaN. */
INLINE v8 relu(v8 v) { return keep(~(v <= splat(0)), v); }

INLINE long round_up(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Under AddressSanitizer nothing may reach behind the first `bytes` of `room` at `at`. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GUARDED 1
INLINE void guard(char *at, size_t bytes, size_t room) {
    ASAN_UNPOISON_MEMORY_REGION(at, room);
    ASAN_POISON_MEMORY_REGION(at + bytes, room - bytes);
}
#else
#define GUARDED 0
INLINE void guard(char *at, size_t bytes, size_t room) { (void)at, (void)bytes, (void)room; }
#endif

/* Zeroed scratch for `count` floats on a cache line; NULL where memory is out. */
static inline float *scratch(long count) {
    size_t bytes = (size_t)count * sizeof(float), room = (bytes + 63) / 64 * 64 + 64;
    float *memory = aligned_alloc(64, room);
    if (memory) {
        memset(memory, 0, room);
        guard((char *)memory, bytes, room);
    }
    return memory;
}

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
