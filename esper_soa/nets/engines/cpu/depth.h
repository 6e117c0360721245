/* Depthwise convolution of one image of one network, and the gradient of its weights; jobs as in conv.h, where I is 1. */
#ifndef ESPER_DEPTH_H
#define ESPER_DEPTH_H

#include "conv.h"

/* A vector of channels of an image; weights [k * k, O]. */
INLINE void depth_channels(const conv_job *job, const float *in, const float *weight, float *out, long k) {
    vec w[9];
#pragma GCC unroll 9
    for (long tap = 0; tap < 9 && k == 3; tap++) w[tap] = load(weight + tap * job->O);
    for (long y = 0; y < job->H; y++)
        for (long x = 0; x < job->W; x++) {
            const float *from = in + job->stride * (y * job->in_line + x * job->in_step);
            vec sum = splat(0);
#pragma GCC unroll 9
            for (long tap = 0; tap < k * k; tap++)
                sum += (k == 3 ? w[tap] : load(weight + tap * job->O)) *
                       load(from + tap / k * job->in_line + tap % k * job->in_step);
            store(out + (y * job->W + x) * job->step, sum);
        }
}

static void conv_by_channels(const conv_job *job) {
    for (long c = 0; c < job->O; c += LANES)
        if (job->k == 3) depth_channels(job, job->in + c, job->weight + c, job->out + c, 3);
        else depth_channels(job, job->in + c, job->weight + c, job->out + c, job->k);
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
