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
    long num_rooms, largest;      /* of gradients of activations, and the most numbers of any */
    float *rooms;                 /* [num_rooms, largest] */
    uint8_t *busy;                /* of rooms, while they are planned */
    arena rest;                   /* where layers work, one after the other */
} network;

/* Whether a convolution takes less time than its output's way to memory and back. */
static int quick_again(const descriptor *s) { return s->kernel == 1 && s->in_channels <= WHOLE / 2; }

static int saves_convolution(const layer *own) {
    return own->kind == SEED || (own->kind == BLOCK && own->s.kernel && !quick_again(&own->s));
}

/* Room for what a layer saves and gives. */
static void give_room(layer *own, arena *a) {
    descriptor *s = &own->s;
    long B = s->batch, P = round_up(s->out_channels), full = B * image_floats(s), small = B * out_floats(s);
    if (saves_convolution(own)) s->conv = take_floats(a, full);
    s->mean = take_floats(a, own->kind == BLOCK ? P : B * P);
    s->rstd = take_floats(a, own->kind == BLOCK ? P : B * P);
    if (s->pooled || (own->kind == WINDOW && !s->linear)) s->place = take(a, (size_t)small);
    if (s->pooled) s->peak = take_floats(a, small);
    if (!hands_on(own)) s->out = take_floats(a, small);
    own->s.q.mean = take_floats(a, B * round_up(own->s.q.inputs));
    own->s.q.units = take_floats(a, B * own->s.q.hidden);
    own->s.q.out = take_floats(a, B * round_up(own->s.q.outputs));
}

static void enter_seed_gradients(layer *own, float *row) {
    const long *sizes = own->tensors;
    own->s.grad_weight = row, own->s.grad_scale = row + sizes[0], own->s.grad_shift = own->s.grad_scale + sizes[1];
    squeeze *q = &own->s.q;
    int biased = q->first_bias != NULL;
    q->grad_first = row, q->grad_first_bias = row + sizes[0];
    q->grad_second = row + sizes[0] + (biased ? sizes[1] : 0);
    q->grad_second_bias = q->grad_second + q->outputs * q->hidden;
}

/* Those of an operation lie in the row of gradients as its parameters do in theirs. */
static void enter_operation_gradients(layer *own, const float *params, float *row) {
    descriptor *s = &own->s;
    s->grad_weight = s->weight ? row + (s->weight - params) : &own->unused;
    if (s->scale) s->grad_scale = row + (s->scale - params);
    if (s->shift) s->grad_shift = row + (s->shift - params);
}

/* Lay the layers out in the arena, each behind those that it reads. */
static void connect(const networks *w, long env, network *net, arena *a) {
    for (layer *own = net->layers; own < net->layers + net->count; own++) {
        descriptor *s = &own->s;
        give_room(own, a);
        s->x = given_by(net->layers, own->from[0], net->images);
        s->host = own->from[1] < 0 ? NULL : net->layers[own->from[1]].given;
        own->given = hands_on(own) ? given_by(net->layers, own->from[own->kind == JOIN], NULL) : s->out;
        long slot = own->slot;
        if (slot < 0) enter_operation_gradients(own, w->params + env * w->width, net->host_grad);
        else if (!own->by_columns) enter_seed_gradients(own, net->seed_grads[slot] + own->place);
        else enter_operation_gradients(own, w->seed_params[slot] + env * w->seed_width[slot], net->seed_grads[slot]);
        long most = s->batch * (in_floats(s) > image_floats(s) ? in_floats(s) : image_floats(s));
        net->largest = most > net->largest ? most : net->largest;
    }
}

/* Places of gradients: rooms by their number from 0 on, and what layer l saved of its convolution is -2 - l. */
static long saved_by(long l) { return -2 - l; }

static float *place_of(const network *net, long place) {
    if (place == NOWHERE) return NULL;
    return place < 0 ? net->layers[saved_by(place)].s.conv : net->rooms + place * net->largest;
}

static long take_room(network *net) {
    long room = 0;
    while (net->busy[room]) room++;
    net->busy[room] = 1;
    if (room >= net->num_rooms) net->num_rooms = room + 1;
    return room;
}

static void leave_room(network *net, long place) {
    if (place >= 0) net->busy[place] = 0;
}

