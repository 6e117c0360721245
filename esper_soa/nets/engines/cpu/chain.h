/* Whole networks: the hosts of a run with their seeds, and the chain of layers that one of them is at the moment.
 *
 * Training (train.c) and validation (validate.c) go network by network, so that everything between the layers of one
 * stays in the caches. A row of parameters is that of nets/host.py: kernel, scale and shift of every block, then weight
 * and bias of the classifier; a seed's row is that of nets/model/blueprints.py. records.py mirrors the record.
 *
 * A seed is a program of parts (program.py). One of a single convolution that is added to the host, or learns
 * behind it, is a layer by itself. Any other is a run of layers that make its residual r(x), or where it is REPLACING all
 * of it, of the host's x, and one that joins the two.
 */
#ifndef ESPER_CHAIN_H
#define ESPER_CHAIN_H

#include "kernels.h"

#define COLOURS 3

/* What a part of a seed is beside its kind. LINEAR: no ReLU follows. BIASED: so is the hidden layer of its squeeze. KEPT:
 * NORMED and SQUEEZED give what they make of x, not what they add to it. REPLACING: so do all parts of the seed together. */
enum { LINEAR = 1, BIASED = 2, KEPT = 4, REPLACING = 8 };

/* A part of a seed in a slot, as program.py writes it. */
typedef struct {
    int64_t kind; /* of the layer that it becomes; 0 behind the last */
    int64_t outputs, kernel, groups, hidden, flags;
} seed_part;

typedef struct {
    int64_t blocks, slots, classes, size;              /* size: of the images, in pixels along a side */
    const int64_t *channels, *kernels, *pooled;        /* [blocks]; kernels: pixels along a side */
    const int64_t *before, *after;                     /* [blocks]: the slots before and behind the pool, -1 for none */
    const int64_t *gate_at, *gate_hidden;              /* [slots]: columns of the gates, units of their hidden layers */
    int64_t blueprints, parts;                         /* parts: rows of a program */
    const seed_part *programs;                         /* [slots, blueprints, parts] */
    int64_t width, statistics_width;                   /* floats of a row of the hosts' pools */
    const int64_t *seed_width;                         /* [slots]: of the seeds' */
    float *params, *momentum, *statistics;                /* [N, width] */
    float *const *seed_params, *const *seed_momentum;     /* [slots] of [N, seed_width] */
    const int64_t *seed_kind, *seed_flags;             /* [N, slots]; kind: 1 + blueprint, 0 where no seed takes part */
    const float *alpha;                                /* [N, slots] */
    double norm_momentum, eps;                         /* of the batch norm; eps of every norm */
} networks;

#define MOST_TENSORS 4

/* A layer of one network: its descriptor with sizes and parameters entered. */
typedef struct {
    int kind;
    long slot, span;            /* of a seed: its slot, and in its first layer their number */
    descriptor s;
    float factor;                /* NORMED: what alpha points to */
    long place;                 /* of a seed: where its parameters begin in the row of gradients */
    work kept;                  /* from image to image of a validation: weights, and the border of padded */
    long tensors[MOST_TENSORS]; /* sizes of its parameter tensors, one after the other; 0 behind the last */
} layer;

/* No network has more layers: a program's parts, but for its end, a join and a pool in either slot of a block. */
INLINE long most_layers(const networks *w) { return (1 + 2 * (w->parts + 1)) * w->blocks; }

INLINE long numbers_of(const layer *own) {
    return own->tensors[0] + own->tensors[1] + own->tensors[2] + own->tensors[3];
}

INLINE descriptor new_descriptor(const networks *w, long batch, long inputs, long outputs, long side, long kernel) {
    return (descriptor){.batch = batch, .in_channels = inputs, .out_channels = outputs, .height = side, .width = side,
                   .kernel = kernel, .x_pixel = round_up(inputs), .eps = w->eps, .momentum = w->norm_momentum};
}

/* Enter `weights` numbers of a kernel at `row`, and scale and shift behind them where there is a norm. */
static inline const float *enter_parameters(layer *own, const float *row, long weights, int norm) {
    long O = own->s.out_channels;
    own->s.weight = row, own->tensors[0] = weights;
    if (norm) own->s.scale = row + weights, own->s.shift = own->s.scale + O, own->tensors[1] = own->tensors[2] = O;
    return row + numbers_of(own);
}

/* The same for the two layers of a squeeze; returns the numbers behind them. */
static inline const float *enter_squeeze(layer *own, const float *row, long inputs, long hidden, long outputs, int biased) {
    squeeze *q = &own->s.q;
    long sizes[MOST_TENSORS] = {hidden * inputs, biased ? hidden : outputs * hidden, biased ? outputs * hidden : outputs,
                                biased ? outputs : 0};
    memcpy(own->tensors, sizes, sizeof(sizes));
    q->inputs = inputs, q->hidden = hidden, q->outputs = outputs;
    q->first = row, q->first_bias = biased ? row + sizes[0] : NULL;
    q->second = row + sizes[0] + (biased ? sizes[1] : 0), q->second_bias = q->second + outputs * hidden;
    return row + numbers_of(own);
}

/* Layers of a seed as they are added. */
typedef struct {
    const networks *w;
    layer *to;        /* the next */
    long batch, side, slot, inputs;
    int flags;
    const float *row; /* of parameters that are not yet entered */
    long place;       /* as in layer */
} building;

static inline layer *add_layer(building *g, int kind, long outputs, long kernel) {
    layer own = {.kind = kind, .slot = g->slot, .place = g->place};
    own.s = new_descriptor(g->w, g->batch, g->inputs, outputs, g->side, kernel), own.s.flags = g->flags;
    *g->to = own;
    g->inputs = outputs;
    return g->to++;
}

