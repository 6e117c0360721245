/* Clipping and SGD with momentum of rows of parameters. */
#ifndef ESPER_SGD_H
#define ESPER_SGD_H

#include <stdint.h>

typedef struct {
    int64_t rows, width;
    double most, eps; /* of a row's norm; 0 for no limit */
    double rate, momentum, decay;
    float *params, *speed;
    const float *grad;
} descent;

/* The share of a gradient that clipping leaves, and a move of `width` numbers by that share of it. */
float sgd_share(const descent *d, const float *grad, long width);
void sgd_move(const descent *d, float *params, float *speed, const float *grad, long width, float share);

int sgd_step(const descent *d);

#endif
