/* Scratch of a layer's forward pass, which validation keeps from image to image. */
#ifndef ESPER_FRONT_H
#define ESPER_FRONT_H

#include "pack.h"
#include "sheet.h"

/* Whether the forward convolution and the gradient of its weights, and the gradient of its input, go by tiles. */
INLINE int forward_tiles(const sheet *s) { return by_tiles(s->height, s->width, s->in_channels, s->kernel); }
INLINE int backward_tiles(const sheet *s) { return by_tiles(s->height, s->width, s->out_channels, s->kernel); }

/* Channels that they read, of x and of dy. */
INLINE long forward_channels(const sheet *s) { return read_channels(s->in_channels, forward_tiles(s)); }
INLINE long backward_channels(const sheet *s) { return read_channels(s->out_channels, backward_tiles(s)); }

static inline float *padded_scratch(const sheet *s, long channels) {
    return scratch((s->height + s->kernel - 1) * (s->width + s->kernel - 1) * channels);
}

/* Numbers of the packed weights. */
INLINE long packed_forward(const sheet *s) {
    return (forward_tiles(s) ? FREQS : s->kernel * s->kernel) * forward_channels(s) * round_up(s->out_channels);
}
INLINE long packed_backward(const sheet *s) {
    return (backward_tiles(s) ? FREQS : s->kernel * s->kernel) * round_up(s->in_channels) * backward_channels(s);
}

/* Scratch of a convolution. */
static inline float *convolution_room(const sheet *s) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels);
    return scratch(tiles_room(s->height, s->width, P > Q ? P : Q));
}

/* Scratch of a forward pass. */
typedef struct {
    float *padded;  /* one image */
    float *weights; /* packed */
    float *room;
    float *rows; /* [P] each, as many as the layer asks for */
} front_scratch;

static inline void close_front(front_scratch *t) { free(t->padded), free(t->weights), free(t->room), free(t->rows); }

static inline int open_front(const sheet *s, front_scratch *t, long rows) {
    *t = (front_scratch){padded_scratch(s, s->x_pixel), scratch(packed_forward(s)), convolution_room(s),
                         scratch(rows * round_up(s->out_channels))};
    if (!t->padded || !t->weights || !t->room || !t->rows) return 1;
    pack_forward(t->weights, s->weight, s->out_channels, s->in_channels, s->kernel, forward_tiles(s));
    return 0;
}

/* What one image passes through where it is not saved: the convolution's output, and that behind a pool. */
typedef struct {
    float *y, *pooled; /* [H, W, P], [H / 2, W / 2, P] */
} image_room;

/* The same for the images of a layer, in one allocation that begins with y; y is NULL where memory is out. */
static inline image_room open_room(const sheet *s) {
    long image = s->height * s->width * round_up(s->out_channels);
    float *memory = scratch(2 * image);
    return (image_room){memory, memory + image};
}

#endif
