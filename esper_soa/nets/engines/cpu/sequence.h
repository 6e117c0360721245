/* Layers of networks on sequences, all networks in a call: what sequences.py asks for. */
#ifndef ESPER_SEQUENCE_H
#define ESPER_SEQUENCE_H

#include <stdint.h>

enum { SCALE, SHIFT, WEIGHT, BIAS, LAST_WEIGHT, LAST_BIAS, TENSORS };

/* x + f(norm(x)), where f is attention between two linear layers, or a perceptron with one hidden layer.
 * Activations [B, T, n, C]. */
typedef struct {
    int64_t nets, batch, length, width, heads;
    int64_t inner;              /* what the first layer gives: 3 C for attention, else the hidden layer */
    int64_t normed, gelu;       /* whether there is a norm before, and GELU between */
    int64_t saves;              /* whether what is saved is wanted; if not, there is room for one sequence */
    double eps;                 /* of the norm */
    const float *x, *grad_out;
    float *out, *grad_x;
    float *statistics;          /* saved [n, B, T, 2]: mean and 1 / deviation */
    float *hidden;              /* saved [n, B, T, inner]: of the first layer */
    float *mixed, *sums;        /* saved of attention [n, B, T, C]; [n, B, heads, T]: logarithms of sums */
    const float *parameters[TENSORS]; /* of the first network; NULL where there is none */
    int64_t steps[TENSORS];           /* from one network's to the next one's */
    float *gradients[TENSORS];        /* [n, ...], zeros before */
} sequence_block;

/* Norm, products with the embeddings of the tokens, cross-entropy; the gradient of its sum. */
typedef struct {
    int64_t nets, batch, length, width, tokens;
    double eps;
    const float *x;
    const float *scale, *shift, *table; /* of the first network */
    int64_t steps[3];
    const int64_t *labels;              /* [n, B, T]; -1 has no loss and is never right */
    double *loss;                       /* [n], sums, zeros before */
    uint8_t *correct;                   /* [n, B, T] */
    float *grad_x;                      /* as x; NULL: no gradients are wanted */
    float *grad_scale, *grad_shift, *grad_table; /* [n, ...], zeros before */
} sequence_head;

#endif
