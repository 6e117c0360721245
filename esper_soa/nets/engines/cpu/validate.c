/* Validation of whole networks under every subset of seeds that is asked for, one network after the other and image by
 * image, or some together where that is quicker. Subsets form a tree: what comes before the first seed in which they differ is computed once. */
#include "head.h"
#include "validate.h"

#define MOST_TOGETHER STRIP /* images; see group_of in work.h */
#define LARGE 200000        /* parameters, which caches do not hold from image to image */

/* One network while it is validated. */
typedef struct {
    const validation *v;
    layer *layers;
    long count, result;        /* result: the layer that the head reads */
    long place;                /* among the networks */
    long most, together;       /* images that go through it at once: at most, and now */
    long numbers[MOST_TOGETHER];
    int64_t labels[MOST_TOGETHER];
    head top;
    float *mean, *logits, *images; /* images: room for `most` */
    arena rest;                    /* where layers work, one after the other */
} validated;

/* Batch norm folded into kernel and bias, with the running statistics. */
static void fold(descriptor *s, arena *a) {
    long O = s->out_channels, each = inputs_of(s) * s->kernel * s->kernel;
    if (!s->scale) return;
    float *weight = take_floats(a, O * each), *bias = take_floats(a, O), *gains = take_floats(a, O);
    if (!a->at) return;
    for (long o = 0; o < O; o++) {
        float gain = s->scale[o] * (float)(1.0 / sqrt((double)s->running_var[o] + s->eps));
        for (long i = 0; i < each; i++) weight[o * each + i] = s->weight[o * each + i] * gain;
        bias[o] = s->shift[o] - s->running_mean[o] * gain, gains[o] = gain;
    }
    s->weight = weight, s->shift = bias, s->scale = gains;
}

/* Room for what a layer works on. */
static void give_room(layer *own, long B, arena *a) {
    if (own->kind == BLOCK) fold(&own->s, a);
    if (!hands_on(own)) own->s.out = take_floats(a, B * out_floats(&own->s));
    own->s.mean = take_floats(a, B * round_up(own->s.out_channels));
    own->s.rstd = take_floats(a, B * round_up(own->s.out_channels));
    own->s.q.mean = take_floats(a, B * round_up(own->s.q.inputs));
    own->s.q.units = take_floats(a, B * own->s.q.hidden);
    own->s.q.out = take_floats(a, B * round_up(own->s.q.outputs));
    own->kept.padded = take_floats(a, group_of(&own->s) * padded_floats(&own->s, own->s.x_pixel));
    own->kept.weights = take_floats(a, packed_forward(&own->s));
    own->kept.dense = take_floats(a, dense_weights(&own->s));
    if (convolves(own) && a->at) ready_forward(&own->s, &own->kept);
}

/* Lay network `env` out in the arena. */
static validated prepare(const validation *v, long env, layer *layers, arena *a) {
    const networks *w = &v->nets;
    validated net = {.v = v, .layers = layers, .count = build_network(w, env, 1, layers)};
    net.most = 1;
    for (long l = 0; l < net.count; l++)
        if (group_of(&layers[l].s) > net.most) net.most = group_of(&layers[l].s);
    if (w->program->together && w->width > LARGE) net.most = MOST_TOGETHER;
    net.images = take_floats(a, net.most * padded_side(w) * padded_side(w) * w->colours);
    for (long l = 0; l < net.count; l++) {
        layers[l].s.padded = layers[l].from[0] < 0 && image_border(w);
        give_room(&layers[l], net.most, a);
    }
    net.result = top_of(w, layers, net.count);
    const descriptor *top = &layers[net.result].s;
    long C = top->out_channels, K = w->classes;
    float *row = w->params + env * w->width;
    net.top = (head){.batch = 1, .channels = C, .pixels = out_pixels(top), .classes = K,
                     .weight = column(row, head_of(w)->weight), .bias = column(row, head_of(w)->shift)};
    net.mean = take_floats(a, round_up(C)), net.logits = take_floats(a, K);
    net.rest = *a;
    return net;
}

