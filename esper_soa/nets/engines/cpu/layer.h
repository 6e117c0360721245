/* What block.c, seed.c and parts.c share: reading images, packing weights, and the two passes behind a norm and a ReLU. */
#ifndef ESPER_LAYER_H
#define ESPER_LAYER_H

#include "norm.h"
#include "pack.h"
#include "sheet.h"

/* Whether the forward convolution and the gradient of its weights, and the gradient of its input, go by tiles. */
INLINE int forward_tiles(const sheet *s) { return by_tiles(s->height, s->width, s->in_channels, s->kernel); }
INLINE int backward_tiles(const sheet *s) { return by_tiles(s->height, s->width, s->out_channels, s->kernel); }

/* Channels that they read, of x and of dy. */
INLINE long forward_channels(const sheet *s) { return read_channels(s->in_channels, forward_tiles(s)); }
INLINE long backward_channels(const sheet *s) { return read_channels(s->out_channels, backward_tiles(s)); }

/* Image b as the convolution reads it; `padded` holds the one that it was last called for. */
static inline const float *read_image(const sheet *s, float *padded, long b) {
    const float *from = s->x + b * s->height * s->width * s->x_pixel;
    if (s->kernel == 1) return from;
    pad_image(padded, s->kernel / 2, from, s->height, s->width, s->x_pixel);
    return padded;
}

static inline float *padded_scratch(const sheet *s, long channels) {
    return scratch((s->height + s->kernel - 1) * (s->width + s->kernel - 1) * channels);
}

/* Whether a gradient flows through the convolution into its input. */
INLINE int wants_input_gradient(const sheet *s) { return s->grad_x && !s->detached; }

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

/* The convolution of image b to [H, W, P]. */
static inline void convolve(const sheet *s, const front_scratch *t, float *out, long b) {
    long P = round_up(s->out_channels);
    conv_job job = {.in = read_image(s, t->padded, b), .weight = t->weights, .out = out, .H = s->height, .W = s->width,
                    .I = forward_channels(s), .O = P, .k = s->kernel, .in_step = s->x_pixel, .step = P, .room = t->room};
    conv_image(&job);
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

/* Image b through a layer whose scratch is open (4 rows); scale is ignored, shift is the convolution's bias. */
void block_infer_image(const sheet *s, const front_scratch *t, const image_room *room, long b);
/* The same of a seed, which saves nothing where conv is NULL. */
void seed_image(const sheet *s, const front_scratch *t, const image_room *room, long b);

/* Floats of one image before the pool, and behind it; pixels behind it. */
INLINE long image_floats(const sheet *s) { return s->height * s->width * round_up(s->out_channels); }
INLINE long out_pixels(const sheet *s) { return s->pooled ? (s->height / 2) * (s->width / 2) : s->height * s->width; }
INLINE long out_floats(const sheet *s) { return out_pixels(s) * round_up(s->out_channels); }

/* residual + alpha * relu(gain * value + offset) of an image [pixels, P]. */
typedef struct {
    const float *value, *gain, *offset, *residual; /* residual may be NULL */
    float *out;
    long pixels, P;
    int linear;  /* no ReLU */
    float alpha; /* share of it that is added to the residual; 1 without a residual */
} emit_job;

static inline void emit_image(const emit_job *job) {
    for (long c = 0; c < job->P; c += LANES) {
        v8 gain = load(job->gain + c), offset = load(job->offset + c);
        for (long p = 0; p < job->pixels; p++) {
            long at = p * job->P + c;
            v8 z = gain * load(job->value + at) + offset;
            z = job->linear ? z : relu(z);
            if (job->residual) z = load(job->residual + at) + job->alpha * z;
            store(job->out + at, z);
        }
    }
}

/* Behind norm and ReLU: z = gain * y + offset, dz the gradient that passes the ReLU, and the gradient of the
 * convolution's output is dy = flow * dz + slope * (y - mean) + level; flow = gain, times alpha. Rows of [P] each: */
enum { GAIN, OFFSET, MEAN, FLOW, SLOPE, LEVEL, BACK_ROWS };

/* dz of 8 channels at one pixel; `y` is the convolution's value there. */
INLINE v8 behind_relu(v8 gain, v8 offset, v8 y, v8 grad) { return keep(~(gain * y + offset <= splat(0)), grad); }

/* Scratch of a backward pass, and the gradients while they are gathered. */
typedef struct {
    float *padded, *grad; /* padded input and padded dy of one image */
    float *room;          /* of a convolution */
    float *rows;          /* [BACK_ROWS, P] */
    float *weights;       /* packed for the gradient of the input */
    float *grad_weight;   /* packed */
    double *sum, *moment; /* [P]: sum of dz, sum of dz * (y - mean) */
} back_scratch;

INLINE void add_sums(const back_scratch *t, long c, v8 sum, v8 moment) {
    for (int l = 0; l < LANES; l++) {
        t->sum[c + l] += (double)sum[l];
        t->moment[c + l] += (double)moment[l];
    }
}

/* Take one image into the sums; `value` [pixels, P] is the convolution's output, `grad` as that. */
static inline void gather_sums(const sheet *s, const back_scratch *t, const float *value, const float *grad) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    for (long c = 0; c < P; c += LANES) {
        const float *rows = t->rows + c;
        v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
        v8 sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)};
        for (long p = 0; p < pixels; p += 2)
