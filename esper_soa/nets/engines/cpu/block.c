/* The host's block, forward and backward: convolution, batch norm, ReLU, 2x2 max pool; see sheet.h for the data. */
#include <math.h>

#include "layer.h"
#include "pool.h"

/* To `out` from image b of network n; rows = gain and offset [2, P]. */
static void emit(const sheet *s, const float *value, const float *rows, long b, long n) {
    long O = s->out_net, pixels = out_pixels(s);
    emit_job job = {.value = value, .gain = rows, .offset = rows + round_up(O),
                    .out = s->out + (b * pixels * s->nets + n) * O, .pixels = pixels, .O = O, .step = s->nets * O, .alpha = 1.0f};
    emit_image(&job);
}

void block_infer_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n) {
    long P = round_up(s->out_channels);
    for (long c = 0; c < P; c++) t->rows[c] = 1.0f;
    pad_row(t->rows + P, s->shift + n * s->out_channels, s->out_channels);
    convolve(s, t, room->y, b, n);
    pool_job pool = {.y = room->y, .peak = room->pooled, .H = s->height, .W = s->width, .P = P};
    if (s->pooled) pool_image(&pool);
    emit(s, s->pooled ? room->pooled : room->y, t->rows, b, n);
}

int block_infer(const sheet *s) {
    front_scratch t = {0};
    image_room room = open_room(s);
    int failed = open_front(s, &t, 4) || !room.y;
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) block_infer_image(s, &t, &room, b, n);
    close_front(&t);
    free(room.y);
    return failed;
}

/* Mean and deviation of the batch into the saved rows, and the running statistics moved with the unbiased variance. */
static void settle(const sheet *s, const moments *m, long n) {
    long O = s->out_channels, P = round_up(O);
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < P; c++) {
        s->mean[n * P + c] = (float)m->mean[c];
        s->rstd[n * P + c] = (float)(1.0 / sqrt(m->square[c] / count + s->eps));
    }
    for (long c = 0; c < O; c++) {
        float *mean = s->running_mean + n * O + c, *var = s->running_var + n * O + c;
        *mean = (float)((1.0 - s->momentum) * *mean + s->momentum * m->mean[c]);
        *var = (float)((1.0 - s->momentum) * *var + s->momentum * m->square[c] / (count - 1.0));
    }
}

/* Where the convolution of image b of network n stands: where it is saved or, for the moment, in the room. */
static float *convolution_at(const sheet *s, const image_room *room, long b, long n) {
    return s->conv ? s->conv + saved_at(s, b, n, s->height * s->width) : room->y;
}

/* The same when it is met again. */
static const float *convolved(const sheet *s, const front_scratch *t, const image_room *room, long b, long n) {
    if (!s->conv) convolve(s, t, room->y, b, n);
    return convolution_at(s, room, b, n);
}

/* Convolution of the whole batch, with its moments. */
static void convolve_batch(const sheet *s, const front_scratch *t, const image_room *room, moments *sums) {
    for (long b = 0; b < s->batch; b++)
        for (long n = 0; n < s->nets; n++) {
            float *y = convolution_at(s, room, b, n);
            convolve(s, t, y, b, n);
            add_moments(&sums[n], y, s->height * s->width, round_up(s->out_channels));
        }
}

/* Norm, ReLU and pool of 8 channels of one image, and where the pool's maxima stood before the norm.
 * Decided behind ReLU: the same bits as a block and a pool of its own, whatever rounding makes equal. */
INLINE void emit_pooled(const sheet *s, const float *y, const float *rows, long b, long n, long c) {
    long O = s->out_net, P = round_up(O), out = out_pixels(s), saved = saved_at(s, b, n, out) + c, W = s->width;
    float *to = s->out + (b * out * s->nets + n) * O + c;
    v8 gain = load(rows + c), offset = load(rows + P + c);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, saved += P, to += s->nets * O) {
            const float *first = y + (r * W + x) * P + c;
            v8 peak = load(first), best = relu(gain * peak + offset);
            i8 place = {0};
#pragma GCC unroll 3
            for (int q = 1; q < 4; q++) {
                v8 value = load(first + ((q >> 1) * W + (q & 1)) * P), next = relu(gain * value + offset);
                i8 wins = overtakes(next, best);
                best = choose(wins, next, best);
                peak = choose(wins, value, peak);
                place = choose_int(wins, q, place);
            }
            store_some(to, best, O - c);
            store(s->peak + saved, peak);
            *(b8u *)(s->place + saved) = __builtin_convertvector(place, b8);
        }
}

/* t->rows = gain and offset [n, 2, P]. */
static void normalise_batch(const sheet *s, const front_scratch *t, const image_room *room) {
    long P = round_up(s->out_channels);
    for (long b = 0; b < s->batch; b++)
        for (long n = 0; n < s->nets; n++) {
            const float *y = convolved(s, t, room, b, n), *own = t->rows + n * 2 * P;
            if (!s->pooled) emit(s, y, own, b, n);
            else
                for (long c = 0; c < P; c += LANES) emit_pooled(s, y, own, b, n, c);
        }
}

