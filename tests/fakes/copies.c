/* The driver's functions for memory: allocation, copies, fills, and attributes of addresses. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake.h"

static CUresult context_needed(CUcontext *context) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = current_context();
    return *context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    CUcontext context;
    CUresult code = context_needed(&context);
    if (code)
        return code;
    void *address = NULL;
    code = memory_allocate(context, MEMORY_DEVICE, bytesize, false, &address);
    if (!code)
        *dptr = (CUdeviceptr)(uintptr_t)address;
    log_call("cuMemAlloc(bytes=%zu, device=%d) = %p", bytesize, context->ordinal, address);
    return code;
}

/* Wait for the work that uses the block, because CUDA synchronises the device here. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!dptr)
        return CUDA_SUCCESS;
    void *address = (void *)(uintptr_t)dptr;
    log_call("cuMemFree(address=%p)", address);
    spans_wait_for(address);
    return memory_release(address, MEMORY_DEVICE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    void *address = NULL;
    code = memory_allocate(stream->context, MEMORY_DEVICE, bytesize, false, &address);
    if (!code)
        *dptr = (CUdeviceptr)(uintptr_t)address;
    log_call("cuMemAllocAsync(bytes=%zu, stream=%p) = %p", bytesize, (void *)hStream, address);
    return code;
}

typedef struct {
    task base;
    void *dst;
    const void *src; /* NULL: fill with value */
    size_t dst_pitch, src_pitch, width, rows;
    int value;
} copy_task;

