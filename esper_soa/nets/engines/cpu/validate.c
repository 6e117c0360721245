/* Validation of whole networks under every subset of seeds that is asked for, one network after the other and image by
 * image. Subsets form a tree, as a network is a chain: what lies before the first seed in which they differ is computed
 * once. */
#include <math.h>

#include "head.h"
#include "validate.h"

/* One network while it is validated. */
typedef struct {
    const validation *v;
    layer *layers;
    front_scratch *fronts; /* as layers */
    long count, place;     /* place: among the networks */
    image_room room;
    head top;
    float *mean, *logits;
    int64_t label;
} validated;

/* Floats of an image with the border that the first block wants. */
static long padded_floats(const networks *w) { return (w->size + w->kernel - 1) * (w->size + w->kernel - 1) * COLOURS; }

/* Batch norm folded into kernel and bias, with the running statistics. */
static void fold(sheet *s, arena *a) {
    long O = s->out_channels, each = s->in_channels * s->kernel * s->kernel;
    float *weight = take_floats(a, O * each), *bias = take_floats(a, O);
    if (!a->at) return;
    for (long o = 0; o < O; o++) {
        float gain = s->scale[o] * (float)(1.0 / sqrt((double)s->running_var[o] + s->eps));
        for (long i = 0; i < each; i++) weight[o * each + i] = s->weight[o * each + i] * gain;
        bias[o] = s->shift[o] - s->running_mean[o] * gain;
    }
    s->weight = weight, s->shift = bias;
}

/* Room for what a layer works on. */
static void give_room(layer *own, arena *a) {
    if (own->kind == BLOCK) fold(&own->s, a);
    if (!hands_on(own)) own->s.out = take_floats(a, out_floats(&own->s));
    own->s.mean = take_floats(a, round_up(own->s.out_channels));
    own->s.rstd = take_floats(a, round_up(own->s.out_channels));
    own->q.mean = take_floats(a, round_up(own->q.inputs));
    own->q.units = take_floats(a, own->q.hidden);
    own->q.out = take_floats(a, round_up(own->q.outputs));
}

/* Lay network `env` out in the arena. */
static validated prepare(const validation *v, long env, layer *layers, arena *a) {
    validated net = {.v = v, .layers = layers, .count = build_chain(&v->nets, env, 1, layers)};
    long most = 0;
    layers[0].s.padded = 1;
    for (long l = 0; l < net.count; l++) {
        give_room(&layers[l], a);
        long numbers = image_floats(&layers[l].s);
        most = numbers > most ? numbers : most;
    }
    const sheet *last = &layers[net.count - 1].s;
    long C = last->out_channels, K = v->nets.classes;
    const float *weight = CLASSIFIER(&v->nets, env, last);
    net.top = (head){.batch = 1, .channels = C, .pixels = out_pixels(last), .classes = K, .weight = weight,
                     .bias = weight + K * C};
    net.mean = take_floats(a, round_up(C)), net.logits = take_floats(a, K);
    net.room.y = take_floats(a, most), net.room.pooled = take_floats(a, most);
    return net;
}

/* Logits of an image under the seeds `on`. */
static void judge(validated *net, const float *x, int64_t on) {
    const validation *v = net->v;
    head_logits(&net->top, x, net->mean, net->logits);
    for (long c = 0; c < v->codes; c++)
        if (v->code[c] == on)
            v->hits[net->place * v->codes + c] += head_largest(net->logits, v->nets.classes) == net->label;
    if (v->code[0] == on) v->loss[net->place] += head_cross_entropy(&net->top, net->logits, net->label);
}

/* Whether a subset begins with the seeds `on` out of `met`. */
static int wanted(const validation *v, int64_t met, int64_t on) {
    for (long c = 0; c < v->codes; c++)
        if ((v->code[c] & met) == on) return 1;
    return 0;
}

/* What is behind a seed that is off: x, or x behind the pool that is part of the seed's layer. */
static const float *pass_by(sheet *s, const float *x) {
    if (!s->pooled) return x;
    s->x = x;
    kernels_of(s)->of[POOL].forward(s);
    return s->out;
}

static int has_front(const layer *own) { return own->kind == BLOCK || own->kind == SEED || own->kind == RELU; }

