/* One training step of whole networks: what it is given, and where its results go. */
#ifndef ESPER_TRAIN_H
#define ESPER_TRAIN_H

#include "chain.h"
#include "images.h"
#include "sgd.h"

typedef struct {
    networks nets;
    int64_t count, batch;
    int64_t accumulate;    /* K, batches of B whose mean gradient makes the step */
    const int64_t *envs;   /* [count] */
    crops images;          /* first [count, K, B] */
    const int64_t *labels; /* [count, K, B] */
    const sgd *host, *seed; /* [N], rules */
    float *loss;           /* [count], added to */
    int64_t *correct;         /* [count], added to */
    double *l2, *health, *ratio;               /* [N, slots]; NULL where no statistics are asked for */
    uint8_t *vanishing, *exploding, *measured; /* [N, slots] */
    double vanishing_norm, exploding_norm, tiny;
} training;

/* Returns 0, or 1 where memory is out. */
__attribute__((visibility("default"))) int train_networks(const training *t);

#endif
