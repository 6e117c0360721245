/* The host's block, forward and backward: convolution where there is a kernel, batch norm or bias, what is added, activation, 2x2 max pool; see
 * descriptor.h for the data. Pools follow a ReLU or nothing, and what is added no pool. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include <math.h>

#include "layer.h"

/* Whether layer.h's passes do what follows the norm. */
INLINE int is_plain(const descriptor *s) { return !s->host && s->activation <= IDENTITY; }

/* gain * y + offset at i, and what is added, of a vector of channels of image b. */
INLINE vec before_activation(const descriptor *s, const float *rows, const float *y, long b, long i) {
    vec z = load(rows) * load(y + i) + load(rows + round_up(s->out_channels));
    return s->host ? z + load(s->host + b * image_floats(s) + i) : z;
}

INLINE void activate_channels(const descriptor *s, const float *rows, const float *y, long b, int kind) {
    long P = round_up(s->out_channels);
    for (long c = 0; c < P; c += LANES)
        for (long i = c; i < image_floats(s); i += P)
            store(s->out + b * image_floats(s) + i, activated(kind, before_activation(s, rows + c, y, b, i)));
}

/* The gradient in front of the activation takes the place of that behind it. */
INLINE void activate_channels_back(const descriptor *s, const float *rows, const float *y, long b, int kind) {
    long P = round_up(s->out_channels);
    for (long c = 0; c < P; c += LANES)
        for (long i = c; i < image_floats(s); i += P) {
            float *grad = s->grad_out + b * image_floats(s) + i;
            store(grad, activated_back(kind, before_activation(s, rows + c, y, b, i), load(grad)));
        }
}

#define BY_ACTIVATION(loops) \
    switch (s->activation) { \
    case RECTIFY: loops(s, rows, y, b, RECTIFY); break; \
    case SILU: loops(s, rows, y, b, SILU); break; \
    case SIGMOID: loops(s, rows, y, b, SIGMOID); break; \
    case TANH: loops(s, rows, y, b, TANH); break; \
    case GELU: loops(s, rows, y, b, GELU); break; \
    case HARDSWISH: loops(s, rows, y, b, HARDSWISH); break; \
    case HARDSIGMOID: loops(s, rows, y, b, HARDSIGMOID); break; \
    case RELU6: loops(s, rows, y, b, RELU6); break; \
    default: loops(s, rows, y, b, IDENTITY); break; \
    }

static void activate(const descriptor *s, const float *rows, const float *y, long b) {
    if (is_plain(s)) emit(s, rows, y, NULL, b);
    else BY_ACTIVATION(activate_channels)
}

static void activate_back(const descriptor *s, const float *rows, const float *y, long b) {
    if (!is_plain(s) && s->activation != IDENTITY) BY_ACTIVATION(activate_channels_back)
}

/* Rows without a norm: a gain of 1, and the bias. */
static void plain_rows(const descriptor *s, float *rows) {
    long O = s->out_channels, P = round_up(O);
    zero(rows, 2 * P);
    for (long c = 0; c < O; c++) rows[GAIN * P + c] = 1.0f;
    if (s->shift) pad_row(rows + OFFSET * P, s->shift, O);
}

/* Where the convolution of image b stands: where it is saved or, for the moment, in t. */
static float *convolution_at(const descriptor *s, const work *t, long b) {
    if (!s->kernel) return (float *)s->x + b * image_floats(s);
    return s->conv ? s->conv + b * image_floats(s) : t->y + b % group_of(s) * image_floats(s);
}

/* Convolve the group that begins with image b, if one does. */
static void convolve_group(const descriptor *s, const work *t, long b) {
    long most = group_of(s), left = s->batch - b;
    if (b % most == 0) convolve_images(s, t, convolution_at(s, t, b), b, left < most ? left : most);
}

/* The same when it is met again. */
static const float *convolved(const descriptor *s, const work *t, long b) {
    if (!s->conv) convolve_group(s, t, b);
    return convolution_at(s, t, b);
}

