/* 2x2 max pooling of one image; ties and NaN as in torch. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "vec.h"

/* The value of y [H, W, P] where sign * y is largest among four, and which of the four it is (may be NULL).
 * Batch norm keeps or turns the order of a channel, as the sign of its scale says, so the pool can go before it. */
typedef struct {
    const float *y, *sign;
    float *peak; /* [H / 2, W / 2, P] */
    uint8_t *place;
    long H, W, P;
} pool_job;

/* The first of equals wins, a NaN wins, as in torch. */
INLINE void pool_pixel(const pool_job *job, const float *y, long to, v8 sign) {
    v8 peak = load(y), best = sign * peak;
    i8 place = {0};
#pragma GCC unroll 3
    for (int q = 1; q < 4; q++) {
        v8 next = load(y + ((q >> 1) * job->W + (q & 1)) * job->P), signed_next = sign * next;
        i8 wins = (signed_next > best) | (signed_next != signed_next);
        best = choose(wins, signed_next, best);
        peak = choose(wins, next, peak);
        place = choose_int(wins, q, place);
    }
    store(job->peak + to, peak);
    if (job->place) *(b8u *)(job->place + to) = __builtin_convertvector(place, b8);
}

static inline void pool_image(const pool_job *job) {
    for (long c = 0; c < job->P; c += LANES) {
        long to = c;
        v8 sign = load(job->sign + c);
        for (long y = 0; y + 1 < job->H; y += 2)
            for (long x = 0; x + 1 < job->W; x += 2, to += job->P)
                pool_pixel(job, job->y + (y * job->W + x) * job->P + c, to, sign);
    }
}

#endif