/* A gradient of what layer l gives arrives: returns where that is to which it is to be added, NOWHERE for the first. */
static long arrive(network *net, long l, long place) {
    if (place == NOWHERE) return NOWHERE;
    long first = net->layers[l].at.out;
    if (first == NOWHERE) net->layers[l].at.out = place;
    else leave_room(net, place);
    return first;
}

/* Whether no gradient reaches what a layer reads, as its seed is cut off from that. */
static int is_cut(const network *net, const layer *own, int which) {
    int single = own->kind == SEED && own->s.own_residual && !own->by_columns;
    if (own->slot < 0 || own->kind == JOIN || single || !(own->s.flags & DETACHED)) return 0;
    return own->from[which] < 0 || net->layers[own->from[which]].slot != own->slot;
}

/* Where layer l writes the gradient of x: where its convolution was saved and is not smaller, that goes there image by
 * image, behind the last use, into lines that the caches hold. NOWHERE for images, and for a seed that is cut off. */
static long input_place(network *net, long l) {
    const layer *own = &net->layers[l];
    if (own->from[0] < 0 || is_cut(net, own, 0)) return NOWHERE;
    if (saves_convolution(own) && in_floats(&own->s) <= image_floats(&own->s)) return saved_by(l);
    return take_room(net);
}

/* Plan where the gradients of all activations lie, from the one that the head gives to layer `top` on. */
static void plan_gradients(network *net, long top) {
    for (long l = 0; l < net->count; l++) net->layers[l].at = (places){NOWHERE, NOWHERE, NOWHERE, {NOWHERE, NOWHERE}};
    net->layers[top].at.out = take_room(net);
    for (long l = net->count - 1; l >= 0; l--) {
        layer *own = &net->layers[l];
        places *at = &own->at;
        if (own->kind == SEED && own->s.through && own->s.detached) { /* all of it passes by */
            arrive(net, own->from[0], at->out);
            continue;
        }
        at->x = input_place(net, l);
        if (own->from[1] >= 0 && !is_cut(net, own, 1)) at->host = own->kind == BLOCK ? at->out : take_room(net);
        if (at->host != at->out) leave_room(net, at->out);
        at->total[0] = arrive(net, own->from[0], at->x);
        at->total[1] = arrive(net, own->from[1], at->host);
    }
    memset(net->busy, 0, (size_t)net->num_rooms);
}

static head lay_head(const network *net, const networks *w, long env, arena *a) {
    const layer *top = net->layers + top_of(w, net->layers, net->count);
    const operation *o = head_of(w);
    long B = top->s.batch, C = top->s.out_channels;
    const float *row = w->params + env * w->width;
    return (head){.batch = B, .channels = C, .pixels = out_pixels(&top->s), .classes = w->classes, .x = top->given,
                  .weight = column((float *)row, o->weight), .bias = column((float *)row, o->shift), .mean = take_floats(a, B * round_up(C)),
                  .gradient = take_floats(a, B * w->classes), .grad_x = place_of(net, top->at.out),
                  .grad_weight = column(net->host_grad, o->weight), .grad_bias = column(net->host_grad, o->shift)};
}

