/* What stands behind the last block: global mean, linear classifier, cross-entropy, hits; and the way back. */
#ifndef ESPER_HEAD_H
#define ESPER_HEAD_H

#include <stdint.h>

typedef struct {
    long batch, channels, pixels, classes;
    const float *x;             /* [B, pixels, P], P the channels in whole vectors with zeros in those added */
    const float *weight, *bias; /* [K, C], [K] */
    const int64_t *labels;      /* [B] */
    float *mean;                /* saved [B, P], over the pixels */
    float *slope;               /* saved [B, K]: softmax less the label's one, over B: the gradient of the logits */
    float *grad_x, *grad_weight, *grad_bias;
} head;

/* Mean loss over the batch, and hits. */
void head_forward(const head *h, float *loss, int64_t *hits);
/* Returns 0, or 1 where memory is out. */
int head_backward(const head *h);

/* Logits [K] of one sample x [pixels, P]; `mean` [P] is over its pixels. */
void head_logits(const head *h, const float *x, float *mean, float *logits);
/* The first of the largest; a NaN counts as larger, as in torch. */
long head_largest(const float *v, long count);
/* Loss of one sample whose logits stand in `slope`, which become their gradient. */
double head_cross_entropy(const head *h, float *slope, int64_t label);

#endif
