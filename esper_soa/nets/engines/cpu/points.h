/* Operations of hosts that are no block: windows of pixels, a product, features side by side; see descriptor.h. */
#ifndef ESPER_POINTS_H
#define ESPER_POINTS_H

#include "pool.h"

/* The lines or columns of a window that lie within an image, from its place `at` on. */
typedef struct {
    long begin, end;
} span;

INLINE span inside(const descriptor *s, long at, long size) {
    long first = at * s->stride - s->padding;
    return (span){first < 0 ? -first : 0, first + s->kernel > size ? size - first : s->kernel};
}

/* For each pixel of every image of an output, and each vector of its channels: `window` is where x begins there. */
#define WINDOWS \
    long P = round_up(s->out_channels), k = s->kernel; \
    for (long b = 0; b < s->batch; b++) \
        for (long y = 0; y < s->height; y++) \
            for (long x = 0; x < s->width; x++) \
                for (long c = 0; c < P; c += LANES)
#define WINDOW_FACTS \
    span rows = inside(s, y, s->in_height), columns = inside(s, x, s->in_width); \
    long at = b * image_floats(s) + (y * s->width + x) * P + c; \
    long from = b * in_floats(s) + ((y * s->stride - s->padding) * s->in_width + x * s->stride - s->padding) * P + c;

/* The mean of a window where linear, of eps pixels of the border counted, else its largest, of which `place` says which. */
static void window_forward(const descriptor *s, const work *t) {
    WINDOWS {
        WINDOW_FACTS
        vec sum = splat(0), best = sum;
        ints place = {0};
        int met = 0;
        for (long r = rows.begin; r < rows.end; r++)
            for (long q = columns.begin; q < columns.end; q++) {
                vec next = load(s->x + from + (r * s->in_width + q) * P);
                ints wins = met++ ? overtakes(next, best) : ~(ints){0};
                sum += next, best = choose(wins, next, best), place = choose_int(wins, (int)(r * k + q), place);
            }
        store(s->out + at, s->linear ? sum / splat((float)s->eps) : best);
        if (s->place) save_place(s->place + at, place);
    }
}

static void window_backward(const descriptor *s, const work *t) {
    if (!s->grad_x) return;
    zero(s->grad_x, s->batch * in_floats(s));
    WINDOWS {
        WINDOW_FACTS
        vec grad = load(s->grad_out + at);
        ints place = s->linear ? (ints){0} : saved_place(s->place + at);
        if (s->linear) grad /= splat((float)s->eps);
        for (long r = rows.begin; r < rows.end; r++)
            for (long q = columns.begin; q < columns.end; q++) {
                float *to = s->grad_x + from + (r * s->in_width + q) * P;
                store(to, load(to) + (s->linear ? grad : keep(place == (int)(r * k + q), grad)));
            }
    }
}

/* Of image b and pixel p, where `host` stands: one for all pixels where spread. */
INLINE long factor_at(const descriptor *s, long b, long p) {
    return (s->spread ? b : b * s->height * s->width + p) * round_up(s->out_channels);
}

/* x times `host`. */
static void product_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    for (long b = 0; b < s->batch; b++)
        for (long p = 0; p < pixels; p++)
            for (long c = 0; c < P; c += LANES) {
                long at = (b * pixels + p) * P + c;
                store(s->out + at, load(s->x + at) * load(s->host + factor_at(s, b, p) + c));
            }
}

static void product_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    if (s->spread && s->grad_host) zero(s->grad_host, s->batch * P);
    for (long b = 0; b < s->batch; b++)
        for (long p = 0; p < pixels; p++)
            for (long c = 0; c < P; c += LANES) {
                long at = (b * pixels + p) * P + c, factor = factor_at(s, b, p) + c;
                vec grad = load(s->grad_out + at), more = load(s->x + at) * grad;
                if (s->grad_x) store(s->grad_x + at, load(s->host + factor) * grad);
                if (s->grad_host) store(s->grad_host + factor, s->spread ? load(s->grad_host + factor) + more : more);
            }
}

/* Channels of x, and behind them those of `host`. */
static void beside_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), C = s->in_channels, D = s->out_channels - C;
    zero(s->out, s->batch * image_floats(s));
    for (long p = 0; p < s->batch * s->height * s->width; p++) {
        memcpy(s->out + p * P, s->x + p * round_up(C), (size_t)C * sizeof(float));
        memcpy(s->out + p * P + C, s->host + p * round_up(D), (size_t)D * sizeof(float));
    }
}

static void beside_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), C = s->in_channels, D = s->out_channels - C;
    for (long p = 0; p < s->batch * s->height * s->width; p++) {
        if (s->grad_x) pad_row(s->grad_x + p * round_up(C), s->grad_out + p * P, C);
        if (s->grad_host) pad_row(s->grad_host + p * round_up(D), s->grad_out + p * P + C, D);
    }
}

