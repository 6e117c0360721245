/* Whole networks: the hosts of a run with their seeds, and the layers that one of them is at the moment.
 *
 * Training (train.c) and validation (validate.c) go network by network, so that everything between the layers of one
 * stays in the caches. A host is a program of operations (host_program.py), in an order in which each comes behind those
 * whose results it takes; a seed's row is that of nets/model/blueprints.py. records.py mirrors the record.
 *
 * A seed is a program of parts (program.py). One of a single convolution that is added to the host, or learns
 * behind it, is a layer by itself. Any other is a run of layers that make its residual r(x), or where it is REPLACING all
 * of it, of the host's x, and one that joins the two.
 */
#ifndef ESPER_CHAIN_H
#define ESPER_CHAIN_H

#include "activation.h"
#include "kernels.h"

/* What a part of a seed is beside its kind. LINEAR: no ReLU follows. BIASED: so is the hidden layer of its squeeze. KEPT:
 * NORMED and SQUEEZED give what they make of x, not what they add to it. REPLACING: so do all parts of the seed together. */
enum { LINEAR = 1, BIASED = 2, KEPT = 4, REPLACING = 8 };

/* A part of a seed in a slot, as program.py writes it. */
typedef struct {
    int64_t kind; /* of the layer that it becomes; 0 behind the last */
    int64_t outputs, kernel, groups, hidden, flags;
} seed_part;

/* An operation of a host, as host_program.py writes it; the last is its head. Places among the parameters and statistics are
 * columns of their rows, -1 for none. */
typedef struct {
    int64_t kind;                  /* of the layer that it becomes */
    int64_t first, second;         /* operations before it whose results it takes; -1: what is given, and none; -2: given */
    int64_t outputs, height, width; /* of what it gives, before a pool */
    int64_t kernel, stride, padding, depthwise, split;
    int64_t begin, by_channel, by_pixel; /* see descriptor.h */
    int64_t activation, pooled, together;
    int64_t before, after;         /* the slots before and behind the pool, -1 for none */
    int64_t weight, scale, shift;  /* of parameters; shift: a bias where there is no scale */
    int64_t mean, variance, count; /* of statistics; count: of batches */
    double eps, momentum;          /* of its norm; of WEIGHED, the factor and what is added; of ATTEND, the factor of scores */
} operation;

/* A seed in a slot that is operations; all zero for one of parts. */
typedef struct {
    int64_t begin, end, numel; /* its operations, and the numbers of its parameters */
} module_seed;

typedef struct {
    int64_t operations, slots, classes, size, colours; /* of the host; size: of the images, in pixels along a side */
    const operation *program;                          /* [operations], and behind them those of seeds */
    const int64_t *gate_at, *gate_hidden;              /* [slots]: columns of the gates, units of their hidden layers */
    int64_t blueprints, parts;                         /* parts: rows of a program */
    const seed_part *programs;                         /* [slots, blueprints, parts] */
    const module_seed *modules;                        /* [slots, blueprints] */
    int64_t longest;                                   /* most operations of any */
    int64_t width, statistics_width;                   /* floats of a row of the hosts' pools */
    const int64_t *seed_width;                         /* [slots]: of the seeds' */
    float *params, *momentum, *statistics;                /* [N, width]; momentum: see sgd.h */
    float *const *seed_params, *const *seed_momentum;     /* [slots] of [N, seed_width], likewise */
    const int64_t *seed_kind, *seed_flags;             /* [N, slots]; kind: 1 + blueprint, 0 where no seed takes part */
    const float *alpha;                                /* [N, slots] */
    double eps;                                        /* of the seeds' norms */
} networks;

#define MOST_TENSORS 4
#define NOWHERE (-1)

/* Where gradients of activations lie, see plan_gradients in train.c. */
typedef struct {
    long out, x, host;   /* of what the layer gives, and of what it reads; NOWHERE where it is not wanted */
    long total[2];       /* of x and host: NOWHERE, or where that is to which it is added */
} places;

/* A layer of one network: its descriptor with sizes and parameters entered. */
typedef struct {
    int kind;
    long operation;              /* of the host, that it is or stands behind */
    long from[2];                /* layers that it reads, as x and host; -1: the images, and none */
    long slot, span;            /* of a seed: its slot, and in its first layer their number */
    int by_columns;              /* its parameters lie in the row as its operation says */
    descriptor s;
    const float *given;          /* what readers are given: out, or what the layer hands on */
    places at;                   /* of gradients */
    float factor, unused;        /* NORMED: what alpha points to, and the gradient of what is no parameter */
    long place;                 /* of a seed: where its parameters begin in the row of gradients */
    work kept;                  /* from image to image of a validation: weights, and the border of padded */
    long tensors[MOST_TENSORS]; /* sizes of its parameter tensors, one after the other; 0 behind the last */
} layer;

/* No network has more layers: a program's parts, but for its end, a join and a pool in either slot of an operation. */
INLINE long most_layers(const networks *w) {
    return (1 + 2 * ((w->parts > w->longest ? w->parts : w->longest) + 2)) * w->operations;
}

