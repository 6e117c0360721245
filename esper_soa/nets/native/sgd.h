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

int sgd_step(const descent *d);

#endif
