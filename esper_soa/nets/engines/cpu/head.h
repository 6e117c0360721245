/* What stands behind the last block: global mean, linear classifier, cross-entropy, correct; and the way back. */
#ifndef ESPER_HEAD_H
#define ESPER_HEAD_H

#include <math.h>

#include "vec.h"

typedef struct {
    long batch, channels, pixels, classes;
    const float *x;             /* [B, pixels, P], P the channels in whole vectors with zeros in those added */
    const float *weight, *bias; /* [K, C], [K]; may be NULL: no bias, and the mean itself */
    const int64_t *labels;      /* [B] */
    float *mean;                /* saved [B, P], over the pixels */
    float *gradient;               /* saved [B, K]: softmax less the label's one, over B: the gradient of the logits */
    float *grad_x, *grad_weight, *grad_bias;
} head;

static inline float dot(const float *a, const float *b, long count) {
    float part[8] = {0}, sum = 0;
    long i = 0;
    for (; i + 8 <= count; i += 8)
        for (int l = 0; l < 8; l++) part[l] += a[i + l] * b[i + l];
    for (; i < count; i++) sum += a[i] * b[i];
    return sum + (((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7])));
}

/* Logits [K] of one sample x [pixels, P]; `mean` [P] is over its pixels. */
static inline void head_logits(const head *h, const float *x, float *mean, float *logits) {
    long C = h->channels, P = round_up(C);
    for (long c = 0; c < P; c += LANES) {
        vec sum = splat(0);
        for (long p = 0; p < h->pixels; p++) sum += load(x + p * P + c);
        store(mean + c, sum / splat((float)h->pixels));
    }
    if (!h->weight) memcpy(logits, mean, (size_t)h->classes * sizeof(float));
    for (long k = 0; k < h->classes && h->weight; k++) logits[k] = (h->bias ? h->bias[k] : 0.0f) + dot(h->weight + k * C, mean, C);
}

/* The first of the largest; a NaN counts as larger, as in torch. */
static inline long head_largest(const float *v, long count) {
    long best = 0;
    for (long i = 1; i < count; i++)
        if (v[i] > v[best] || (v[i] != v[i] && v[best] == v[best])) best = i;
    return best;
}

/* Loss of one sample whose logits stand in `gradient`, which become their gradient. */
static inline double head_cross_entropy(const head *h, float *gradient, int64_t label) {
    float top = gradient[head_largest(gradient, h->classes)], own = gradient[label] - top, sum = 0;
    for (long k = 0; k < h->classes; k++) {
        gradient[k] = expf(gradient[k] - top);
        sum += gradient[k];
    }
    for (long k = 0; k < h->classes; k++) gradient[k] = (gradient[k] / sum - (float)(k == label)) / (float)h->batch;
    return log((double)sum) - (double)own;
}

/* Mean loss over the batch, and correct. */
static inline void head_forward(const head *h, float *loss, int64_t *correct) {
    long P = round_up(h->channels), K = h->classes;
    double sum = 0;
    *correct = 0;
    for (long b = 0; b < h->batch; b++) {
        float *gradient = h->gradient + b * K;
        head_logits(h, h->x + b * h->pixels * P, h->mean + b * P, gradient);
        *correct += head_largest(gradient, K) == h->labels[b];
        sum += head_cross_entropy(h, gradient, h->labels[b]);
    }
    *loss = (float)(sum / (double)h->batch);
}

/* One sample's part in the gradients. */
static inline void sample_back(const head *h, long b) {
    long C = h->channels, P = round_up(C);
    float *to = h->grad_x + b * h->pixels * P; /* of all pixels, at the first */
    const float *mean = h->mean + b * P, *gradient = h->gradient + b * h->classes;
    zero(to, P);
    if (!h->weight) memcpy(to, gradient, (size_t)h->classes * sizeof(float));
    for (long k = 0; k < h->classes && h->weight; k++) {
        float *grad = h->grad_weight + k * C;
        const float *weight = h->weight + k * C;
        if (h->bias) h->grad_bias[k] += gradient[k];
        for (long c = 0; c < C; c++) {
            grad[c] += gradient[k] * mean[c];
            to[c] += gradient[k] * weight[c];
        }
    }
    for (long c = 0; c < C; c++) to[c] /= (float)h->pixels;
    for (long p = 1; p < h->pixels; p++) memcpy(to + p * P, to, (size_t)P * sizeof(float));
}

static inline void head_backward(const head *h) {
    if (h->weight) zero(h->grad_weight, h->classes * h->channels);
    if (h->bias) zero(h->grad_bias, h->classes);
    for (long b = 0; b < h->batch; b++) sample_back(h, b);
}

#endif