/* Logits of an image, whose features are x, under the seeds `on`. */
static void judge(validated *net, const float *x, long number, int64_t label, int64_t on) {
    const validation *v = net->v;
    head_logits(&net->top, x, net->mean, net->logits);
    int right = head_largest(net->logits, v->nets.classes) == label;
    for (long c = 0; c < v->codes; c++)
        if (v->code[c] == on) v->correct[net->place * v->codes + c] += right;
    if (v->code[0] != on) return;
    if (v->answers) v->answers[net->place * v->images + number] = (uint8_t)right;
    v->loss[net->place] += head_cross_entropy(&net->top, net->logits, label);
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

/* Images through the layers from l on: `on` of the seeds `met` so far are in. */
static void walk(validated *net, const float *images, long l, int64_t met, int64_t on) {
    for (; l < net->count; l++) {
        layer *own = &net->layers[l];
        int64_t bit = own->span ? (int64_t)1 << own->slot & net->v->ablated : 0;
        const float *x = given_by(net->layers, own->from[0], images);
        if (bit) {
            met |= bit;
            if (wanted(net->v, met, on)) {
                own[own->span - 1].given = pass_by(net, own, x);
                walk(net, images, l + own->span, met, on);
            }
            if (!wanted(net->v, met, on | bit)) return;
            on |= bit;
        }
        own->s.x = x, own->s.host = own->from[1] < 0 ? NULL : net->layers[own->from[1]].given;
        infer(net, own);
        own->given = own->s.out;
    }
    const layer *top = net->layers + net->result;
    for (long i = 0; i < net->together; i++)
        judge(net, top->given + i * out_floats(&top->s), net->numbers[i], net->labels[i], on);
}

static void measure(validated *net, const float *images) {
    for (long l = 0; l < net->count; l++) net->layers[l].s.batch = net->together;
    walk(net, images, 0, 0, 0);
    net->v->counted[net->place] += net->together;
    net->together = 0;
}

/* shared: the images that all networks see, NULL where each has its own. */
static void validate_network(const validation *v, long at, layer *layers, const float *shared, arena a) {
    validated net = prepare(v, v->envs[at], layers, &a);
    long first = shared ? 0 : at * v->images, side = padded_side(&v->nets), numel = side * side * v->nets.colours;
    crops cut = v->images_of;
    net.place = at, cut.size = v->nets.size, cut.colours = v->nets.colours, cut.first += first, cut.values += at * cut.env_stride;
    for (long i = 0; i < v->images; i++, cut.first++) {
        int64_t label = v->labels[first + i];
        if (label < 0) continue;
        float *to = net.images + net.together * numel;
        if (!shared) cut_padded(&cut, 1, image_border(&v->nets), to);
        else if (net.most > 1) memcpy(to, shared + i * numel, (size_t)numel * sizeof(float));
        net.numbers[net.together] = i, net.labels[net.together++] = label;
        if (net.together == net.most) measure(&net, shared && net.most == 1 ? shared + i * numel : net.images);
    }
    if (net.together) measure(&net, net.images);
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
    long side = padded_side(&v->nets), count = v->shared ? v->images : 0, numel = count * side * side * v->nets.colours;
    void *whole;
    a.at = get_memory(largest + (size_t)(numel + 32) / 16 * 64, &whole);
    if (a.at) {
        float *shared = v->shared ? take_floats(&a, numel) : NULL;
        crops cut = v->images_of;
        cut.size = v->nets.size, cut.colours = v->nets.colours;
        cut_padded(&cut, count, image_border(&v->nets), shared);
        for (long at = 0; at < v->count; at++) validate_network(v, at, layers, shared, a);
    }
    free(layers), free(whole);
    return !a.at;
}
