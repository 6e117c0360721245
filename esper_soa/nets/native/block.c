/* Forward and backward passes of the host's block; see block.h for the data, conv.h for the convolution. */
#include <math.h>

#include "block.h"
#include "conv.h"
#include "norm.h"

/* relu(gain * y + offset) of one image [H, W, P], pooled or not, to `out` of O channels, `step` floats a pixel. */
typedef struct {
    const float *y, *gain, *offset;
    float *out, *peak;
    uint8_t *place;
    long H, W, O, step;
} emit_job;

INLINE void emit_plain(const emit_job *job) {
    long P = round_up(job->O);
    for (long c = 0; c < job->O; c += LANES) {
        v8 gain = load(job->gain + c), offset = load(job->offset + c);
        for (long p = 0; p < job->H * job->W; p++)
            store_some(job->out + p * job->step + c, relu(gain * load(job->y + p * P + c) + offset), job->O - c);
    }
}

/* The maximum of four: the first of equals wins, a NaN wins, as in torch. */
INLINE void emit_pixel(const emit_job *job, const float *y, long c, long to, int save) {
    long P = round_up(job->O);
    v8 gain = load(job->gain + c), offset = load(job->offset + c);
    v8 peak = load(y), best = gain * peak + offset;
    i8 place = {0};
#pragma GCC unroll 3
    for (int q = 1; q < 4; q++) {
        v8 next = load(y + ((q >> 1) * job->W + (q & 1)) * P), z = gain * next + offset;
        i8 wins = (z > best) | (z != z);
        best = choose(wins, z, best);
        peak = choose(wins, next, peak);
        place = (place & ~wins) | (wins & q);
    }
    store_some(job->out + to * job->step + c, relu(best), job->O - c);
    if (save) {
        store(job->peak + to * P + c, peak);
        *(b8u *)(job->place + to * P + c) = __builtin_convertvector(place, b8);
    }
}

INLINE void emit_pooled(const emit_job *job, int save) {
    long P = round_up(job->O), to = 0;
    for (long y = 0; y + 1 < job->H; y += 2)
        for (long x = 0; x + 1 < job->W; x += 2, to++)
            for (long c = 0; c < job->O; c += LANES) emit_pixel(job, job->y + (y * job->W + x) * P + c, c, to, save);
}

/* Image b of network n as the convolution reads it. */
static void read_image(const block_sheet *s, float *padded, long b, long n) {
    const float *from = s->x + b * s->height * s->width * s->x_pixel + n * s->x_net;
    pad_image(padded, s->in_channels, s->kernel / 2, from, s->x_pixel, s->height, s->width, s->in_channels);
}

/* Weights of every network, packed; the caller frees. */
static float *packed_weights(const block_sheet *s) {
    long each = s->out_channels * s->in_channels * s->kernel * s->kernel;
    long packed = s->kernel * s->kernel * s->in_channels * round_up(s->out_channels);
    float *weights = scratch(s->nets * packed);
    if (weights)
        for (long n = 0; n < s->nets; n++)
            pack_forward(weights + n * packed, s->weight + n * each, s->out_channels, s->in_channels, s->kernel);
    return weights;
}

static conv_job forward_job(const block_sheet *s, const float *padded, const float *weights, float *out, long n) {
    long P = round_up(s->out_channels), packed = s->kernel * s->kernel * s->in_channels * P;
    return (conv_job){.in = padded, .weight = weights + n * packed, .out = out, .H = s->height, .W = s->width,
                      .I = s->in_channels, .O = P, .k = s->kernel, .step = P};
}

static float *padded_scratch(const block_sheet *s) {
    return scratch((s->height + s->kernel - 1) * (s->width + s->kernel - 1) * s->in_channels);
}

/* Where image b of network n stands in a saved array of `pixels` pixels an image. */
INLINE long saved_at(const block_sheet *s, long b, long n, long pixels) {
    return (n * s->batch + b) * pixels * round_up(s->out_channels);
}

