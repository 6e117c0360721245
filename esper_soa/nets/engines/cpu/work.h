/* What a layer works on beside what its descriptor names: laid out before it is needed, and made ready for either way. */
#ifndef ESPER_WORK_H
#define ESPER_WORK_H

#include "arena.h"
#include "pack.h"
#include "descriptor.h"

/* Whether a convolution gives as many pixels as it is given. */
INLINE int keeps_size(const descriptor *s) { return s->stride == 1 && 2 * s->padding == s->kernel - 1; }

/* Whether all channels of x have a part in all that are given. */
INLINE int is_dense(const descriptor *s) { return !s->depthwise && s->split == 1; }

/* The tiles (see tile_side) of the forward convolution and the gradient of its weights, and of that of its input. */
INLINE int forward_tiles(const descriptor *s) {
    return is_dense(s) && keeps_size(s) ? tile_side(s->height, s->width, s->in_channels, s->kernel) : 0;
}
INLINE int backward_tiles(const descriptor *s) {
    return is_dense(s) ? tile_side(s->in_height, s->in_width, s->out_channels, s->kernel) : 0;
}

/* Images that are convolved together, so that their tiles fill a strip. */
INLINE long group_of(const descriptor *s) {
    int m = s->together ? forward_tiles(s) : 0;
    long tiles = m && m == backward_tiles(s) ? (s->height / m) * (s->width / m) : STRIP;
    return tiles < STRIP ? STRIP / tiles : 1;
}

/* Channels that they read, of x and of dy. */
INLINE long forward_channels(const descriptor *s) {
    return s->depthwise ? 1 : read_channels(s->in_channels / s->split, forward_tiles(s));
}
INLINE long backward_channels(const descriptor *s) {
    return read_channels(s->out_channels / s->split, backward_tiles(s));
}

/* Pixels of a line of x with the border that the convolution wants, and floats of such an image. */
INLINE long padded_width(const descriptor *s) { return s->in_width + 2 * s->padding; }
INLINE long padded_floats(const descriptor *s, long channels) {
    return (s->in_height + 2 * s->padding) * padded_width(s) * channels;
}

/* The gradient of the convolution's output stands so many pixels apart, with zeros between and around it, that a
 * convolution of stride 1 makes of it that of x; a pointwise one goes by lines (see input_gradient in layer.h). */
INLINE long apart_of(const descriptor *s) { return s->kernel > 1 ? s->stride : 1; }
INLINE long grad_width(const descriptor *s) { return s->kernel > 1 ? s->in_width + s->kernel - 1 : s->width; }
INLINE long grad_floats(const descriptor *s) {
    return (s->kernel > 1 ? s->in_height + s->kernel - 1 : s->height) * grad_width(s) * round_up(s->out_channels);
}

/* Numbers of the packed weights. */
INLINE long packed_forward(const descriptor *s) {
    return packed_taps(s->kernel, forward_tiles(s)) * forward_channels(s) * round_up(s->out_channels);
}
INLINE long packed_backward(const descriptor *s) {
    if (s->depthwise) return packed_forward(s);
    return packed_taps(s->kernel, backward_tiles(s)) * round_up(s->in_channels) * backward_channels(s);
}

/* Rows of [P] behind norm and ReLU: z = gain * y + offset, dz the gradient that passes the ReLU, and the gradient of the
 * convolution's output is dy = flow * dz + slope * (y - mean) + level; flow = gain, times alpha. */
enum { GAIN, OFFSET, MEAN, FLOW, SLOPE, LEVEL, ROWS };

typedef struct {
    float *padded, *grad;    /* padded input and padded dy of the images of a group */
    float *room;             /* of a convolution */
    float *weights, *turned; /* packed for the convolution, and for the gradient of its input */
    float *grad_weight;      /* packed */
    float *dense;            /* where sparse: weights of all channels, most of them 0, or their gradient */
    float *rows;             /* [ROWS, P] */
    float *y;                /* [H, W, P] where it is not saved */
    double *sum, *moment;    /* [P]: sum of dz, sum of dz * (y - mean) */
} work;

/* Numbers in whole vectors of any length. */
INLINE long whole(long count) { return (count + 15) / 16 * 16; }

