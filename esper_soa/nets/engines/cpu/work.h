/* What a layer works on beside what its descriptor names: laid out before it is needed, and made ready for either way. */
#ifndef ESPER_WORK_H
#define ESPER_WORK_H

#include "arena.h"
#include "pack.h"
#include "descriptor.h"

/* The tiles (see tile_side) of the forward convolution and the gradient of its weights, and of that of its input. */
INLINE int forward_tiles(const descriptor *s) { return tile_side(s->height, s->width, s->in_channels, s->kernel); }
INLINE int backward_tiles(const descriptor *s) { return tile_side(s->height, s->width, s->out_channels, s->kernel); }

/* Channels that they read, of x and of dy. */
INLINE long forward_channels(const descriptor *s) { return read_channels(s->in_channels, forward_tiles(s)); }
INLINE long backward_channels(const descriptor *s) { return read_channels(s->out_channels, backward_tiles(s)); }

/* Floats of an image with the border that the convolution wants. */
INLINE long padded_floats(const descriptor *s, long channels) {
    return (s->height + s->kernel - 1) * (s->width + s->kernel - 1) * channels;
}

/* Numbers of the packed weights. */
INLINE long packed_forward(const descriptor *s) {
    return packed_taps(s->kernel, forward_tiles(s)) * forward_channels(s) * round_up(s->out_channels);
}
INLINE long packed_backward(const descriptor *s) {
    return packed_taps(s->kernel, backward_tiles(s)) * round_up(s->in_channels) * backward_channels(s);
}

/* Rows of [P] behind norm and ReLU: z = gain * y + offset, dz the gradient that passes the ReLU, and the gradient of the
 * convolution's output is dy = flow * dz + slope * (y - mean) + level; flow = gain, times alpha. */
enum { GAIN, OFFSET, MEAN, FLOW, SLOPE, LEVEL, ROWS };

typedef struct {
    float *padded, *grad;    /* padded input and padded dy of one image */
    float *room;             /* of a convolution */
    float *weights, *turned; /* packed for the convolution, and for the gradient of its input */
    float *grad_weight;      /* packed */
    float *rows;             /* [ROWS, P] */
    float *y;                /* [H, W, P] where it is not saved */
    double *sum, *moment;    /* [P]: sum of dz, sum of dz * (y - mean) */
} work;

static inline work lay_work(const descriptor *s, arena *a) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels);
    work t = {.padded = take_floats(a, padded_floats(s, P > s->x_pixel ? P : s->x_pixel)),
              .grad = take_floats(a, padded_floats(s, P)),
              .room = take_floats(a, tiles_room(s->height, s->width, P > Q ? P : Q)),
              .weights = take_floats(a, packed_forward(s)), .turned = take_floats(a, packed_backward(s)),
              .grad_weight = take_floats(a, packed_forward(s)), .rows = take_floats(a, ROWS * P)};
    if (!s->conv) t.y = take_floats(a, image_floats(s));
    t.sum = take(a, (size_t)P * sizeof(double)), t.moment = take(a, (size_t)P * sizeof(double));
    return t;
}

/* For the convolution. */
static inline void ready_forward(const descriptor *s, const work *t) {
    zero(t->padded, padded_floats(s, s->x_pixel));
    zero(t->weights, packed_forward(s));
    pack_forward(t->weights, s->weight, s->out_channels, s->in_channels, s->kernel, forward_tiles(s));
}

/* Whether a gradient flows through the convolution into its input. */
INLINE int wants_input_gradient(const descriptor *s) { return s->grad_x && !s->detached; }

/* For sums over a batch. */
static inline void ready_sums(const descriptor *s, const work *t) {
    zero(t->rows, ROWS * round_up(s->out_channels));
    for (long c = 0; c < round_up(s->out_channels); c++) t->sum[c] = t->moment[c] = 0.0;
}

/* For the gradients of a convolution. */
static inline void ready_backward(const descriptor *s, const work *t) {
    ready_sums(s, t);
    zero(t->padded, padded_floats(s, s->x_pixel));
    zero(t->grad, padded_floats(s, round_up(s->out_channels)));
    zero(t->grad_weight, packed_forward(s));
    if (!wants_input_gradient(s)) return;
    zero(t->turned, packed_backward(s));
    pack_backward(t->turned, s->weight, s->out_channels, s->in_channels, s->kernel, backward_tiles(s));
}

#endif
