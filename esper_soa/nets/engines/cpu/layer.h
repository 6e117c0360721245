/* What block.h, seed.h and parts.h share: convolving images, and the two passes behind a norm and a ReLU. */
#ifndef ESPER_LAYER_H
#define ESPER_LAYER_H

#include "activation.h"
#include "depth.h"
#include "direct.h"
#include "norm.h"
#include "pool.h"
#include "winograd.h"
#include "work.h"

/* Image b as the convolution reads it; `padded` holds those of the group that it was last called for. */
static inline const float *read_image(const descriptor *s, float *padded, long b) {
    if (s->padded) return s->x + b * padded_floats(s, s->x_pixel);
    const float *from = s->x + b * in_floats(s);
    if (!s->padding) return from;
    padded += b % group_of(s) * padded_floats(s, s->x_pixel);
    pad_image(padded, s->padding, from, s->in_height, s->in_width, s->x_pixel);
    return padded;
}

static void conv_by(const conv_job *job) {
    if (job->depthwise) conv_by_channels(job);
    else if (job->tiles) conv_by_tiles(job);
    else conv_by_taps(job);
}

static void wgrad_by(const wgrad_job *job) {
    if (job->depthwise) wgrad_by_channels(job);
    else if (job->tiles) wgrad_by_tiles(job);
    else wgrad_by_taps(job);
}

static inline void conv_image(const conv_job *job) {
    kernels_for(job->O, in_pairs(job->W, job->k, job->in_step, job->stride, job->tiles))->convolve(job);
}

static inline void wgrad_image(const wgrad_job *job) {
    kernels_for(job->O, in_pairs(job->W, job->k, job->in_step, job->stride, job->tiles))->wgrad(job);
}

/* The convolution of images b to b + count, of a group, to [count, height, width, P]. */
static inline void convolve_images(const descriptor *s, const work *t, float *out, long b, long count) {
    long P = round_up(s->out_channels);
    if (!s->kernel) return; /* it stands where x does */
    for (long i = 1; i < count; i++) read_image(s, t->padded, b + i);
    conv_job job = {.in = read_image(s, t->padded, b), .weight = t->weights, .out = out, .H = s->height, .W = s->width,
                    .I = forward_channels(s), .O = group_outputs(s), .k = s->kernel, .in_step = s->x_pixel, .step = P,
                    .room = t->room, .in_line = padded_width(s) * s->x_pixel, .stride = s->stride, .tiles = forward_tiles(s),
                    .depthwise = s->depthwise, .images = count, .in_image = padded_floats(s, s->x_pixel),
                    .out_image = image_floats(s)};
    for (long g = 0; g < s->split; g++, job.in += job.I, job.weight += group_weights(s), job.out += job.O) conv_image(&job);
}
static inline void convolve(const descriptor *s, const work *t, float *out, long b) { convolve_images(s, t, out, b, 1); }

/* The factor in which the layer is added. */
INLINE float alpha_of(const descriptor *s) { return s->alpha ? *s->alpha : 1.0f; }

/* residual + alpha * relu(gain * y + offset) at one pixel; residual may be NULL. */
INLINE vec emitted(const descriptor *s, vec gain, vec offset, const float *y, const float *residual) {
    vec z = gain * load(y) + offset;
    z = s->linear ? z : relu(z);
    return residual ? load(residual) + alpha_of(s) * z : z;
}

/* A vector of channels of one image and of the pool behind it, to the place `at`, and where the pool's maxima stood.
 * Decided on what is pooled: the same bits as a pool of its own gives, whatever rounding makes equal. */
INLINE void emit_pooled(const descriptor *s, const float *rows, const float *y, const float *residual, long at) {
    long P = round_up(s->out_channels), W = s->width;
    vec gain = load(rows), offset = load(rows + P);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, at += P) {
            vec best = splat(0), peak = splat(0);
            ints place = {0};
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                long p = ((r + (q >> 1)) * W + x + (q & 1)) * P;
                vec z = emitted(s, gain, offset, y + p, residual ? residual + p : NULL);
                ints wins = q ? overtakes(z, best) : ~(ints){0};
                best = choose(wins, z, best);
                peak = choose(wins, load(y + p), peak);
                place = choose_int(wins, q, place);
            }
            store(s->out + at, best);
            if (!s->place) continue;
            store(s->peak + at, peak);
            save_place(s->place + at, place);
        }
}

/* Image b from its convolution y; residual as y, or NULL; rows = gain and offset [2, P]. */
static inline void emit(const descriptor *s, const float *rows, const float *y, const float *residual, long b) {
    long P = round_up(s->out_channels), at = b * out_floats(s);
    for (long c = 0; c < P; c += LANES) {
        vec gain = load(rows + c), offset = load(rows + P + c);
        if (s->pooled) emit_pooled(s, rows + c, y + c, residual ? residual + c : NULL, at + c);
        for (long i = c; i < image_floats(s) && !s->pooled; i += P)
            store(s->out + at + i, emitted(s, gain, offset, y + i, residual ? residual + i : NULL));
    }
}

