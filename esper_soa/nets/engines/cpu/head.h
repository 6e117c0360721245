/* What stands behind the last block: global mean, linear classifier, cross-entropy, hits; and the way back. */
#ifndef ESPER_HEAD_H
#define ESPER_HEAD_H

#include <stdint.h>

typedef struct {
    int64_t batch, nets, channels, pixels, classes;
    int64_t x_pixel;             /* floats in a pixel of x: n*C, or C in whole vectors with zeros in those added */
    const float *x;              /* [B, pixels, x_pixel] */
    const float *weight, *bias;  /* [n, K, C], [n, K] */
    const int64_t *labels;       /* [B, n] */
    float *mean;                 /* saved [B, n, C], over the pixels */
    float *slope;                /* saved [B, n, K]: softmax less the label's one, over B: the gradient of the logits */
    float *loss;                 /* [n], mean over the batch */
    int64_t *hits;               /* [n] */
    const float *grad;           /* [n], of the loss */
    float *grad_x, *grad_weight, *grad_bias;
} head;

int head_forward(const head *h);
int head_backward(const head *h);

/* Logits [K] of one sample x [pixels, x_pixel] of network n; `mean` [C] is over its pixels. */
void head_logits(const head *h, const float *x, int64_t n, float *mean, float *logits);
/* The first of the largest; a NaN counts as larger, as in torch. */
int64_t head_largest(const float *v, int64_t count);
/* Loss of one sample whose logits stand in `slope`, which become their gradient. */
double head_cross_entropy(const head *h, float *slope, int64_t label);

#endif
