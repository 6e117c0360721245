/* One training step of whole networks, one after the other: batch, forward, backward, clipping, SGD, gradient
 * statistics. The layers' own kernels do the work; here is what stands between them. */
#include <math.h>

#include "chain.h"
#include "head.h"
#include "images.h"
#include "sgd.h"

typedef struct {
    networks nets;
    int64_t count, batch;
    const int64_t *envs;   /* [count] */
    crops images;          /* first [count, B] */
    const int64_t *labels; /* [count, B] */
    descent host, seed;    /* the rule alone */
    float *loss;           /* [count], added to */
    int64_t *hits;         /* [count], added to */
    double *l2, *health, *ratio;               /* [N, slots]; NULL where no statistics are asked for */
    uint8_t *vanishing, *exploding, *measured; /* [N, slots] */
    double vanishing_norm, exploding_norm, tiny;
} training;

/* One network while it trains. */
typedef struct {
    layer *layers;
    long count;
    float *images;
    head top;
    float *host_grad;   /* [width] */
    float **seed_grads; /* [slots] of [seed_width] */
    float *grads[2];    /* of activations, taken in turn */
} network;

/* Room for what a layer saves and gives. */
static void give_room(sheet *s, int kind, arena *a) {
    long B = s->batch, P = round_up(s->out_channels), pixels = s->height * s->width, small = out_pixels(s);
    if (kind != POOL) s->conv = take_floats(a, B * pixels * P);
    s->mean = take_floats(a, kind == SEED ? B * P : P);
    s->rstd = take_floats(a, kind == SEED ? B * P : P);
    if (s->pooled) s->place = take(a, (size_t)(B * small * P));
    if (s->pooled && kind == BLOCK) s->peak = take_floats(a, B * small * P);
    if (!s->through) s->out = take_floats(a, B * small * s->out_channels);
}

static void enter_gradients(sheet *s, float *row) {
    s->grad_weight = row;
    s->grad_scale = row + s->out_channels * s->in_channels * s->kernel * s->kernel;
    s->grad_shift = s->grad_scale + s->out_channels;
}

/* Lay network `env` out in the arena: from image to image every layer reads what the one before it gave. */
static network lay_out(const training *t, long env, layer *layers, float **seed_grads, arena *a) {
    const networks *w = &t->nets;
    network net = {.layers = layers, .count = build_chain(w, env, t->batch, layers), .seed_grads = seed_grads};
    net.images = take_floats(a, t->batch * w->size * w->size * COLOURS);
    net.host_grad = take_floats(a, w->width);
    for (long slot = 0; slot < w->slots; slot++) seed_grads[slot] = take_floats(a, w->seed_width[slot]);
    const float *x = net.images;
    float *row = net.host_grad;
    long most = 0;
    for (long l = 0; l < net.count; l++) {
        sheet *s = &layers[l].s;
        give_room(s, layers[l].kind, a);
        s->x = x;
        if (layers[l].kind == SEED) s->residual = x, enter_gradients(s, seed_grads[layers[l].slot]);
        if (layers[l].kind == BLOCK) enter_gradients(s, row), row += layer_numbers(s);
        if (!s->through) x = s->out;
        long numbers = s->batch * s->height * s->width * s->out_channels;
        most = numbers > most ? numbers : most;
    }
    const sheet *last = &layers[net.count - 1].s;
    long C = last->out_channels, K = w->classes;
    const float *weight = CLASSIFIER(w, env, last);
    net.top = (head){.batch = t->batch, .nets = 1, .channels = C, .pixels = out_pixels(last), .classes = K, .x = x,
                     .weight = weight, .bias = weight + K * C, .mean = take_floats(a, t->batch * C),
                     .slope = take_floats(a, t->batch * K), .grad_weight = row, .grad_bias = row + K * C};
    for (int g = 0; g < 2; g++) net.grads[g] = take_floats(a, most);
    return net;
}

static int forward(const network *net) {
    int failed = 0;
    for (long l = 0; l < net->count && !failed; l++) {
        const layer *own = &net->layers[l];
        failed = own->kind == BLOCK ? block_train(&own->s) : own->kind == SEED ? seed_forward(&own->s) : pool_forward(&own->s);
    }
    return failed || head_forward(&net->top);
}

/* Gradients of everything that trains. A seed that is cut off leaves the gradient of a host that goes on with x as is. */
static int backward(network *net) {
    const float *grad = net->grads[0];
    net->top.grad_x = net->grads[0];
    int failed = head_backward(&net->top), next = 1;
    for (long l = net->count - 1; l >= 0 && !failed; l--) {
        layer *own = &net->layers[l];
        int passes = own->kind == SEED && own->s.through && own->s.detached;
        own->s.grad_out = grad;
        own->s.grad_x = passes || l == 0 ? NULL : net->grads[next];
        failed = own->kind == BLOCK ? block_backward(&own->s) : own->kind == SEED ? seed_backward(&own->s) : pool_backward(&own->s);
        if (passes) continue;
        grad = own->s.grad_x;
        next = !next;
    }
    return failed;
}

