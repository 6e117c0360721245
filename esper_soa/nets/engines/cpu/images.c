/* Batches of crops from an image bank: bytes looked up as normalised floats, written where the networks read them. */
#include "images.h"

int cut_images(const crops *c) {
    int64_t pixel = 3 * c->nets, size = c->size;
    float *to = c->out;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t y = 0; y < size; y++, to += size * pixel)
            for (int64_t n = 0; n < c->nets; n++) {
                const uint8_t *red = c->bytes + c->first[b * c->nets + n] + y * c->line;
                const uint8_t *green = red + c->colour, *blue = green + c->colour;
                float *at = to + 3 * n;
                for (int64_t x = 0; x < size; x++, at += pixel) {
                    at[0] = c->values[red[x]];
                    at[1] = c->values[256 + green[x]];
                    at[2] = c->values[512 + blue[x]];
                }
            }
    return 0;
}