static long out_pixels(const block_sheet *s) {
    return s->pooled ? (s->height / 2) * (s->width / 2) : s->height * s->width;
}

static emit_job emit_of(const block_sheet *s, const float *y, const float *gain, const float *offset, long b, long n) {
    long O = s->out_channels, pixels = out_pixels(s), at = saved_at(s, b, n, pixels);
    return (emit_job){.y = y, .gain = gain, .offset = offset, .out = s->out + b * pixels * s->nets * O + n * O,
                      .peak = s->peak ? s->peak + at : NULL, .place = s->place ? s->place + at : NULL,
                      .H = s->height, .W = s->width, .O = O, .step = s->nets * O};
}

int block_infer(const block_sheet *s) {
    long P = round_up(s->out_channels);
    float *padded = padded_scratch(s), *weights = packed_weights(s), *y = scratch(s->height * s->width * P);
    float *rows = scratch(2 * P); /* gain 1, offset */
    int failed = !padded || !weights || !y || !rows;
    for (long c = 0; c < P && !failed; c++) rows[c] = 1.0f;
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) {
            if (n == 0 || s->x_net) read_image(s, padded, b, n);
            conv_job job = forward_job(s, padded, weights, y, n);
            conv_image(&job);
            pad_row(rows + P, s->shift + n * s->out_channels, s->out_channels);
            emit_job emit = emit_of(s, y, rows, rows + P, b, n);
            if (s->pooled) emit_pooled(&emit, 0);
            else emit_plain(&emit);
        }
    free(padded), free(weights), free(y), free(rows);
    return failed;
}

/* Mean and deviation of the batch into the saved rows, and the running statistics moved with the unbiased variance. */
static void settle(const block_sheet *s, const moments *m, long n) {
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

static void convolve_batch(const block_sheet *s, const float *weights, float *padded, moments *sums) {
    long pixels = s->height * s->width, P = round_up(s->out_channels);
    for (long b = 0; b < s->batch; b++)
        for (long n = 0; n < s->nets; n++) {
            if (n == 0 || s->x_net) read_image(s, padded, b, n);
            conv_job job = forward_job(s, padded, weights, s->conv + saved_at(s, b, n, pixels), n);
            conv_image(&job);
            add_moments(&sums[n], job.out, pixels, P);
        }
}

int block_train(const block_sheet *s) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    float *padded = padded_scratch(s), *weights = packed_weights(s), *rows = scratch(s->nets * 2 * P);
    moments *sums = new_moments(s->nets, P);
    int failed = !padded || !weights || !rows || !sums;
    if (!failed) convolve_batch(s, weights, padded, sums);
    for (long n = 0; n < s->nets && !failed; n++) {
        settle(s, &sums[n], n);
        gain_offset(rows + n * 2 * P, s->mean + n * P, s->rstd + n * P, s->scale + n * s->out_channels,
                    s->shift + n * s->out_channels, s->out_channels);
    }
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) {
            const float *gain = rows + n * 2 * P;
            emit_job emit = emit_of(s, s->conv + saved_at(s, b, n, pixels), gain, gain + P, b, n);
            if (s->pooled) emit_pooled(&emit, 1);
            else emit_plain(&emit);
        }
    free(padded), free(weights), free(rows), free(sums);
    return failed;
}

/* Backward. With z = gain * y + offset, xhat = (y - mean) * rstd and dz the gradient behind ReLU and pool:
 * dy = gain * (dz - sum(dz) / count - xhat * sum(dz * xhat) / count); rows of a network, [P] each: */
enum { GAIN, OFFSET, MEAN, SLOPE, LEVEL, BACK_ROWS }; /* dy = gain * dz + slope * (y - mean) + level */

/* One network's gradients while they are gathered. */
typedef struct {
    double *sum, *moment; /* [P]: sum of dz, sum of dz * (y - mean) */
    float *rows;          /* [BACK_ROWS, P] */
    float *weights;       /* packed for the gradient of the input */
    float *grad_weight;   /* packed [k, k*I, P] */
} back_net;

