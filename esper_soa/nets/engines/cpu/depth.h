/* Depthwise convolution of one image of one network, and the gradient of its weights; jobs as in conv.h, where I is 1. */
#ifndef ESPER_DEPTH_H
#define ESPER_DEPTH_H

#include "conv.h"

/* P pixels in a row of a vector of channels; weights [k * k, O]. */
INLINE void depth_tile(const conv_job *job, const float *in, const float *weight, float *out, int P) {
    vec sum[8];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) sum[p] = splat(0);
    for (long ky = 0; ky < job->k; ky++, in += job->in_line)
        for (long kx = 0; kx < job->k; kx++, weight += job->O) {
            vec w = load(weight);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) sum[p] += w * load(in + (p * job->stride + kx) * job->in_step);
        }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) store(out + p * job->step, sum[p]);
}

/* A vector of channels of an image. */
static void depth_lines(const conv_job *job, const float *in, const float *weight, float *out) {
    long right = job->stride * job->in_step;
    for (long y = 0; y < job->H; y++, in += job->stride * job->in_line, out += job->W * job->step) {
        long x = 0;
        for (; x + 8 <= job->W; x += 8) depth_tile(job, in + x * right, weight, out + x * job->step, 8);
        for (; x + 4 <= job->W; x += 4) depth_tile(job, in + x * right, weight, out + x * job->step, 4);
        for (; x < job->W; x++) depth_tile(job, in + x * right, weight, out + x * job->step, 1);
    }
}

/* The same of a 3x3 kernel, which stays in registers. */
INLINE void depth_channels(const conv_job *job, const float *in, const float *weight, float *out) {
    vec w[9];
#pragma GCC unroll 9
    for (long tap = 0; tap < 9; tap++) w[tap] = load(weight + tap * job->O);
    for (long y = 0; y < job->H; y++)
        for (long x = 0; x < job->W; x++) {
            const float *from = in + job->stride * (y * job->in_line + x * job->in_step);
            vec sum = splat(0);
#pragma GCC unroll 9
            for (long tap = 0; tap < 9; tap++)
                sum += w[tap] * load(from + tap / 3 * job->in_line + tap % 3 * job->in_step);
            store(out + (y * job->W + x) * job->step, sum);
        }
}

static void conv_by_channels(const conv_job *job) {
    for (long c = 0; c < job->O; c += LANES)
        if (job->k == 3) depth_channels(job, job->in + c, job->weight + c, job->out + c);
        else depth_lines(job, job->in + c, job->weight + c, job->out + c);
}

/* sum [k * k, O] += in at a tap * gradient, of a vector of channels and K taps of a line. */
INLINE void depth_weights(const wgrad_job *job, const float *in, const float *out, float *sum, int K) {
    vec part[3];
#pragma GCC unroll 3
    for (int t = 0; t < K; t++) part[t] = splat(0);
    for (long y = 0; y < job->H; y++)
        for (long x = 0; x < job->W; x++) {
            const float *from = in + job->stride * (y * job->in_line + x * job->in_step);
            vec g = load(out + y * job->line + x * job->step);
#pragma GCC unroll 3
            for (int t = 0; t < K; t++) part[t] += load(from + t * job->in_step) * g;
        }
#pragma GCC unroll 3
    for (int t = 0; t < K; t++) store(sum + t * job->O, load(sum + t * job->O) + part[t]);
}

static void wgrad_by_channels(const wgrad_job *job) {
    for (long c = 0; c < job->O; c += LANES)
        for (long ky = 0; ky < job->k; ky++) {
            const float *in = job->in + ky * job->in_line + c;
            float *sum = job->sum + ky * job->k * job->O + c;
            long kx = 0;
            for (; kx + 3 <= job->k; kx += 3) depth_weights(job, in + kx * job->in_step, job->out + c, sum + kx * job->O, 3);
            for (; kx < job->k; kx++) depth_weights(job, in + kx * job->in_step, job->out + c, sum + kx * job->O, 1);
        }
}

#endif
