/* A seed's layer, forward and backward: convolution, group norm, ReLU, blended into a residual, and the host's 2x2 max
 * pool where one follows; see sheet.h for the data. */
#include "group.h"
#include "pool.h"

/* 8 channels of the layer and of the pool behind it: decided on what the layer gives, as by a pool of its own. */
INLINE void emit_pooled(const sheet *s, const float *rows, const float *y, long b, long n, long c) {
    long O = s->out_net, P = round_up(O), W = s->width, step = s->nets * O, small = out_pixels(s);
    const float *x = s->residual + b * s->height * W * step + n * O + c;
    float *to = s->out + b * small * step + n * O + c;
    uint8_t *saved = s->place ? s->place + saved_at(s, b, n, small) + c : NULL;
    v8 gain = load(rows + c), offset = load(rows + P + c);
    float alpha = alpha_of(s, n);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long col = 0; col + 1 < W; col += 2, to += step) {
            v8 best = splat(0);
            i8 place = {0};
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                long p = (r + (q >> 1)) * W + col + (q & 1);
                v8 z = gain * load(y + p * P + c) + offset;
                z = load_some(x + p * step, O - c) + alpha * (s->linear ? z : relu(z));
                i8 wins = q ? overtakes(z, best) : ~(i8){0};
                best = choose(wins, z, best);
                place = choose_int(wins, q, place);
            }
            store_some(to, best, O - c);
            if (!saved) continue;
            *(b8u *)saved = __builtin_convertvector(place, b8);
            saved += P;
        }
}

/* The layer of image b of network n from its normalised convolution; the rows of t are gain and offset. */
static void emit_seed(const sheet *s, const front_scratch *t, const float *y, long b, long n) {
    long O = s->out_net, P = round_up(O), pixels = s->height * s->width, step = s->nets * O, at = b * pixels * step + n * O;
    for (long c = 0; c < O && s->pooled; c += LANES) emit_pooled(s, t->rows, y, b, n, c);
    if (s->pooled) return;
    emit_job job = {.value = y, .gain = t->rows, .offset = t->rows + P, .residual = s->residual ? s->residual + at : NULL,
                    .out = s->out + at, .pixels = pixels, .O = O, .step = step, .residual_step = step,
                    .linear = (int)s->linear, .alpha = alpha_of(s, n)};
    emit_image(&job);
}

void seed_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n) {
    long O = s->out_channels, P = round_up(O), at = (n * s->batch + b) * P;
    float *y = s->conv ? s->conv + saved_at(s, b, n, s->height * s->width) : room->y;
    float *mean = s->conv ? s->mean + at : t->rows + 2 * P, *rstd = s->conv ? s->rstd + at : t->rows + 3 * P;
    convolve(s, t, y, b, n);
    group_statistics(s, y, mean, rstd);
    gain_offset(t->rows, mean, rstd, s->scale + n * O, s->shift + n * O, O);
    if (s->out) emit_seed(s, t, y, b, n);
}

int seed_forward(const sheet *s) {
    front_scratch t = {0};
    image_room room = open_room(s);
    int failed = open_front(s, &t, 4) || !room.y;
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) seed_image(s, &t, &room, b, n);
    close_front(&t);
    free(room.y);
    return failed;
}

/* A gradient of an image, `step` floats a pixel; where `place` is given, that of the pool behind it. */
typedef struct {
    const float *at;
    long step;
    const uint8_t *place; /* [H / 2, W / 2, P] */
} image_gradient;

static image_gradient gradient_of(const sheet *s, long b, long n) {
    long O = s->out_net, step = s->nets * O, small = out_pixels(s);
    const uint8_t *place = s->pooled ? s->place + saved_at(s, b, n, small) : NULL;
    return (image_gradient){s->grad_out + b * small * step + n * O, step, place};
}

/* The pool's gradient of 8 channels at pixel p of the pool, and where it goes. */
INLINE v8 pool_gradient(const sheet *s, image_gradient grad, long p, long c, i8 *place) {
    *place = __builtin_convertvector(*(const b8u *)(grad.place + p * round_up(s->out_channels) + c), i8);
    return load_some(grad.at + p * grad.step + c, s->out_net - c);
}