static double norm_of(const float *v, long count) {
    double part[8] = {0}, sum = 0;
    for (long i = 0; i < count; i++) part[i & 7] += (double)v[i] * (double)v[i];
    for (int l = 0; l < 8; l++) sum += part[l];
    return sqrt(sum);
}

/* As supervised.gradient_statistics, of one seed. */
static void measure(const training *t, long at, const float *host_grad, const sheet *s) {
    long C = s->out_channels, weights = C * C * s->kernel * s->kernel, numbers = layer_numbers(s);
    double norms[3] = {norm_of(s->grad_weight, weights), norm_of(s->grad_scale, C), norm_of(s->grad_shift, C)};
    double host_norm = norm_of(host_grad, t->nets.width), total = 0;
    int vanishing = 0, exploding = 0;
    for (int i = 0; i < 3; i++) {
        total += norms[i] * norms[i];
        vanishing += norms[i] < t->vanishing_norm;
        exploding += !(norms[i] <= t->exploding_norm);
    }
    total = sqrt(total);
    double health = fmin(fmax(1.0 - 0.5 * (vanishing / 3.0) - 0.8 * (exploding / 3.0), 0.0), 1.0);
    double ratio = total / sqrt((double)numbers) / (host_norm / sqrt((double)t->nets.width) + t->tiny);
    t->l2[at] = total;
    t->health[at] = isfinite(total) ? health : 0.0;
    t->ratio[at] = isfinite(ratio) && total >= t->tiny && host_norm >= t->tiny ? ratio : 0.0;
    t->vanishing[at] = vanishing > 0;
    t->exploding[at] = exploding > 0;
    t->measured[at] = 1;
}

static void descend(const descent *rule, float *params, float *speed, const float *grad, long width) {
    descent own = *rule;
    own.rows = 1, own.width = width, own.params = params, own.speed = speed, own.grad = grad;
    sgd_step(&own);
}

static void update(const training *t, const network *net, long env) {
    const networks *w = &t->nets;
    for (long l = 0; l < net->count; l++) {
        const layer *own = &net->layers[l];
        if (own->kind != SEED) continue;
        if (t->l2 && own->flags & MEASURED) measure(t, env * w->slots + own->slot, net->host_grad, &own->s);
        long at = env * w->seed_width[own->slot];
        if (!(own->flags & FROZEN))
            descend(&t->seed, w->seed_params[own->slot] + at, w->seed_speed[own->slot] + at, net->seed_grads[own->slot],
                    layer_numbers(&own->s));
    }
    descend(&t->host, w->params + env * w->width, w->speed + env * w->width, net->host_grad, w->width);
}

static int train_network(const training *t, long at, layer *layers, float **seed_grads, arena a) {
    network net = lay_out(t, t->envs[at], layers, seed_grads, &a);
    crops images = t->images;
    float loss, one = 1.0f;
    int64_t hits;
    images.batch = t->batch, images.nets = 1, images.size = t->nets.size;
    images.first += at * t->batch, images.out = net.images;
    net.top.labels = t->labels + at * t->batch, net.top.loss = &loss, net.top.hits = &hits, net.top.grad = &one;
    if (cut_images(&images) || forward(&net) || backward(&net)) return 1;
    update(t, &net, t->envs[at]);
    t->loss[at] += loss, t->hits[at] += hits;
    return 0;
}

/* Bytes of the largest network. */
static size_t most_room(const training *t, layer *layers, float **seed_grads) {
    size_t most = 64;
    for (long at = 0; at < t->count; at++) {
        arena a = {0};
        lay_out(t, t->envs[at], layers, seed_grads, &a);
        most = a.used > most ? a.used : most;
    }
    return most;
}

int train_networks(const training *t) {
    layer *layers = calloc((size_t)most_layers(&t->nets), sizeof(layer));
    float **seed_grads = calloc((size_t)t->nets.slots + 1, sizeof(float *));
    int failed = !layers || !seed_grads;
    arena a = {0};
    if (!failed) a.at = aligned_alloc(64, most_room(t, layers, seed_grads));
    failed = failed || !a.at;
    for (long at = 0; at < t->count && !failed; at++) failed = train_network(t, at, layers, seed_grads, a);
    free(layers), free(seed_grads), free(a.at);
    return failed;
}
