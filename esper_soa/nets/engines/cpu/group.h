/* Group norms of one image, forward and backward. */
#ifndef ESPER_GROUP_H
#define ESPER_GROUP_H

#include <math.h>

#include "layer.h"

/* Mean and 1 / deviation of every group of an image y [pixels, P], written once per channel. */
static inline void group_statistics(const descriptor *s, const float *y, float *mean, float *rstd) {
    long O = s->out_channels, P = round_up(O), each = O / s->groups, pixels = s->height * s->width;
    double count = (double)each * pixels;
    for (long c = 0; c < P; c += LANES) store(mean + c, sum_pixels(y + c, pixels, P));
    for (long g = 0; g < s->groups; g++) {
        double sum = 0;
        for (long c = 0; c < each; c++) sum += mean[g * each + c];
        for (long c = 0; c < each; c++) mean[g * each + c] = (float)(sum / count);
    }
    for (long c = 0; c < P; c += LANES) store(rstd + c, sum_squares(y + c, load(mean + c), pixels, P));
    for (long g = 0; g < s->groups; g++) {
        double square = 0;
        for (long c = 0; c < each; c++) square += rstd[g * each + c];
        for (long c = 0; c < each; c++) rstd[g * each + c] = (float)(1.0 / sqrt(square / count + s->eps));
    }
}

/* Slope and level of every group from the sums over this image, which go into the gradients of scale and shift.
 * dy = rstd * (scale dz - mean(scale dz) - xhat mean(scale dz xhat)), means over the group's pixels and channels. */
static inline void settle_group(const descriptor *s, const work *t, const float *rstd) {
    long O = s->out_channels, P = round_up(O), each = O / s->groups;
    double count = (double)each * s->height * s->width;
    for (long g = 0; g < s->groups; g++) {
        double sum = 0, moment = 0, deviation = rstd[g * each];
        for (long c = g * each; c < (g + 1) * each; c++) {
            double scale = s->scale[c];
            t->sum[c] *= alpha_of(s);
            t->moment[c] *= alpha_of(s);
            sum += scale * t->sum[c];
            moment += scale * t->moment[c];
            s->grad_scale[c] += (float)(t->moment[c] * deviation);
            s->grad_shift[c] += (float)t->sum[c];
        }
        for (long c = g * each; c < (g + 1) * each; c++) {
            t->rows[SLOPE * P + c] = (float)(-deviation * deviation * deviation * moment / count);
            t->rows[LEVEL * P + c] = (float)(-deviation * sum / count);
        }
    }
    for (long c = 0; c < P; c++) t->sum[c] = t->moment[c] = 0.0;
}

#endif
