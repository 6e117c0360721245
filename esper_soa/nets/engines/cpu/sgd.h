/* Clipping and SGD with momentum of a row of parameters. */
#ifndef ESPER_SGD_H
#define ESPER_SGD_H

typedef struct {
    double most, eps; /* of a row's norm; 0 for no limit */
    double rate, momentum, decay;
} descent;

/* The share of a gradient that clipping leaves, and a move of `width` numbers by that share of it. */
float sgd_share(const descent *d, const float *grad, long width);
void sgd_move(const descent *d, float *params, float *speed, const float *grad, long width, float share);

#endif
