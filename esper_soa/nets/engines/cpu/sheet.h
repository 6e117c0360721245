/* The data sheet of a layer: same-padded convolution, norm, ReLU, of n networks at once.
 *
 * The host's block (block.c) has a batch norm and an optional 2x2 max pool; a seed's layer (seed.c) has a group norm, an
 * optional residual, and an optional pool of the host behind it; parts.c has what seeds are made of beside that.
 * Activations are [B, H, W, n*C], or [B, H, W, P] of a network that runs whole; P is C in whole vectors, and the
 * channels added are zero. Weights and per-channel numbers have a leading [n]. What the backward pass needs is saved per
 * network in whole vectors, contiguous. nets/engines/cpu/library.py mirrors the record field by field.
 */
#ifndef ESPER_SHEET_H
#define ESPER_SHEET_H

#include <stdint.h>

typedef struct {
    int64_t batch, nets, in_channels, out_channels, height, width, kernel;
    int64_t x_pixel, x_net; /* floats between pixels of x, and between networks (0: all see the same images) */
    int64_t out_net;        /* floats of a network in a pixel of out and residual: O, or P with zeros in those added */
    int64_t pooled;         /* a 2x2 max pool follows */
    int64_t groups;         /* seed: groups of a network's norm */
    int64_t linear;         /* seed: no ReLU */
    int64_t own_residual;   /* seed and parts: the residual is x, and grad_x contains what flows through it */
    int64_t through;        /* seed: straight-through, the host goes on with x; there is no out */
    int64_t detached;       /* seed: of grad_x only (1 - alpha) of the gradient that arrives, nothing through the layer */
    double momentum, eps;
    const float *x;
    const float *weight;        /* [n, O, I, k, k] */
    const float *scale, *shift; /* [n, O] */
    const float *residual;      /* seed: of the layer's size, which is added to it; NULL for none */
    const float *alpha;         /* seed: [n], share of the layer that is added; NULL for 1 */
    float *out;                 /* [B, H', W', n*out_net], H' = H / 2 where pooled */
    float *conv;                /* saved [n, B, H, W, P]: output of the convolution; NULL: block: computed anew */
    float *peak;                /* block: saved [n, B, H', W', P], pooled only: its value where the maximum lies */
    uint8_t *place;             /* saved [n, B, H', W', P], pooled only: which of the four pixels, row by row */
    float *mean, *rstd;         /* saved [n, P]; seed: [n, B, P] */
    float *running_mean, *running_var; /* [n, O], moved */
    const float *grad_out;             /* as out */
    float *grad_x;                     /* as x; NULL where not wanted */
    float *grad_weight, *grad_scale, *grad_shift;
} sheet;

/* All return 0, or 1 where scratch memory is out. */
int block_train(const sheet *s);
int block_backward(const sheet *s);
int block_infer(const sheet *s); /* scale is ignored, shift is the convolution's bias */
int seed_forward(const sheet *s); /* saves nothing where conv is NULL */
int seed_backward(const sheet *s);
int pool_forward(const sheet *s);  /* x [B, H, W, P] of one network to out, and place */
int pool_backward(const sheet *s); /* grad_out to grad_x */

#endif
