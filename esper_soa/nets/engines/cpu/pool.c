/* 2x2 max pool on its own, forward and backward, where a seed stands between ReLU and pool; see sheet.h. */
#include "pool.h"
#include "sheet.h"

int pool_forward(const sheet *s) {
    long P = round_up(s->out_channels), pixels = s->height * s->width * P, out = (s->height / 2) * (s->width / 2) * P;
    for (long b = 0; b < s->batch; b++) {
        pool_job job = {.y = s->x + b * pixels, .peak = s->out + b * out,
                        .place = s->place ? s->place + b * out : NULL, .H = s->height, .W = s->width, .P = P};
        pool_image(&job);
    }
    return 0;
}

/* The gradient of two lines of x from one line of the pool's. */
static void unpool_line(const sheet *s, const float *grad, const uint8_t *place, float *to) {
    long P = round_up(s->out_channels), line = s->width * P;
    for (long x = 0; x + 1 < s->width; x += 2, grad += P, place += P, to += 2 * P)
        for (long c = 0; c < P; c += LANES) {
            i8 where = saved_place(place + c);
            for (int q = 0; q < 4; q++) store(to + (q >> 1) * line + (q & 1) * P + c, keep(where == q, load(grad + c)));
        }
}

int pool_backward(const sheet *s) {
    long P = round_up(s->out_channels), lines = s->batch * (s->height / 2);
    long out = s->width / 2 * P, in = 2 * s->width * P;
    for (long l = 0; l < lines; l++) unpool_line(s, s->grad_out + l * out, s->place + l * out, s->grad_x + l * in);
    return 0;
}
