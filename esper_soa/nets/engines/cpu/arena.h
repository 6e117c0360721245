/* Memory for networks, in one piece that one network after the other is laid out in. */
#ifndef ESPER_ARENA_H
#define ESPER_ARENA_H

#include "vec.h"

/* Under AddressSanitizer nothing may reach behind the first `bytes` of `room` at `at`. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GUARDED 1
INLINE void guard(char *at, size_t bytes, size_t room) {
    ASAN_UNPOISON_MEMORY_REGION(at, room);
    ASAN_POISON_MEMORY_REGION(at + bytes, room - bytes);
}
#else
#define GUARDED 0
INLINE void guard(char *at, size_t bytes, size_t room) { (void)at, (void)bytes, (void)room; }
#endif

/* Memory for an arena, whole lines of the cache; `whole` is what to free. Not by aligned_alloc: with glibc the room that
 * one call frees is too small for the next, of the same size, and the heap grows. */
static inline char *get_memory(size_t bytes, void **whole) {
    *whole = malloc(bytes + 64);
    return *whole ? (char *)(((uintptr_t)*whole + 63) & ~(uintptr_t)63) : NULL;
}

/* Memory handed out bit by bit; counts where `at` is NULL. Where it is guarded, it is NaNs until it is written. */
typedef struct {
    char *at;
    size_t used;
} arena;

static inline void *take(arena *a, size_t bytes) {
    size_t from = a->used, room = (bytes + 63) / 64 * 64 + 64 * GUARDED;
    a->used += room;
    if (!a->at) return NULL;
    guard(a->at + from, bytes, room);
    if (GUARDED) memset(a->at + from, 0xff, bytes);
    return a->at + from;
}
static inline float *take_floats(arena *a, long count) { return take(a, (size_t)count * sizeof(float)); }

#endif
