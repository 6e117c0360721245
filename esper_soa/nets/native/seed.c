/* A seed's layer, forward and backward: convolution, group norm, ReLU, blended into a residual, and the host's 2x2 max
 * pool where one follows; see sheet.h for the data. */
#include "group.h"
#include "pool.h"

/* The layer of image b of network n from its normalised convolution; the rows of t are gain and offset. */
static void emit_seed(const sheet *s, const front_scratch *t, const image_room *room, const float *y, long b, long n) {
    long O = s->out_channels, P = round_up(O), pixels = s->height * s->width, step = s->nets * O, at = b * pixels * step + n * O;
    long small = out_pixels(s), saved = saved_at(s, b, n, small);
    emit_job job = {.value = y, .gain = t->rows, .offset = t->rows + P, .residual = s->residual ? s->residual + at : NULL,
                    .out = s->pooled ? room->wide : s->out + at, .pixels = pixels, .O = O, .step = s->pooled ? P : step,
                    .residual_step = step, .linear = (int)s->linear, .alpha = alpha_of(s, n)};
    emit_image(&job);
    if (!s->pooled) return;
    pool_job pool = {.y = room->wide, .peak = room->pooled, .place = s->place ? s->place + saved : NULL, .H = s->height,
                     .W = s->width, .P = P};
    pool_image(&pool);
    copy_pixels(s->out + b * small * step + n * O, step, room->pooled, P, small, O);
}

void seed_image(const sheet *s, const front_scratch *t, const image_room *room, long b, long n) {
    long O = s->out_channels, P = round_up(O), at = (n * s->batch + b) * P;
    float *y = s->conv ? s->conv + saved_at(s, b, n, s->height * s->width) : room->y;
    float *mean = s->conv ? s->mean + at : t->rows + 2 * P, *rstd = s->conv ? s->rstd + at : t->rows + 3 * P;
    convolve(s, t, y, b, n);
    group_statistics(s, y, mean, rstd);
    gain_offset(t->rows, mean, rstd, s->scale + n * O, s->shift + n * O, O);
    if (s->out) emit_seed(s, t, room, y, b, n);
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

/* A gradient of an image, `step` floats a pixel. */
typedef struct {
    const float *at;
    long step;
} image_gradient;

/* The gradient of image b of network n before the pool, for which `wide` [H, W, P] is room. */
static image_gradient gradient_of(const sheet *s, float *wide, long b, long n) {
    long O = s->out_channels, P = round_up(O), step = s->nets * O, small = out_pixels(s), columns = s->width / 2;
    const float *grad = s->grad_out + b * small * step + n * O;
    if (!s->pooled) return (image_gradient){grad, step};
    for (long p = 0; p < small; p++)
        for (long c = 0; c < O; c += LANES) {
            i8 place = __builtin_convertvector(*(const b8u *)(s->place + saved_at(s, b, n, small) + p * P + c), i8);
            v8 g = load_some(grad + p * step + c, O - c);
            float *to = wide + (p / columns * 2 * s->width + p % columns * 2) * P + c;
            for (int q = 0; q < 4; q++) store(to + ((q >> 1) * s->width + (q & 1)) * P, keep(place == q, g));
        }
    return (image_gradient){wide, P};
}

/* What reaches x beside the layer: all of the gradient, or (1 - alpha) of it where the layer is cut off from x; twice
 * the gradient where x went on as it was and the seed x + layer(x) got all of it as well. */
static void residual_gradient(const sheet *s, image_gradient grad, long b, long n) {
    long O = s->out_channels, pixels = s->height * s->width, step = s->nets * O;
    float *to = s->grad_x + (b * pixels * s->nets + n) * O;
    float share = s->detached ? 1.0f - alpha_of(s, n) : s->through ? 2.0f : 1.0f;
    for (long c = 0; c < O; c += LANES)
        for (long p = 0; p < pixels; p++) {
            v8 sum = share * load_some(grad.at + p * grad.step + c, O - c);
            if (!s->detached) sum += load_some(to + p * step + c, O - c);
            store_some(to + p * step + c, sum, O - c);
        }
}

static void seed_image_back(const sheet *s, const back_scratch *t, float *wide, long b, long n) {
    long O = s->out_channels, P = round_up(O), at = (n * s->batch + b) * P;
    const float *y = s->conv + saved_at(s, b, n, s->height * s->width);
    image_gradient grad = gradient_of(s, wide, b, n);
    back_net *net = &t->nets[n];
    start_rows(s, net, s->mean + at, s->rstd + at, n);
    gather_sums(s, net, y, grad.at, grad.step);
    settle_group(s, net, s->rstd + at, n);
    for (long c = 0; c < O; c += LANES) spread_plain(s, net, y, grad.at, grad.step, padded_grad(s, t), c);
    convolution_gradients(s, t, b, n);
    if (s->grad_x && s->own_residual) residual_gradient(s, grad, b, n);
}

int seed_backward(const sheet *s) {
    back_scratch t = {0};
    float *wide = scratch(s->height * s->width * round_up(s->out_channels));
    int failed = open_back(s, &t) || !wide;
    memset(s->grad_scale, 0, (size_t)(s->nets * s->out_channels) * sizeof(float));
    memset(s->grad_shift, 0, (size_t)(s->nets * s->out_channels) * sizeof(float));
    for (long b = 0; b < s->batch && !failed; b++)
        for (long n = 0; n < s->nets; n++) seed_image_back(s, &t, wide, b, n);
    if (!failed) unpack_gradients(s, &t);
    close_back(&t);
    free(wide);
    return failed;
}