/* Fails where memory is out. */
static int infer(validated *net, long l) {
    const layer *own = &net->layers[l];
    const kernels *by = kernels_of(&own->s);
    switch (own->kind) {
    case BLOCK: by->block_image(&own->s, &net->fronts[l], &net->room, 0); return 0;
    case SEED: by->seed_image(&own->s, &net->fronts[l], &net->room, 0); return 0;
    case RELU: by->relu_image(&own->s, &net->fronts[l], 0); return 0;
    case SQUEEZED: return by->squeezed_forward(&own->s, &own->q);
    default: return by->of[own->kind].forward(&own->s);
    case JOIN: break;
    }
    joint j = joint_of(own);
    join_forward(&j);
    return 0;
}

/* An image through the layers from l on: `on` of the seeds `met` so far are in. */
static int walk(validated *net, long l, const float *x, int64_t met, int64_t on) {
    const float *host = x;
    for (; l < net->count; l++) {
        layer *own = &net->layers[l];
        int64_t bit = own->span ? (int64_t)1 << own->slot & net->v->ablated : 0;
        if (own->span) host = x;
        if (bit) {
            met |= bit;
            if (wanted(net->v, met, on) && walk(net, l + own->span, pass_by(&own->s, x), met, on)) return 1;
            if (!wanted(net->v, met, on | bit)) return 0;
            on |= bit;
        }
        own->s.x = x, own->host = host;
        if (infer(net, l)) return 1;
        x = own->s.out;
    }
    judge(net, x, on);
    return 0;
}

/* `shared`: the images that all networks see, where they do; else there is room for one at `image`. */
static int walk_images(validated *net, const float *shared, float *image) {
    const validation *v = net->v;
    for (long i = 0; i < v->images; i++) {
        long at = (shared ? 0 : net->place * v->images) + i;
        net->label = v->labels[at];
        if (net->label < 0) continue;
        crops cut = v->images_of;
        cut.size = v->nets.size, cut.first += at;
        if (!shared) cut_padded(&cut, 1, v->nets.kernel / 2, image);
        if (walk(net, 0, shared ? shared + i * padded_floats(&v->nets) : image, 0, 0)) return 1;
        v->counted[net->place]++;
    }
    return 0;
}

/* Memory for the networks, one after the other. */
typedef struct {
    layer *layers;
    front_scratch *fronts; /* as layers */
    float *shared;         /* images */
    arena room;
} memory;

static int validate_network(const validation *v, long at, const memory *m) {
    arena a = m->room;
    float *image = take_floats(&a, padded_floats(&v->nets));
    validated net = prepare(v, v->envs[at], m->layers, &a);
    int failed = 0;
    net.fronts = m->fronts, net.place = at;
    for (long l = 0; l < net.count; l++) net.fronts[l] = (front_scratch){0};
    for (long l = 0; l < net.count && !failed; l++)
        if (has_front(&net.layers[l])) failed = open_front(&net.layers[l].s, &net.fronts[l], 4);
    failed = failed || walk_images(&net, m->shared, image);
    for (long l = 0; l < net.count; l++) close_front(&net.fronts[l]);
    return failed;
}

/* Bytes of the largest network. */
static size_t most_room(const validation *v, layer *layers) {
    size_t most = 64;
    for (long at = 0; at < v->count; at++) {
        arena a = {0};
        take_floats(&a, padded_floats(&v->nets));
        prepare(v, v->envs[at], layers, &a);
        most = a.used > most ? a.used : most;
    }
    return most;
}

static int open_memory(const validation *v, memory *m) {
    m->layers = calloc((size_t)most_layers(&v->nets), sizeof(layer));
    m->fronts = calloc((size_t)most_layers(&v->nets), sizeof(front_scratch));
    if (v->shared) m->shared = scratch(v->images * padded_floats(&v->nets));
    if (!m->layers || !m->fronts || (v->shared && !m->shared)) return 1;
    m->room.at = aligned_alloc(64, most_room(v, m->layers));
    return !m->room.at;
}

int validate_networks(const validation *v) {
    memory m = {0};
    int failed = open_memory(v, &m);
    crops images = v->images_of;
    images.size = v->nets.size;
    if (v->shared && !failed) cut_padded(&images, v->images, v->nets.kernel / 2, m.shared);
    for (long at = 0; at < v->count && !failed; at++) failed = validate_network(v, at, &m);
    free(m.layers), free(m.fronts), free(m.shared), free(m.room.at);
    return failed;
}
