/* What block.c and seed.c share: reading images, packing weights, and the two passes behind a norm and a ReLU. */
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

/* Floats of a network in a pixel of x. */
INLINE long x_room(const sheet *s) { return s->x_net ? s->x_net : s->x_pixel; }

/* Floats between pixels of an image as the convolution reads it: without a border it lies where it is. */
INLINE long read_step(const sheet *s) {
    return s->kernel == 1 ? s->x_pixel : forward_tiles(s) ? forward_channels(s) : x_room(s);
}

/* Image b of network n as the convolution reads it; `padded` holds the one that it was last called for. */
static inline const float *read_image(const sheet *s, float *padded, long b, long n) {
    const float *from = s->x + b * s->height * s->width * s->x_pixel + n * s->x_net;
    if (s->kernel == 1) return from;
    if (n == 0 || s->x_net)
        pad_image(padded, read_step(s), s->kernel / 2, from, s->x_pixel, s->height, s->width, x_room(s));
    return padded;
}

static inline float *padded_scratch(const sheet *s, long channels) {
    return scratch((s->height + s->kernel - 1) * (s->width + s->kernel - 1) * channels);
}

/* Whether a gradient flows through the convolution into its input. */
INLINE int wants_input_gradient(const sheet *s) { return s->grad_x && !s->detached; }

/* Numbers in a network's packed weights. */
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
    float *weights; /* of every network, packed */
    float *room;
    float *rows; /* [P] each, as many as the layer asks for */
} front_scratch;

static inline void close_front(front_scratch *t) { free(t->padded), free(t->weights), free(t->room), free(t->rows); }

static inline int open_front(const sheet *s, front_scratch *t, long rows) {
    long each = s->out_channels * s->in_channels * s->kernel * s->kernel;
    *t = (front_scratch){padded_scratch(s, read_step(s)), scratch(s->nets * packed_forward(s)), convolution_room(s),
                         scratch(rows * round_up(s->out_channels))};
    if (!t->padded || !t->weights || !t->room || !t->rows) return 1;
    for (long n = 0; n < s->nets; n++)
        pack_forward(t->weights + n * packed_forward(s), s->weight + n * each, s->out_channels, s->in_channels, s->kernel,
                     forward_tiles(s));
    return 0;
}

/* The convolution of image b of network n to [H, W, P]. */
static inline void convolve(const sheet *s, const front_scratch *t, float *out, long b, long n) {
    long P = round_up(s->out_channels);
    conv_job job = {.in = read_image(s, t->padded, b, n), .weight = t->weights + n * packed_forward(s), .out = out,
                    .H = s->height, .W = s->width, .I = forward_channels(s), .O = P, .k = s->kernel,
                    .in_step = read_step(s), .step = P, .room = t->room};
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

/* Image b of network n through a layer whose scratch is open (4 rows). */
void block_infer_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n);
void seed_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n);

/* Where image b of network n stands in a saved array of `pixels` pixels an image. */
INLINE long saved_at(const sheet *s, long b, long n, long pixels) {
    return (n * s->batch + b) * pixels * round_up(s->out_channels);
}

INLINE long out_pixels(const sheet *s) {
    return s->pooled ? (s->height / 2) * (s->width / 2) : s->height * s->width;
}

/* residual + alpha * relu(gain * value + offset) of an image [pixels, P] to `out` of O channels. */
typedef struct {
    const float *value, *gain, *offset, *residual; /* residual may be NULL */
    float *out;
    long pixels, O, step, residual_step; /* floats a pixel, of out and of residual */
    int linear;                          /* no ReLU */
    float alpha;                         /* share of it that is added to the residual; 1 without a residual */
} emit_job;

/* `count` channels of it from c on, up to a vector; a constant where the caller's is. */
INLINE void emit_channels(const emit_job *job, long c, long count) {
    long P = round_up(job->O);
    v8 gain = load(job->gain + c), offset = load(job->offset + c);
    for (long p = 0; p < job->pixels; p++) {
        v8 z = gain * load(job->value + p * P + c) + offset;
        z = job->linear ? z : relu(z);
        if (job->residual) z = load_some(job->residual + p * job->residual_step + c, count) + job->alpha * z;
        store_some(job->out + p * job->step + c, z, count);
    }
}

