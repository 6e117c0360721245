/* The kernels of layers by vectors of 8 floats and, where the processor has them, of 16. */
#ifndef ESPER_KERNELS_H
#define ESPER_KERNELS_H

#include "front.h"
#include "squeeze.h"

enum { BLOCK, POOL, SEED, RELU, DEPTH, NORMED, SQUEEZED, JOIN }; /* SEED: convolution and group norm; RELU: no norm */

/* What returns an int returns 0, or 1 where scratch memory is out. */
typedef struct {
    struct {
        int (*forward)(const sheet *), (*backward)(const sheet *);
    } of[SQUEEZED]; /* by kind: those that a sheet says all about */
    int (*squeezed_forward)(const sheet *, const squeeze *), (*squeezed_backward)(const sheet *, const squeeze *);
    void (*block_image)(const sheet *, const front_scratch *, const image_room *, long);
    void (*seed_image)(const sheet *, const front_scratch *, const image_room *, long);
    void (*relu_image)(const sheet *, const front_scratch *, long);
    void (*convolve)(const conv_job *);                                      /* see layer.h */
    void (*patches)(const float *in, long W, long I, long lines, float *to); /* see winograd.h */
} kernels;

extern const kernels KERNELS_8;
#ifdef __AVX512F__
extern const kernels KERNELS_16;
#endif

/* Those for a layer: the wider ones where the channels that it gives fill their vectors. Where those that it is given
 * do not, what depends on them goes by vectors of 8 all the same. */
INLINE const kernels *kernels_of(const sheet *s) {
#ifdef __AVX512F__
    if (round_up(s->out_channels) % 16 == 0) return &KERNELS_16;
#endif
    (void)s;
    return &KERNELS_8;
}

#endif
