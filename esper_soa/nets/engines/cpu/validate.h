/* Validation of whole networks: what it is given, and where its results go. */
#ifndef ESPER_VALIDATE_H
#define ESPER_VALIDATE_H

#include "chain.h"
#include "images.h"

typedef struct {
    networks nets;
    int64_t count, images;
    const int64_t *envs;        /* [count] */
    int64_t shared;             /* whether all networks see the same images */
    crops images_of;            /* first [V] where they do, else [count, V] */
    const int64_t *labels;      /* [V], or [count, V]; -1 does not count */
    int64_t codes, ablated;     /* ablated: bit mask of the slots in which subsets differ */
    const int64_t *code;        /* [codes]: seeds that are on, of those */
    double *loss;               /* [count], sum over the images under the first code */
    int64_t *correct, *counted;    /* [count, codes], [count] */
    uint8_t *answers;           /* [count, images]: whether each is right under the first code; may be NULL */
} validation;

/* Returns 0, or 1 where memory is out. */
__attribute__((visibility("default"))) int validate_networks(const validation *v);

#endif
