/* Clipping of a row's gradient, and its move by SGD with momentum or by AdamW. */
#ifndef ESPER_SGD_H
#define ESPER_SGD_H

#include <math.h>

#define ADAM_EPS 1e-8f /* beside the root of the second moment */

typedef struct {
    double max_norm, eps; /* of a row's norm; 0 for no limit */
    double rate, momentum, decay;
    double second_decay; /* of the second moment of AdamW; 0: SGD */
} sgd;

/* Some numbers of a row, and what is kept for them: momentum, or two moments and, for the whole row, a count. */
typedef struct {
    float *params, *first, *second, *count;
} moving;

/* All of row `at` of rows of `width` parameters. */
static inline moving moving_row(const sgd *d, float *params, float *state, long at, long width) {
    if (d->second_decay <= 0) return (moving){.params = params + at * width, .first = state + at * width};
    float *first = state + at * (2 * width + 1);
    return (moving){.params = params + at * width, .first = first, .second = first + width, .count = first + 2 * width};
}

/* Those from a column on. */
static inline moving moving_from(moving m, long column) {
    m.params += column, m.first += column;
    if (m.count) m.second += column;
    return m;
}

static inline double norm_of(const float *v, long count) {
    double part[8] = {0}, sum = 0;
    for (long i = 0; i < count; i++) part[i & 7] += (double)v[i] * (double)v[i];
    for (int l = 0; l < 8; l++) sum += part[l];
    return sqrt(sum);
}

/* The factor of a gradient that clipping leaves; a move is counted. */
static inline float sgd_factor(const sgd *d, const float *grad, long width, moving m) {
    double factor = d->max_norm > 0 ? d->max_norm / (norm_of(grad, width) + d->eps) : 1.0;
    if (m.count) *m.count += 1.0f;
    return factor > 1.0 ? 1.0f : (float)factor; /* a NaN stays one */
}

static inline void adamw_move(const sgd *d, moving m, const float *grad, long width, float factor) {
    float kept = (float)d->momentum, held = (float)d->second_decay, rate = (float)d->rate;
    float fresh = (float)(1.0 - d->momentum), new = (float)(1.0 - d->second_decay), shrink = (float)(1.0 - d->rate * d->decay);
    float first = 1.0f - powf(kept, *m.count), second = 1.0f - powf(held, *m.count);
    for (long i = 0; i < width; i++) {
        float g = grad[i] * factor;
        m.first[i] += fresh * (g - m.first[i]);
        m.second[i] = held * m.second[i] + new * g * g;
        m.params[i] = m.params[i] * shrink - rate * (m.first[i] / first) / (sqrtf(m.second[i] / second) + ADAM_EPS);
    }
}

/* A move of `width` numbers by a factor of their gradient. */
static inline void sgd_move(const sgd *d, moving m, const float *grad, long width, float factor) {
    float rate = (float)d->rate, kept = (float)d->momentum, decay = (float)d->decay;
    if (m.count) {
        adamw_move(d, m, grad, width, factor);
        return;
    }
    for (long i = 0; i < width; i++) {
        float g = grad[i] * factor + decay * m.params[i];
        m.first[i] = kept * m.first[i] + g;
        m.params[i] -= rate * m.first[i];
    }
}

#endif