#pragma GCC unroll 2
            for (long q = 0; q < 2; q++) {
                if (p + q == pixels) break;
                v8 y = load(value + (p + q) * P + c), g = load(grad + (p + q) * P + c);
                v8 dz = s->linear ? g : behind_relu(gain, offset, y, g);
                sum[q] += dz;
                moment[q] += dz * (y - mean);
            }
        add_sums(t, c, sum[0] + sum[1], moment[0] + moment[1]);
    }
}

static inline void close_back(back_scratch *t) { free(t->padded), free(t->grad), free(t->room), free(t->rows), free(t->sum); }

static inline int open_back(const sheet *s, back_scratch *t) {
    long P = round_up(s->out_channels);
    *t = (back_scratch){.padded = padded_scratch(s, s->x_pixel), .grad = padded_scratch(s, P),
                        .room = convolution_room(s),
                        .rows = scratch(BACK_ROWS * P + packed_backward(s) + packed_forward(s))};
    t->sum = calloc((size_t)(2 * P), sizeof(double));
    if (!t->padded || !t->grad || !t->room || !t->rows || !t->sum) return 1;
    t->weights = t->rows + BACK_ROWS * P;
    t->grad_weight = t->weights + packed_backward(s);
    t->moment = t->sum + P;
    if (wants_input_gradient(s))
        pack_backward(t->weights, s->weight, s->out_channels, s->in_channels, s->kernel, backward_tiles(s));
    return 0;
}

/* The share in which the layer is added. */
INLINE float alpha_of(const sheet *s) { return s->alpha ? *s->alpha : 1.0f; }

/* The rows that a backward pass starts from; mean and rstd are saved ones. */
static inline void start_rows(const sheet *s, const back_scratch *t, const float *mean, const float *rstd) {
    long O = s->out_channels, P = round_up(O);
    gain_offset(t->rows, mean, rstd, s->scale, s->shift, O);
    pad_row(t->rows + MEAN * P, mean, O);
    for (long c = 0; c < O; c++) t->rows[FLOW * P + c] = t->rows[GAIN * P + c] * alpha_of(s);
}

/* Where the first pixel lies in the padded gradient. */
INLINE float *padded_grad(const sheet *s, const back_scratch *t) {
    long half = s->kernel / 2;
    return t->grad + (half * (s->width + s->kernel - 1) + half) * round_up(s->out_channels);
}

/* dy of an unpooled image into the padded gradient. */
static inline void spread_plain(const sheet *s, const back_scratch *t, const float *y, const float *grad) {
    long P = round_up(s->out_channels), W = s->width, line = (W + s->kernel - 1) * P;
    float *to = padded_grad(s, t);
    for (long c = 0; c < P; c += LANES) {
        const float *rows = t->rows + c;
        v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
        v8 flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
        for (long r = 0; r < s->height; r++)
            for (long x = 0; x < W; x++) {
                v8 value = load(y + (r * W + x) * P + c), g = load(grad + (r * W + x) * P + c);
                v8 dz = s->linear ? g : behind_relu(gain, offset, value, g);
                store(to + r * line + x * P + c, flow * dz + (slope * (value - mean) + level));
            }
    }
}

/* From dy of image b, in t->grad, the gradients of weights and input. */
static inline void convolution_gradients(const sheet *s, const back_scratch *t, long b) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels);
    wgrad_job job = {.in = read_image(s, t->padded, b), .out = padded_grad(s, t), .sum = t->grad_weight, .H = s->height,
                     .W = s->width, .I = forward_channels(s), .O = P, .k = s->kernel, .in_step = s->x_pixel, .step = P,
                     .line = (s->width + s->kernel - 1) * P, .room = t->room};
    wgrad_image(&job);
    if (!wants_input_gradient(s)) return;
    conv_job back = {.in = t->grad, .weight = t->weights, .out = s->grad_x + b * s->height * s->width * Q,
                     .H = s->height, .W = s->width, .I = backward_channels(s), .O = Q, .k = s->kernel, .in_step = P,
                     .step = Q, .room = t->room};
    conv_image(&back);
}

static inline void unpack_gradients(const sheet *s, const back_scratch *t) {
    unpack_gradient(s->grad_weight, t->grad_weight, s->out_channels, s->in_channels, s->kernel, forward_tiles(s));
}

#endif
