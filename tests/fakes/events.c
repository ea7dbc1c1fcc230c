/* Waiting for streams: synchronisation, queries and events. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "fake.h"

enum { EVENT_MAGIC = 0x45564e54, EVENT_DEAD = 0x44454144 };

/* The structure outlives its destruction, so that a stale handle is an error, not a crash. */
struct CUevent_st {
    int magic;
    CUcontext context;
    pthread_mutex_t mutex;
    mark *recorded; /* the last record; NULL before the first */
};

static bool event_exists(CUevent event) {
    return event && __atomic_load_n(&event->magic, __ATOMIC_ACQUIRE) == EVENT_MAGIC;
}

static mark *event_mark(CUevent event) {
    pthread_mutex_lock(&event->mutex);
    mark *point = event->recorded ? mark_keep(event->recorded) : NULL;
    pthread_mutex_unlock(&event->mutex);
    return point;
}

typedef struct {
    task base;
    mark *point;
} mark_task;

static void run_reach(task *work) {
    mark *point = ((mark_task *)work)->point;
    mark_reach(point);
    mark_drop(point);
}

static void run_wait(task *work) {
    mark *point = ((mark_task *)work)->point;
    mark_wait(point);
    mark_drop(point);
}

static void enqueue_mark(CUstream stream, void (*run)(task *), mark *point) {
    mark_task *work = calloc(1, sizeof *work);
    if (!work)
        abort();
    work->base.run = run;
    work->point = point;
    stream_enqueue(stream, &work->base);
}

/* Wait for all work that is on the stream now. */
void stream_drain(CUstream stream) {
    pthread_mutex_lock(&stream->mutex);
    uint64_t until = stream->issued;
    while (stream->finished < until)
        pthread_cond_wait(&stream->changed, &stream->mutex);
    pthread_mutex_unlock(&stream->mutex);
}

EXPORT CUresult cuStreamSynchronize(CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    log_call("cuStreamSynchronize(stream=%p)", (void *)hStream);
    stream_drain(stream);
    return sticky_error();
}

EXPORT CUresult cuStreamQuery(CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    pthread_mutex_lock(&stream->mutex);
    bool idle = stream->finished == stream->issued;
    pthread_mutex_unlock(&stream->mutex);
    return idle ? sticky_error() : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamGetCtx(CUstream hStream, CUcontext *pctx) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (!code)
        *pctx = stream->context;
    return code;
}

EXPORT CUresult cuCtxSynchronize(void) {
    enum { MANY = 4096 };
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUcontext context = current_context();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUstream *found = malloc(MANY * sizeof *found);
    if (!found)
        return CUDA_ERROR_OUT_OF_MEMORY;
    log_call("cuCtxSynchronize(device=%d)", context->ordinal);
    int count = streams_of(context, found, MANY);
    for (int i = 0; i < count; i++)
        stream_drain(found[i]);
    free(found);
    return sticky_error();
}

EXPORT CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!current_context())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!phEvent || Flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    CUevent made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->context = current_context();
    pthread_mutex_init(&made->mutex, NULL);
    made->magic = EVENT_MAGIC;
    *phEvent = made;
    log_call("cuEventCreate(event=%p, flags=%u)", (void *)made, Flags);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent hEvent) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    int alive = EVENT_MAGIC;
    if (!hEvent || !__atomic_compare_exchange_n(&hEvent->magic, &alive, EVENT_DEAD, false,
                                                __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return CUDA_ERROR_INVALID_HANDLE;
    log_call("cuEventDestroy(event=%p)", (void *)hEvent);
    pthread_mutex_lock(&hEvent->mutex);
    mark_drop(hEvent->recorded);
    hEvent->recorded = NULL;
    pthread_mutex_unlock(&hEvent->mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    if (!event_exists(hEvent) || hEvent->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    log_call("cuEventRecord(event=%p, stream=%p)", (void *)hEvent, (void *)hStream);
    mark *point = mark_new(2); /* references of the event and of the task */
    pthread_mutex_lock(&hEvent->mutex);
    mark *before = hEvent->recorded;
    hEvent->recorded = point;
    pthread_mutex_unlock(&hEvent->mutex);
    mark_drop(before);
    enqueue_mark(stream, run_reach, point);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    if (!event_exists(hEvent))
        return CUDA_ERROR_INVALID_HANDLE;
    if (Flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    log_call("cuStreamWaitEvent(stream=%p, event=%p)", (void *)hStream, (void *)hEvent);
    mark *point = event_mark(hEvent);
    if (point)
        enqueue_mark(stream, run_wait, point);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent hEvent) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!event_exists(hEvent))
        return CUDA_ERROR_INVALID_HANDLE;
    mark *point = event_mark(hEvent);
    bool reached = !point || mark_reached(point);
    mark_drop(point);
    return reached ? sticky_error() : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent hEvent) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!event_exists(hEvent))
        return CUDA_ERROR_INVALID_HANDLE;
    log_call("cuEventSynchronize(event=%p)", (void *)hEvent);
    mark *point = event_mark(hEvent);
    if (point)
        mark_wait(point);
    mark_drop(point);
    return sticky_error();
}

typedef struct {
    task base;
    CUhostFn function;
    void *data;
} host_task;

static void run_host(task *work) {
    host_task *call = (host_task *)work;
    call->function(call->data);
}

EXPORT CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) {
    CUstream stream;
    CUresult code = stream_resolve(hStream, NULL, &stream);
    if (code)
        return code;
    if (!fn)
        return CUDA_ERROR_INVALID_VALUE;
    host_task *work = calloc(1, sizeof *work);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    log_call("cuLaunchHostFunc(stream=%p)", (void *)hStream);
    work->base.run = run_host;
    work->base.moves = true; /* host functions are delayed, too */
    work->function = fn;
    work->data = userData;
    stream_enqueue(stream, &work->base);
    return CUDA_SUCCESS;
}
