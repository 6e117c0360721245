/* Crops of an image bank: bytes looked up as normalised floats. */
#ifndef ESPER_IMAGES_H
#define ESPER_IMAGES_H

#include <stdint.h>

typedef struct {
    int64_t size, colours; /* pixels of a side; 3, or 1 where they are grey */
    int64_t line, colour;  /* bytes between lines of an image, and between the colours of a line */
    int64_t env_stride;    /* floats between the values of two networks; 0: all have the same */
    const uint8_t *bytes;
    const int64_t *first;  /* where a crop begins */
    const float *values;   /* [colours, 256], or [count, colours, 256]: what a byte stands for */
} crops;

/* The first `count` crops to [count, size + 2 pad, size + 2 pad, colours], with `pad` pixels of zeros around them. */
void cut_padded(const crops *c, long count, long pad, float *to);

#endif