int block_train(const sheet *s) {
    long O = s->out_channels, P = round_up(O);
    front_scratch t = {0};
    image_room room = open_room(s);
    moments *sums = new_moments(s->nets, P);
    int failed = open_front(s, &t, 2 * s->nets) || !sums || !room.y;
    if (!failed) convolve_batch(s, &t, &room, sums);
    for (long n = 0; n < s->nets && !failed; n++) {
        settle(s, &sums[n], n);
        gain_offset(t.rows + n * 2 * P, s->mean + n * P, s->rstd + n * P, s->scale + n * O, s->shift + n * O, O);
    }
    if (!failed) normalise_batch(s, &t, &room);
    close_front(&t);
    free(sums), free(room.y);
    return failed;
}

/* The rows of pass two, and the gradients of scale and shift. */
static void settle_back(const sheet *s, back_net *net, long n) {
    long O = s->out_channels, P = round_up(O);
    double count = (double)s->batch * s->height * s->width;
    for (long c = 0; c < O; c++) {
        double rstd = s->rstd[n * P + c], gain = net->rows[GAIN * P + c];
        net->rows[SLOPE * P + c] = (float)(-gain * net->moment[c] * rstd * rstd / count);
        net->rows[LEVEL * P + c] = (float)(-gain * net->sum[c] / count);
        s->grad_scale[n * O + c] = (float)(net->moment[c] * rstd);
        s->grad_shift[n * O + c] = (float)net->sum[c];
    }
}

/* gather_sums of a pooled image: the same sums in the same order as over all its pixels, where most of dz is zero. */
static void gather_pooled(const sheet *s, back_net *net, long saved, const float *grad) {
    long O = s->out_net, P = round_up(O), columns = s->width / 2;
    for (long c = 0; c < O; c += LANES) {
        v8 sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)}, mean = load(net->rows + MEAN * P + c);
        v8 gain = load(net->rows + GAIN * P + c), offset = load(net->rows + OFFSET * P + c);
        for (long line = 0; line < s->height; line++)
            for (long x = 0; x < columns; x++) {
                long p = line / 2 * columns + x, at = saved + p * P + c;
                v8 y = load(s->peak + at), g = load_some(grad + p * s->nets * O + c, O - c);
                v8 dz = behind_relu(gain, offset, y, g);
                i8 place = __builtin_convertvector(*(const b8u *)(s->place + at), i8);
#pragma GCC unroll 2
                for (int q = 0; q < 2; q++) {
                    v8 here = keep(place == (int)(line & 1) * 2 + q, dz);
                    sum[q] += here;
                    moment[q] += here * (y - mean);
                }
            }
        add_sums(net, c, sum[0] + sum[1], moment[0] + moment[1]);
    }
}

/* dy of 8 channels of a pooled image into the padded gradient: dz lies at the place of the maximum. */
INLINE void spread_pooled(const sheet *s, const back_net *net, const float *y, const float *grad, float *to,
                          long saved, long c) {
    long O = s->out_net, P = round_up(O), W = s->width, line = (W + s->kernel - 1) * P, p = 0;
    const float *rows = net->rows + c;
    v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    v8 flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, p++) {
            v8 peak = load(s->peak + saved + p * P + c);
            v8 dz = behind_relu(gain, offset, peak, load_some(grad + p * s->nets * O + c, O - c));
            i8 place = __builtin_convertvector(*(const b8u *)(s->place + saved + p * P + c), i8);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                v8 value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P + c);
                v8 dy = flow * keep(place == q, dz) + (slope * (value - mean) + level);
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * P + c, dy);
            }
        }
}

/* Pass two for one image, y the convolution: dy into scratch, from there the gradients of weights and input. */
static void pass_two(const sheet *s, const back_scratch *t, const float *y, long b, long n) {
    long O = s->out_net, out = out_pixels(s);
    const float *grad = s->grad_out + (b * out * s->nets + n) * O;
    if (!s->pooled) spread_plain(s, &t->nets[n], y, grad, s->nets * O, padded_grad(s, t));
    for (long c = 0; c < O && s->pooled; c += LANES)
        spread_pooled(s, &t->nets[n], y, grad, padded_grad(s, t), saved_at(s, b, n, out), c);
    convolution_gradients(s, t, b, n);
}

int block_backward(const sheet *s) {
    long O = s->out_net, P = round_up(O), pixels = out_pixels(s);
    back_scratch t = {0};
    front_scratch front = {0};
    image_room room = open_room(s);
    int failed = open_back(s, &t) || !room.y || (!s->conv && open_front(s, &front, 0));
    for (long n = 0; n < s->nets && !failed; n++) start_rows(s, &t.nets[n], s->mean + n * P, s->rstd + n * P, n);
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) {
            const float *grad = s->grad_out + (b * pixels * s->nets + n) * O;
            if (s->pooled) gather_pooled(s, &t.nets[n], saved_at(s, b, n, pixels), grad);
            else gather_sums(s, &t.nets[n], convolved(s, &front, &room, b, n), grad, s->nets * O);
        }
    for (long n = 0; n < s->nets && !failed; n++) settle_back(s, &t.nets[n], n);
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) pass_two(s, &t, convolved(s, &front, &room, b, n), b, n);
    if (!failed) unpack_gradients(s, &t);
    close_back(&t), close_front(&front);
    free(room.y);
    return failed;
}
