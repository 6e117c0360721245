/* What block.h, seed.h and parts.h share: convolving images, and the two passes behind a norm and a ReLU. */
#ifndef ESPER_LAYER_H
#define ESPER_LAYER_H

#include "direct.h"
#include "front.h"
#include "norm.h"
#include "winograd.h"

/* Image b as the convolution reads it; `padded` holds the one that it was last called for. */
static inline const float *read_image(const sheet *s, float *padded, long b) {
    long more = s->padded ? s->kernel - 1 : 0;
    const float *from = s->x + b * (s->height + more) * (s->width + more) * s->x_pixel;
    if (s->padded || s->kernel == 1) return from;
    pad_image(padded, s->kernel / 2, from, s->height, s->width, s->x_pixel);
    return padded;
}

/* Whether a gradient flows through the convolution into its input. */
INLINE int wants_input_gradient(const sheet *s) { return s->grad_x && !s->detached; }

static inline void conv_image(const conv_job *job) {
    if (job->O % LANES) KERNELS_8.convolve(job);
    else if (by_tiles(job->H, job->W, job->I, job->k)) conv_by_tiles(job);
    else conv_by_taps(job);
}

static inline void wgrad_image(const wgrad_job *job) {
    if (by_tiles(job->H, job->W, job->I, job->k)) wgrad_by_tiles(job);
    else wgrad_by_taps(job);
}

/* The convolution of image b to [H, W, P]. */
static inline void convolve(const sheet *s, const front_scratch *t, float *out, long b) {
    long P = round_up(s->out_channels);
    conv_job job = {.in = read_image(s, t->padded, b), .weight = t->weights, .out = out, .H = s->height, .W = s->width,
                    .I = forward_channels(s), .O = P, .k = s->kernel, .in_step = s->x_pixel, .step = P, .room = t->room};
    conv_image(&job);
}

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
        vec gain = load(job->gain + c), offset = load(job->offset + c);
        for (long p = 0; p < job->pixels; p++) {
            long at = p * job->P + c;
            vec z = gain * load(job->value + at) + offset;
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
INLINE vec behind_relu(vec gain, vec offset, vec y, vec grad) { return keep(~(gain * y + offset <= splat(0)), grad); }

/* Scratch of a backward pass, and the gradients while they are gathered. */
typedef struct {
    float *padded, *grad; /* padded input and padded dy of one image */
    float *room;          /* of a convolution */
    float *rows;          /* [BACK_ROWS, P] */
    float *weights;       /* packed for the gradient of the input */
    float *grad_weight;   /* packed */
    double *sum, *moment; /* [P]: sum of dz, sum of dz * (y - mean) */
} back_scratch;

INLINE void add_sums(const back_scratch *t, long c, vec sum, vec moment) {
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
        vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
        vec sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)};
        for (long p = 0; p < pixels; p += 2)
#pragma GCC unroll 2
            for (long q = 0; q < 2; q++) {
                if (p + q == pixels) break;
                vec y = load(value + (p + q) * P + c), g = load(grad + (p + q) * P + c);
                vec dz = s->linear ? g : behind_relu(gain, offset, y, g);
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
        vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
        vec flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
        for (long r = 0; r < s->height; r++)
            for (long x = 0; x < W; x++) {
                vec value = load(y + (r * W + x) * P + c), g = load(grad + (r * W + x) * P + c);
                vec dz = s->linear ? g : behind_relu(gain, offset, value, g);
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