/* The rows that a backward pass starts from; mean and rstd are saved ones. */
static inline void start_rows(const descriptor *s, const work *t, const float *mean, const float *rstd) {
    long O = s->out_channels, P = round_up(O);
    gain_offset(t->rows, mean, rstd, s->scale, s->shift, O);
    pad_row(t->rows + MEAN * P, mean, O);
    for (long c = 0; c < O; c++) t->rows[FLOW * P + c] = t->rows[GAIN * P + c] * alpha_of(s);
}

/* Where the first pixel of image b lies in the padded gradients of its group. */
INLINE float *padded_grad(const descriptor *s, const work *t, long b) {
    long before = s->kernel > 1 ? s->kernel - 1 - s->padding : 0;
    return t->grad + b % group_of(s) * grad_floats(s) + before * (grad_width(s) + 1) * round_up(s->out_channels);
}

/* The gradient that passes the ReLU, of a vector of channels at one pixel; y is the convolution's value there. */
INLINE vec behind_relu(const descriptor *s, vec gain, vec offset, vec y, vec grad) {
    return s->linear ? grad : keep(~(gain * y + offset <= splat(0)), grad);
}

/* The sums of dz and of dz * (y - mean) over an image, in four parts by the place in windows of 2x2 pixels, whether
 * there is a pool or not: dz of a pool lies at the place of the maximum. */
typedef struct {
    vec sum[4], moment[4];
} window_sums;

INLINE void gather_plain(const descriptor *s, window_sums *w, const float *rows, const float *y, const float *grad) {
    long P = round_up(s->out_channels), W = s->width, odd = (s->height | W) & 1;
    vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    for (long r = 0; r < s->height; r += 2)
        for (long x = 0; x < W; x += 2)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                long line = r + (q >> 1), column = x + (q & 1), at = (line * W + column) * P;
                if (odd && (line == s->height || column == W)) continue;
                vec value = load(y + at), dz = behind_relu(s, gain, offset, value, load(grad + at));
                w->sum[q] += dz, w->moment[q] += dz * (value - mean);
            }
}

INLINE void gather_pooled(const descriptor *s, window_sums *w, const float *rows, long at) {
    long P = round_up(s->out_channels), end = at + out_floats(s);
    vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    for (; at < end; at += P) {
        vec peak = load(s->peak + at), dz = behind_relu(s, gain, offset, peak, load(s->grad_out + at));
        ints place = saved_place(s->place + at);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            vec here = keep(place == q, dz);
            w->sum[q] += here, w->moment[q] += here * (peak - mean);
        }
    }
}

/* Take image b into the sums; y [pixels, P] is its convolution, which is not read where there is a pool. */
static inline void gather(const descriptor *s, const work *t, const float *y, long b) {
    long P = round_up(s->out_channels), at = b * out_floats(s);
    for (long c = 0; c < P; c += LANES) {
        window_sums w = {0};
        if (s->pooled) gather_pooled(s, &w, t->rows + c, at + c);
        else gather_plain(s, &w, t->rows + c, y + c, s->grad_out + at + c);
        vec sum = (w.sum[0] + w.sum[1]) + (w.sum[2] + w.sum[3]);
        vec moment = (w.moment[0] + w.moment[1]) + (w.moment[2] + w.moment[3]);
        for (int l = 0; l < LANES; l++) t->sum[c + l] += (double)sum[l], t->moment[c + l] += (double)moment[l];
    }
}

/* dy of a vector of channels of one image into the padded gradient `to`. */
INLINE void spread_channels(const descriptor *s, const float *rows, const float *y, long at, float *to) {
    long P = round_up(s->out_channels), W = s->width, right = apart_of(s) * P, line = grad_width(s) * right;
    vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    vec flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r < s->height && !s->pooled; r++)
        for (long x = 0; x < W; x++, at += P, y += P) {
            vec dz = behind_relu(s, gain, offset, load(y), load(s->grad_out + at));
            store(to + r * line + x * right, flow * dz + (slope * (load(y) - mean) + level));
        }
    for (long r = 0; r + 1 < s->height && s->pooled; r += 2)
        for (long x = 0; x + 1 < W; x += 2, at += P) {
            vec dz = behind_relu(s, gain, offset, load(s->peak + at), load(s->grad_out + at));
            ints place = saved_place(s->place + at);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                vec value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P);
                vec dy = flow * keep(place == q, dz) + (slope * (value - mean) + level);
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * right, dy);
            }
        }
    for (long r = 0; r < s->height && s->pooled; r++) /* what is in no window of the pool */
        for (long x = r < s->height / 2 * 2 ? W / 2 * 2 : 0; x < W; x++)
            store(to + r * line + x * right, slope * (load(y + (r * W + x) * P) - mean) + level);
}

