/* A seed's layer, forward and backward: convolution, group norm, ReLU, blended into its input, and the host's 2x2 max
 * pool where one follows; see sheet.h for the data. */
#ifndef ESPER_SEED_H
#define ESPER_SEED_H

#include "group.h"
#include "pool.h"

/* 8 channels of the layer and of the pool behind it: decided on what the layer gives, as by a pool of its own. */
INLINE void seed_emit_pooled(const sheet *s, const float *rows, const float *y, long b, long c) {
    long P = round_up(s->out_channels), W = s->width, at = b * out_floats(s) + c;
    const float *x = s->x + b * image_floats(s) + c;
    vec gain = load(rows + c), offset = load(rows + P + c);
    float alpha = alpha_of(s);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long col = 0; col + 1 < W; col += 2, at += P) {
            vec best = splat(0);
            ints place = {0};
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                long p = (r + (q >> 1)) * W + col + (q & 1);
                vec z = gain * load(y + p * P + c) + offset;
                z = load(x + p * P) + alpha * (s->linear ? z : relu(z));
                ints wins = q ? overtakes(z, best) : ~(ints){0};
                best = choose(wins, z, best);
                place = choose_int(wins, q, place);
            }
            store(s->out + at, best);
            if (s->place) save_place(s->place + at, place);
        }
}

/* The layer of image b from its convolution; the rows of t are gain and offset. */
static void emit_seed(const sheet *s, const front_scratch *t, const float *y, long b) {
    long P = round_up(s->out_channels), at = b * image_floats(s);
    for (long c = 0; c < P && s->pooled; c += LANES) seed_emit_pooled(s, t->rows, y, b, c);
    if (s->pooled) return;
    emit_job job = {.value = y, .gain = t->rows, .offset = t->rows + P, .residual = s->own_residual ? s->x + at : NULL,
                    .out = s->out + at, .pixels = s->height * s->width, .P = P, .linear = s->linear, .alpha = alpha_of(s)};
    emit_image(&job);
}

/* Image b, with scratch for 4 rows; saves nothing where conv is NULL. */
static void seed_image(const sheet *s, const front_scratch *t, const image_room *room, long b) {
    long P = round_up(s->out_channels);
    float *y = s->conv ? s->conv + b * image_floats(s) : room->y;
    float *mean = s->conv ? s->mean + b * P : t->rows + 2 * P, *rstd = s->conv ? s->rstd + b * P : t->rows + 3 * P;
    convolve(s, t, y, b);
    group_statistics(s, y, mean, rstd);
    gain_offset(t->rows, mean, rstd, s->scale, s->shift, s->out_channels);
    if (s->out) emit_seed(s, t, y, b);
}

static int seed_forward(const sheet *s) {
    front_scratch t = {0};
    int failed = open_front(s, &t, 2);
    for (long b = 0; b < s->batch && !failed; b++) seed_image(s, &t, NULL, b);
    close_front(&t);
    return failed;
}

/* gather_sums behind a pool: the same sums in the same order, where most of the gradient is zero. `at`: where the image
 * begins in what is saved behind the pool. */
static void seed_gather_pooled(const sheet *s, const back_scratch *t, const float *y, long at) {
    long P = round_up(s->out_channels), columns = s->width / 2;
    for (long c = 0; c < P; c += LANES) {
        vec sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)}, mean = load(t->rows + MEAN * P + c);
        vec gain = load(t->rows + GAIN * P + c), offset = load(t->rows + OFFSET * P + c);
        for (long line = 0; line < s->height; line++)
            for (long x = 0; x < columns; x++) {
                long p = at + (line / 2 * columns + x) * P + c;
                vec g = load(s->grad_out + p);
                ints place = saved_place(s->place + p);
#pragma GCC unroll 2
                for (int q = 0; q < 2; q++) {
                    vec value = load(y + (line * s->width + 2 * x + q) * P + c);
                    vec here = keep(place == (int)(line & 1) * 2 + q, g);
                    vec dz = s->linear ? here : behind_relu(gain, offset, value, here);
                    sum[q] += dz;
                    moment[q] += dz * (value - mean);
                }
            }
        add_sums(t, c, sum[0] + sum[1], moment[0] + moment[1]);
    }
}

/* spread_plain behind a pool, of 8 channels. */
INLINE void seed_spread_pooled(const sheet *s, const back_scratch *t, const float *y, long at, long c) {
    long P = round_up(s->out_channels), W = s->width, line = (W + s->kernel - 1) * P;
    const float *rows = t->rows + c;
    float *to = padded_grad(s, t) + c;
    vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    vec flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    at += c;
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, at += P) {
            vec g = load(s->grad_out + at);
            ints place = saved_place(s->place + at);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                vec value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P + c), here = keep(place == q, g);
                vec dz = s->linear ? here : behind_relu(gain, offset, value, here);
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * P, flow * dz + (slope * (value - mean) + level));
            }
        }
}

/* `share` of the gradient of 8 channels at one pixel, into `to` or, where the layer sees x, to what is there. */
INLINE void add_residual(const sheet *s, float *to, float share, vec grad) {
    vec sum = share * grad;
    if (!s->detached) sum += load(to);
    store(to, sum);
}

/* What reaches x beside the layer: all of the gradient, or (1 - alpha) of it where the layer is cut off from x; twice
 * the gradient where x went on as it was and the seed x + layer(x) got all of it as well. */
static void residual_gradient(const sheet *s, long b) {
    long P = round_up(s->out_channels), W = s->width, from = b * out_floats(s);
    float *to = s->grad_x + b * image_floats(s);
    float share = s->detached ? 1.0f - alpha_of(s) : s->through ? 2.0f : 1.0f;
    for (long i = 0; i < out_floats(s) && !s->pooled; i += LANES)
        add_residual(s, to + i, share, load(s->grad_out + from + i));
    for (long p = 0; p < out_pixels(s) && s->pooled; p++)
        for (long c = 0; c < P; c += LANES) {
            long at = from + p * P + c;
            ints place = saved_place(s->place + at);
            float *first = to + (p / (W / 2) * 2 * W + p % (W / 2) * 2) * P + c;
            for (int q = 0; q < 4; q++)
                add_residual(s, first + ((q >> 1) * W + (q & 1)) * P, share, keep(place == q, load(s->grad_out + at)));
        }
}

static void seed_image_back(const sheet *s, const back_scratch *t, long b) {
    long P = round_up(s->out_channels), at = b * out_floats(s);
    const float *y = s->conv + b * image_floats(s);
    start_rows(s, t, s->mean + b * P, s->rstd + b * P);
    if (s->pooled) seed_gather_pooled(s, t, y, at);
    else gather_sums(s, t, y, s->grad_out + at);
    settle_group(s, t, s->rstd + b * P);
    if (!s->pooled) spread_plain(s, t, y, s->grad_out + at);
    for (long c = 0; c < P && s->pooled; c += LANES) seed_spread_pooled(s, t, y, at, c);
    convolution_gradients(s, t, b);
    if (s->grad_x && s->own_residual) residual_gradient(s, b);
}

static int seed_backward(const sheet *s) {
    back_scratch t = {0};
    int failed = open_back(s, &t);
    memset(s->grad_scale, 0, (size_t)s->out_channels * sizeof(float));
    memset(s->grad_shift, 0, (size_t)s->out_channels * sizeof(float));
    for (long b = 0; b < s->batch && !failed; b++) seed_image_back(s, &t, b);
    if (!failed) unpack_gradients(s, &t);
    close_back(&t);
    return failed;
}

#endif
