/* The host's block on n networks: same-padded convolution, batch norm, ReLU, optional 2x2 max pool; the data sheet.
 *
 * Activations are [B, H, W, n*C]; weights and per-channel numbers have a leading [n]. P is O in whole vectors. What the
 * backward pass needs is saved per network, contiguous. nets/native/library.py mirrors the record field by field.
 */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include <stdint.h>

typedef struct {
    int64_t batch, nets, in_channels, out_channels, height, width, kernel, pooled;
    int64_t x_pixel, x_net; /* floats between pixels of x, and between networks (0: all see the same images) */
    double momentum, eps;
    const float *x;
    const float *weight;        /* [n, O, I, k, k] */
    const float *scale, *shift; /* [n, O] */
    float *out;                 /* [B, H', W', n*O], H' = H / 2 where pooled */
    float *conv;                /* saved [n, B, H, W, P]: output of the convolution */
    float *peak;                /* saved [n, B, H', W', P], pooled only: its value where the maximum lies */
    uint8_t *place;             /* saved, as peak: which of the four pixels, row by row */
    float *mean, *rstd;         /* saved [n, P] */
    float *running_mean, *running_var; /* [n, O], moved */
    const float *grad_out;             /* as out */
    float *grad_x;                     /* as x; NULL where not wanted */
    float *grad_weight, *grad_scale, *grad_shift;
} block_sheet;

/* All return 0, or 1 where scratch memory is out. */
int block_train(const block_sheet *sheet);
int block_backward(const block_sheet *sheet);
int block_infer(const block_sheet *sheet); /* scale is ignored, shift is the convolution's bias */

#endif