INLINE long numbers_of(const layer *own) {
    return own->tensors[0] + own->tensors[1] + own->tensors[2] + own->tensors[3];
}

INLINE descriptor new_descriptor(const networks *w, long batch, long inputs, long outputs, long height, long width, long kernel) {
    return (descriptor){.batch = batch, .in_channels = inputs, .out_channels = outputs, .height = height, .width = width,
                   .in_height = height, .in_width = width, .kernel = kernel, .stride = 1, .padding = kernel / 2, .split = 1,
                   .x_pixel = round_up(inputs), .eps = w->eps};
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

/* Layers of a network as they are added. */
typedef struct {
    const networks *w;
    layer *layers, *to;      /* the first, and where the next goes */
    long env, batch, operation;
    long from, inputs, height, width; /* of the next: the layer that it reads, its channels and size */
    long slot;               /* -1 outside of seeds */
    int flags;
    const float *row; /* of parameters that are not yet entered */
    long place;       /* as in layer */
} building;

static inline layer *add_layer(building *g, int kind, long outputs, long kernel) {
    layer own = {.kind = kind, .operation = g->operation, .from = {g->from, -1}, .slot = g->slot, .place = g->place};
    own.s = new_descriptor(g->w, g->batch, g->inputs, outputs, g->height, g->width, kernel), own.s.flags = g->flags;
    *g->to = own;
    g->inputs = outputs, g->from = g->to - g->layers;
    return g->to++;
}

/* The layer of a part, with its parameters. */
static inline layer *add_part(building *g, const seed_part *p) {
    int depthwise = p->kind == DEPTH;
    long inputs = depthwise ? 1 : g->inputs, weights = p->outputs * inputs * p->kernel * p->kernel;
    layer *own = add_layer(g, (int)p->kind, p->outputs, p->kernel);
    own->s.depthwise = depthwise, own->s.groups = p->groups, own->s.linear = !!(p->flags & LINEAR), own->s.own_residual = !!(p->flags & KEPT);
    if (p->kind == NORMED) own->factor = tanhf(*g->row), own->s.alpha = &own->factor, weights = 1;
    if (p->kind == SQUEEZED) g->row = enter_squeeze(own, g->row, inputs, p->hidden, p->outputs, p->flags & BIASED);
    else g->row = enter_parameters(own, g->row, weights, p->kind == SEED || p->kind == NORMED);
    g->place += numbers_of(own);
    return own;
}

static inline void add_pool(building *g) {
    g->slot = -1, g->flags = 0, g->place = 0;
    add_layer(g, POOL, g->inputs, 1)->s.pooled = 1;
}

/* The parts, and the join. */
static inline void add_runs(building *g, const seed_part *p, const float *gate, const float *alpha) {
    layer *first = g->to;
    long C = g->inputs, host = g->from;
    int replaced = p->flags & REPLACING ? REPLACED : 0;
    for (; p->kind; p++) add_part(g, p);
    layer *own = add_layer(g, JOIN, C, 1);
    own->from[1] = host;
    own->s.alpha = alpha, own->s.flags |= replaced;
    if (g->flags & GATED && !(g->flags & THROUGH)) enter_squeeze(own, gate, C, g->w->gate_hidden[g->slot], 1, 1);
    first->span = g->to - first;
}

INLINE float *column(float *row, long at) { return at < 0 ? NULL : row + at; }

/* What comes next takes what this layer gives. */
INLINE void stand_behind(building *g, const descriptor *s) {
    g->inputs = s->out_channels, g->height = out_height(s), g->width = out_width(s);
}

/* The layer of an operation that reads layers `x` and `host`; its parameters and statistics stand in these rows. */
static inline void add_operation(building *g, const operation *o, long x, long host, float *row, float *moving) {
    g->from = x, g->inputs = g->w->colours, g->height = g->width = g->w->size;
    if (x >= 0) stand_behind(g, &g->layers[x].s);
    layer *own = add_layer(g, (int)o->kind, o->outputs, o->kernel);
    descriptor *s = &own->s;
    own->from[1] = host, own->by_columns = 1;
    if (x < 0) s->x_pixel = g->w->colours;
    s->mixed = o->kind == MIXED, s->attends = o->kind == ATTEND;
    if (o->kind == PRODUCT) s->spread = out_pixels(&g->layers[host].s) == 1 && o->height * o->width > 1;
    s->height = o->height, s->width = o->width, s->stride = o->stride, s->padding = o->padding;
    s->depthwise = (int)o->depthwise, s->split = o->split, s->together = o->together && o->kind == BLOCK;
    s->activation = (int)o->activation, s->linear = s->activation == IDENTITY;
    s->pooled = (int)o->pooled, s->eps = o->eps, s->momentum = o->momentum;
    s->weight = column(row, o->weight), s->scale = column(row, o->scale), s->shift = column(row, o->shift);
    s->running_mean = column(moving, o->mean), s->running_var = column(moving, o->variance);
    s->batches = column(moving, o->count);
    if (o->kind == BLOCK) s->sparse = o->begin;
    s->begin = o->begin, s->by_channel = o->by_channel, s->by_pixel = o->by_pixel;
    if (o->kind != BLOCK) s->groups = o->split, s->split = 1;
    stand_behind(g, s);
    if (o->kind != NORMED) return;
    own->factor = s->weight ? tanhf(*s->weight) : 1.0f, s->alpha = &own->factor, s->own_residual = 1;
}

/* The operations of a seed, and the join. */
static inline void add_module(building *g, const module_seed *m, float *row, const float *alpha) {
    layer *first = g->to;
    long base = first - g->layers, host = g->from, C = g->inputs;
    for (const operation *o = g->w->program + m->begin; o < g->w->program + m->end; o++) {
        long second = o->second == -2 ? host : o->second < 0 ? -1 : base + o->second;
        add_operation(g, o, o->first < 0 ? host : base + o->first, second, row, NULL);
    }
    g->place = m->numel;
    layer *own = add_layer(g, JOIN, C, 1);
    own->from[1] = host;
    own->s.alpha = alpha, own->s.flags |= REPLACED;
    if (g->flags & GATED && !(g->flags & THROUGH))
        enter_squeeze(own, row + g->w->gate_at[g->slot], C, g->w->gate_hidden[g->slot], 1, 1);
    first->span = g->to - first;
}

/* The seed in `slot`, and the pool that follows. */
static inline void add_seed(building *g, long slot, int pooled) {
    const networks *w = g->w;
    long at = g->env * w->slots + slot;
    int kind = (int)w->seed_kind[at];
    g->slot = slot, g->flags = (int)w->seed_flags[at], g->place = 0;
    float *row = w->seed_params[slot] + g->env * w->seed_width[slot];
    const module_seed *m = w->modules + slot * w->blueprints + kind - 1;
    g->row = row;
    const seed_part *p = w->programs + (slot * w->blueprints + kind - 1) * w->parts;
    int single = p[0].kind == SEED && !p[1].kind && !(p[0].flags & REPLACING), through = g->flags & THROUGH;
    if (m->end) add_module(g, m, row, w->alpha + at);
    else if (!single || (!through && g->flags & (MULTIPLIED | GATED))) add_runs(g, p, row + w->gate_at[slot], w->alpha + at);
    else {
        layer *own = add_part(g, p);
        own->span = 1;
        own->s.own_residual = 1, own->s.through = !!through, own->s.detached = !!(g->flags & DETACHED);
        own->s.alpha = through ? NULL : w->alpha + at;
        own->s.pooled = pooled && !through;
        pooled = pooled && through;
    }
    if (pooled) add_pool(g);
}

/* Whether a seed takes part in `slot` of `env`. */
INLINE int seed_in(const networks *w, long env, long slot) {
    return slot >= 0 && w->seed_kind[env * w->slots + slot] != 0;
}

/* The layer whose output is the result of an operation, of the first `count`; -1 for the images. */
INLINE long result_of(const layer *layers, long count, long operation) {
    while (count && layers[count - 1].operation > operation) count--;
    return count - 1;
}

/* The layers of `env` on a batch, into `layers`; returns their number. */
static inline long build_network(const networks *w, long env, long batch, layer *layers) {
    building g = {.w = w, .layers = layers, .to = layers, .env = env, .batch = batch};
    float *row = w->params + env * w->width, *moving = w->statistics + env * w->statistics_width;
    for (g.operation = 0; g.operation + 1 < w->operations; g.operation++) {
        const operation *o = w->program + g.operation;
        int seeded = seed_in(w, env, o->before);
        long count = g.to - layers, second = o->second < 0 ? -1 : result_of(layers, count, o->second);
        g.slot = -1, g.flags = 0, g.place = 0;
        add_operation(&g, o, result_of(layers, count, o->first), second, row, moving);
        if (seeded) g.to[-1].s.pooled = 0, stand_behind(&g, &g.to[-1].s);
        if (seeded) add_seed(&g, o->before, (int)o->pooled), stand_behind(&g, &g.to[-1].s);
        if (seed_in(w, env, o->after)) add_seed(&g, o->after, 0);
    }
    return g.to - layers;
}

/* The head, and the layer that it reads. */
INLINE const operation *head_of(const networks *w) { return w->program + w->operations - 1; }
INLINE long top_of(const networks *w, const layer *layers, long count) {
    return result_of(layers, count, head_of(w)->first);
}

/* Pixels of zeros around an image of a validation: those that its reader wants, where that is only one. */
INLINE long image_border(const networks *w) {
    for (const operation *o = w->program + 1; o < head_of(w); o++)
        if (o->first < 0) return 0;
    return w->program->padding;
}
INLINE long padded_side(const networks *w) { return w->size + 2 * image_border(w); }

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

/* What layer `from` gives, or the images. */
INLINE const float *given_by(const layer *layers, long from, const float *images) {
    return from < 0 ? images : layers[from].given;
}

#endif
