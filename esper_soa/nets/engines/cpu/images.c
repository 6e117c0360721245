/* Crops from an image bank: bytes looked up as normalised floats, written where the networks read them. */
#include "images.h"

#include <string.h>

/* The crop that begins at byte `first`; `line`: floats between lines of `to`. */
static void cut_image(const crops *c, int64_t first, float *to, long line) {
    for (long y = 0; y < c->size; y++) {
        const uint8_t *red = c->bytes + first + y * c->line, *green = red + c->colour, *blue = green + c->colour;
        float *at = to + y * line;
        for (long x = 0; x < c->size && c->colours == 1; x++) at[x] = c->values[red[x]];
        for (long x = 0; x < c->size && c->colours == 3; x++, at += 3) {
            at[0] = c->values[red[x]];
            at[1] = c->values[256 + green[x]];
            at[2] = c->values[512 + blue[x]];
        }
    }
}

void cut_padded(const crops *c, long count, long pad, float *to) {
    long side = c->size + 2 * pad, line = c->colours * side, border = pad * (line + c->colours), both = 2 * pad * c->colours;
    for (long i = 0; i < count; i++, to += side * line) {
        memset(to, 0, (size_t)border * sizeof(float));
        for (long y = 1; y < c->size && pad; y++)
            memset(to + border + y * line - both, 0, (size_t)both * sizeof(float));
        memset(to + side * line - border, 0, (size_t)border * sizeof(float));
        cut_image(c, c->first[i], to + border, line);
    }
}
