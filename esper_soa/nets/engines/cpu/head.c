/* What stands behind the last block: global mean, linear classifier, cross-entropy, hits; and the way back. */
#include <math.h>

#include "head.h"
#include "vec.h"

static void spatial_mean(const head *h, const float *x, float *mean) {
    for (int64_t c = 0; c < h->channels; c += LANES) {
        v8 sum = splat(0);
        for (int64_t p = 0; p < h->pixels; p++) sum += load_some(x + p * h->x_pixel + c, h->channels - c);
        store_some(mean + c, sum / splat((float)h->pixels), h->channels - c);
    }
}

static float dot(const float *a, const float *b, int64_t count) {
    float part[8] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int l = 0; l < 8; l++) part[l] += a[i + l] * b[i + l];
    for (; i < count; i++) sum += a[i] * b[i];
    return sum + (((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7])));
}

void head_logits(const head *h, const float *x, int64_t n, float *mean, float *logits) {
    int64_t C = h->channels, K = h->classes;
    spatial_mean(h, x, mean);
    for (int64_t k = 0; k < K; k++) logits[k] = h->bias[n * K + k] + dot(h->weight + (n * K + k) * C, mean, C);
}

int64_t head_largest(const float *v, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (v[i] > v[best] || (v[i] != v[i] && v[best] == v[best])) best = i;
    return best;
}

double head_cross_entropy(const head *h, float *slope, int64_t label) {
    float top = slope[head_largest(slope, h->classes)], own = slope[label] - top, sum = 0;
    for (int64_t k = 0; k < h->classes; k++) {
        slope[k] = expf(slope[k] - top);
        sum += slope[k];
    }
    for (int64_t k = 0; k < h->classes; k++) slope[k] = (slope[k] / sum - (float)(k == label)) / (float)h->batch;
    return log((double)sum) - (double)own;
}

int head_forward(const head *h) {
    int64_t C = h->channels, K = h->classes;
    for (int64_t n = 0; n < h->nets; n++) {
        double loss = 0;
        h->hits[n] = 0;
        for (int64_t b = 0; b < h->batch; b++) {
            int64_t row = b * h->nets + n, label = h->labels[row];
            float *mean = h->mean + row * C, *slope = h->slope + row * K;
            head_logits(h, h->x + b * h->pixels * h->x_pixel + n * C, n, mean, slope);
            h->hits[n] += head_largest(slope, K) == label;
            loss += head_cross_entropy(h, slope, label);
        }
        h->loss[n] = (float)(loss / (double)h->batch);
    }
    return 0;
}

/* One sample's share in the gradients of network n; `to` is scratch of C in whole vectors, zero in those added. */
static void sample_back(const head *h, int64_t b, int64_t n, float *to) {
    int64_t C = h->channels, K = h->classes, row = b * h->nets + n;
    const float *mean = h->mean + row * C, *slope = h->slope + row * K;
    memset(to, 0, (size_t)C * sizeof(float));
    for (int64_t k = 0; k < K; k++) {
        float g = h->grad[n] * slope[k], *grad = h->grad_weight + (n * K + k) * C;
        const float *weight = h->weight + (n * K + k) * C;
        h->grad_bias[n * K + k] += g;
        for (int64_t c = 0; c < C; c++) {
            grad[c] += g * mean[c];
            to[c] += g * weight[c];
        }
    }
    for (int64_t c = 0; c < C; c++) to[c] /= (float)h->pixels;
    float *x = h->grad_x + b * h->pixels * h->x_pixel + n * C;
    int64_t room = h->x_pixel / h->nets;
    for (int64_t c = 0; c < C; c += LANES)
        for (int64_t p = 0; p < h->pixels; p++) store_some(x + p * h->x_pixel + c, load(to + c), room - c);
}

int head_backward(const head *h) {
    size_t rows = (size_t)(h->nets * h->classes);
    float *to = scratch(round_up(h->channels));
    if (!to) return 1;
    memset(h->grad_weight, 0, rows * (size_t)h->channels * sizeof(float));
    memset(h->grad_bias, 0, rows * sizeof(float));
    for (int64_t b = 0; b < h->batch; b++)
        for (int64_t n = 0; n < h->nets; n++) sample_back(h, b, n, to);
    free(to);
    return 0;
}
