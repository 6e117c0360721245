/* The host's block, forward and backward: convolution, batch norm, ReLU, 2x2 max pool; see descriptor.h for the data. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include <math.h>

#include "layer.h"

/* A batch as validation has it; scale is ignored, shift is the convolution's bias. */
static void block_infer(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    descriptor behind = *s; /* the pool, which comes first where all that follows rises */
    if (s->pooled) behind.height /= 2, behind.width /= 2, behind.pooled = 0;
    for (long c = 0; c < P; c++) t->rows[c] = 1.0f;
    pad_row(t->rows + P, s->shift, s->out_channels);
    for (long b = 0; b < s->batch; b++) {
        convolve(s, t, t->y, b);
        if (s->pooled) pool_image(s, t->y, t->grad, NULL);
        emit(&behind, t->rows, s->pooled ? t->grad : t->y, NULL, b);
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
}

/* Where the convolution of image b stands: where it is saved or, for the moment, in t. */
static float *convolution_at(const descriptor *s, const work *t, long b) {
    return s->conv ? s->conv + b * image_floats(s) : t->y;
}

/* The same when it is met again. */
static const float *convolved(const descriptor *s, const work *t, long b) {
    if (!s->conv) convolve(s, t, t->y, b);
    return convolution_at(s, t, b);
}

static void block_train(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    ready_sums(s, t);
    for (long b = 0; b < s->batch; b++) {
        convolve(s, t, convolution_at(s, t, b), b);
        add_moments(t->sum, t->moment, b, convolution_at(s, t, b), pixels, P);
    }
    settle(s, t);
    gain_offset(t->rows, s->mean, s->rstd, s->scale, s->shift, s->out_channels);
    for (long b = 0; b < s->batch; b++) emit(s, t->rows, convolved(s, t, b), NULL, b);
}

/* The rows of pass two, and the gradients of scale and shift. */
static void settle_back(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < s->out_channels; c++) {
        double rstd = s->rstd[c], gain = t->rows[GAIN * P + c];
        t->rows[SLOPE * P + c] = (float)(-gain * t->moment[c] * rstd * rstd / count);
        t->rows[LEVEL * P + c] = (float)(-gain * t->sum[c] / count);
        s->grad_scale[c] = (float)(t->moment[c] * rstd);
        s->grad_shift[c] = (float)t->sum[c];
    }
}

static void block_backward(const descriptor *s, const work *t) {
    if (!s->conv) ready_forward(s, t);
    start_rows(s, t, s->mean, s->rstd);
    for (long b = 0; b < s->batch; b++) gather(s, t, s->pooled ? NULL : convolved(s, t, b), b);
    settle_back(s, t);
    for (long b = 0; b < s->batch; b++) {
        spread(s, t, convolved(s, t, b), b);
        convolution_gradients(s, t, b);
    }
    unpack_gradients(s, t);
}

#endif
