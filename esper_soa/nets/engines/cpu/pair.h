/* Two of a kind in one vector: where 8 channels fill half of it, the other half takes a second pixel, tile or number.
 *
 * Lane 2c + h belongs to channel c of the h-th. Everywhere `each` says how many there are, 1 or 2, a constant; the
 * second lies `apart` floats behind the first. A lane does what it does alone.
 */
#ifndef ESPER_PAIR_H
#define ESPER_PAIR_H

#include "vec.h"

/* How many go into a vector, of O channels in whole vectors of 8. */
INLINE int each_of(long O) { return LANES == 16 && O == WHOLE ? 2 : 1; }

#if LANES == 16
#include <immintrin.h>

/* Vectors of channels of both. */
INLINE vec load_each(const float *p, long apart, int each) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    if (each == 1) return load(p);
    return _mm512_permutex2var_ps(_mm512_castps256_ps512(_mm256_loadu_ps(p)), order,
                                  _mm512_castps256_ps512(_mm256_loadu_ps(p + apart)));
}

/* The same vector of channels for both. */
INLINE vec repeat_each(const float *p, int each) { return load_each(p, 0, each); }

/* One number of each, for all channels. */
INLINE vec splat_each(const float *p, long apart, int each) {
    double two;
    if (each == 1 || apart == 0) return splat(*p);
    if (apart != 1) return _mm512_mask_broadcastss_ps(splat(*p), 0xaaaa, _mm_load_ss(p + apart));
    memcpy(&two, p, sizeof(two));
    return _mm512_castpd_ps(_mm512_set1_pd(two));
}

/* The reverse of load_each. */
INLINE void store_each(float *p, long apart, vec v, int each) {
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    if (each == 1) {
        store(p, v);
        return;
    }
    v = _mm512_permutexvar_ps(order, v);
    _mm256_storeu_ps(p, _mm512_castps512_ps256(v));
    _mm256_storeu_pd((void *)(p + apart), _mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
#else
INLINE vec load_each(const float *p, long apart, int each) { return (void)apart, (void)each, load(p); }
INLINE vec repeat_each(const float *p, int each) { return (void)each, load(p); }
INLINE vec splat_each(const float *p, long apart, int each) { return (void)apart, (void)each, splat(*p); }
INLINE void store_each(float *p, long apart, vec v, int each) { (void)apart, (void)each, store(p, v); }
#endif

#endif
