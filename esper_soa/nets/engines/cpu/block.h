/* The host's block, forward and backward: convolution, batch norm, ReLU, 2x2 max pool; see sheet.h for the data. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include <math.h>

#include "layer.h"
#include "pool.h"

/* To `out` from image b; rows = gain and offset [2, P]. */
static void block_emit(const sheet *s, const float *value, const float *rows, long b) {
    long P = round_up(s->out_channels);
    emit_job job = {.value = value, .gain = rows, .offset = rows + P, .out = s->out + b * out_floats(s),
                    .pixels = out_pixels(s), .P = P, .alpha = 1.0f};
    emit_image(&job);
}

/* Image b as validation has it, with scratch for 4 rows; scale is ignored, shift is the convolution's bias. */
static void block_infer_image(const sheet *s, const front_scratch *t, const image_room *room, long b) {
    long P = round_up(s->out_channels);
    for (long c = 0; c < P; c++) t->rows[c] = 1.0f;
    pad_row(t->rows + P, s->shift, s->out_channels);
    convolve(s, t, room->y, b);
    pool_job pool = {.y = room->y, .peak = room->pooled, .H = s->height, .W = s->width, .P = P};
    if (s->pooled) pool_image(&pool);
    block_emit(s, s->pooled ? room->pooled : room->y, t->rows, b);
}

/* Mean and deviation of the batch into the saved rows, and the running statistics moved with the unbiased variance. */
static void settle(const sheet *s, const moments *m) {
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < round_up(s->out_channels); c++) {
        s->mean[c] = (float)m->mean[c];
        s->rstd[c] = (float)(1.0 / sqrt(m->square[c] / count + s->eps));
    }
    for (long c = 0; c < s->out_channels; c++) {
        float *mean = s->running_mean + c, *var = s->running_var + c;
        *mean = (float)((1.0 - s->momentum) * *mean + s->momentum * m->mean[c]);
        *var = (float)((1.0 - s->momentum) * *var + s->momentum * m->square[c] / (count - 1.0));
    }
}

/* Where the convolution of image b stands: where it is saved or, for the moment, in the room. */
static float *convolution_at(const sheet *s, const image_room *room, long b) {
    return s->conv ? s->conv + b * image_floats(s) : room->y;
}

/* The same when it is met again. */
static const float *convolved(const sheet *s, const front_scratch *t, const image_room *room, long b) {
    if (!s->conv) convolve(s, t, room->y, b);
    return convolution_at(s, room, b);
}

/* Norm, ReLU and pool of 8 channels of one image, and where the pool's maxima stood before the norm.
 * Decided behind ReLU: the same bits as a block and a pool of its own, whatever rounding makes equal. */
INLINE void block_emit_pooled(const sheet *s, const float *y, const float *rows, long b, long c) {
    long P = round_up(s->out_channels), at = b * out_floats(s) + c, W = s->width;
    vec gain = load(rows + c), offset = load(rows + P + c);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, at += P) {
            const float *first = y + (r * W + x) * P + c;
            vec peak = load(first), best = relu(gain * peak + offset);
            ints place = {0};
#pragma GCC unroll 3
            for (int q = 1; q < 4; q++) {
                vec value = load(first + ((q >> 1) * W + (q & 1)) * P), next = relu(gain * value + offset);
                ints wins = overtakes(next, best);
                best = choose(wins, next, best);
                peak = choose(wins, value, peak);
                place = choose_int(wins, q, place);
            }
            store(s->out + at, best);
            store(s->peak + at, peak);
            save_place(s->place + at, place);
        }
}

static int block_train(const sheet *s) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    front_scratch t = {0};
    image_room room = open_room(s);
    moments *sums = new_moments(P);
    int failed = open_front(s, &t, 2) || !sums || !room.y;
    for (long b = 0; b < s->batch && !failed; b++) {
        convolve(s, &t, convolution_at(s, &room, b), b);
        add_moments(sums, convolution_at(s, &room, b), pixels, P);
    }
    if (!failed) {
        settle(s, sums);
        gain_offset(t.rows, s->mean, s->rstd, s->scale, s->shift, s->out_channels);
    }
    for (long b = 0; b < s->batch && !failed; b++) {
        const float *y = convolved(s, &t, &room, b);
        if (!s->pooled) block_emit(s, y, t.rows, b);
        for (long c = 0; c < P && s->pooled; c += LANES) block_emit_pooled(s, y, t.rows, b, c);
    }
    close_front(&t);
    free(sums), free(room.y);
    return failed;
}

