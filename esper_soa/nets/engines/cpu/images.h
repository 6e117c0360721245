/* Crops of an image bank: bytes looked up as normalised floats. */
#ifndef ESPER_IMAGES_H
#define ESPER_IMAGES_H

#include <stdint.h>

typedef struct {
    int64_t batch, nets, size;
    int64_t line, colour;  /* bytes between lines of an image, and between the colours of a line */
    const uint8_t *bytes;
    const int64_t *first;  /* [B, n]: where a crop begins */
    const float *values;   /* [3, 256]: what a byte stands for */
    float *out;            /* [B, size, size, n*3] */
} crops;

__attribute__((visibility("default"))) int cut_images(const crops *c);

/* The first `count` crops to [count, size + 2 pad, size + 2 pad, 3], with `pad` pixels of zeros around them. */
void cut_padded(const crops *c, long count, long pad, float *to);

#endif
