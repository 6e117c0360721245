/* The data descriptor of a layer of one network: same-padded convolution, norm, ReLU, and a 2x2 max pool where one follows.
 *
 * The host's block (block.h) has a batch norm; a seed's layer (seed.h) has a group norm and can be added to its input;
 * parts.h has what seeds are made of beside that. Activations are [B, H, W, P], P the channels in whole vectors with
 * zeros in those added; images are [B, H, W, 3].
 */
#ifndef ESPER_SHEET_H
#define ESPER_SHEET_H

#include "squeeze_excite.h"

/* What a seed is beside its kind. THROUGH: the host goes on with x, the seed gets all of the gradient that arrives.
 * DETACHED: the seed sees x cut off from the graph. */
enum { THROUGH = 1, DETACHED = 2, FROZEN = 4, MEASURED = 8, MULTIPLIED = 16, GATED = 32, REPLACED = 64 };

typedef struct {
    long batch, in_channels, out_channels, height, width, kernel;
    long x_pixel;            /* floats between pixels of x */
    int padded;              /* x has the border of zeros already that the convolution wants */
    int pooled;              /* a 2x2 max pool follows */
    int flags;               /* of the seed */
    int linear;              /* seed: no ReLU */
    int own_residual;        /* seed and parts: x is added, and grad_x contains what flows through it */
    int through;             /* seed: straight-through, the host goes on with x; there is no out */
    int detached;            /* seed: of grad_x only (1 - alpha) of the gradient that arrives, nothing through the layer */
    long groups;             /* seed: groups of the norm */
    double momentum, eps;
    const float *x;
    const float *weight;        /* [O, I, k, k] */
    const float *scale, *shift; /* [O] */
    const float *alpha;         /* seed: factor of the layer that is added; NULL for 1 */
    float *out;                 /* [B, H', W', P], H' = H / 2 where pooled */
    float *conv;                /* saved [B, H, W, P]: output of the convolution; NULL: computed anew where it is needed */
    float *peak;                /* saved [B, H', W', P], pooled only: its value where the maximum lies */
    uint8_t *place;             /* saved [B, H', W', P], pooled only: which of the four pixels, row by row */
    float *mean, *rstd;         /* saved [P]; seed: [B, P] */
    float *running_mean, *running_var; /* [O], moved */
    const float *grad_out;             /* as out */
    float *grad_x;                     /* as x; NULL where not wanted */
    float *grad_weight, *grad_scale, *grad_shift;
    const float *host;          /* join: what the seed was given, where x is its residual or, where REPLACED, what it gives */
    float *grad_host;           /* join: what does not pass through the residual */
    squeeze q;                  /* of parts and joins that have one */
} descriptor;

/* Floats of one image before the pool, and behind it; pixels behind it. */
INLINE long image_floats(const descriptor *s) { return s->height * s->width * round_up(s->out_channels); }
INLINE long out_pixels(const descriptor *s) { return s->pooled ? (s->height / 2) * (s->width / 2) : s->height * s->width; }
INLINE long out_floats(const descriptor *s) { return out_pixels(s) * round_up(s->out_channels); }

#endif