/* A batch as validation has it; scale, which is ignored behind a convolution, and shift are those of all that is linear. */
static void block_infer(const descriptor *s, const work *t) {
    descriptor behind = *s; /* the pool, which comes first where all that follows rises */
    if (s->pooled) behind.height /= 2, behind.width /= 2, behind.pooled = 0;
    plain_rows(s, t->rows);
    if (!s->kernel && s->scale) pad_row(t->rows + GAIN * round_up(s->out_channels), s->scale, s->out_channels);
    for (long b = 0; b < s->batch; b++) {
        const float *y = convolved(s, t, b);
        if (s->pooled) pool_image(s, y, t->grad, NULL);
        activate(&behind, t->rows, s->pooled ? t->grad : y, b);
    }
}

/* Mean and deviation of the batch into the saved rows, and the running statistics moved with the unbiased variance. */
static void settle(const descriptor *s, const work *t) {
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < round_up(s->out_channels); c++) {
        s->mean[c] = (float)t->sum[c];
        s->rstd[c] = (float)(1.0 / sqrt(t->moment[c] / count + s->eps));
    }
    for (long c = 0; c < s->out_channels; c++) {
        float *mean = s->running_mean + c, *var = s->running_var + c;
        *mean = (float)((1.0 - s->momentum) * *mean + s->momentum * t->sum[c]);
        *var = (float)((1.0 - s->momentum) * *var + s->momentum * t->moment[c] / (count - 1.0));
    }
    if (s->batches) *s->batches += 1.0f;
}

static void block_train(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    ready_sums(s, t);
    for (long b = 0; b < s->batch && s->scale; b++) {
        convolve_group(s, t, b);
        add_moments(t->sum, t->moment, b, convolution_at(s, t, b), pixels, P);
    }
    if (s->scale) {
        settle(s, t);
        gain_offset(t->rows, s->mean, s->rstd, s->scale, s->shift, s->out_channels);
    } else plain_rows(s, t->rows);
    for (long b = 0; b < s->batch; b++) {
        if (!s->scale && s->conv) convolve_group(s, t, b);
        activate(s, t->rows, convolved(s, t, b), b);
    }
}

/* The rows of pass one. */
static void ready_rows(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    if (s->scale) start_rows(s, t, s->mean, s->rstd);
    else {
        plain_rows(s, t->rows);
        memcpy(t->rows + FLOW * P, t->rows + GAIN * P, (size_t)P * sizeof(float));
    }
}

/* The rows of pass two, and the gradients of scale and shift. */
static void settle_back(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < s->out_channels && s->scale; c++) {
        double rstd = s->rstd[c], gain = t->rows[GAIN * P + c];
        t->rows[SLOPE * P + c] = (float)(-gain * t->moment[c] * rstd * rstd / count);
        t->rows[LEVEL * P + c] = (float)(-gain * t->sum[c] / count);
        s->grad_scale[c] = (float)(t->moment[c] * rstd);
    }
    for (long c = 0; c < s->out_channels && s->shift; c++) s->grad_shift[c] = (float)t->sum[c];
}

static void block_backward(const descriptor *s, const work *t) {
    descriptor own = *s;
    if (!is_plain(s)) own.linear = 1; /* behind activate_back */
    if (!s->conv) ready_forward(s, t);
    ready_rows(s, t);
    for (long b = 0; b < s->batch; b++) {
        const float *y = s->pooled ? NULL : convolved(s, t, b);
        activate_back(s, t->rows, y, b);
        gather(&own, t, y, b);
    }
    settle_back(s, t);
    for (long b = 0, first = 0; b < s->batch; b++) {
        spread(&own, t, convolved(s, t, b), b);
        if ((b + 1) % group_of(s) && b + 1 < s->batch) continue;
        group_gradients(s, t, first, b + 1 - first);
        first = b + 1;
    }
    unpack_gradients(s, t);
}

#endif