/* dz of 8 channels at one pixel of the output; `y` is the convolution's value there. */
INLINE v8 behind_relu(const back_net *net, v8 y, v8 grad, long c, long P) {
    v8 z = load(net->rows + GAIN * P + c) * y + load(net->rows + OFFSET * P + c);
    return keep(~(z <= splat(0)), grad);
}

/* Take one image into the sums; `value` is [pixels, P]: peaks where pooled, else the convolution's output. */
static void gather_sums(const block_sheet *s, back_net *net, const float *value, const float *grad) {
    long O = s->out_channels, P = round_up(O), pixels = out_pixels(s), step = s->nets * O;
    for (long c = 0; c < O; c += LANES) {
        v8 sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)}, mean = load(net->rows + MEAN * P + c);
        for (long p = 0; p < pixels; p++) {
            v8 y = load(value + p * P + c), dz = behind_relu(net, y, load_some(grad + p * step + c, O - c), c, P);
            sum[p & 1] += dz;
            moment[p & 1] += dz * (y - mean);
        }
        v8 total = sum[0] + sum[1], product = moment[0] + moment[1];
        for (int l = 0; l < LANES; l++) {
            net->sum[c + l] += (double)total[l];
            net->moment[c + l] += (double)product[l];
        }
    }
}

/* The rows of pass two, and the gradients of scale and shift. */
static void settle_back(const block_sheet *s, back_net *net, long n) {
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

/* dy of 8 channels of an unpooled image into the padded gradient. */
INLINE void spread_plain(const block_sheet *s, const back_net *net, const float *y, const float *grad, float *to, long c) {
    long O = s->out_channels, P = round_up(O), W = s->width, line = (W + s->kernel - 1) * P;
    const float *rows = net->rows + c;
    v8 gain = load(rows), mean = load(rows + MEAN * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r < s->height; r++)
        for (long x = 0; x < W; x++) {
            v8 value = load(y + (r * W + x) * P + c);
            v8 dz = behind_relu(net, value, load_some(grad + (r * W + x) * s->nets * O + c, O - c), c, P);
            store(to + r * line + x * P + c, gain * dz + (slope * (value - mean) + level));
        }
}

/* The same where the block is pooled: dz lies at the place of the maximum. */
INLINE void spread_pooled(const block_sheet *s, const back_net *net, const float *y, const float *grad, float *to,
                          long saved, long c) {
    long O = s->out_channels, P = round_up(O), W = s->width, line = (W + s->kernel - 1) * P, p = 0;
    const float *rows = net->rows + c;
    v8 gain = load(rows), mean = load(rows + MEAN * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, p++) {
            v8 peak = load(s->peak + saved + p * P + c);
            v8 dz = gain * behind_relu(net, peak, load_some(grad + p * s->nets * O + c, O - c), c, P);
            i8 place = __builtin_convertvector(*(const b8u *)(s->place + saved + p * P + c), i8);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                v8 value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P + c);
                v8 rest = slope * (value - mean) + level;
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * P + c, rest + keep(place == q, dz));
            }
        }
}

/* Scratch of a backward pass. */
typedef struct {
    float *padded, *grad; /* padded input and padded dy of one image */
    float *grad_x;        /* [H, W, Q] where the input's channels do not fill vectors */
    float *room;          /* rows and packed weights of every network */
    double *sums;
    back_net *nets;
} back_scratch;

