/* Means and variances of channels, gathered image by image so that no large mean cancels, and what follows from them. */
#ifndef ESPER_NORM_H
#define ESPER_NORM_H

#include "vec.h"

/* Running moments of P channels: mean, and the sum of squared distances from it. */
typedef struct {
    double *mean, *square;
    long images;
} moments;

/* With room for P channels, in one allocation; NULL where memory is out. */
static inline moments *new_moments(long P) {
    moments *all = calloc(1, sizeof(moments) + 2 * (size_t)P * sizeof(double));
    if (!all) return NULL;
    all->mean = (double *)(all + 1);
    all->square = all->mean + P;
    return all;
}

/* Sum of 8 channels of an image over its pixels. */
INLINE vec sum_pixels(const float *y, long pixels, long P) {
    vec part[4] = {splat(0), splat(0), splat(0), splat(0)};
    long p = 0;
    for (; p + 4 <= pixels; p += 4)
        for (int q = 0; q < 4; q++) part[q] += load(y + (p + q) * P);
    for (; p < pixels; p++) part[0] += load(y + p * P);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* Sum of squared distances of 8 channels from `mean`. */
INLINE vec sum_squares(const float *y, vec mean, long pixels, long P) {
    vec part[4] = {splat(0), splat(0), splat(0), splat(0)};
    long p = 0;
    for (; p + 4 <= pixels; p += 4)
        for (int q = 0; q < 4; q++) {
            vec away = load(y + (p + q) * P) - mean;
            part[q] += away * away;
        }
    for (; p < pixels; p++) {
        vec away = load(y + p * P) - mean;
        part[0] += away * away;
    }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* Take an image [pixels, P] into the moments (Chan, Golub and LeVeque's pairwise update, images of equal size). */
static inline void add_moments(moments *m, const float *y, long pixels, long P) {
    double weight = 1.0 / (double)(m->images + 1), shrink = (double)pixels * (double)m->images * weight;
    for (long c = 0; c < P; c += LANES) {
        vec mean = sum_pixels(y + c, pixels, P) / splat((float)pixels);
        vec square = sum_squares(y + c, mean, pixels, P);
        for (int l = 0; l < LANES; l++) {
            double away = (double)mean[l] - m->mean[c + l];
            m->mean[c + l] += away * weight;
            m->square[c + l] += (double)square[l] + away * away * shrink;
        }
    }
    m->images++;
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
