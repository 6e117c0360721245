/* Clipping and SGD with momentum of a row of parameters. */
#ifndef ESPER_SGD_H
#define ESPER_SGD_H

#include <math.h>

typedef struct {
    double most, eps; /* of a row's norm; 0 for no limit */
    double rate, momentum, decay;
} descent;

static inline double norm_of(const float *v, long count) {
    double part[8] = {0}, sum = 0;
    for (long i = 0; i < count; i++) part[i & 7] += (double)v[i] * (double)v[i];
    for (int l = 0; l < 8; l++) sum += part[l];
    return sqrt(sum);
}

/* The share of a gradient that clipping leaves. */
static inline float sgd_share(const descent *d, const float *grad, long width) {
    double share = d->most > 0 ? d->most / (norm_of(grad, width) + d->eps) : 1.0;
    return share > 1.0 ? 1.0f : (float)share; /* a NaN stays one */
}

/* A move of `width` numbers by a share of their gradient. */
static inline void sgd_move(const descent *d, float *params, float *speed, const float *grad, long width, float share) {
    float rate = (float)d->rate, momentum = (float)d->momentum, decay = (float)d->decay;
    for (long i = 0; i < width; i++) {
        float g = grad[i] * share + decay * params[i];
        speed[i] = momentum * speed[i] + g;
        params[i] -= rate * speed[i];
    }
}

#endif