static inline void emit_image(const emit_job *job) {
    long c = 0;
    for (; c + LANES <= job->O; c += LANES) emit_channels(job, c, LANES);
    if (c < job->O) emit_channels(job, c, job->O - c);
}

/* Behind norm and ReLU: z = gain * y + offset, dz the gradient that passes the ReLU, and the gradient of the
 * convolution's output is dy = flow * dz + slope * (y - mean) + level; flow = gain, times alpha. Rows of [P] each: */
enum { GAIN, OFFSET, MEAN, FLOW, SLOPE, LEVEL, BACK_ROWS };

/* One network's gradients while they are gathered. */
typedef struct {
    double *sum, *moment; /* [P]: sum of dz, sum of dz * (y - mean) */
    float *rows;          /* [BACK_ROWS, P] */
    float *weights;       /* packed for the gradient of the input */
    float *grad_weight;   /* packed */
} back_net;

/* dz of 8 channels at one pixel; `y` is the convolution's value there. */
INLINE v8 behind_relu(v8 gain, v8 offset, v8 y, v8 grad) { return keep(~(gain * y + offset <= splat(0)), grad); }

INLINE void add_sums(back_net *net, long c, v8 sum, v8 moment) {
    for (int l = 0; l < LANES; l++) {
        net->sum[c + l] += (double)sum[l];
        net->moment[c + l] += (double)moment[l];
    }
}

/* `count` channels from c on, as in emit_channels, of `value` [pixels, P] and `grad` of `step` floats a pixel. */
INLINE void gather_channels(const sheet *s, back_net *net, const float *value, const float *grad, long step, long c,
                            long count) {
    long P = round_up(s->out_net), pixels = s->height * s->width;
    const float *rows = net->rows + c;
    v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    v8 sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)};
    for (long p = 0; p < pixels; p += 2)
#pragma GCC unroll 2
        for (long q = 0; q < 2; q++) {
            if (p + q == pixels) break;
            v8 y = load(value + (p + q) * P + c), g = load_some(grad + (p + q) * step + c, count);
            v8 dz = s->linear ? g : behind_relu(gain, offset, y, g);
            sum[q] += dz;
            moment[q] += dz * (y - mean);
        }
    add_sums(net, c, sum[0] + sum[1], moment[0] + moment[1]);
}

/* Take one image into the sums; `value` [pixels, P] is the convolution's output, `grad` has `step` floats a pixel. */
static inline void gather_sums(const sheet *s, back_net *net, const float *value, const float *grad, long step) {
    long O = s->out_net, c = 0;
    for (; c + LANES <= O; c += LANES) gather_channels(s, net, value, grad, step, c, LANES);
    if (c < O) gather_channels(s, net, value, grad, step, c, O - c);
}

/* Scratch of a backward pass. */
typedef struct {
    float *padded, *grad; /* padded input and padded dy of one image */
    float *grad_x;        /* [H, W, Q] where x has no whole vectors */
    float *room;          /* of a convolution */
    float *own;           /* rows, packed weights and their gradient of every network */
    double *sums;
    back_net *nets;
} back_scratch;

static inline void close_back(back_scratch *t) {
    free(t->padded), free(t->grad), free(t->grad_x), free(t->room), free(t->own), free(t->sums), free(t->nets);
}

static inline int open_back(const sheet *s, back_scratch *t) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), taps = s->kernel * s->kernel;
    long each = BACK_ROWS * P + packed_backward(s) + packed_forward(s);
    t->padded = padded_scratch(s, read_step(s));
    t->grad = padded_scratch(s, P);
    t->grad_x = scratch(s->height * s->width * Q);
    t->room = convolution_room(s);
    t->own = scratch(s->nets * each);
    t->sums = calloc((size_t)(s->nets * 2 * P), sizeof(double));
    t->nets = calloc((size_t)s->nets, sizeof(back_net));
    if (!t->padded || !t->grad || !t->grad_x || !t->room || !t->own || !t->sums || !t->nets) return 1;
    for (long n = 0; n < s->nets; n++) {
        back_net *net = &t->nets[n];
        net->rows = t->own + n * each;
        net->weights = net->rows + BACK_ROWS * P;
        net->grad_weight = net->weights + packed_backward(s);
        net->sum = t->sums + n * 2 * P;
        net->moment = net->sum + P;
        if (wants_input_gradient(s))
            pack_backward(net->weights, s->weight + n * s->out_channels * s->in_channels * taps, s->out_channels,
                          s->in_channels, s->kernel, backward_tiles(s));
    }
    return 0;
}

