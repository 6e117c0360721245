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

/* The mean of a window where linear, pixels of the border counted, else its largest, of which `place` says which. */
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
        store(s->out + at, s->linear ? sum / splat((float)(k * k)) : best);
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
        if (s->linear) grad /= splat((float)(k * k));
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

#endif