/* gather_sums behind a pool: the same sums in the same order, where most of the gradient is zero. */
static void gather_pooled(const sheet *s, back_net *net, const float *y, image_gradient grad) {
    long O = s->out_net, P = round_up(O), columns = s->width / 2;
    for (long c = 0; c < O; c += LANES) {
        v8 sum[2] = {splat(0), splat(0)}, moment[2] = {splat(0), splat(0)}, mean = load(net->rows + MEAN * P + c);
        v8 gain = load(net->rows + GAIN * P + c), offset = load(net->rows + OFFSET * P + c);
        for (long line = 0; line < s->height; line++)
            for (long x = 0; x < columns; x++) {
                i8 place;
                v8 g = pool_gradient(s, grad, line / 2 * columns + x, c, &place);
#pragma GCC unroll 2
                for (int q = 0; q < 2; q++) {
                    v8 value = load(y + (line * s->width + 2 * x + q) * P + c);
                    v8 here = keep(place == (int)(line & 1) * 2 + q, g);
                    v8 dz = s->linear ? here : behind_relu(gain, offset, value, here);
                    sum[q] += dz;
                    moment[q] += dz * (value - mean);
                }
            }
        add_sums(net, c, sum[0] + sum[1], moment[0] + moment[1]);
    }
}

/* spread_plain behind a pool. */
INLINE void spread_pooled(const sheet *s, const back_net *net, const float *y, image_gradient grad, float *to, long c) {
    long P = round_up(s->out_channels), W = s->width, line = (W + s->kernel - 1) * P, p = 0;
    const float *rows = net->rows + c;
    v8 gain = load(rows + GAIN * P), offset = load(rows + OFFSET * P), mean = load(rows + MEAN * P);
    v8 flow = load(rows + FLOW * P), slope = load(rows + SLOPE * P), level = load(rows + LEVEL * P);
    for (long r = 0; r + 1 < s->height; r += 2)
        for (long x = 0; x + 1 < W; x += 2, p++) {
            i8 place;
            v8 g = pool_gradient(s, grad, p, c, &place);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                v8 value = load(y + ((r + (q >> 1)) * W + x + (q & 1)) * P + c), here = keep(place == q, g);
                v8 dz = s->linear ? here : behind_relu(gain, offset, value, here);
                store(to + (r + (q >> 1)) * line + (x + (q & 1)) * P + c, flow * dz + (slope * (value - mean) + level));
            }
        }
}

/* `share` of the gradient of 8 channels at one pixel, into `to` or, where the layer sees x, to what is there. */
INLINE void add_residual(const sheet *s, float *to, float share, v8 grad, long count) {
    v8 sum = share * grad;
    if (!s->detached) sum += load_some(to, count);
    store_some(to, sum, count);
}

/* What reaches x beside the layer: all of the gradient, or (1 - alpha) of it where the layer is cut off from x; twice
 * the gradient where x went on as it was and the seed x + layer(x) got all of it as well. */
static void residual_gradient(const sheet *s, image_gradient grad, long b, long n) {
    long O = s->out_net, W = s->width, step = s->nets * O;
    float *to = s->grad_x + (b * s->height * W * s->nets + n) * O;
    float share = s->detached ? 1.0f - alpha_of(s, n) : s->through ? 2.0f : 1.0f;
    for (long c = 0; c < O; c += LANES) {
        for (long p = 0; p < s->height * W && !s->pooled; p++)
            add_residual(s, to + p * step + c, share, load_some(grad.at + p * grad.step + c, O - c), O - c);
        for (long p = 0; p < out_pixels(s) && s->pooled; p++) {
            i8 place;
            v8 g = pool_gradient(s, grad, p, c, &place);
            float *first = to + (p / (W / 2) * 2 * W + p % (W / 2) * 2) * step + c;
            for (int q = 0; q < 4; q++)
                add_residual(s, first + ((q >> 1) * W + (q & 1)) * step, share, keep(place == q, g), O - c);
        }
    }
}

static void seed_image_back(const sheet *s, const back_scratch *t, long b, long n) {
    long O = s->out_net, P = round_up(O), at = (n * s->batch + b) * P;
    const float *y = s->conv + saved_at(s, b, n, s->height * s->width);
    image_gradient grad = gradient_of(s, b, n);
    back_net *net = &t->nets[n];
    start_rows(s, net, s->mean + at, s->rstd + at, n);
    if (s->pooled) gather_pooled(s, net, y, grad);
    else gather_sums(s, net, y, grad.at, grad.step);
    settle_group(s, net, s->rstd + at, n);
    if (!s->pooled) spread_plain(s, net, y, grad.at, grad.step, padded_grad(s, t));
    for (long c = 0; c < O && s->pooled; c += LANES) spread_pooled(s, net, y, grad, padded_grad(s, t), c);
    convolution_gradients(s, t, b, n);
    if (s->grad_x && s->own_residual) residual_gradient(s, grad, b, n);
}

int seed_backward(const sheet *s) {
    back_scratch t = {0};
    int failed = open_back(s, &t);
    memset(s->grad_scale, 0, (size_t)(s->nets * s->out_channels) * sizeof(float));
    memset(s->grad_shift, 0, (size_t)(s->nets * s->out_channels) * sizeof(float));
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) seed_image_back(s, &t, b, n);
    if (!failed) unpack_gradients(s, &t);
    close_back(&t);
    return failed;
}
