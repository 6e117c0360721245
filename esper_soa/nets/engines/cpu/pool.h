/* 2x2 max pooling of one image; ties and NaN as in torch. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "vec.h"

/* The largest of four neighbours of y [H, W, P], and which of the four it is (may be NULL). */
typedef struct {
    const float *y;
    float *peak;    /* [H / 2, W / 2, P] */
    uint8_t *place; /* as peak */
    long H, W, P;
} pool_job;

/* Where `next` takes over from `best`: the first of equals wins, a NaN wins, as in torch. */
INLINE i8 overtakes(v8 next, v8 best) { return (next > best) | (next != next); }

/* Which of the four, of 8 channels, in memory. */
INLINE void save_place(uint8_t *to, i8 place) { *(b8u *)to = __builtin_convertvector(place, b8); }
INLINE i8 saved_place(const uint8_t *from) { return __builtin_convertvector(*(const b8u *)from, i8); }

INLINE void pool_pixel(const pool_job *job, const float *y, long to) {
    v8 peak = load(y);
    i8 place = {0};
#pragma GCC unroll 3
    for (int q = 1; q < 4; q++) {
        v8 next = load(y + ((q >> 1) * job->W + (q & 1)) * job->P);
        i8 wins = overtakes(next, peak);
        peak = choose(wins, next, peak);
        place = choose_int(wins, q, place);
    }
    store(job->peak + to, peak);
    if (job->place) save_place(job->place + to, place);
}

static inline void pool_image(const pool_job *job) {
    for (long c = 0; c < job->P; c += LANES) {
        long to = c;
        for (long y = 0; y + 1 < job->H; y += 2)
            for (long x = 0; x + 1 < job->W; x += 2, to += job->P)
                pool_pixel(job, job->y + (y * job->W + x) * job->P + c, to);
    }
}

#endif
