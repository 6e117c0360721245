/* The kernels of layers by vectors of 8 floats. */
#define LANES 8
#define KERNELS KERNELS_8
#include "table.h"