/* Floats of a line of numbers of all pixels of x, in whole vectors of any length. */
INLINE long mixed_line(const descriptor *s) { return whole(s->in_height * s->in_width); }
INLINE long mixed_room(const descriptor *s) {
    return s->mixed ? (s->out_channels + s->height * s->width) * mixed_line(s) : 0;
}

/* Parameters of WEIGHED. */
INLINE long weighed_numbers(const descriptor *s) {
    return (s->by_channel ? s->out_channels : 1) * (s->by_pixel ? s->height * s->width : 1);
}

/* ATTEND: scores and their gradients [T, T], queries, keys, values and gradients of all heads' outputs [T, D] and [D, T]. */
INLINE long attention_room(const descriptor *s) {
    long T = s->height * s->width, D = s->out_channels / s->groups;
    return 2 * T * whole(T) + 6 * T * whole(D) + whole(D) * whole(T);
}

INLINE long dense_weights(const descriptor *s) {
    return s->sparse ? s->out_channels * s->in_channels * s->kernel * s->kernel : 0;
}

static inline work lay_work(const descriptor *s, arena *a) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), G = group_of(s);
    work t = {.padded = take_floats(a, G * padded_floats(s, s->x_pixel)),
              .grad = take_floats(a, G * grad_floats(s)),
              .room = take_floats(a, s->mixed ? mixed_room(s) : s->attends ? attention_room(s) : tiles_room(s->in_height, s->in_width, P > Q ? P : Q)),
              .weights = take_floats(a, packed_forward(s)), .turned = take_floats(a, packed_backward(s)),
              .grad_weight = take_floats(a, packed_forward(s)), .rows = take_floats(a, ROWS * P)};
    t.dense = take_floats(a, dense_weights(s));
    if (!s->conv) t.y = take_floats(a, G * image_floats(s));
    t.sum = take(a, (size_t)P * sizeof(double)), t.moment = take(a, (size_t)P * sizeof(double));
    return t;
}

/* Numbers of the weights of a group, packed and as they are where there are several; what it gives in whole vectors. */
INLINE long group_weights(const descriptor *s) {
    return s->kernel * s->kernel * (s->in_channels / s->split) * (s->out_channels / s->split);
}
INLINE long group_outputs(const descriptor *s) {
    return s->split > 1 ? s->out_channels / s->split : round_up(s->out_channels);
}

/* Weights as the convolution has them. */
static inline const float *weights_of(const descriptor *s, const work *t) {
    long taps = s->kernel * s->kernel, I = s->in_channels;
    if (!s->sparse) return s->weight;
    long O = s->out_channels / s->sparse, each = I / s->sparse * taps;
    zero(t->dense, dense_weights(s));
    for (long o = 0; o < s->out_channels; o++)
        memcpy(t->dense + o * I * taps + o / O * each, s->weight + o * each, (size_t)each * sizeof(float));
    return t->dense;
}

/* For the convolution. */
static inline void ready_forward(const descriptor *s, const work *t) {
    zero(t->padded, group_of(s) * padded_floats(s, s->x_pixel));
    zero(t->weights, packed_forward(s));
    if (s->depthwise) pack_depth(t->weights, s->weight, s->out_channels, s->kernel, 0);
    long O = s->out_channels / s->split, I = s->in_channels / s->split;
    const float *weight = weights_of(s, t);
    for (long g = 0; g < s->split && !s->depthwise; g++)
        pack_forward(t->weights + g * group_weights(s), weight + g * group_weights(s), O, I, s->kernel, forward_tiles(s));
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
    zero(t->padded, group_of(s) * padded_floats(s, s->x_pixel));
    zero(t->grad, group_of(s) * grad_floats(s));
    zero(t->grad_weight, packed_forward(s));
    if (!wants_input_gradient(s)) return;
    zero(t->turned, packed_backward(s));
    if (s->depthwise) pack_depth(t->turned, s->weight, s->out_channels, s->kernel, 1);
    long O = s->out_channels / s->split, I = s->in_channels / s->split;
    const float *weight = weights_of(s, t);
    for (long g = 0; g < s->split && !s->depthwise; g++)
        pack_backward(t->turned + g * group_weights(s), weight + g * group_weights(s), O, I, s->kernel,
                      backward_tiles(s));
}

#endif
