/* One training step of whole networks, one after the other: batch, forward, backward, clipping, SGD, gradient
 * statistics. The layers' own kernels do the work; here is what stands between them. */
#include "head.h"
#include "train.h"

/* One network while it trains. */
typedef struct {
    layer *layers;
    long count;
    float *images;
    head top;
    float *host_grad;             /* [width] */
    float **seed_grads;           /* [slots] of [seed_width], parameters of a gate behind the others */
    float *host_sum, **seed_sums; /* of the gradients of earlier batches of the step, like them */
    float *grad, *direct;         /* gradients of activations: the newest, and what passes by a seed */
    float *rooms[3];              /* for them */
    arena rest;                   /* where layers work, one after the other */
} network;

/* Whether a convolution takes less time than its output's way to memory and back. */
static int quick_again(const descriptor *s) { return s->kernel == 1 && s->in_channels <= WHOLE / 2; }

/* Room for what a layer saves and gives. */
static void give_room(layer *own, arena *a) {
    descriptor *s = &own->s;
    long B = s->batch, P = round_up(s->out_channels), full = B * image_floats(s), small = B * out_floats(s);
    if (own->kind == SEED || (own->kind == BLOCK && !quick_again(s))) s->conv = take_floats(a, full);
    s->mean = take_floats(a, own->kind == BLOCK ? P : B * P);
    s->rstd = take_floats(a, own->kind == BLOCK ? P : B * P);
    if (s->pooled) s->place = take(a, (size_t)small);
    if (s->pooled) s->peak = take_floats(a, small);
    if (!hands_on(own)) s->out = take_floats(a, small);
    own->s.q.mean = take_floats(a, B * round_up(own->s.q.inputs));
    own->s.q.units = take_floats(a, B * own->s.q.hidden);
    own->s.q.out = take_floats(a, B * round_up(own->s.q.outputs));
}

static void enter_gradients(layer *own, float *row) {
    const long *sizes = own->tensors;
    own->s.grad_weight = row, own->s.grad_scale = row + sizes[0], own->s.grad_shift = own->s.grad_scale + sizes[1];
    squeeze *q = &own->s.q;
    int biased = q->first_bias != NULL;
    q->grad_first = row, q->grad_first_bias = row + sizes[0];
    q->grad_second = row + sizes[0] + (biased ? sizes[1] : 0);
    q->grad_second_bias = q->grad_second + q->outputs * q->hidden;
}

/* Lay the layers out in the arena: from image to image every layer reads what the one before it gave. Returns what the
 * last gives, and the most numbers that a layer is given. */
static const float *connect(const training *t, network *net, arena *a, long *largest) {
    const float *x = net->images, *host = x;
    float *row = net->host_grad;
    for (long l = 0; l < net->count; l++) {
        layer *own = &net->layers[l];
        descriptor *s = &own->s;
        give_room(own, a);
        if (own->span) host = x;
        s->x = x, s->host = host;
        if (own->kind == BLOCK) enter_gradients(own, row), row += numbers_of(own);
        if (own->slot >= 0) enter_gradients(own, net->seed_grads[own->slot] + own->place);
        x = hands_on(own) ? host : s->out;
        long P = round_up(s->out_channels), numel = t->batch * s->height * s->width * (s->x_pixel > P ? s->x_pixel : P);
        *largest = numel > *largest ? numel : *largest;
    }
    return x;
}

static network lay_out(const training *t, long env, layer *layers, float **seed_grads, arena *a) {
    const networks *w = &t->nets;
    network net = {.layers = layers, .count = build_chain(w, env, t->batch, layers), .seed_grads = seed_grads};
    net.images = take_floats(a, t->batch * w->size * w->size * COLOURS);
    net.host_grad = take_floats(a, w->width);
    for (long slot = 0; slot < w->slots; slot++) seed_grads[slot] = take_floats(a, w->seed_width[slot]);
    if (t->accumulate > 1) {
        net.host_sum = take_floats(a, w->width), net.seed_sums = seed_grads + w->slots;
        for (long slot = 0; slot < w->slots; slot++) net.seed_sums[slot] = take_floats(a, w->seed_width[slot]);
    }
    long largest = 0;
    const float *x = connect(t, &net, a, &largest);
    const descriptor *last = &layers[net.count - 1].s;
    long C = last->out_channels, K = w->classes;
    const float *weight = CLASSIFIER(w, env, last);
    float *grad_weight = net.host_grad + (weight - (w->params + env * w->width));
    net.top = (head){.batch = t->batch, .channels = C, .pixels = out_pixels(last), .classes = K, .x = x,
                     .weight = weight, .bias = weight + K * C, .mean = take_floats(a, t->batch * round_up(C)),
                     .gradient = take_floats(a, t->batch * K),
                     .grad_weight = grad_weight, .grad_bias = grad_weight + K * C};
    for (int i = 0; i < 3; i++) net.rooms[i] = take_floats(a, largest);
    net.rest = *a;
    return net;
}