/* The rows of pass two, and the gradients of scale and shift. */
static void settle_back(const sheet *s, const back_scratch *t) {
    long P = round_up(s->out_channels);
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < s->out_channels; c++) {
        double rstd = s->rstd[c], gain = t->rows[GAIN * P + c];
        t->rows[SLOPE * P + c] = (float)(-gain * t->moment[c] * rstd * rstd / count);
        t->rows[LEVEL * P + c] = (float)(-gain * t->sum[c] / count);
        s->grad_scale[c] = (float)(t->moment[c] * rstd);
        s->grad_shift[c] = (float)t->sum[c];
    }
}

/* gather_sums of a pooled image: the same sums in the same order as over all its pixels, where most of dz is zero.
 * `at`: where the image begins in what is saved behind the pool. */
static void block_gather_pooled(const sheet *s, const back_scratch *t, long at) {
    long P = round_up(s->out_channels), columns = s->width / 2;
    for (long c = 0; c < P; c += LANES) {
        vec sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)}, mean = load(t->rows + MEAN * P + c);
        vec gain = load(t->rows + GAIN * P + c), offset = load(t->rows + OFFSET * P + c);
        for (long line = 0; line < s->height; line++)
            for (long x = 0; x < columns; x++) {
                long p = at + (line / 2 * columns + x) * P + c;
                vec y = load(s->peak + p), dz = behind_relu(gain, offset, y, load(s->grad_out + p));
                ints place = saved_place(s->place + p);
#pragma GCC unroll 2
                for (int q = 0; q < 2; q++) {
                    vec here = keep(place == (int)(line & 1) * 2 + q, dz);
                    sum[q] += here;
                    moment[q] += here * (y - mean);
                }
            }
        add_sums(t, c, sum[0] + sum[1], moment[0] + moment[1]);
    }
}

/* dy of 8 channels of a pooled image into the padded gradient: dz lies at the place of the maximum. */
INLINE void block_spread_pooled(const sheet *s, const back_scratch *t, const float *y, long at, long c) {
    long P = round_up(s->out_channels), W = s->width, line = (W + s->kernel - 1) * P;
    const float *rows = t->rows + c;
    float *to = padded_grad(s, t) + c;
    vec gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    vec flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    at += c;
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, at += P) {
            vec dz = behind_relu(gain, offset, load(s->peak + at), load(s->grad_out + at));
            ints place = saved_place(s->place + at);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                vec value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P + c);
                vec dy = flow * keep(place == q, dz) + (slope * (value - mean) + level);
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * P, dy);
            }
        }
}

static int block_backward(const sheet *s) {
    long P = round_up(s->out_channels);
    back_scratch t = {0};
    front_scratch front = {0};
    image_room room = open_room(s);
    int failed = open_back(s, &t) || !room.y || (!s->conv && open_front(s, &front, 0));
    if (!failed) start_rows(s, &t, s->mean, s->rstd);
    for (long b = 0; b < s->batch && !failed; b++)
        if (s->pooled) block_gather_pooled(s, &t, b * out_floats(s));
        else gather_sums(s, &t, convolved(s, &front, &room, b), s->grad_out + b * out_floats(s));
    if (!failed) settle_back(s, &t);
    for (long b = 0; b < s->batch && !failed; b++) {
        const float *y = convolved(s, &front, &room, b);
        if (!s->pooled) spread_plain(s, &t, y, s->grad_out + b * out_floats(s));
        for (long c = 0; c < P && s->pooled; c += LANES) block_spread_pooled(s, &t, y, b * out_floats(s), c);
        convolution_gradients(s, &t, b);
    }
    if (!failed) unpack_gradients(s, &t);
    close_back(&t), close_front(&front);
    free(room.y);
    return failed;
}

#endif
