/* 2x2 max pooling; ties and NaN as in torch. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "work.h"

/* Where `next` takes over from `best`: the first of equals wins, a NaN wins, as in torch. */
INLINE ints overtakes(vec next, vec best) { return (next > best) | (next != next); }

/* Which of the four, of a vector of channels, in memory. */
INLINE void save_place(uint8_t *to, ints place) { *(bytes_loose *)to = __builtin_convertvector(place, bytes); }
INLINE ints saved_place(const uint8_t *from) { return __builtin_convertvector(*(const bytes_loose *)from, ints); }

/* The largest of four neighbours of one image y [H, W, P], and which of the four it is (may be NULL). */
static inline void pool_image(const descriptor *s, const float *y, float *peak, uint8_t *place) {
    long P = round_up(s->out_channels), W = s->width, to = 0;
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2)
            for (long c = 0; c < P; c += LANES, to += LANES) {
                const float *first = y + (r * W + x) * P + c;
                vec best = load(first);
                ints at = {0};
#pragma GCC unroll 3
                for (int q = 1; q < 4; q++) {
                    vec next = load(first + ((q >> 1) * W + (q & 1)) * P);
                    ints wins = overtakes(next, best);
                    best = choose(wins, next, best), at = choose_int(wins, q, at);
                }
                store(peak + to, best);
                if (place) save_place(place + to, at);
            }
}

/* On its own, where a seed stands between ReLU and pool: x to out, and place where there is one. */
static void pool_forward(const descriptor *s, const work *t) {
    for (long b = 0; b < s->batch; b++)
        pool_image(s, s->x + b * image_floats(s), s->out + b * out_floats(s), s->place ? s->place + b * out_floats(s) : NULL);
}

/* Whether pixels are in no window. */
INLINE int has_rest(const descriptor *s) { return s->pooled && (s->height | s->width) & 1; }

static void pool_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), W = s->width, from = 0;
    if (has_rest(s)) zero(s->grad_x, s->batch * image_floats(s));
    for (long l = 0; l < s->batch * (s->height / 2); l++)
        for (long x = 0; x + 1 < W; x += 2)
            for (long c = 0; c < P; c += LANES, from += LANES) {
                ints place = saved_place(s->place + from);
                float *to = s->grad_x + l / (s->height / 2) * image_floats(s) + (l % (s->height / 2) * 2 * W + x) * P + c;
                for (int q = 0; q < 4; q++)
                    store(to + ((q >> 1) * W + (q & 1)) * P, keep(place == q, load(s->grad_out + from)));
            }
}

#endif
