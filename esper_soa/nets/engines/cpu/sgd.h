/* Clipping and SGD with momentum of a row of parameters. */
#ifndef ESPER_SGD_H
#define ESPER_SGD_H

#include <math.h>

typedef struct {
    double max_norm, eps; /* of a row's norm; 0 for no limit */
    double rate, momentum, decay;
} sgd;

static inline double norm_of(const float *v, long count) {
    double part[8] = {0}, sum = 0;
    for (long i = 0; i < count; i++) part[i & 7] += (double)v[i] * (double)v[i];
    for (int l = 0; l < 8; l++) sum += part[l];
    return sqrt(sum);
}

/* The factor of a gradient that clipping leaves. */
static inline float sgd_factor(const sgd *d, const float *grad, long width) {
    double factor = d->max_norm > 0 ? d->max_norm / (norm_of(grad, width) + d->eps) : 1.0;
    return factor > 1.0 ? 1.0f : (float)factor; /* a NaN stays one */
}

/* A move of `width` numbers by a factor of their gradient. */
static inline void sgd_move(const sgd *d, float *params, float *momentum, const float *grad, long width, float factor) {
    float rate = (float)d->rate, kept = (float)d->momentum, decay = (float)d->decay;
    for (long i = 0; i < width; i++) {
        float g = grad[i] * factor + decay * params[i];
        momentum[i] = kept * momentum[i] + g;
        params[i] -= rate * momentum[i];
    }
}

#endif