static void run_free(task *work) {
    copy_task *block = (copy_task *)work;
    if (!memory_release(block->dst, MEMORY_DEVICE)) {
        log_call("freed twice(address=%p)", block->dst);
        set_sticky_error();
    }
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    allocation block;
    void *address = (void *)(uintptr_t)dptr;
    if (!memory_find(address, &block) || block.start != (uintptr_t)address ||
        block.kind != MEMORY_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    copy_task *work = calloc(1, sizeof *work);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    log_call("cuMemFreeAsync(address=%p, stream=%p)", address, (void *)hStream);
    work->base.run = run_free;
    work->dst = address;
    stream_enqueue(stream, &work->base);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    CUcontext context;
    CUresult code = context_needed(&context);
    if (code)
        return code;
    if (Flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    code = memory_allocate(context, MEMORY_PINNED, bytesize, false, pp);
    log_call("cuMemHostAlloc(bytes=%zu, flags=%u) = %p", bytesize, Flags, code ? NULL : *pp);
    return code;
}

EXPORT CUresult cuMemFreeHost(void *p) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    log_call("cuMemFreeHost(address=%p)", p);
    spans_wait_for(p);
    return memory_release(p, MEMORY_PINNED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void run_copy(task *work) {
    copy_task *copy = (copy_task *)work;
    for (size_t row = 0; row < copy->rows; row++) {
        char *to = (char *)copy->dst + row * copy->dst_pitch;
        if (copy->src)
            memmove(to, (const char *)copy->src + row * copy->src_pitch, copy->width);
        else
            memset(to, copy->value, copy->width);
    }
}

static CUresult enqueue_copy(CUstream stream, const copy_task *what) {
    copy_task *work = malloc(sizeof *work);
    span *spans = malloc(2 * sizeof *spans);
    if (!work || !spans) {
        free(work);
        free(spans);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *work = *what;
    work->base = (task){.run = run_copy, .moves = true, .spans = spans};
    spans[0] = (span){.start = (uintptr_t)what->dst, .width = what->width,
                      .pitch = what->dst_pitch, .rows = what->rows, .writes = true};
    work->base.span_count = 1;
    if (what->src) {
        spans[1] = (span){.start = (uintptr_t)what->src, .width = what->width,
                          .pitch = what->src_pitch, .rows = what->rows};
        work->base.span_count = 2;
    }
    stream_enqueue(stream, &work->base);
    return CUDA_SUCCESS;
}

/* Whether the bytes are within a known block, or the block is unknown. */
static bool fits(const void *address, size_t bytes) {
    allocation block;
    return !memory_find(address, &block) || (uintptr_t)address + bytes <= block.end;
}

static CUresult copy_rows(copy_task what, CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code || !what.rows || !what.width)
        return code;
    size_t to = (what.rows - 1) * what.dst_pitch + what.width;
    size_t from = (what.rows - 1) * what.src_pitch + what.width;
    if (!what.dst || !fits(what.dst, to) || (what.src && !fits(what.src, from)))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue_copy(stream, &what);
}

static CUresult copy_bytes(void *dst, const void *src, size_t bytes, CUstream hStream) {
    log_call("cuMemcpyAsync(dst=%p, src=%p, bytes=%zu, stream=%p)", dst, src, bytes,
             (void *)hStream);
    if (bytes && !src)
        return CUDA_ERROR_INVALID_VALUE;
    return copy_rows((copy_task){.dst = dst, .src = src, .width = bytes, .rows = 1}, hStream);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount,
                              CUstream hStream) {
    return copy_bytes((void *)(uintptr_t)dst, (void *)(uintptr_t)src, ByteCount, hStream);
}

static bool is_on_device(CUdeviceptr address) {
    allocation block;
    return memory_find((void *)(uintptr_t)address, &block) && block.kind == MEMORY_DEVICE;
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount,
                                     CUstream hStream) {
    if (ByteCount && !is_on_device(srcDevice))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_bytes(dstHost, (void *)(uintptr_t)srcDevice, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount,
                                     CUstream hStream) {
    if (ByteCount && !is_on_device(dstDevice))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_bytes((void *)(uintptr_t)dstDevice, srcHost, ByteCount, hStream);
}

/* Copy on the legacy stream, and wait for that stream. */
EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
    CUstream stream;
    CUresult code = stream_resolve(NULL, NULL, &stream);
    if (!code)
        code = cuMemcpyAsync(dst, src, ByteCount, NULL);
    if (!code)
        stream_drain(stream);
    return code ? code : sticky_error();
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
    if (!pCopy || pCopy->srcMemoryType == CU_MEMORYTYPE_ARRAY ||
        pCopy->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_INVALID_VALUE;
    const char *src = pCopy->srcMemoryType == CU_MEMORYTYPE_HOST
                          ? pCopy->srcHost
                          : (const char *)(uintptr_t)pCopy->srcDevice;
    char *dst = pCopy->dstMemoryType == CU_MEMORYTYPE_HOST ? pCopy->dstHost
                                                           : (char *)(uintptr_t)pCopy->dstDevice;
    size_t src_pitch = pCopy->srcPitch, dst_pitch = pCopy->dstPitch;
    if ((src_pitch && src_pitch < pCopy->srcXInBytes + pCopy->WidthInBytes) ||
        (dst_pitch && dst_pitch < pCopy->dstXInBytes + pCopy->WidthInBytes) || !src)
        return CUDA_ERROR_INVALID_VALUE;
    log_call("cuMemcpy2DAsync(dst=%p, dst_pitch=%zu, src=%p, src_pitch=%zu, width=%zu, rows=%zu, "
             "stream=%p)",
             (void *)dst, dst_pitch, (const void *)src, src_pitch, pCopy->WidthInBytes,
             pCopy->Height, (void *)hStream);
    copy_task what = {.dst = dst + pCopy->dstY * dst_pitch + pCopy->dstXInBytes,
                      .src = src + pCopy->srcY * src_pitch + pCopy->srcXInBytes,
                      .dst_pitch = dst_pitch ? dst_pitch : pCopy->WidthInBytes,
                      .src_pitch = src_pitch ? src_pitch : pCopy->WidthInBytes,
                      .width = pCopy->WidthInBytes,
                      .rows = pCopy->Height};
    return copy_rows(what, hStream);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N,
                                CUstream hStream) {
    void *dst = (void *)(uintptr_t)dstDevice;
    log_call("cuMemsetD8Async(dst=%p, value=%u, bytes=%zu, stream=%p)", dst, uc, N,
             (void *)hStream);
    return copy_rows((copy_task){.dst = dst, .value = uc, .width = N, .rows = 1}, hStream);
}

/* Pinned host memory has a device ordinal too: that of the context that allocated it. */
EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    allocation block;
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!data || !memory_find((void *)(uintptr_t)ptr, &block))
        return CUDA_ERROR_INVALID_VALUE;
    bool pinned = block.kind == MEMORY_PINNED;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = block.context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = ptr; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = block.context->ordinal; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = block.start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = block.end - block.start; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
