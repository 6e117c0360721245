/* The kernels of layers by vectors of 16 floats. */
#ifdef __AVX512F__
/* gcc schedules these worse for an AMD, and takes a Zen 5 for a Zen 3; what is computed is the same. */
#pragma GCC target("tune=icelake-server")
#define LANES 16
#define KERNELS KERNELS_16
#include "table.h"
#endif
