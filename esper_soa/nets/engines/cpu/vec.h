/* Vectors of 8 floats, scratch memory and copies between the engine's layout and the kernels' own.
 *
 * The engine's activations are [B, H, W, n*C] in memory. The kernels' own images, and all between the layers of a
 * network that runs whole, are [H, W, P] of one network, P the channels rounded up to whole vectors, with zeros in the
 * channels added. Included by conv.h, head.c and, through those, by all that computes.
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

/* The first `count` lanes, the others zero; a whole vector where there are LANES or more. */
INLINE v8 load_some(const float *p, long count) {
    if (count >= LANES) return load(p);
    v8 v = splat(0);
    for (long c = 0; c < count; c++) v[c] = p[c];
    return v;
}
INLINE void store_some(float *p, v8 v, long count) {
    if (count >= LANES) {
        store(p, v);
        return;
    }
    for (long c = 0; c < count; c++) p[c] = v[c];
}

/* As copy_pixels; quick where `channels` is a constant. */
INLINE void copy_spaced(float *to, long to_step, const float *from, long from_step, long pixels, long channels) {
#pragma GCC unroll 4
    for (long p = 0; p < pixels; p++, to += to_step, from += from_step) {
        long c = 0;
        for (; c + LANES <= channels; c += LANES) store(to + c, load(from + c));
        for (; c < channels; c++) to[c] = from[c];
    }
}

/* `pixels` pixels of `channels` floats from one spacing to another. */
INLINE void copy_pixels(float *to, long to_step, const float *from, long from_step, long pixels, long channels) {
    if (to_step == channels && from_step == channels)
        memcpy(to, from, (size_t)(pixels * channels) * sizeof(float));
    else if (channels == 3) copy_spaced(to, to_step, from, from_step, pixels, 3);
    else if (channels == 8) copy_spaced(to, to_step, from, from_step, pixels, 8);
    else if (channels == 16) copy_spaced(to, to_step, from, from_step, pixels, 16);
    else if (channels == 32) copy_spaced(to, to_step, from, from_step, pixels, 32);
    else copy_spaced(to, to_step, from, from_step, pixels, channels);
}

/* An image of H x W pixels into the middle of a zeroed one with `pad` pixels around, `step` floats a pixel. */
INLINE void pad_image(float *to, long step, long pad, const float *from, long from_step, long H, long W, long channels) {
    for (long y = 0; y < H; y++)
        copy_pixels(to + ((y + pad) * (W + 2 * pad) + pad) * step, step, from + y * W * from_step, from_step, W, channels);
}

/* One value per channel, `channels` of them, into a zero-padded row. */
INLINE void pad_row(float *to, const float *from, long channels) {
    memcpy(to, from, (size_t)channels * sizeof(float));
    memset(to + channels, 0, (size_t)(round_up(channels) - channels) * sizeof(float));
}

#endif
