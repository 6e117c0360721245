/* The kernels of layers by vectors of 8 floats and, where the processor has them, of 16. */
#ifndef ESPER_KERNELS_H
#define ESPER_KERNELS_H

#include "work.h"

enum { BLOCK, POOL, SEED, RELU, DEPTH, NORMED, SQUEEZED, JOIN }; /* SEED: convolution and group norm; RELU: no norm */

/* A batch through a layer; where it convolves, its work is ready for that. */
typedef void layer_kernel(const descriptor *s, const work *t);

typedef struct {
    struct {
        layer_kernel *forward, *backward;
    } of[JOIN + 1];            /* by kind */
    layer_kernel *block_infer; /* see block.h */
    void (*convolve)(const conv_job *);                                      /* see layer.h */
    void (*patches)(const float *in, long W, long I, long lines, float *to); /* see winograd.h */
} kernels;

extern const kernels KERNELS_8;
#ifdef __AVX512F__
extern const kernels KERNELS_16;
#endif

/* Those for a layer: the wider ones where the channels that it gives fill their vectors. Where those that it is given
 * do not, what depends on them goes by vectors of 8 all the same. */
INLINE const kernels *kernels_of(const descriptor *s) {
#ifdef __AVX512F__
    if (round_up(s->out_channels) % 16 == 0) return &KERNELS_16;
#endif
    (void)s;
    return &KERNELS_8;
}

#endif
