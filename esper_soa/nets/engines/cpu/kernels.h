/* The kernels of layers by vectors of 8 floats and, where the processor has them, of 16. */
#ifndef ESPER_KERNELS_H
#define ESPER_KERNELS_H

#include "work.h"

/* SEED: convolution and group norm; RELU: no norm. From WINDOW on: points.h, tokens.h and attention.h. */
enum {
    BLOCK, POOL, SEED, RELU, DEPTH, NORMED, SQUEEZED, JOIN, WINDOW, PRODUCT, BESIDE, PIXELS, MIXED, WEIGHED, PICK, LEAD,
    ATTEND
};

/* A batch through a layer; where it convolves, its work is ready for that. */
typedef void layer_kernel(const descriptor *s, const work *t);

typedef struct {
    struct {
        layer_kernel *forward, *backward;
    } of[ATTEND + 1];          /* by kind */
    layer_kernel *block_infer; /* see block.h */
    void (*convolve)(const conv_job *), (*wgrad)(const wgrad_job *);         /* see layer.h */
    void (*patches)(const float *in, long W, long I, long lines, float *to, int m); /* see winograd.h */
} kernels;

extern const kernels KERNELS_8;
#ifdef __AVX512F__
extern const kernels KERNELS_16;
#endif

/* Those for O channels, in whole vectors of 8: the wider ones where these fill their vectors, or half of one and
 * `pairs` are taken. */
INLINE const kernels *kernels_for(long O, int pairs) {
#ifdef __AVX512F__
    if (O % 16 == 0 || (O == WHOLE && pairs)) return &KERNELS_16;
#endif
    (void)O, (void)pairs;
    return &KERNELS_8;
}

/* Those for a layer, by the channels that it gives. */
INLINE const kernels *kernels_of(const descriptor *s) { return kernels_for(round_up(s->out_channels), 0); }

#endif