static void forward(const network *net) {
    for (const layer *own = net->layers; own < net->layers + net->count; own++) {
        arena a = net->rest;
        work room = lay_work(&own->s, &a);
        if (convolves(own)) ready_forward(&own->s, &room);
        kernels_of(&own->s)->of[own->kind].forward(&own->s, &room);
    }
}

static void layer_backward(const network *net, const layer *own) {
    arena a = net->rest;
    work room = lay_work(&own->s, &a);
    if (own->s.q.outputs) zero(own->s.q.grad_first, numbers_of(own));
    if (convolves(own)) ready_backward(&own->s, &room);
    kernels_of(&own->s)->of[own->kind].backward(&own->s, &room);
}

/* Room for a gradient that nothing is in. */
static float *spare(const network *net) {
    float *const *room = net->rooms;
    while (*room == net->grad || *room == net->direct) room++;
    return *room;
}

/* Behind the first layer of a residual: what passed by the seed, and what went through it unless it is cut off. */
static void rejoin(network *net, const layer *own) {
    long numel = own->s.batch * own->s.height * own->s.width * own->s.x_pixel;
    if (own->s.flags & DETACHED) {
        net->grad = net->direct, net->direct = spare(net);
        return;
    }
    for (long i = 0; i < numel; i++) own->s.grad_x[i] += net->direct[i];
    net->grad = own->s.grad_x;
}

/* Gradients of everything that trains. That of a layer's input takes the place of its convolution where that was saved
 * and is not smaller: image by image, behind the last use, into lines that the caches hold. */
static void backward(network *net) {
    net->grad = net->top.grad_x = net->rooms[0], net->direct = net->rooms[1];
    head_backward(&net->top);
    for (long l = net->count - 1; l >= 0; l--) {
        layer *own = &net->layers[l];
        int single = own->kind == SEED && own->s.own_residual, first = own->span > 0 && !single;
        int passes = single && own->s.through && own->s.detached;
        int over = own->s.conv && round_up(own->s.in_channels) <= round_up(own->s.out_channels);
        own->s.grad_out = net->grad, own->s.grad_host = net->direct;
        own->s.grad_x = over ? own->s.conv : spare(net);
        if (passes || l == 0 || (first && own->s.flags & DETACHED)) own->s.grad_x = NULL;
        layer_backward(net, own);
        if (first) rejoin(net, own);
        else if (!passes) net->grad = own->s.grad_x;
    }
}

/* Norms of the gradients of a seed's parameter tensors. */
typedef struct {
    double total, tensors, vanishing, exploding;
    long numel;
} seed_norms;

static seed_norms norms_of(const training *t, const layer *first, const float *grads) {
    seed_norms found = {0};
    for (const layer *own = first; own < first + first->span; own++)
        for (int i = 0; i < MOST_TENSORS && own->tensors[i]; i++) {
            double norm = norm_of(grads + found.numel, own->tensors[i]);
            found.numel += own->tensors[i];
            found.total += norm * norm;
            found.tensors += 1;
            found.vanishing += norm < t->vanishing_norm;
            found.exploding += !(norm <= t->exploding_norm);
        }
    found.total = sqrt(found.total);
    return found;
}

/* As nets/gradients.gradient_statistics, of one seed. */
static void measure(const training *t, long at, const float *host_grad, seed_norms of) {
    double host_norm = norm_of(host_grad, t->nets.width);
    double health = fmin(fmax(1.0 - 0.5 * (of.vanishing / of.tensors) - 0.8 * (of.exploding / of.tensors), 0.0), 1.0);
    double ratio = of.total / sqrt((double)of.numel) / (host_norm / sqrt((double)t->nets.width) + t->tiny);
    t->l2[at] = of.total;
    t->health[at] = isfinite(of.total) ? health : 0.0;
    t->ratio[at] = isfinite(ratio) && of.total >= t->tiny && host_norm >= t->tiny ? ratio : 0.0;
    t->vanishing[at] = of.vanishing > 0;
    t->exploding[at] = of.exploding > 0;
    t->measured[at] = 1;
}

