/* Two small layers on the mean of an image: sigmoid(W2 relu(W1 m + b1) + b2), for attention and for gates. */
#ifndef ESPER_SQUEEZE_H
#define ESPER_SQUEEZE_H

#include <math.h>

#include "norm.h"

typedef struct {
    long inputs, hidden, outputs;
    const float *first, *first_bias, *second, *second_bias; /* first_bias may be NULL */
    float *mean, *units, *out; /* saved, [B, hidden] units; the others in whole vectors, zeros in those added */
    float *grad_first, *grad_first_bias, *grad_second, *grad_second_bias; /* added to */
} squeeze;

INLINE float *squeeze_mean(const squeeze *q, long b) { return q->mean + b * round_up(q->inputs); }
INLINE float *squeeze_out(const squeeze *q, long b) { return q->out + b * round_up(q->outputs); }

/* Image b, x [pixels, inputs in whole vectors]. */
static inline void squeeze_image(const squeeze *q, const float *x, long pixels, long b) {
    float *mean = squeeze_mean(q, b), *units = q->units + b * q->hidden, *out = squeeze_out(q, b);
    long P = round_up(q->inputs);
    for (long c = 0; c < P; c += LANES) store(mean + c, sum_pixels(x + c, pixels, P) / splat((float)pixels));
    for (long h = 0; h < q->hidden; h++) {
        float sum = q->first_bias ? q->first_bias[h] : 0.0f;
        for (long c = 0; c < q->inputs; c++) sum += q->first[h * q->inputs + c] * mean[c];
        units[h] = sum <= 0 ? 0.0f : sum;
    }
    for (long o = 0; o < q->outputs; o++) {
        float sum = q->second_bias[o];
        for (long h = 0; h < q->hidden; h++) sum += q->second[o * q->hidden + h] * units[h];
        out[o] = 1.0f / (1.0f + expf(-sum));
    }
    for (long o = q->outputs; o < round_up(q->outputs); o++) out[o] = 0.0f;
}

/* From the gradient of image b's outputs, those of the parameters and, into `grad_mean` [inputs], that of its mean. */
static inline void squeeze_image_back(const squeeze *q, const float *grad, float *grad_mean, long b) {
    const float *mean = squeeze_mean(q, b), *units = q->units + b * q->hidden, *out = squeeze_out(q, b);
    memset(grad_mean, 0, (size_t)q->inputs * sizeof(float));
    for (long o = 0; o < q->outputs; o++) {
        float gradient = grad[o] * out[o] * (1.0f - out[o]);
        q->grad_second_bias[o] += gradient;
        for (long h = 0; h < q->hidden; h++) q->grad_second[o * q->hidden + h] += gradient * units[h];
    }
    for (long h = 0; h < q->hidden; h++) {
        float sum = 0;
        for (long o = 0; o < q->outputs; o++) sum += grad[o] * out[o] * (1.0f - out[o]) * q->second[o * q->hidden + h];
        if (units[h] <= 0) continue;
        if (q->first_bias) q->grad_first_bias[h] += sum;
        for (long c = 0; c < q->inputs; c++) {
            q->grad_first[h * q->inputs + c] += sum * mean[c];
            grad_mean[c] += sum * q->first[h * q->inputs + c];
        }
    }
}

#endif
