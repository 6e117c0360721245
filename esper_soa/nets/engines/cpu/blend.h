/* How a host takes on a seed s = x + r, given its residual r or, where REPLACED, s: x + alpha r, x + alpha g r with a gate
 * g per image, or x (1 + alpha tanh r); or not at all, while the seed learns behind it. See nets/blend.py. */
#ifndef ESPER_JOIN_H
#define ESPER_JOIN_H

#include "activation.h"
#include "work.h"

/* The factor of image b's residual that is added. */
INLINE float factor_of(const descriptor *s, long b) { return *s->alpha * (s->flags & GATED ? *squeeze_out(&s->q, b) : 1); }

/* A vector of the residual at i. */
INLINE vec residual_at(const descriptor *s, long i) {
    vec r = load(s->x + i);
    return s->flags & REPLACED ? r - load(s->host + i) : r;
}

static void blend_forward(const descriptor *s, const work *t) {
    if (!s->out) return; /* the host goes on with what it had */
    long numel = image_floats(s);
    for (long b = 0; b < s->batch; b++) {
        long at = b * numel;
        const float *x = s->host;
        if (s->flags & GATED) squeeze_image(&s->q, x + at, (s->height * s->width), b);
        vec factor = splat(factor_of(s, b));
        if (s->flags & MULTIPLIED)
            for (long i = at; i < at + numel; i += LANES)
                store(s->out + i, load(x + i) * (splat(1) + factor * hyperbolic_tangent(residual_at(s, i))));
        else
            for (long i = at; i < at + numel; i += LANES) store(s->out + i, load(x + i) + factor * residual_at(s, i));
    }
}

/* The residual of a seed that replaces x falls as x rises, unless that x is cut off. */
static void multiplied_back(const descriptor *s, long b) {
    long numel = image_floats(s), at = b * numel;
    int falling = s->flags & REPLACED && !(s->flags & DETACHED);
    vec factor = splat(*s->alpha);
    for (long i = at; i < at + numel; i += LANES) {
        vec grad = load(s->grad_out + i), tangent = hyperbolic_tangent(residual_at(s, i));
        vec inner = factor * load(s->host + i) * (splat(1) - tangent * tangent) * grad;
        vec outer = (splat(1) + factor * tangent) * grad;
        store(s->grad_x + i, inner);
        store(s->grad_host + i, falling ? outer - inner : outer);
    }
}

/* x + factor r: where the seed is cut off or replaces x, (1 - factor) of the gradient reaches x; where it is cut off, none
 * through a gate. */
static void added_back(const descriptor *s, long b, float *grad_mean) {
    long numel = image_floats(s), at = b * numel;
    int cut = s->flags & DETACHED;
    float factor = factor_of(s, b);
    vec gate[2] = {splat(0), splat(0)}, kept = splat(cut || s->flags & REPLACED ? 1.0f - factor : 1.0f);
    for (long i = at; i < at + numel; i += LANES) {
        vec grad = load(s->grad_out + i);
        gate[i / LANES & 1] += grad * residual_at(s, i);
        store(s->grad_x + i, splat(factor) * grad);
        store(s->grad_host + i, kept * grad);
    }
    if (!(s->flags & GATED)) return;
    float part[LANES];
    store(part, gate[0] + gate[1]);
    for (int left = LANES / 2; left; left /= 2)
        for (int l = 0; l < left; l++) part[l] = part[2 * l] + part[2 * l + 1];
    float sum = *s->alpha * part[0];
    squeeze_image_back(&s->q, &sum, grad_mean, b);
    for (long p = 0; p < (s->height * s->width) && !cut; p++)
        for (long c = 0; c < round_up(s->out_channels); c += LANES) {
            float *to = s->grad_host + at + p * round_up(s->out_channels) + c;
            store(to, load(to) + load(grad_mean + c) / splat((float)(s->height * s->width)));
        }
}

/* Behind a host that went on with x, the seed and x both get the gradient, and x the seed's own x in x + r again. */
static void through_back(const descriptor *s, long b) {
    long numel = image_floats(s), at = b * numel;
    vec factor = splat(s->flags & (DETACHED | REPLACED) ? 1.0f : 2.0f);
    for (long i = at; i < at + numel; i += LANES) {
        vec grad = load(s->grad_out + i);
        store(s->grad_x + i, grad);
        store(s->grad_host + i, factor * grad);
    }
}

static void blend_backward(const descriptor *s, const work *t) {
    zero(t->rows, round_up(s->out_channels));
    for (long b = 0; b < s->batch; b++)
        if (s->flags & THROUGH) through_back(s, b);
        else if (s->flags & MULTIPLIED) multiplied_back(s, b);
        else added_back(s, b, t->rows);
}

#endif