/* Parameters of WEIGHED at pixel p, those of channel c at p * by_pixel + c * by_channel, or `constant` where there are none. */
static inline void weights_at(const descriptor *s, const float *from, float constant, long p, float *to) {
    for (long c = 0; c < s->out_channels; c++) to[c] = from ? from[p * s->by_pixel + c * s->by_channel] : constant;
}

/* x times scale, or a constant, plus shift, or a constant. */
static void weighed_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), pixels = s->height * s->width;
    float *gain = t->rows, *offset = gain + P;
    zero(gain, 2 * P);
    for (long p = 0; p < pixels; p++) {
        weights_at(s, s->scale, (float)s->eps, p, gain), weights_at(s, s->shift, (float)s->momentum, p, offset);
        for (long b = 0; b < s->batch; b++)
            for (long c = 0, at = (b * pixels + p) * P; c < P; c += LANES)
                store(s->out + at + c, load(s->x + at + c) * load(gain + c) + load(offset + c));
    }
}

static void weighed_backward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C), pixels = s->height * s->width;
    float *gain = t->rows, *sum = gain + P, *moment = sum + P;
    ready_sums(s, t);
    for (long i = 0; i < weighed_numbers(s) && (s->scale || s->shift); i++) *(s->scale ? s->grad_scale + i : s->grad_shift + i) = 0.0f;
    for (long p = 0; p < pixels; p++) {
        weights_at(s, s->scale, (float)s->eps, p, gain);
        zero(sum, 2 * P);
        for (long b = 0; b < s->batch; b++)
            for (long c = 0, at = (b * pixels + p) * P; c < P; c += LANES) {
                vec grad = load(s->grad_out + at + c);
                store(sum + c, load(sum + c) + grad);
                store(moment + c, load(moment + c) + grad * load(s->x + at + c));
                if (s->grad_x) store(s->grad_x + at + c, grad * load(gain + c));
            }
        for (long c = 0; c < C; c++) {
            if (s->scale) s->grad_scale[p * s->by_pixel + c * s->by_channel] += moment[c];
            if (s->shift) s->grad_shift[p * s->by_pixel + c * s->by_channel] += sum[c];
        }
    }
}

/* Channels and pixels of x: from pixel by_pixel on, begin + w * by_channel + i as channel i * groups + w. */
static void pick_forward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), Q = s->x_pixel, ways = s->groups, pixels = s->height * s->width;
    zero(s->out, s->batch * image_floats(s));
    for (long b = 0; b < s->batch; b++)
        for (long p = 0; p < pixels; p++) {
            const float *from = s->x + b * in_floats(s) + (s->by_pixel + p) * Q + s->begin;
            float *to = s->out + b * image_floats(s) + p * P;
            for (long w = 0; w < ways; w++)
                for (long i = 0; i < s->out_channels / ways; i++) to[i * ways + w] = from[w * s->by_channel + i];
        }
}

static void pick_backward(const descriptor *s, const work *t) {
    long P = round_up(s->out_channels), Q = s->x_pixel, ways = s->groups, pixels = s->height * s->width;
    if (!s->grad_x) return;
    zero(s->grad_x, s->batch * in_floats(s));
    for (long b = 0; b < s->batch; b++)
        for (long p = 0; p < pixels; p++) {
            const float *from = s->grad_out + b * image_floats(s) + p * P;
            float *to = s->grad_x + b * in_floats(s) + (s->by_pixel + p) * Q + s->begin;
            for (long w = 0; w < ways; w++)
                for (long i = 0; i < s->out_channels / ways; i++) to[w * s->by_channel + i] = from[i * ways + w];
        }
}

/* Pixels of parameters, weight [pixels, C], and behind them those of x. */
static void lead_forward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C), first = image_floats(s) - in_floats(s);
    for (long b = 0; b < s->batch; b++) {
        float *to = s->out + b * image_floats(s);
        for (long p = 0; p < first / P; p++) pad_row(to + p * P, s->weight + p * C, C);
        memcpy(to + first, s->x + b * in_floats(s), (size_t)in_floats(s) * sizeof(float));
    }
}

static void lead_backward(const descriptor *s, const work *t) {
    long C = s->out_channels, P = round_up(C), first = image_floats(s) - in_floats(s);
    zero(s->grad_weight, first / P * C);
    for (long b = 0; b < s->batch; b++) {
        const float *from = s->grad_out + b * image_floats(s);
        for (long p = 0; p < first / P; p++)
            for (long c = 0; c < C; c++) s->grad_weight[p * C + c] += from[p * P + c];
        if (s->grad_x) memcpy(s->grad_x + b * in_floats(s), from + first, (size_t)in_floats(s) * sizeof(float));
    }
}

#endif