/* dy of image b, y its convolution, into the padded gradient. */
static inline void spread(const descriptor *s, const work *t, const float *y, long b) {
    for (long c = 0; c < round_up(s->out_channels); c += LANES)
        spread_channels(s, t->rows + c, y + c, b * out_floats(s) + c, padded_grad(s, t, b) + c);
}

/* Where a kernel covers all of x, each pixel met one tap; dy is the pixel `at`. */
static inline void by_pixels(const descriptor *s, conv_job job, long at) {
    long taps = job.k * job.k, each = (s->depthwise ? 1 : job.I) * job.O;
    job.in += at, job.H = job.W = job.k = 1;
    for (long tap = taps - 1; tap >= 0; tap--, job.out += job.step) {
        conv_job own = job;
        own.weight += tap * each;
        conv_image(&own);
    }
}

/* Of a pointwise convolution with a stride. */
static inline void by_lines(const descriptor *s, conv_job job) {
    long line = s->stride * s->in_width * job.step;
    job.H = 1, job.W = s->width, job.step *= s->stride;
    for (long y = 0; y < s->height; y++, job.in += job.in_line, job.out += line) conv_image(&job);
}

/* The gradient of images b to b + count of x, from dy in t->grad. */
static inline void input_gradient(const descriptor *s, const work *t, long b, long count) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), k = s->kernel;
    float *to = s->grad_x + b * in_floats(s);
    conv_job job = {.in = t->grad, .weight = t->turned, .out = to, .H = s->in_height, .W = s->in_width,
                    .I = backward_channels(s), .O = s->split > 1 ? s->in_channels / s->split : Q, .k = k, .in_step = P,
                    .step = Q, .room = t->room, .in_line = grad_width(s) * P, .stride = 1, .tiles = backward_tiles(s),
                    .depthwise = s->depthwise, .images = count, .in_image = grad_floats(s), .out_image = in_floats(s)};
    if (k == 1 && s->stride > 1) zero(to, in_floats(s));
    for (long g = 0; g < s->split; g++, job.in += job.I, job.weight += group_weights(s), job.out += job.O)
        if (k > 1 && k == s->in_height && k == s->in_width && !s->padding) by_pixels(s, job, padded_grad(s, t, b) - t->grad);
        else if (k > 1 || s->stride == 1) conv_image(&job);
        else by_lines(s, job);
}

/* From dy of images b to b + count, in t->grad, the gradients of weights and input. */
static inline void group_gradients(const descriptor *s, const work *t, long b, long count) {
    long P = round_up(s->out_channels), right = apart_of(s) * P;
    if (!s->kernel) {
        if (wants_input_gradient(s)) memcpy(s->grad_x + b * in_floats(s), t->grad, (size_t)in_floats(s) * sizeof(float));
        return;
    }
    for (long i = 1; i < count; i++) read_image(s, t->padded, b + i);
    wgrad_job job = {.in = read_image(s, t->padded, b), .out = padded_grad(s, t, b), .sum = t->grad_weight, .H = s->height,
                     .W = s->width, .I = forward_channels(s), .O = group_outputs(s), .k = s->kernel,
                     .in_step = s->x_pixel, .step = right, .line = grad_width(s) * right, .room = t->room, .in_line = padded_width(s) * s->x_pixel,
                     .stride = s->stride, .tiles = forward_tiles(s), .depthwise = s->depthwise, .images = count,
                     .in_image = padded_floats(s, s->x_pixel), .out_image = grad_floats(s)};
    for (long g = 0; g < s->split; g++, job.in += job.I, job.out += job.O, job.sum += group_weights(s)) wgrad_image(&job);
    if (wants_input_gradient(s)) input_gradient(s, t, b, count);
}
static inline void convolution_gradients(const descriptor *s, const work *t, long b) { group_gradients(s, t, b, 1); }

static inline void unpack_gradients(const descriptor *s, const work *t) {
    long C = s->out_channels, taps = s->kernel * s->kernel;
    float *to = s->sparse ? t->dense : s->grad_weight;
    for (long g = 0, at = 0; g < s->split && !s->depthwise; g++, at += group_weights(s))
        unpack_gradient(to + at, t->grad_weight + at, C / s->split, s->in_channels / s->split, s->kernel,
                        forward_tiles(s));
    for (long c = 0; c < C && s->depthwise; c++)
        for (long tap = 0; tap < taps; tap++) s->grad_weight[c * taps + tap] = t->grad_weight[tap * round_up(C) + c];
    if (!s->sparse) return;
    long O = C / s->sparse, each = s->in_channels / s->sparse * taps;
    for (long c = 0; c < C; c++)
        memcpy(s->grad_weight + c * each, t->dense + c * s->in_channels * taps + c / O * each, (size_t)each * sizeof(float));
}

#endif
