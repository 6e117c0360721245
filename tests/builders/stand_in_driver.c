// A libcuda.so.1 that loads and launches nothing, so that Triton's own compiler, loader and launcher
// run without a GPU. FAKE_SMEM: bytes of shared memory that a program may have at most.
#include <stdlib.h>
#include <string.h>

typedef int Result;

enum { MAX_THREADS = 1, SHARED = 8, WARP = 10, REGISTERS = 12, CLOCK = 13, PROCESSORS = 16 };
enum { MEMORY_CLOCK = 36, BUS = 37, MAJOR = 75, MINOR = 76, SHARED_OF_ALL = 81, SHARED_OPTIN = 97 };

Result cuDeviceGetAttribute(int *value, int which, int device) {
    const char *shared = getenv("FAKE_SMEM");
    switch (which) {
    case MAX_THREADS: *value = 1024; break;
    case SHARED: *value = 49152; break;
    case WARP: *value = 32; break;
    case REGISTERS: *value = 65536; break;
    case CLOCK: *value = 1755000; break;
    case PROCESSORS: *value = 132; break;
    case MEMORY_CLOCK: *value = 2619000; break;
    case BUS: *value = 5120; break;
    case MAJOR: *value = 9; break;
    case MINOR: *value = 0; break;
    case SHARED_OF_ALL: *value = 233472; break;
    case SHARED_OPTIN: *value = shared ? atoi(shared) : 232448; break;
    default: *value = 1;
    }
    return 0;
}

Result cuFuncGetAttribute(int *value, int which, void *function) {
    *value = which == 0 ? 1024 : which == 1 || which == 3 ? 0 : 64;  // threads, bytes, registers
    return 0;
}

Result cuPointerGetAttribute(void *value, int which, unsigned long long place) {
    memcpy(value, &place, sizeof place);  // memory of the host counts as the device's
    return 0;
}

Result cuGetErrorString(Result error, const char **words) { *words = "stand-in"; return 0; }
Result cuDeviceGet(int *device, int number) { *device = 0; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
Result cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetLimit(size_t *value, int which) { *value = 0; return 0; }
Result cuCtxSetLimit(int which, size_t value) { return 0; }
Result cuModuleLoadData(void **module, const void *image) { *module = (void *)2; return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)3;
    return 0;
}
Result cuFuncSetCacheConfig(void *function, int which) { return 0; }
Result cuFuncSetAttribute(void *function, int which, int value) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuOccupancyMaxActiveClusters(int *count, void *function, void *sizes) {
    *count = 1;
    return 0;
}
Result cuPointerGetAttributes() { return 0; }
Result cuTensorMapEncodeTiled() { return 0; }
Result cuTensorMapEncodeIm2col() { return 0; }
Result cuLaunchKernel() { return 0; }
Result cuLaunchKernelEx() { return 0; }
