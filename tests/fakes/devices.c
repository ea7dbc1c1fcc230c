/* Devices, their primary contexts, and the current context of each thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { STACK_DEPTH = 64 };

static struct CUctx_st contexts[MAX_DEVICES];
static int devices = -1; /* -1 before cuInit */
static bool forked;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext stack[STACK_DEPTH];
static __thread int depth;

/* As in CUDA, a child of fork() cannot use the driver that its parent initialised. */
static void after_fork(void) {
    if (devices >= 0)
        forked = true;
}

/* Find the visible devices of the machine, as CUDA_VISIBLE_DEVICES selects them. */
static int find_devices(void) {
    int there = (int)knob(KNOB_DEVICES), found = 0;
    if (there > MAX_DEVICES)
        there = MAX_DEVICES;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !visible && i < there; i++)
        contexts[found++].physical = i;
    while (visible && *visible) {
        char *end;
        long which = strtol(visible, &end, 10);
        if (end == visible || which < 0 || which >= there || found == MAX_DEVICES)
            break;
        contexts[found++].physical = (int)which;
        visible = *end == ',' ? end + 1 : end;
    }
    for (int i = 0; i < found; i++)
        contexts[i].ordinal = i;
    return found;
}

EXPORT CUresult cuInit(unsigned int Flags) {
    if (Flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    if (devices < 0) {
        devices = find_devices();
        pthread_atfork(NULL, NULL, after_fork);
    }
    pthread_mutex_unlock(&mutex);
    return forked ? CUDA_ERROR_NOT_INITIALIZED : devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuda_ready(void) {
    return devices < 0 || forked ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

int device_count(void) { return devices < 0 ? 0 : devices; }

CUcontext current_context(void) { return depth ? stack[depth - 1] : NULL; }

CUcontext device_context(int ordinal) {
    return ordinal < 0 || ordinal >= device_count() ? NULL : &contexts[ordinal];
}

#define NEEDS_DEVICE(ordinal)                  \
    do {                                       \
        if (cuda_ready())                      \
            return CUDA_ERROR_NOT_INITIALIZED; \
        if (!device_context(ordinal))          \
            return CUDA_ERROR_INVALID_DEVICE;  \
    } while (0)

EXPORT CUresult cuDriverGetVersion(int *driverVersion) {
    if (!driverVersion)
        return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = (int)knob(KNOB_DRIVER_VERSION);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    NEEDS_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    NEEDS_DEVICE(dev);
    if (!name || len < 1)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)len, "Fake GPU %d", contexts[dev].physical);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    NEEDS_DEVICE(dev);
    *bytes = (size_t)knob(KNOB_MEMORY_BYTES);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    NEEDS_DEVICE(dev);
    if (!pi || attrib < 1 || attrib > 200)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attrib) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *pi = 132; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *pi = contexts[dev].physical + 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *pi = 9; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *pi = 1; break;
    default: *pi = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    NEEDS_DEVICE(dev);
    if (!pciBusId || len < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(pciBusId, (size_t)len, "0000:%02X:00.0", contexts[dev].physical + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    NEEDS_DEVICE(dev);
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    contexts[dev].retained++;
    pthread_mutex_unlock(&mutex);
    *pctx = &contexts[dev];
    log_call("cuDevicePrimaryCtxRetain(dev=%d)", dev);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    NEEDS_DEVICE(dev);
    pthread_mutex_lock(&mutex);
    bool held = contexts[dev].retained > 0;
    contexts[dev].retained -= held;
    pthread_mutex_unlock(&mutex);
    log_call("cuDevicePrimaryCtxRelease(dev=%d)", dev);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static bool is_live(CUcontext ctx) {
    return ctx >= contexts && ctx < contexts + device_count() && ctx->retained > 0;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *pctx) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    *pctx = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_live(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *pctx) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext popped = stack[--depth];
    if (pctx)
        *pctx = popped;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext ctx) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (ctx && !is_live(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    depth -= depth > 0;
    return ctx ? cuCtxPushCurrent_v2(ctx) : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!current_context())
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_context()->ordinal;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
};

static int error_index(CUresult error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return (int)i;
    return -1;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **pStr) {
    int i = error_index(error);
    *pStr = i < 0 ? NULL : errors[i].name;
    return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **pStr) {
    int i = error_index(error);
    *pStr = i < 0 ? NULL : errors[i].text;
    return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
