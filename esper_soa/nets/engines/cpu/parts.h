/* The parts of seeds that are not one convolution with group norm (seed.h). */
#ifndef ESPER_PARTS_H
#define ESPER_PARTS_H

#include "group.h"
#include "squeeze_excite.h"

/* Convolution and ReLU, or without the ReLU where linear. */
static void relu_forward(const descriptor *s, const work *t) {
    for (long b = 0; b < s->batch; b++) {
        float *out = s->out + b * image_floats(s);
        convolve(s, t, out, b);
        for (long i = 0; !s->linear && i < image_floats(s); i += LANES) store(out + i, relu(load(out + i)));
    }
}

/* The gradient of image b where ReLU let the value pass, or all of it without one, into the padded gradient. */
static void behind_zero(const descriptor *s, const work *t, long b) {
    long P = round_up(s->out_channels), line = (s->width + s->kernel - 1) * P;
    const float *out = s->out + b * image_floats(s), *grad = s->grad_out + b * image_floats(s);
    float *to = padded_grad(s, t, b);
    for (long y = 0; y < s->height; y++)
        for (long i = 0; i < s->width * P; i += LANES) {
            long at = y * s->width * P + i;
            vec g = load(grad + at);
            store(to + y * line + i, s->linear ? g : keep(~(load(out + at) <= splat(0)), g));
        }
}

static void relu_backward(const descriptor *s, const work *t) {
    for (long b = 0; b < s->batch; b++) {
        behind_zero(s, t, b);
        convolution_gradients(s, t, b);
    }
    unpack_gradients(s, t);
}

/* Depthwise convolution; weight [C, 1, k, k]. */
static void depth_forward(const descriptor *s, const work *t) {
    ready_forward(s, t);
    for (long b = 0; b < s->batch; b++) convolve(s, t, s->out + b * image_floats(s), b);
}

static void depth_backward(const descriptor *s, const work *t) {
    ready_backward(s, t);
    for (long b = 0; b < s->batch; b++) {
        const float *grad = s->grad_out + b * image_floats(s);
        pad_image(t->grad, s->kernel / 2, grad, s->height, s->width, round_up(s->out_channels));
        convolution_gradients(s, t, b);
    }
    unpack_gradients(s, t);
}

/* factor * (norm(x) - x), a group norm, plus x where own_residual; factor = alpha, and the gradient of its arc hyperbolic
 * tangent is grad_weight. */
static void normed_forward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C), pixels = s->height * s->width;
    float *rows = t->rows;
    vec factor = splat(*s->alpha);
    for (long b = 0; b < s->batch; b++) {
        const float *x = s->x + b * image_floats(s);
        float *out = s->out + b * image_floats(s);
        group_statistics(s, x, s->mean + b * P, s->rstd + b * P);
        gain_offset(rows, s->mean + b * P, s->rstd + b * P, s->scale, s->shift, C);
        for (long p = 0; p < pixels; p++)
            for (long c = 0; c < P; c += LANES) {
                vec value = load(x + p * P + c);
                vec added = factor * (load(rows + c) * value + load(rows + P + c) - value);
                store(out + p * P + c, s->own_residual ? value + added : added);
            }
    }
}

/* The factor's gradient from the sums over an image: the sum of dz * (gain x + offset - x). */
static double share_gradient(const work *t, long C) {
    long P = round_up(C);
    double sum = 0;
    for (long c = 0; c < C; c++) {
        double gain = t->rows[GAIN * P + c], offset = t->rows[OFFSET * P + c], mean = t->rows[MEAN * P + c];
        sum += (gain - 1.0) * (t->moment[c] + mean * t->sum[c]) + offset * t->sum[c];
    }
    return sum;
}

static void normed_image_back(const descriptor *s, const work *t, long b) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    const float *x = s->x + b * image_floats(s), *grad = s->grad_out + b * image_floats(s), *rows = t->rows;
    start_rows(s, t, s->mean + b * P, s->rstd + b * P);
    gather(s, t, x, b);
    *s->grad_weight += (float)(share_gradient(t, s->out_channels) * (1.0 - (double)*s->alpha * *s->alpha));
    settle_group(s, t, s->rstd + b * P);
    for (long p = 0; p < pixels && s->grad_x; p++)
        for (long c = 0; c < P; c += LANES) {
            vec away = load(x + p * P + c) - load(rows + MEAN * P + c);
            vec flow = load(rows + FLOW * P + c) - splat(*s->alpha - (s->own_residual ? 1.0f : 0.0f));
            vec dx = flow * load(grad + p * P + c) + load(rows + SLOPE * P + c) * away + load(rows + LEVEL * P + c);
            store(s->grad_x + b * image_floats(s) + p * P + c, dx);
        }
}

static void normed_backward(const descriptor *s, const work *t) {
    ready_sums(s, t);
    *s->grad_weight = 0.0f;
    zero(s->grad_scale, s->out_channels);
    zero(s->grad_shift, s->out_channels);
    for (long b = 0; b < s->batch; b++) normed_image_back(s, t, b);
}

/* What of x is not given, as it is there already. */
INLINE vec taken_off(const descriptor *s) { return splat(s->own_residual ? 0.0f : 1.0f); }

/* (a - 1) * x, one a per channel from the squeeze, or a * x where own_residual. */
static void squeezed_forward(const descriptor *s, const work *t) {
    const squeeze *q = &s->q;
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    for (long b = 0; b < s->batch; b++) {
        const float *x = s->x + b * image_floats(s), *a = squeeze_out(q, b);
        squeeze_image(q, x, pixels, b);
        for (long p = 0; p < pixels; p++)
            for (long c = 0; c < P; c += LANES)
                store(s->out + b * image_floats(s) + p * P + c, (load(a + c) - taken_off(s)) * load(x + p * P + c));
    }
}

static void squeezed_backward(const descriptor *s, const work *t) {
    const squeeze *q = &s->q;
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    float *gradient = t->rows, *grad_mean = gradient + P;
    zero(gradient, 2 * P);
    for (long b = 0; b < s->batch; b++) {
        const float *x = s->x + b * image_floats(s), *grad = s->grad_out + b * image_floats(s), *a = squeeze_out(q, b);
        for (long c = 0; c < P; c += LANES) {
            vec part[2] = {splat(0), splat(0)};
            for (long p = 0; p < pixels; p++) part[p & 1] += load(x + p * P + c) * load(grad + p * P + c);
            store(gradient + c, part[0] + part[1]);
        }
        squeeze_image_back(q, gradient, grad_mean, b);
        for (long p = 0; p < pixels && s->grad_x; p++)
            for (long c = 0; c < P; c += LANES) {
                vec dx = (load(a + c) - taken_off(s)) * load(grad + p * P + c) + load(grad_mean + c) / splat((float)pixels);
                store(s->grad_x + b * image_floats(s) + p * P + c, dx);
            }
    }
}

#endif
