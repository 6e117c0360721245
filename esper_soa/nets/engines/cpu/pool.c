/* 2x2 max pool on its own, forward and backward, where a seed stands between ReLU and pool; see sheet.h. */
#include "pool.h"
#include "sheet.h"

int pool_forward(const sheet *s) {
    long O = s->out_channels, pixels = s->height * s->width * O, out = (s->height / 2) * (s->width / 2) * O;
    for (long b = 0; b < s->batch; b++) {
        pool_job job = {.y = s->x + b * pixels, .peak = s->out + b * out,
                        .place = s->place ? s->place + b * out : NULL, .H = s->height, .W = s->width, .P = O};
        pool_image(&job);
    }
    return 0;
}

/* The gradient of two lines of x from one line of the pool's. */
static void unpool_line(const sheet *s, const float *grad, const uint8_t *place, float *to) {
    long O = s->out_channels, line = s->width * O;
    for (long x = 0; x + 1 < s->width; x += 2, grad += O, place += O, to += 2 * O)
        for (long c = 0; c < O; c += LANES) {
            i8 where = __builtin_convertvector(*(const b8u *)(place + c), i8);
            for (int q = 0; q < 4; q++) store(to + (q >> 1) * line + (q & 1) * O + c, keep(where == q, load(grad + c)));
        }
}

int pool_backward(const sheet *s) {
    long O = s->out_channels, lines = s->batch * (s->height / 2), out = s->width / 2 * O, in = 2 * s->width * O;
    for (long l = 0; l < lines; l++) unpool_line(s, s->grad_out + l * out, s->place + l * out, s->grad_x + l * in);
    return 0;
}
