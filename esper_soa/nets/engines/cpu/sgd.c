/* Clipping and SGD with momentum of a row of parameters. */
#include <math.h>

#include "sgd.h"

float sgd_share(const descent *d, const float *grad, long width) {
    double part[8] = {0}, norm = 0;
    for (long i = 0; d->most > 0 && i < width; i++) part[i & 7] += (double)grad[i] * (double)grad[i];
    for (int l = 0; l < 8; l++) norm += part[l];
    double share = d->most > 0 ? d->most / (sqrt(norm) + d->eps) : 1.0;
    return share > 1.0 ? 1.0f : (float)share; /* a NaN stays one */
}

void sgd_move(const descent *d, float *params, float *speed, const float *grad, long width, float share) {
    float rate = (float)d->rate, momentum = (float)d->momentum, decay = (float)d->decay;
    for (long i = 0; i < width; i++) {
        float g = grad[i] * share + decay * params[i];
        speed[i] = momentum * speed[i] + g;
        params[i] -= rate * speed[i];
    }
}