static int open_back(const block_sheet *s, back_scratch *t) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), taps = s->kernel * s->kernel;
    long each = BACK_ROWS * P + taps * P * Q + taps * s->in_channels * P;
    t->padded = padded_scratch(s);
    t->grad = scratch((s->height + s->kernel - 1) * (s->width + s->kernel - 1) * P);
    t->grad_x = scratch(s->height * s->width * Q);
    t->room = scratch(s->nets * each);
    t->sums = calloc((size_t)(s->nets * 2 * P), sizeof(double));
    t->nets = calloc((size_t)s->nets, sizeof(back_net));
    if (!t->padded || !t->grad || !t->grad_x || !t->room || !t->sums || !t->nets) return 1;
    for (long n = 0; n < s->nets; n++) {
        back_net *net = &t->nets[n];
        net->rows = t->room + n * each;
        net->weights = net->rows + BACK_ROWS * P;
        net->grad_weight = net->weights + taps * P * Q;
        net->sum = t->sums + n * 2 * P;
        net->moment = net->sum + P;
        gain_offset(net->rows, s->mean + n * P, s->rstd + n * P, s->scale + n * s->out_channels,
                    s->shift + n * s->out_channels, s->out_channels);
        pad_row(net->rows + MEAN * P, s->mean + n * P, s->out_channels);
        pack_backward(net->weights, s->weight + n * s->out_channels * s->in_channels * taps, s->out_channels,
                      s->in_channels, s->kernel);
    }
    return 0;
}

static void close_back(back_scratch *t) {
    free(t->padded), free(t->grad), free(t->grad_x), free(t->room), free(t->sums), free(t->nets);
}

/* dx of one image, straight to its place where the channels fill vectors. */
static void input_gradient(const block_sheet *s, const back_scratch *t, long b, long n) {
    long P = round_up(s->out_channels), Q = round_up(s->in_channels), pixels = s->height * s->width;
    float *to = s->grad_x + b * pixels * s->x_pixel + n * s->x_net;
    int direct = Q == s->in_channels;
    conv_job job = {.in = t->grad, .weight = t->nets[n].weights, .out = direct ? to : t->grad_x, .H = s->height,
                    .W = s->width, .I = P, .O = Q, .k = s->kernel, .step = direct ? s->x_pixel : Q};
    conv_image(&job);
    if (!direct) copy_pixels(to, s->x_pixel, t->grad_x, Q, pixels, s->in_channels);
}

/* Pass two for one image: dy into scratch, from there the gradients of weights and input. */
static void pass_two(const block_sheet *s, const back_scratch *t, long b, long n) {
    long O = s->out_channels, P = round_up(O), out = out_pixels(s), pixels = s->height * s->width, half = s->kernel / 2;
    long line = (s->width + s->kernel - 1) * P;
    const float *y = s->conv + saved_at(s, b, n, pixels), *grad = s->grad_out + (b * out * s->nets + n) * O;
    float *to = t->grad + half * line + half * P;
    for (long c = 0; c < O; c += LANES)
        if (s->pooled) spread_pooled(s, &t->nets[n], y, grad, to, saved_at(s, b, n, out), c);
        else spread_plain(s, &t->nets[n], y, grad, to, c);
    if (n == 0 || s->x_net) read_image(s, t->padded, b, n);
    wgrad_job job = {.in = t->padded, .out = to, .sum = t->nets[n].grad_weight, .H = s->height, .W = s->width,
                     .I = s->in_channels, .O = P, .k = s->kernel, .step = P, .line = line};
    wgrad_image(&job);
    if (s->grad_x) input_gradient(s, t, b, n);
}

int block_backward(const block_sheet *s) {
    long O = s->out_channels, pixels = out_pixels(s), each = O * s->in_channels * s->kernel * s->kernel;
    const float *value = s->pooled ? s->peak : s->conv;
    back_scratch t = {0};
    int failed = open_back(s, &t);
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++)
            gather_sums(s, &t.nets[n], value + saved_at(s, b, n, pixels), s->grad_out + (b * pixels * s->nets + n) * O);
    for (long n = 0; n < s->nets && !failed; n++) settle_back(s, &t.nets[n], n);
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) pass_two(s, &t, b, n);
    for (long n = 0; n < s->nets && !failed; n++)
        unpack_gradient(s->grad_weight + n * each, t.nets[n].grad_weight, O, s->in_channels, s->kernel);
    close_back(&t);
    return failed;
}
