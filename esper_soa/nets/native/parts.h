/* The parts of seeds that are not one convolution with group norm (seed.c). All take a sheet of a network that runs
 * whole; what a part computes stands beside its kernels in parts.c. */
#ifndef ESPER_PARTS_H
#define ESPER_PARTS_H

#include "layer.h"
#include "squeeze.h"

/* Convolution and ReLU. */
void relu_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n);
int relu_forward(const sheet *s);
int relu_backward(const sheet *s);

/* Depthwise convolution; weight [C, 1, 3, 3]. */
int depth_forward(const sheet *s);
int depth_backward(const sheet *s);

/* share * (norm(x) - x), a group norm; share = alpha, and the gradient of its arc hyperbolic tangent is grad_weight. */
int normed_forward(const sheet *s);
int normed_backward(const sheet *s);

/* (a - 1) * x, one a per channel from the squeeze. */
int squeezed_forward(const sheet *s, const squeeze *q);
int squeezed_backward(const sheet *s, const squeeze *q);

#endif
