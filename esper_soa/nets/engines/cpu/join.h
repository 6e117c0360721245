/* How a host takes on a seed s = x + r, given its residual r or, where REPLACED, s: x + alpha r, x + alpha g r with a gate
 * g per image, or x (1 + alpha tanh r); or not at all, while the seed learns behind it. See nets/blend.py. */
#ifndef ESPER_JOIN_H
#define ESPER_JOIN_H

#include "squeeze.h"

/* What a seed is beside its kind. THROUGH: the host goes on with x, the seed gets all of the gradient that arrives.
 * DETACHED: the seed sees x cut off from the graph. */
enum { THROUGH = 1, DETACHED = 2, FROZEN = 4, MEASURED = 8, MULTIPLIED = 16, GATED = 32, REPLACED = 64 };

/* One network's batch, all [B, pixels, channels], channels in whole vectors with zeros in those added. */
typedef struct {
    long batch, pixels, channels;
    int flags;
    float alpha;
    squeeze gate; /* where GATED */
    const float *host, *residual; /* residual: s where REPLACED */
    float *out;
    const float *grad_out;
    float *grad_residual, *grad_host; /* grad_host: what does not pass through the residual */
} joint;

void join_forward(const joint *j);
int join_backward(const joint *j);

#endif