/* The share in which network n's layer is added. */
INLINE float alpha_of(const sheet *s, long n) { return s->alpha ? s->alpha[n] : 1.0f; }

/* The rows that a backward pass starts from; mean and rstd are saved rows of network n. */
static inline void start_rows(const sheet *s, back_net *net, const float *mean, const float *rstd, long n) {
    long O = s->out_channels;
    gain_offset(net->rows, mean, rstd, s->scale + n * O, s->shift + n * O, O);
    pad_row(net->rows + MEAN * round_up(O), mean, O);
    for (long c = 0; c < O; c++) net->rows[FLOW * round_up(O) + c] = net->rows[GAIN * round_up(O) + c] * alpha_of(s, n);
}

/* Where the first pixel lies in the padded gradient. */
INLINE float *padded_grad(const sheet *s, const back_scratch *t) {
    long half = s->kernel / 2;
    return t->grad + (half * (s->width + s->kernel - 1) + half) * round_up(s->out_channels);
}

/* dy of `count` channels from c on, as in emit_channels, into the padded gradient `to`. */
INLINE void spread_channels(const sheet *s, const back_net *net, const float *y, const float *grad, long step, float *to,
                            long c, long count) {
    long P = round_up(s->out_net), W = s->width, line = (W + s->kernel - 1) * P;
    const float *rows = net->rows + c;
    v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    v8 flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r < s->height; r++)
        for (long x = 0; x < W; x++) {
            v8 value = load(y + (r * W + x) * P + c), g = load_some(grad + (r * W + x) * step + c, count);
            v8 dz = s->linear ? g : behind_relu(gain, offset, value, g);
            store(to + r * line + x * P + c, flow * dz + (slope * (value - mean) + level));
        }
}

/* dy of an unpooled image into the padded gradient; `grad` has `step` floats a pixel. */
static inline void spread_plain(const sheet *s, const back_net *net, const float *y, const float *grad, long step,
                                float *to) {
    long O = s->out_net, c = 0;
    for (; c + LANES <= O; c += LANES) spread_channels(s, net, y, grad, step, to, c, LANES);
    if (c < O) spread_channels(s, net, y, grad, step, to, c, O - c);
}

/* dx of one image, straight to its place where x has whole vectors. */
static inline void input_gradient(const sheet *s, const back_scratch *t, long b, long n) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), pixels = s->height * s->width;
    float *to = s->grad_x + b * pixels * s->x_pixel + n * s->x_net;
    int direct = x_room(s) == Q;
    conv_job job = {.in = t->grad, .weight = t->nets[n].weights, .out = direct ? to : t->grad_x, .H = s->height,
                    .W = s->width, .I = backward_channels(s), .O = Q, .k = s->kernel, .in_step = P,
                    .step = direct ? s->x_pixel : Q, .room = t->room};
    conv_image(&job);
    if (!direct) copy_pixels(to, s->x_pixel, t->grad_x, Q, pixels, s->in_channels);
}

/* From dy of one image, in t->grad, the gradients of weights and input. */
static inline void convolution_gradients(const sheet *s, const back_scratch *t, long b, long n) {
    long P = round_up(s->out_channels);
    wgrad_job job = {.in = read_image(s, t->padded, b, n), .out = padded_grad(s, t), .sum = t->nets[n].grad_weight,
                     .H = s->height, .W = s->width, .I = forward_channels(s), .O = P, .k = s->kernel,
                     .in_step = read_step(s), .step = P, .line = (s->width + s->kernel - 1) * P, .room = t->room};
    wgrad_image(&job);
    if (wants_input_gradient(s)) input_gradient(s, t, b, n);
}

static inline void unpack_gradients(const sheet *s, const back_scratch *t) {
    long each = s->out_channels * s->in_channels * s->kernel * s->kernel;
    for (long n = 0; n < s->nets; n++)
        unpack_gradient(s->grad_weight + n * each, t->nets[n].grad_weight, s->out_channels, s->in_channels, s->kernel,
                        forward_tiles(s));
}

#endif