static network lay_out(const training *t, long env, layer *layers, float **seed_grads, arena *a) {
    const networks *w = &t->nets;
    network net = {.layers = layers, .count = build_network(w, env, t->batch, layers), .seed_grads = seed_grads};
    net.busy = (uint8_t *)(layers + most_layers(w));
    net.images = take_floats(a, t->batch * w->size * w->size * w->colours);
    net.host_grad = take_floats(a, w->width);
    for (long slot = 0; slot < w->slots; slot++) seed_grads[slot] = take_floats(a, w->seed_width[slot]);
    if (t->accumulate > 1) {
        net.host_sum = take_floats(a, w->width), net.seed_sums = seed_grads + w->slots;
        for (long slot = 0; slot < w->slots; slot++) net.seed_sums[slot] = take_floats(a, w->seed_width[slot]);
    }
    connect(w, env, &net, a);
    plan_gradients(&net, top_of(w, layers, net.count));
    net.rooms = take_floats(a, net.num_rooms * net.largest);
    net.top = lay_head(&net, w, env, a);
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

static void add_to(float *total, const float *more, long count) {
    for (long i = 0; i < count && total; i++) total[i] += more[i];
}

/* Gradients of everything that trains. */
static void backward(network *net) {
    head_backward(&net->top);
    for (layer *own = net->layers + net->count - 1; own >= net->layers; own--) {
        descriptor *s = &own->s;
        s->grad_out = place_of(net, own->at.out);
        s->grad_x = place_of(net, own->at.x), s->grad_host = place_of(net, own->at.host);
        layer_backward(net, own);
        add_to(place_of(net, own->at.total[0]), s->grad_x, s->batch * in_floats(s));
        if (own->from[1] < 0) continue;
        add_to(place_of(net, own->at.total[1]), s->grad_host, s->batch * out_floats(&net->layers[own->from[1]].s));
    }
}

/* Norms of the gradients of a seed's parameter tensors. */
typedef struct {
    double total, tensors, vanishing, exploding;
    long numel;
} seed_norms;

static void add_norm(const training *t, const float *grad, long numel, seed_norms *found) {
    double norm = norm_of(grad, numel);
    found->numel += numel;
    found->total += norm * norm;
    found->tensors += 1;
    found->vanishing += norm < t->vanishing_norm;
    found->exploding += !(norm <= t->exploding_norm);
}

static void add_operation_norms(const training *t, const descriptor *s, int kind, seed_norms *found) {
    long each = s->kernel ? inputs_of(s) * s->kernel * s->kernel : 0;
    long O = s->mixed ? s->height * s->width : s->out_channels;
    if (s->mixed) each = s->in_height * s->in_width;
    if (kind == LEAD) each = (image_floats(s) - in_floats(s)) / s->x_pixel;
    if (kind == WEIGHED) O = weighed_numbers(s);
    if (s->weight && each) add_norm(t, s->grad_weight, O * each, found);
    if (s->scale) add_norm(t, s->grad_scale, O, found);
    if (s->shift) add_norm(t, s->grad_shift, O, found);
}

static seed_norms norms_of(const training *t, const layer *first, const float *grads) {
    seed_norms found = {0};
    for (const layer *own = first; own < first + first->span; own++)
        if (own->by_columns) add_operation_norms(t, &own->s, own->kind, &found);
        else
            for (int i = 0; i < MOST_TENSORS && own->tensors[i]; i++)
                add_norm(t, grads + found.numel, own->tensors[i], &found);
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
    const networks *w = &t->nets;
    const sgd *rule = t->seed + env;
    long numel = numbers_of_seed(first), slot = first->slot, gate = last->kind == JOIN ? numbers_of(last) : 0;
    moving m = moving_row(rule, w->seed_params[slot], w->seed_momentum[slot], env, w->seed_width[slot]);
    float factor = sgd_factor(rule, grads, numel, m);
    sgd_move(rule, m, grads, numel - gate, factor);
    if (gate) sgd_move(rule, moving_from(m, w->gate_at[slot]), grads + numel - gate, gate, factor);
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
    moving m = moving_row(t->host + env, w->params, w->momentum, env, w->width);
    sgd_move(t->host + env, m, net->host_grad, w->width, sgd_factor(t->host + env, net->host_grad, w->width, m));
}

static void train_network(const training *t, long at, layer *layers, float **seed_grads, arena a) {
    network net = lay_out(t, t->envs[at], layers, seed_grads, &a);
    for (long batch = 0; batch < t->accumulate; batch++) {
        crops images = t->images;
        float loss;
        int64_t correct, first = (at * t->accumulate + batch) * t->batch;
        images.size = t->nets.size, images.colours = t->nets.colours, images.first += first, images.values += at * images.env_stride;
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
    layer *layers = calloc((size_t)most_layers(&t->nets), sizeof(layer) + 3); /* and behind them rooms that are busy */
    float **seed_grads = calloc(2 * (size_t)t->nets.slots + 1, sizeof(float *)); /* and behind them their sums */
    void *whole = NULL;
    arena a = {0};
    if (layers && seed_grads) a.at = get_memory(most_room(t, layers, seed_grads), &whole);
    for (long at = 0; at < t->count && a.at; at++) train_network(t, at, layers, seed_grads, a);
    free(layers), free(seed_grads), free(whole);
    return !a.at;
}
