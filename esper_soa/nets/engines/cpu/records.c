/* Where every field of the records that Python fills lies; proof.py compares it with what ctypes made of them. */
#include <stddef.h>

#include "sequence.h"
#include "train.h"
#include "validate.h"

typedef struct {
    const char *record, *name; /* name: "" for the record as a whole */
    int64_t at, size;          /* bytes */
} field;

#define RECORD(record) {#record, "", 0, sizeof(record)}
#define AT(record, name) {#record, #name, offsetof(record, name), sizeof(((record *)0)->name)}

#define CROPS(name) AT(crops, name)
#define SGD(name) AT(sgd, name)
#define OPERATION(name) AT(operation, name)
#define MODULE(name) AT(module_seed, name)
#define NETWORKS(name) AT(networks, name)
#define PART(name) AT(seed_part, name)
#define TRAINING(name) AT(training, name)
#define VALIDATION(name) AT(validation, name)
#define BLOCK(name) AT(sequence_block, name)
#define HEAD(name) AT(sequence_head, name)

static const field FIELDS[] = {
    RECORD(crops), CROPS(size), CROPS(colours), CROPS(line), CROPS(colour), CROPS(env_stride), CROPS(bytes),
    CROPS(first), CROPS(values),
    RECORD(sgd), SGD(max_norm), SGD(eps), SGD(rate), SGD(momentum), SGD(decay), SGD(second_decay),
    RECORD(operation), OPERATION(kind), OPERATION(first), OPERATION(second), OPERATION(outputs), OPERATION(height),
    OPERATION(width), OPERATION(begin), OPERATION(by_channel), OPERATION(by_pixel), OPERATION(kernel), OPERATION(stride), OPERATION(padding), OPERATION(depthwise), OPERATION(split), OPERATION(activation),
    OPERATION(pooled), OPERATION(together), OPERATION(before), OPERATION(after), OPERATION(weight), OPERATION(scale), OPERATION(shift),
    OPERATION(mean), OPERATION(variance), OPERATION(count), OPERATION(eps), OPERATION(momentum),
    RECORD(networks), NETWORKS(operations), NETWORKS(slots), NETWORKS(classes), NETWORKS(size), NETWORKS(colours), NETWORKS(program),
    NETWORKS(gate_at),
    NETWORKS(gate_hidden), NETWORKS(blueprints), NETWORKS(parts), NETWORKS(programs), NETWORKS(modules), NETWORKS(longest),
    NETWORKS(width), NETWORKS(statistics_width), NETWORKS(seed_width), NETWORKS(params), NETWORKS(momentum),
    NETWORKS(statistics), NETWORKS(seed_params), NETWORKS(seed_momentum), NETWORKS(seed_kind), NETWORKS(seed_flags),
    NETWORKS(alpha), NETWORKS(eps),
    RECORD(module_seed), MODULE(begin), MODULE(end), MODULE(numel),
    RECORD(seed_part), PART(kind), PART(outputs), PART(kernel), PART(groups), PART(hidden), PART(flags),
    RECORD(training), TRAINING(nets), TRAINING(count), TRAINING(batch), TRAINING(accumulate), TRAINING(envs),
    TRAINING(images), TRAINING(labels), TRAINING(host), TRAINING(seed), TRAINING(loss), TRAINING(correct), TRAINING(l2),
    TRAINING(health), TRAINING(ratio), TRAINING(vanishing), TRAINING(exploding), TRAINING(measured),
    TRAINING(vanishing_norm), TRAINING(exploding_norm), TRAINING(tiny),
    RECORD(validation), VALIDATION(nets), VALIDATION(count), VALIDATION(images), VALIDATION(envs), VALIDATION(shared),
    VALIDATION(images_of), VALIDATION(labels), VALIDATION(codes), VALIDATION(ablated), VALIDATION(code), VALIDATION(loss),
    VALIDATION(correct), VALIDATION(counted), VALIDATION(answers),
    RECORD(sequence_block), BLOCK(nets), BLOCK(batch), BLOCK(length), BLOCK(width), BLOCK(heads), BLOCK(inner),
    BLOCK(normed), BLOCK(gelu), BLOCK(saves), BLOCK(eps), BLOCK(x), BLOCK(grad_out), BLOCK(out), BLOCK(grad_x),
    BLOCK(statistics), BLOCK(hidden), BLOCK(mixed), BLOCK(sums), BLOCK(parameters), BLOCK(steps), BLOCK(gradients),
    RECORD(sequence_head), HEAD(nets), HEAD(batch), HEAD(length), HEAD(width), HEAD(tokens), HEAD(eps), HEAD(x),
    HEAD(scale), HEAD(shift), HEAD(table), HEAD(steps), HEAD(labels), HEAD(loss), HEAD(correct), HEAD(grad_x),
    HEAD(grad_scale), HEAD(grad_shift), HEAD(grad_table),
};

/* All of them; returns their number. */
__attribute__((visibility("default"))) int64_t record_fields(const field **all) {
    *all = FIELDS;
    return sizeof(FIELDS) / sizeof(FIELDS[0]);
}
