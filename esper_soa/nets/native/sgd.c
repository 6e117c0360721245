/* Clipping and SGD with momentum of rows of parameters, each row by its own norm. */
#include <math.h>

#include "sgd.h"

int sgd_step(const descent *d) {
    float rate = (float)d->rate, momentum = (float)d->momentum, decay = (float)d->decay;
    for (int64_t r = 0; r < d->rows; r++) {
        float *params = d->params + r * d->width, *speed = d->speed + r * d->width;
        const float *grad = d->grad + r * d->width;
        double part[8] = {0}, norm = 0;
        int64_t i = 0;
        for (; d->most > 0 && i < d->width; i++) part[i & 7] += (double)grad[i] * (double)grad[i];
        for (int l = 0; l < 8; l++) norm += part[l];
        double share = d->most > 0 ? d->most / (sqrt(norm) + d->eps) : 1.0;
        float scale = share > 1.0 ? 1.0f : (float)share; /* a NaN stays one */
        for (i = 0; i < d->width; i++) {
            float g = grad[i] * scale + decay * params[i];
            speed[i] = momentum * speed[i] + g;
            params[i] -= rate * speed[i];
        }
    }
    return 0;
}
