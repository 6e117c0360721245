/* Means and variances of channels, gathered image by image so that no large mean cancels, and what follows from them. */
#ifndef ESPER_NORM_H
#define ESPER_NORM_H

#include "vec.h"

/* Sum over an image of a vector of channels. */
INLINE vec sum_pixels(const float *y, long pixels, long P) {
    vec part[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (long p = 0; p < pixels; p += 4)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
            if (p + q < pixels) part[q] += load(y + (p + q) * P);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* The same of squared distances from `mean`. */
INLINE vec sum_squares(const float *y, vec mean, long pixels, long P) {
    vec part[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (long p = 0; p < pixels; p += 4)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            if (p + q == pixels) break;
            vec away = load(y + (p + q) * P) - mean;
            part[q] += away * away;
        }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* Take an image [pixels, P] into the mean and the sum of squared distances from it, [P] each, of the `images` before it
 * (Chan, Golub and LeVeque's pairwise update, images of equal size). */
static inline void add_moments(double *means, double *squares, long images, const float *y, long pixels, long P) {
    double weight = 1.0 / (double)(images + 1), shrink = (double)pixels * (double)images * weight;
    for (long c = 0; c < P; c += LANES) {
        vec mean = sum_pixels(y + c, pixels, P) / splat((float)pixels);
        vec square = sum_squares(y + c, mean, pixels, P);
        for (int l = 0; l < LANES; l++) {
            double away = (double)mean[l] - means[c + l];
            means[c + l] += away * weight;
            squares[c + l] += (double)square[l] + away * away * shrink;
        }
    }
}

/* rows [2, P]: gain and offset with which norm(y) = gain * y + offset; zeros in the channels added. */
static inline void gain_offset(float *rows, const float *mean, const float *rstd, const float *scale,
                               const float *shift, long O) {
    long P = round_up(O);
    memset(rows, 0, 2 * (size_t)P * sizeof(float));
    for (long c = 0; c < O; c++) {
        rows[c] = scale[c] * rstd[c];
        rows[P + c] = shift[c] - mean[c] * rows[c];
    }
}

#endif
