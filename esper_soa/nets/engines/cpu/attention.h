/* Attention of all tokens to all, by heads: softmax(factor q k') v; x is [q k v] of all heads side by side, see
 * descriptor.h. */
#ifndef ESPER_ATTENTION_H
#define ESPER_ATTENTION_H

#include "activation.h"
#include "pool.h"
#include "tokens.h"

/* One head of an image: T tokens of D numbers, lines of E and S floats. */
typedef struct {
    long T, D, E, S, Q;        /* Q: floats between tokens of x */
    const float *query;        /* keys and values stand C and 2 C numbers behind */
    float *shares, *gradients; /* [T, S]: of the softmax */
    float *turned;             /* [D, S] */
    float *taken[3], *to[3];   /* [T, E]: query, key and value, and gradients or what is given */
} attention_head;

static inline attention_head head_at(const descriptor *s, const work *t, long b, long h) {
    long T = s->height * s->width, D = s->out_channels / s->groups, E = whole(D), S = whole(T);
    attention_head a = {.T = T, .D = D, .E = E, .S = S, .Q = s->x_pixel, .query = s->x + b * in_floats(s) + h * D};
    a.shares = t->room, a.gradients = a.shares + T * S, a.turned = a.gradients + T * S;
    for (int i = 0; i < 3; i++) a.taken[i] = a.turned + E * S + i * T * E, a.to[i] = a.taken[i] + 3 * T * E;
    return a;
}

/* Lines of D numbers, `apart` floats apart, to lines of E. */
static inline void gather_lines(const attention_head *a, const float *from, long apart, float *to) {
    zero(to, a->T * a->E);
    for (long i = 0; i < a->T; i++) memcpy(to + i * a->E, from + i * apart, (size_t)a->D * sizeof(float));
}
static inline void scatter_lines(const attention_head *a, const float *from, long apart, float *to) {
    for (long i = 0; i < a->T; i++) memcpy(to + i * apart, from + i * a->E, (size_t)a->D * sizeof(float));
}

/* The same to columns. */
static inline void turn_lines(const attention_head *a, const float *from, long apart) {
    zero(a->turned, a->D * a->S);
    for (long i = 0; i < a->T; i++)
        for (long d = 0; d < a->D; d++) a->turned[d * a->S + i] = from[i * apart + d];
}

/* The largest of the first T numbers of a line. */
INLINE float largest_of(const float *line, long T) {
    vec most = splat(line[0]);
    float part[LANES];
    for (long j = 0; j < T; j += LANES) {
        vec next = load(line + j);
        if (j + LANES > T) next = choose(lanes_within(T - j), next, most);
        most = choose(overtakes(next, most), next, most);
    }
    store(part, most);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) part[l] = part[l + half] > part[l] ? part[l + half] : part[l];
    return part[0];
}

/* The shares of a line of scores. */
INLINE void soften(const attention_head *a, float *line, float factor) {
    float largest = largest_of(line, a->T);
    vec sum = splat(0);
    for (long j = 0; j < a->S; j += LANES) {
        vec share = exponential(splat(factor) * (load(line + j) - splat(largest)));
        if (j + LANES > a->T) share = keep(lanes_within(a->T - j), share);
        sum += share, store(line + j, share);
    }
    vec all = splat(1.0f / sum_lanes(sum));
    for (long j = 0; j < a->S; j += LANES) store(line + j, load(line + j) * all);
}

static void share_out(const descriptor *s, const attention_head *a) {
    turn_lines(a, a->query + s->out_channels, a->Q);
    mix_pixels(a->turned, a->shares, a->S, a->T, a->D, a->query, a->Q, 1, NULL);
    for (long i = 0; i < a->T; i++) soften(a, a->shares + i * a->S, (float)s->eps);
}

static void attend_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    zero(s->out, s->batch * image_floats(s));
    for (long b = 0; b < s->batch; b++)
        for (long h = 0; h < s->groups; h++) {
            attention_head a = head_at(s, t, b, h);
            share_out(s, &a);
            gather_lines(&a, a.query + 2 * s->out_channels, a.Q, a.taken[2]);
            mix_pixels(a.taken[2], a.to[0], a.E, a.T, a.T, a.shares, a.S, 1, NULL);
            scatter_lines(&a, a.to[0], P, s->out + b * image_floats(s) + h * a.D);
        }
}

/* The gradients of scores, from those of shares. */
INLINE void harden(const attention_head *a, long i, float factor) {
    float *grad = a->gradients + i * a->S;
    const float *share = a->shares + i * a->S;
    vec sum = splat(0);
    for (long j = 0; j < a->S; j += LANES) sum += load(grad + j) * load(share + j);
    vec all = splat(sum_lanes(sum));
    for (long j = 0; j < a->S; j += LANES) store(grad + j, splat(factor) * load(share + j) * (load(grad + j) - all));
}

static void attend_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), C = s->out_channels;
    if (!s->grad_x) return;
    zero(s->grad_x, s->batch * in_floats(s));
    for (long b = 0; b < s->batch; b++)
        for (long h = 0; h < s->groups; h++) {
            attention_head a = head_at(s, t, b, h);
            const float *grad = s->grad_out + b * image_floats(s) + h * a.D;
            share_out(s, &a);
            gather_lines(&a, grad, P, a.taken[2]);
            mix_pixels(a.taken[2], a.to[2], a.E, a.T, a.T, a.shares, 1, a.S, NULL);
            turn_lines(&a, a.query + 2 * C, a.Q);
            mix_pixels(a.turned, a.gradients, a.S, a.T, a.D, grad, P, 1, NULL);
            for (long i = 0; i < a.T; i++) harden(&a, i, (float)s->eps);
            for (int i = 0; i < 2; i++) gather_lines(&a, a.query + i * C, a.Q, a.taken[i]);
            mix_pixels(a.taken[1], a.to[0], a.E, a.T, a.T, a.gradients, a.S, 1, NULL);
            mix_pixels(a.taken[0], a.to[1], a.E, a.T, a.T, a.gradients, 1, a.S, NULL);
            for (int i = 0; i < 3; i++)
                scatter_lines(&a, a.to[i], a.Q, s->grad_x + b * in_floats(s) + i * C + h * a.D);
        }
}

#endif
