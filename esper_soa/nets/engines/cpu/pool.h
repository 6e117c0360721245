/* 2x2 max pooling of one image; ties and NaN as in torch. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "sheet.h"

/* The largest of four neighbours of y [H, W, P], and which of the four it is (may be NULL). */
typedef struct {
    const float *y;
    float *peak;    /* [H / 2, W / 2, P] */
    uint8_t *place; /* as peak */
    long H, W, P;
} pool_job;

/* Where `next` takes over from `best`: the first of equals wins, a NaN wins, as in torch. */
INLINE ints overtakes(vec next, vec best) { return (next > best) | (next != next); }

/* Which of the four, of 8 channels, in memory. */
INLINE void save_place(uint8_t *to, ints place) { *(bytes_loose *)to = __builtin_convertvector(place, bytes); }
INLINE ints saved_place(const uint8_t *from) { return __builtin_convertvector(*(const bytes_loose *)from, ints); }

INLINE void pool_pixel(const pool_job *job, const float *y, long to) {
    vec peak = load(y);
    ints place = {0};
#pragma GCC unroll 3
    for (int q = 1; q < 4; q++) {
        vec next = load(y + ((q >> 1) * job->W + (q & 1)) * job->P);
        ints wins = overtakes(next, peak);
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

/* On its own, where a seed stands between ReLU and pool: x to out, and place where there is one. */
static int pool_forward(const sheet *s) {
    long P = round_up(s->out_channels), pixels = s->height * s->width * P, out = (s->height / 2) * (s->width / 2) * P;
    for (long b = 0; b < s->batch; b++) {
        pool_job job = {.y = s->x + b * pixels, .peak = s->out + b * out,
                        .place = s->place ? s->place + b * out : NULL, .H = s->height, .W = s->width, .P = P};
        pool_image(&job);
    }
    return 0;
}

/* The gradient of two lines of x from one line of the pool's. */
static void unpool_line(const sheet *s, const float *grad, const uint8_t *place, float *to) {
    long P = round_up(s->out_channels), line = s->width * P;
    for (long x = 0; x + 1 < s->width; x += 2, grad += P, place += P, to += 2 * P)
        for (long c = 0; c < P; c += LANES) {
            ints where = saved_place(place + c);
            for (int q = 0; q < 4; q++) store(to + (q >> 1) * line + (q & 1) * P + c, keep(where == q, load(grad + c)));
        }
}

static int pool_backward(const sheet *s) {
    long P = round_up(s->out_channels), lines = s->batch * (s->height / 2);
    long out = s->width / 2 * P, in = 2 * s->width * P;
    for (long l = 0; l < lines; l++) unpool_line(s, s->grad_out + l * out, s->place + l * out, s->grad_x + l * in);
    return 0;
}

#endif
