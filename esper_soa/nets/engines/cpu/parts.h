/* The parts of seeds that are not one convolution with group norm (seed.c); what a part computes stands beside its
 * kernels in parts.c. */
#ifndef ESPER_PARTS_H
#define ESPER_PARTS_H

#include "layer.h"
#include "squeeze.h"

/* Convolution and ReLU, or without the ReLU where linear. */
void relu_image(const sheet *s, const front_scratch *t, long b);
int relu_forward(const sheet *s);
int relu_backward(const sheet *s);

/* Depthwise convolution; weight [C, 1, 3, 3]. */
int depth_forward(const sheet *s);
int depth_backward(const sheet *s);

/* share * (norm(x) - x), a group norm, plus x where own_residual; share = alpha, and the gradient of its arc hyperbolic
 * tangent is grad_weight. */
int normed_forward(const sheet *s);
int normed_backward(const sheet *s);

/* (a - 1) * x, one a per channel from the squeeze, or a * x where own_residual. */
int squeezed_forward(const sheet *s, const squeeze *q);
int squeezed_backward(const sheet *s, const squeeze *q);

#endif
