/* Whole networks: the hosts of a run with their seeds, and the chain of layers that one of them is at the moment.
 *
 * Training (train.c) and validation (validate.c) go network by network, so that everything between the layers of one
 * stays in the caches. A row of parameters is that of nets/host.py: kernel, scale and shift of every block, then weight
 * and bias of the classifier; a seed's is kernel, scale, shift. nets/native/whole.py mirrors the record.
 */
#ifndef ESPER_CHAIN_H
#define ESPER_CHAIN_H

#include "layer.h"

#define COLOURS 3

/* What a seed is, beside its kernel. */
enum { THROUGH = 1, DETACHED = 2, FROZEN = 4, MEASURED = 8 };

typedef struct {
    int64_t blocks, slots, classes, kernel, size;      /* size: of the images, in pixels along a side */
    const int64_t *channels, *pooled, *before, *after; /* [blocks]; the slots before and behind the pool, -1 for none */
    const int64_t *groups;                             /* [slots]: of the seeds' norms */
    int64_t width, statistics_width;                   /* floats of a row of the hosts' pools */
    const int64_t *seed_width;                         /* [slots]: of the seeds' */
    float *params, *speed, *statistics;                /* [N, width] */
    float *const *seed_params, *const *seed_speed;     /* [slots] of [N, seed_width] */
    const int64_t *seed_kernel, *seed_flags;           /* [N, slots]; kernel 0 where no seed runs */
    const float *alpha;                                /* [N, slots] */
    double momentum, eps;                              /* of the batch norm; eps of every norm */
} networks;

enum { BLOCK, SEED, POOL };

/* A layer of one network: its sheet with sizes and parameters entered, and where its gradients go. */
typedef struct {
    int kind, flags;
    long slot; /* of a seed */
    sheet s;
} layer;

/* No network has more layers. */
INLINE long most_layers(const networks *w) { return 4 * w->blocks; }

/* Floats of a kernel with what its norm takes. */
INLINE long layer_numbers(const sheet *s) {
    return s->out_channels * (s->in_channels * s->kernel * s->kernel + 2);
}

INLINE sheet new_sheet(const networks *w, long batch, long inputs, long outputs, long side, long kernel) {
    return (sheet){.batch = batch, .nets = 1, .in_channels = inputs, .out_channels = outputs, .height = side,
                   .width = side, .kernel = kernel, .x_pixel = inputs, .eps = w->eps, .momentum = w->momentum};
}

/* Enter kernel, scale and shift that stand one after the other at `row`. */
INLINE void enter_parameters(sheet *s, const float *row) {
    s->weight = row;
    s->scale = row + s->out_channels * s->in_channels * s->kernel * s->kernel;
    s->shift = s->scale + s->out_channels;
}

/* The kernel of the seed that stands in `slot` of `env`, 0 for none. */
INLINE long kernel_in(const networks *w, long env, long slot) {
    return slot < 0 ? 0 : w->seed_kernel[env * w->slots + slot];
}

/* The seed in `slot`, and the pool where it follows: within the seed's layer, unless the host goes on with x. */
static inline long add_seed(const networks *w, long env, long slot, const sheet *block, int pooled, layer *to) {
    long O = block->out_channels, at = env * w->slots + slot;
    int flags = (int)w->seed_flags[at], through = flags & THROUGH;
    layer own = {SEED, flags, slot, new_sheet(w, block->batch, O, O, block->height, w->seed_kernel[at])};
    own.s.groups = w->groups[slot], own.s.own_residual = 1;
    own.s.through = !!through, own.s.detached = !!(flags & DETACHED), own.s.pooled = pooled && !through;
    own.s.alpha = through ? NULL : w->alpha + at;
    enter_parameters(&own.s, w->seed_params[slot] + env * w->seed_width[slot]);
    to[0] = own;
    if (!pooled || !through) return 1;
    to[1] = (layer){POOL, 0, 0, new_sheet(w, block->batch, O, O, block->height, 1)};
    to[1].s.pooled = 1;
    return 2;
}

/* The layers of `env` on a batch, into `to`; returns their number. */
static inline long build_chain(const networks *w, long env, long batch, layer *to) {
    long count = 0, inputs = COLOURS, side = w->size;
    const float *row = w->params + env * w->width;
    float *moving = w->statistics + env * w->statistics_width;
    for (long i = 0; i < w->blocks; i++) {
        long O = w->channels[i];
        int seeded = kernel_in(w, env, w->before[i]) > 0;
        layer block = {BLOCK, 0, -1, new_sheet(w, batch, inputs, O, side, w->kernel)};
        block.s.pooled = w->pooled[i] && !seeded;
        enter_parameters(&block.s, row);
        block.s.running_mean = moving, block.s.running_var = moving + O;
        row += layer_numbers(&block.s), moving += 2 * O;
        to[count++] = block;
        if (seeded) count += add_seed(w, env, w->before[i], &block.s, (int)w->pooled[i], to + count);
        if (w->pooled[i]) side /= 2;
        block.s.height = block.s.width = side;
        if (kernel_in(w, env, w->after[i])) count += add_seed(w, env, w->after[i], &block.s, 0, to + count);
        inputs = O;
    }
    return count;
}

/* Weight and bias of the classifier of `env`, and its sizes. */
#define CLASSIFIER(w, env, last) ((w)->params + ((env) + 1) * (w)->width - (w)->classes * ((last)->out_channels + 1))

/* Numbers of one image of n channels behind the layer. */
INLINE long out_numbers(const sheet *s) { return out_pixels(s) * s->out_channels; }

/* Memory handed out bit by bit; counts where `at` is NULL. */
typedef struct {
    char *at;
    size_t used;
} arena;

static inline void *take(arena *a, size_t bytes) {
    size_t from = a->used;
    a->used += (bytes + 63) / 64 * 64;
    return a->at ? a->at + from : NULL;
}
static inline float *take_floats(arena *a, long count) { return take(a, (size_t)count * sizeof(float)); }

#endif
