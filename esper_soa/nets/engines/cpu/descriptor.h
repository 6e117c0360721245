/* The data descriptor of a layer of one network: convolution, norm, activation, and a 2x2 max pool where one follows.
 *
 * The host's block (block.h) has a batch norm or none; a seed's layer (seed.h) has a group norm and can be added to its
 * input; parts.h has what seeds are made of beside that. Activations are [B, H, W, P], P the channels in whole vectors with
 * zeros in those added; images are [B, H, W, 3], or [B, H, W, 1].
 */
#ifndef ESPER_SHEET_H
#define ESPER_SHEET_H

#include "squeeze_excite.h"

/* What a seed is beside its kind. THROUGH: the host goes on with x, the seed gets all of the gradient that arrives.
 * DETACHED: the seed sees x cut off from the graph. */
enum { THROUGH = 1, DETACHED = 2, FROZEN = 4, MEASURED = 8, MULTIPLIED = 16, GATED = 32, REPLACED = 64 };

typedef struct {
    long batch, in_channels, out_channels;
    long kernel;             /* block: 0 where there is no convolution, and what follows takes x */
    long height, width;      /* of what it gives, before a pool */
    long in_height, in_width;
    long stride, padding;    /* of the convolution; of same-padded ones, as all those of seeds are, 1 and kernel / 2 */
    int depthwise;           /* every channel has a kernel for itself */
    long split;              /* groups of a convolution that is not depthwise: whole vectors on either side if not 1 */
    int together;            /* block: images whose tiles do not fill a strip are convolved together (group_of in work.h) */
    int activation;          /* block: see activation.h */
    long x_pixel;            /* floats between pixels of x */
    int padded;              /* x has the border of zeros already that the convolution wants */
    int pooled;              /* a 2x2 max pool follows */
    int flags;               /* of the seed */
    int linear;              /* no ReLU; window: its mean */
    long sparse;             /* block: groups of a convolution that is computed as if it had 1, with zeros; 0: none */
    long begin, by_channel, by_pixel; /* points.h says where they are read */
    int mixed;               /* the weights are of pixels, [pixels, pixels of x], and the shift is of pixels */
    int attends;             /* x is queries, keys and values of heads, side by side */
    int spread;              /* product: `host` has one pixel, for all of x */
    int own_residual;        /* seed and parts: x is added, and grad_x contains what flows through it */
    int through;             /* seed: straight-through, the host goes on with x; there is no out */
    int detached;            /* seed: of grad_x only (1 - alpha) of the gradient that arrives, nothing through the layer */
    long groups;             /* seed: groups of the norm; pick: ways; attend: heads */
    double momentum, eps;
    const float *x;
    const float *weight;        /* [O, I, k, k] */
    const float *scale, *shift; /* [O]; block without a norm: no scale, and shift is a bias or NULL */
    const float *alpha;         /* seed: factor of the layer that is added; NULL for 1 */
    float *out;                 /* [B, H', W', P], H' = H / 2 where pooled */
    float *conv;                /* saved [B, H, W, P]: output of the convolution; NULL: computed anew where it is needed */
    float *peak;                /* saved [B, H', W', P], pooled only: its value where the maximum lies */
    uint8_t *place;             /* saved, as out, pooled or of a window: which of its pixels, row by row */
    float *mean, *rstd;         /* saved [P]; seed: [B, P] */
    float *running_mean, *running_var; /* [O], moved */
    float *batches;                    /* block: counts those that moved them; may be NULL */
    float *grad_out;                   /* as out; block: becomes the gradient of `host` where that is added */
    float *grad_x;                     /* as x; NULL where not wanted */
    float *grad_weight, *grad_scale, *grad_shift;
    const float *host;          /* block: what is added to the norm, as out, or NULL; join: what the seed was given, where x is its residual or, where REPLACED, what it gives */
    float *grad_host;           /* join: what does not pass through the residual */
    squeeze q;                  /* of parts and joins that have one */
} descriptor;

/* Channels of x that have a part in one that is given. */
INLINE long inputs_of(const descriptor *s) {
    return s->depthwise ? 1 : s->in_channels / s->split / (s->sparse ? s->sparse : 1);
}

/* Floats of an image of x. */
INLINE long in_floats(const descriptor *s) { return s->in_height * s->in_width * s->x_pixel; }

/* Floats of one image before the pool, and behind it; pixels and lines behind it. */
INLINE long image_floats(const descriptor *s) { return s->height * s->width * round_up(s->out_channels); }
INLINE long out_height(const descriptor *s) { return s->pooled ? s->height / 2 : s->height; }
INLINE long out_width(const descriptor *s) { return s->pooled ? s->width / 2 : s->width; }
INLINE long out_pixels(const descriptor *s) { return s->pooled ? (s->height / 2) * (s->width / 2) : s->height * s->width; }
INLINE long out_floats(const descriptor *s) { return out_pixels(s) * round_up(s->out_channels); }

#endif
