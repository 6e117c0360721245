/* Pixels as tokens: a norm of the channels of each, and linear layers of the pixels of a channel; see descriptor.h. */
#ifndef ESPER_TOKENS_H
#define ESPER_TOKENS_H

#include <math.h>

#include "work.h"

/* The first `count` lanes. */
INLINE ints lanes_within(long count) {
    ints lanes;
    for (int l = 0; l < LANES; l++) lanes[l] = l < count ? -1 : 0;
    return lanes;
}

INLINE float sum_lanes(vec v) {
    float part[LANES];
    store(part, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) part[l] += part[l + half];
    return part[0];
}

/* The mean of a pixel's channels, and one over their deviation. */
typedef struct {
    float mean, rstd;
} spread_of;

INLINE spread_of spread_at(const descriptor *s, const float *x) {
    long C = s->out_channels;
    vec sum = splat(0), squares = sum;
    for (long c = 0; c < C; c += LANES) sum += load(x + c);
    float mean = sum_lanes(sum) / (float)C;
    for (long c = 0; c < C; c += LANES) {
        vec away = load(x + c) - splat(mean);
        if (c + LANES > C) away = keep(lanes_within(C - c), away);
        squares += away * away;
    }
    return (spread_of){mean, 1.0f / sqrtf(sum_lanes(squares) / (float)C + (float)s->eps)};
}

/* A norm of the channels of each pixel. */
static void pixels_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels);
    float *gain = t->rows, *offset = gain + P;
    pad_row(gain, s->scale, s->out_channels), pad_row(offset, s->shift, s->out_channels);
    for (long at = 0; at < s->batch * image_floats(s); at += P) {
        spread_of of = spread_at(s, s->x + at);
        for (long c = 0; c < P; c += LANES)
            store(s->out + at + c,
                  (load(s->x + at + c) - splat(of.mean)) * splat(of.rstd) * load(gain + c) + load(offset + c));
    }
}

static void pixels_backward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C);
    float *gain = t->rows, *scale = gain + P, *shift = scale + P;
    ready_sums(s, t);
    pad_row(gain, s->scale, C);
    for (long b = 0; b < s->batch; b++) {
        zero(scale, 2 * P);
        for (long at = b * image_floats(s); at < (b + 1) * image_floats(s); at += P) {
            spread_of of = spread_at(s, s->x + at);
            vec sum = splat(0), moment = sum, mean = splat(of.mean), rstd = splat(of.rstd);
            for (long c = 0; c < P; c += LANES) {
                vec grad = load(s->grad_out + at + c), flow = grad * load(gain + c);
                vec y = (load(s->x + at + c) - mean) * rstd;
                store(scale + c, load(scale + c) + grad * y), store(shift + c, load(shift + c) + grad);
                sum += flow, moment += flow * y;
            }
            vec level = splat(sum_lanes(sum) / (float)C), slope = splat(sum_lanes(moment) / (float)C);
            for (long c = 0; c < P && s->grad_x; c += LANES) {
                vec y = (load(s->x + at + c) - mean) * rstd;
                vec dx = rstd * (load(s->grad_out + at + c) * load(gain + c) - level - slope * y);
                store(s->grad_x + at + c, c + LANES > C ? keep(lanes_within(C - c), dx) : dx);
            }
        }
        for (long c = 0; c < C; c++) t->moment[c] += (double)scale[c], t->sum[c] += (double)shift[c];
    }
    for (long c = 0; c < C; c++) s->grad_scale[c] = (float)t->moment[c], s->grad_shift[c] = (float)t->sum[c];
}

/* out [O, P] = weights * in [I, P], those of o and i at weight + o * by_o + i * by_i; bias [O], or NULL. */
INLINE void mix_pixels(const float *in, float *out, long C, long O, long I, const float *weight, long by_o, long by_i,
                       const float *bias) {
    long P = round_up(C);
    for (long o = 0; o < O; o += 4)
        for (long c = 0; c < P; c += LANES) {
            const float *row[4];
            vec sum[4];
            for (long q = 0; q < 4; q++) {
                long line = o + q < O ? o + q : o;
                row[q] = weight + line * by_o;
                sum[q] = splat(bias ? bias[line] : 0.0f);
                if (c + LANES > C) sum[q] = keep(lanes_within(C - c), sum[q]);
            }
            for (long i = 0; i < I; i++) {
                vec x = load(in + i * P + c);
#pragma GCC unroll 4
                for (long q = 0; q < 4; q++) sum[q] += splat(row[q][i * by_i]) * x;
            }
            for (long q = 0; q < 4 && o + q < O; q++) store(out + (o + q) * P + c, sum[q]);
        }
}

/* A linear layer of the pixels of each channel; weight [pixels, pixels of x]. */
static void mixed_forward(const descriptor *s, const work *t) {
    long I = s->in_height * s->in_width, O = s->height * s->width;
    for (long b = 0; b < s->batch; b++)
        mix_pixels(s->x + b * in_floats(s), s->out + b * image_floats(s), s->out_channels, O, I, s->weight, I, 1,
                   s->shift);
}

/* sum [O, V] += grad [O, P] * x' of an image, x' [C, V] laid out in `turned`. */
INLINE void mix_weights(const float *x, const float *grad, float *turned, float *sum, long C, long O, long I, long V) {
    long P = round_up(C);
    for (long i = 0; i < I; i++)
        for (long c = 0; c < C; c++) turned[c * V + i] = x[i * P + c];
    for (long o = 0; o < O; o += 4)
        for (long i = 0; i < V; i += LANES) {
            vec part[4];
            for (long q = 0; q < 4; q++) part[q] = splat(0);
            for (long c = 0; c < C; c++) {
                vec value = load(turned + c * V + i);
#pragma GCC unroll 4
                for (long q = 0; q < 4; q++) part[q] += splat(grad[(o + q < O ? o + q : o) * P + c]) * value;
            }
            for (long q = 0; q < 4 && o + q < O; q++) {
                float *to = sum + (o + q) * V + i;
                store(to, load(to) + part[q]);
            }
        }
}

static void mixed_backward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C), V = mixed_line(s);
    long I = s->in_height * s->in_width, O = s->height * s->width;
    float *turned = t->room, *sum = turned + C * V;
    zero(turned, (C + O) * V);
    for (long o = 0; o < O && s->shift; o++) s->grad_shift[o] = 0.0f;
    for (long b = 0; b < s->batch; b++) {
        const float *grad = s->grad_out + b * image_floats(s);
        mix_weights(s->x + b * in_floats(s), grad, turned, sum, C, O, I, V);
        for (long o = 0; o < O && s->shift; o++) {
            vec all = splat(0);
            for (long c = 0; c < P; c += LANES) all += load(grad + o * P + c);
            s->grad_shift[o] += sum_lanes(all);
        }
        if (s->grad_x) mix_pixels(grad, s->grad_x + b * in_floats(s), C, I, O, s->weight, 1, I, NULL);
    }
    for (long o = 0; o < O; o++) memcpy(s->grad_weight + o * I, sum + o * V, (size_t)I * sizeof(float));
}

#endif
