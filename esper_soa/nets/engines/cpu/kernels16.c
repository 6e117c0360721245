/* The kernels of layers by vectors of 16 floats. */
#ifdef __AVX512F__
#define LANES 16
#define KERNELS KERNELS_16
#include "table.h"
#endif
