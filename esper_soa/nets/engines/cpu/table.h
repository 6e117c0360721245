/* The table of kernels of one width; included by the files that say which. */
#include "attention.h"
#include "block.h"
#include "blend.h"
#include "parts.h"
#include "points.h"
#include "pool.h"
#include "seed.h"
#include "tokens.h"

const kernels KERNELS = {
    .of = {
        [BLOCK] = {block_train, block_backward},
        [POOL] = {pool_forward, pool_backward},
        [SEED] = {seed_forward, seed_backward},
        [RELU] = {relu_forward, relu_backward},
        [DEPTH] = {depth_forward, depth_backward},
        [NORMED] = {normed_forward, normed_backward},
        [SQUEEZED] = {squeezed_forward, squeezed_backward},
        [JOIN] = {blend_forward, blend_backward},
        [WINDOW] = {window_forward, window_backward},
        [PRODUCT] = {product_forward, product_backward},
        [BESIDE] = {beside_forward, beside_backward},
        [PIXELS] = {pixels_forward, pixels_backward},
        [MIXED] = {mixed_forward, mixed_backward},
        [WEIGHED] = {weighed_forward, weighed_backward},
        [PICK] = {pick_forward, pick_backward},
        [LEAD] = {lead_forward, lead_backward},
        [ATTEND] = {attend_forward, attend_backward},
    },
    .block_infer = block_infer,
    .convolve = conv_by,
    .wgrad = wgrad_by,
    .patches = common_patches,
};
