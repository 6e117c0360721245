/* A seed's layer, forward and backward: convolution, group norm, ReLU, blended into its input, and the host's 2x2 max
 * pool where one follows; see descriptor.h for the data. */
#ifndef ESPER_SEED_H
#define ESPER_SEED_H

#include "group.h"

/* Saves nothing where conv is NULL. */
static void seed_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    for (long b = 0; b < s->batch; b++) {
        float *y = s->conv ? s->conv + b * image_floats(s) : t->y;
        float *mean = s->conv ? s->mean + b * P : t->rows + 2 * P, *rstd = s->conv ? s->rstd + b * P : t->rows + 3 * P;
        convolve(s, t, y, b);
        group_statistics(s, y, mean, rstd);
        gain_offset(t->rows, mean, rstd, s->scale, s->shift, s->out_channels);
        if (s->out) emit(s, t->rows, y, s->own_residual ? s->x + b * image_floats(s) : NULL, b);
    }
}

/* `factor` of the gradient of 8 channels at one pixel, into `to` or, where the layer sees x, to what is there. */
INLINE void add_residual(const descriptor *s, float *to, float factor, vec grad) {
    vec sum = factor * grad;
    if (!s->detached) sum += load(to);
    store(to, sum);
}

/* What reaches x beside the layer: all of the gradient, or (1 - alpha) of it where the layer is cut off from x; twice
 * the gradient where x went on as it was and the seed x + layer(x) got all of it as well. */
static void residual_gradient(const descriptor *s, long b) {
    long P = round_up(s->out_channels), W = s->width, from = b * out_floats(s);
    float *to = s->grad_x + b * image_floats(s);
    float factor = s->detached ? 1.0f - alpha_of(s) : s->through ? 2.0f : 1.0f;
    if (s->detached && has_rest(s)) zero(to, image_floats(s));
    for (long i = 0; i < out_floats(s) && !s->pooled; i += LANES)
        add_residual(s, to + i, factor, load(s->grad_out + from + i));
    for (long p = 0; p < out_pixels(s) && s->pooled; p++)
        for (long c = 0; c < P; c += LANES) {
            long at = from + p * P + c;
            ints place = saved_place(s->place + at);
            float *first = to + (p / (W / 2) * 2 * W + p % (W / 2) * 2) * P + c;
            for (int q = 0; q < 4; q++)
                add_residual(s, first + ((q >> 1) * W + (q & 1)) * P, factor, keep(place == q, load(s->grad_out + at)));
        }
}

static void seed_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    zero(s->grad_scale, s->out_channels);
    zero(s->grad_shift, s->out_channels);
    for (long b = 0; b < s->batch; b++) {
        const float *y = s->conv + b * image_floats(s), *rstd = s->rstd + b * P;
        start_rows(s, t, s->mean + b * P, rstd);
        gather(s, t, y, b);
        settle_group(s, t, rstd);
        spread(s, t, y, b);
        convolution_gradients(s, t, b);
        if (s->grad_x && s->own_residual) residual_gradient(s, b);
    }
    unpack_gradients(s, t);
}

#endif