/* The layer of a part, with its parameters. */
static inline layer *add_part(building *g, const seed_part *p) {
    long inputs = p->kind == DEPTH ? 1 : g->inputs, weights = p->outputs * inputs * p->kernel * p->kernel;
    layer *own = add_layer(g, (int)p->kind, p->outputs, p->kernel);
    own->s.groups = p->groups, own->s.linear = !!(p->flags & LINEAR), own->s.own_residual = !!(p->flags & KEPT);
    if (p->kind == NORMED) own->factor = tanhf(*g->row), own->s.alpha = &own->factor, weights = 1;
    if (p->kind == SQUEEZED) g->row = enter_squeeze(own, g->row, inputs, p->hidden, p->outputs, p->flags & BIASED);
    else g->row = enter_parameters(own, g->row, weights, p->kind == SEED || p->kind == NORMED);
    g->place += numbers_of(own);
    return own;
}

static inline layer *add_pool(building *g, long C) {
    *g->to = (layer){.kind = POOL, .slot = -1, .s = new_descriptor(g->w, g->batch, C, C, g->side, 1)};
    (g->to++)->s.pooled = 1;
    return g->to;
}

/* The parts, the join, and the pool where one follows. */
static inline layer *add_runs(building *g, const seed_part *p, long C, int pooled, const float *gate, const float *alpha) {
    layer *first = g->to;
    int replaced = p->flags & REPLACING ? REPLACED : 0;
    for (; p->kind; p++) add_part(g, p);
    layer *own = add_layer(g, JOIN, C, 1);
    own->s.alpha = alpha, own->s.flags |= replaced;
    if (g->flags & GATED && !(g->flags & THROUGH)) enter_squeeze(own, gate, C, g->w->gate_hidden[g->slot], 1, 1);
    first->span = g->to - first;
    return pooled ? add_pool(g, C) : g->to;
}

/* The seed in `slot` of `env` behind a block, and the pool that follows. Returns where the next layer goes. */
static inline layer *add_seed(const networks *w, long env, long slot, const descriptor *block, int pooled, layer *to) {
    long C = block->out_channels, at = env * w->slots + slot;
    int kind = (int)w->seed_kind[at], flags = (int)w->seed_flags[at];
    const float *row = w->seed_params[slot] + env * w->seed_width[slot];
    building g = {.w = w, .to = to, .batch = block->batch, .side = block->height, .slot = slot, .inputs = C,
                  .flags = flags, .row = row};
    const seed_part *p = w->programs + (slot * w->blueprints + kind - 1) * w->parts;
    int single = p[0].kind == SEED && !p[1].kind && !(p[0].flags & REPLACING), through = flags & THROUGH;
    if (!single || (!through && flags & (MULTIPLIED | GATED)))
        return add_runs(&g, p, C, pooled, row + w->gate_at[slot], w->alpha + at);
    layer *own = add_part(&g, p);
    own->span = 1;
    own->s.own_residual = 1, own->s.through = !!through, own->s.detached = !!(flags & DETACHED);
    own->s.alpha = through ? NULL : w->alpha + at;
    own->s.pooled = pooled && !through;
    return pooled && through ? add_pool(&g, C) : g.to;
}

/* Whether a seed takes part in `slot` of `env`. */
INLINE int seed_in(const networks *w, long env, long slot) {
    return slot >= 0 && w->seed_kind[env * w->slots + slot] != 0;
}

/* The layers of `env` on a batch, into `to`; returns their number. */
static inline long build_chain(const networks *w, long env, long batch, layer *to) {
    layer *next = to;
    long inputs = COLOURS, side = w->size;
    const float *row = w->params + env * w->width;
    float *moving = w->statistics + env * w->statistics_width;
    for (long i = 0; i < w->blocks; i++) {
        long O = w->channels[i], kernel = w->kernels[i];
        int seeded = seed_in(w, env, w->before[i]);
        layer block = {.kind = BLOCK, .slot = -1, .s = new_descriptor(w, batch, inputs, O, side, kernel)};
        if (i == 0) block.s.x_pixel = COLOURS;
        block.s.pooled = w->pooled[i] && !seeded;
        row = enter_parameters(&block, row, O * inputs * kernel * kernel, 1);
        block.s.running_mean = moving, block.s.running_var = moving + O, moving += 2 * O;
        *next++ = block;
        if (seeded) next = add_seed(w, env, w->before[i], &block.s, (int)w->pooled[i], next);
        if (w->pooled[i]) side /= 2;
        block.s.height = block.s.width = side;
        if (seed_in(w, env, w->after[i])) next = add_seed(w, env, w->after[i], &block.s, 0, next);
        inputs = O;
    }
    return next - to;
}

/* Weight and bias of the classifier of `env`, and its sizes. */
#define CLASSIFIER(w, env, last) ((w)->params + ((env) + 1) * (w)->width - (w)->classes * ((last)->out_channels + 1))

/* Bytes that are used where the largest of `count` layers works behind what is used by now. */
static inline size_t most_work(const layer *layers, long count, arena used) {
    size_t largest = used.used;
    for (long l = 0; l < count; l++) {
        arena a = used;
        lay_work(&layers[l].s, &a);
        largest = a.used > largest ? a.used : largest;
    }
    return largest;
}

/* Whether its work has to be made ready. */
INLINE int convolves(const layer *own) { return own->kind == BLOCK || own->kind == SEED || own->kind == RELU; }

/* Whether the layer hands on what it was given: a seed that learns behind the host. */
INLINE int hands_on(const layer *own) {
    return (own->kind == SEED && own->s.through) || (own->kind == JOIN && own->s.flags & THROUGH);
}

#endif
