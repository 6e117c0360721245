/* Validation of whole networks under every subset of seeds that is asked for, one network after the other and image by
 * image. Subsets form a tree, as a network is a chain: what lies before the first seed in which they differ is computed
 * once. */
#include "head.h"
#include "validate.h"

/* One network while it is validated. */
typedef struct {
    const validation *v;
    layer *layers;
    long count, place, number; /* place: among the networks; number: of the image */
    head top;
    float *mean, *logits, *image; /* image: room for one */
    arena rest;                   /* where layers work, one after the other */
    int64_t label;
} validated;

/* Batch norm folded into kernel and bias, with the running statistics. */
static void fold(descriptor *s, arena *a) {
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
    own->s.q.mean = take_floats(a, round_up(own->s.q.inputs));
    own->s.q.units = take_floats(a, own->s.q.hidden);
    own->s.q.out = take_floats(a, round_up(own->s.q.outputs));
    own->kept.padded = take_floats(a, padded_floats(&own->s, own->s.x_pixel));
    own->kept.weights = take_floats(a, packed_forward(&own->s));
    if (convolves(own) && a->at) ready_forward(&own->s, &own->kept);
}

/* Lay network `env` out in the arena. */
static validated prepare(const validation *v, long env, layer *layers, arena *a) {
    validated net = {.v = v, .layers = layers, .count = build_chain(&v->nets, env, 1, layers)};
    const descriptor *first = &layers[0].s, *last = &layers[net.count - 1].s;
    layers[0].s.padded = 1;
    net.image = take_floats(a, padded_floats(first, COLOURS));
    for (long l = 0; l < net.count; l++) give_room(&layers[l], a);
    long C = last->out_channels, K = v->nets.classes;
    const float *weight = CLASSIFIER(&v->nets, env, last);
    net.top = (head){.batch = 1, .channels = C, .pixels = out_pixels(last), .classes = K, .weight = weight,
                     .bias = weight + K * C};
    net.mean = take_floats(a, round_up(C)), net.logits = take_floats(a, K);
    net.rest = *a;
    return net;
}

/* Logits of an image under the seeds `on`. */
static void judge(validated *net, const float *x, int64_t on) {
    const validation *v = net->v;
    head_logits(&net->top, x, net->mean, net->logits);
    int right = head_largest(net->logits, v->nets.classes) == net->label;
    for (long c = 0; c < v->codes; c++)
        if (v->code[c] == on) v->correct[net->place * v->codes + c] += right;
    if (v->code[0] != on) return;
    if (v->answers) v->answers[net->place * v->images + net->number] = (uint8_t)right;
    v->loss[net->place] += head_cross_entropy(&net->top, net->logits, net->label);
}

/* Whether a subset begins with the seeds `on` out of `met`. */
static int wanted(const validation *v, int64_t met, int64_t on) {
    for (long c = 0; c < v->codes; c++)
        if ((v->code[c] & met) == on) return 1;
    return 0;
}

/* Where a layer works, beside what it keeps. */
static work work_of(const validated *net, const layer *own) {
    arena a = net->rest;
    work t = lay_work(&own->s, &a);
    t.padded = own->kept.padded, t.weights = own->kept.weights;
    return t;
}

/* What is behind a seed that is off: x, or x behind the pool that is part of the seed's layer. */
static const float *pass_by(const validated *net, layer *own, const float *x) {
    work t = work_of(net, own);
    if (!own->s.pooled) return x;
    own->s.x = x;
    kernels_of(&own->s)->of[POOL].forward(&own->s, &t);
    return own->s.out;
}

static void infer(const validated *net, const layer *own) {
    const kernels *by = kernels_of(&own->s);
    work t = work_of(net, own);
    if (own->kind == BLOCK) by->block_infer(&own->s, &t);
    else by->of[own->kind].forward(&own->s, &t);
}

/* An image through the layers from l on: `on` of the seeds `met` so far are in. */
static void walk(validated *net, long l, const float *x, int64_t met, int64_t on) {
    const float *host = x;
    for (; l < net->count; l++) {
        layer *own = &net->layers[l];
        int64_t bit = own->span ? (int64_t)1 << own->slot & net->v->ablated : 0;
        if (own->span) host = x;
        if (bit) {
            met |= bit;
            if (wanted(net->v, met, on)) walk(net, l + own->span, pass_by(net, own, x), met, on);
            if (!wanted(net->v, met, on | bit)) return;
            on |= bit;
        }
        own->s.x = x, own->s.host = host;
        infer(net, own);
        x = own->s.out;
    }
    judge(net, x, on);
}

/* shared: the images that all networks see, NULL where each has its own. */
static void validate_network(const validation *v, long at, layer *layers, const float *shared, arena a) {
    validated net = prepare(v, v->envs[at], layers, &a);
    long first = shared ? 0 : at * v->images, numel = padded_floats(&layers[0].s, COLOURS);
    crops cut = v->images_of;
    net.place = at, cut.size = v->nets.size, cut.first += first, cut.values += at * cut.env_stride;
    for (long i = 0; i < v->images; i++, cut.first++) {
        net.number = i, net.label = v->labels[first + i];
        if (net.label < 0) continue;
        if (!shared) cut_padded(&cut, 1, v->nets.kernels[0] / 2, net.image);
        walk(&net, 0, shared ? shared + i * numel : net.image, 0, 0);
        v->counted[at]++;
    }
}

int validate_networks(const validation *v) {
    layer *layers = calloc((size_t)most_layers(&v->nets), sizeof(layer));
    size_t largest = 64;
    arena a = {0};
    if (!layers) return 1;
    for (long at = 0; at < v->count; at++) {
        arena own = {0};
        validated net = prepare(v, v->envs[at], layers, &own);
        size_t bytes = most_work(layers, net.count, net.rest);
        largest = bytes > largest ? bytes : largest;
    }
    long side = v->nets.size + v->nets.kernels[0] - 1, count = v->shared ? v->images : 0;
    void *whole;
    a.at = get_memory(largest + (size_t)(count * side * side * COLOURS + 32) / 16 * 64, &whole);
    if (a.at) {
        float *shared = v->shared ? take_floats(&a, count * side * side * COLOURS) : NULL;
        crops cut = v->images_of;
        cut.size = v->nets.size;
        cut_padded(&cut, count, v->nets.kernels[0] / 2, shared);
        for (long at = 0; at < v->count; at++) validate_network(v, at, layers, shared, a);
    }
    free(layers), free(whole);
    return !a.at;
}