/* Numbers of a seed and, where it has one, of its gate, behind its first layer. */
static long numbers_of_seed(const layer *first) {
    const layer *last = first + first->span - 1;
    return last->place + numbers_of(last);
}

/* Clipped by the norm over all of it, a seed's gradient moves its parameters and, elsewhere in the row, its gate's. */
static void descend_seed(const training *t, const layer *first, long env, const float *grads) {
    const layer *last = first + first->span - 1;
    long numel = numbers_of_seed(first), slot = first->slot, at = env * t->nets.seed_width[slot], gate = last->kind == JOIN ? numbers_of(last) : 0;
    float *params = t->nets.seed_params[slot] + at, *momentum = t->nets.seed_momentum[slot] + at;
    float factor = sgd_factor(t->seed + env, grads, numel);
    sgd_move(t->seed + env, params, momentum, grads, numel - gate, factor);
    long column = t->nets.gate_at[slot];
    if (gate) sgd_move(t->seed + env, params + column, momentum + column, grads + numel - gate, gate, factor);
}

/* Add the newest gradients of a row to those before them; those of the last batch become the mean. */
static void gather_row(float *sum, float *grad, long count, long batch, long batches) {
    float share = 1.0f / (float)batches;
    for (long i = 0; i < count; i++) {
        float all = batch ? sum[i] + grad[i] : grad[i];
        if (batch + 1 < batches) sum[i] = all;
        else grad[i] = all * share;
    }
}

static void gather(const training *t, const network *net, long batch) {
    gather_row(net->host_sum, net->host_grad, t->nets.width, batch, t->accumulate);
    for (const layer *own = net->layers; own < net->layers + net->count; own++)
        if (own->span) gather_row(net->seed_sums[own->slot], net->seed_grads[own->slot], numbers_of_seed(own), batch,
                                  t->accumulate);
}

static void update(const training *t, const network *net, long env) {
    const networks *w = &t->nets;
    for (const layer *own = net->layers; own < net->layers + net->count; own++) {
        if (!own->span) continue;
        const float *grads = net->seed_grads[own->slot];
        if (t->l2 && own->s.flags & MEASURED)
            measure(t, env * w->slots + own->slot, net->host_grad, norms_of(t, own, grads));
        if (!(own->s.flags & FROZEN)) descend_seed(t, own, env, grads);
    }
    float factor = sgd_factor(t->host + env, net->host_grad, w->width);
    sgd_move(t->host + env, w->params + env * w->width, w->momentum + env * w->width, net->host_grad, w->width, factor);
}

static void train_network(const training *t, long at, layer *layers, float **seed_grads, arena a) {
    network net = lay_out(t, t->envs[at], layers, seed_grads, &a);
    for (long batch = 0; batch < t->accumulate; batch++) {
        crops images = t->images;
        float loss;
        int64_t correct, first = (at * t->accumulate + batch) * t->batch;
        images.size = t->nets.size, images.first += first, images.values += at * images.env_stride;
        cut_padded(&images, t->batch, 0, net.images);
        net.top.labels = t->labels + first;
        forward(&net);
        head_forward(&net.top, &loss, &correct);
        backward(&net);
        if (t->accumulate > 1) gather(t, &net, batch);
        t->loss[at] += loss, t->correct[at] += correct;
    }
    update(t, &net, t->envs[at]);
}

/* Bytes of the largest network, with room for its largest layer to work in. */
static size_t most_room(const training *t, layer *layers, float **seed_grads) {
    size_t largest = 64;
    for (long at = 0; at < t->count; at++) {
        arena a = {0};
        network net = lay_out(t, t->envs[at], layers, seed_grads, &a);
        size_t bytes = most_work(layers, net.count, net.rest);
        largest = bytes > largest ? bytes : largest;
    }
    return largest;
}

int train_networks(const training *t) {
    layer *layers = calloc((size_t)most_layers(&t->nets), sizeof(layer));
    float **seed_grads = calloc(2 * (size_t)t->nets.slots + 1, sizeof(float *)); /* and behind them their sums */
    void *whole = NULL;
    arena a = {0};
    if (layers && seed_grads) a.at = get_memory(most_room(t, layers, seed_grads), &whole);
    for (long at = 0; at < t->count && a.at; at++) train_network(t, at, layers, seed_grads, a);
    free(layers), free(seed_grads), free(whole);
    return !a.at;
}
