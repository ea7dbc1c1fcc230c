/* Streams: queues whose work a separate thread does later, in order. And marks. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct mark {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool reached;
    int references;
};

mark *mark_new(int references) {
    mark *made = calloc(1, sizeof *made);
    if (!made)
        abort();
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->changed, NULL);
    made->references = references;
    return made;
}

void mark_reach(mark *point) {
    pthread_mutex_lock(&point->mutex);
    point->reached = true;
    pthread_cond_broadcast(&point->changed);
    pthread_mutex_unlock(&point->mutex);
}

void mark_wait(mark *point) {
    pthread_mutex_lock(&point->mutex);
    while (!point->reached)
        pthread_cond_wait(&point->changed, &point->mutex);
    pthread_mutex_unlock(&point->mutex);
}

bool mark_reached(mark *point) {
    pthread_mutex_lock(&point->mutex);
    bool reached = point->reached;
    pthread_mutex_unlock(&point->mutex);
    return reached;
}

mark *mark_keep(mark *point) {
    __atomic_add_fetch(&point->references, 1, __ATOMIC_RELAXED);
    return point;
}

void mark_drop(mark *point) {
    if (!point || __atomic_sub_fetch(&point->references, 1, __ATOMIC_ACQ_REL))
        return;
    pthread_mutex_destroy(&point->mutex);
    pthread_cond_destroy(&point->changed);
    free(point);
}

/* Sticky error, as after an illegal access. fake_reset_error clears it. */
static bool sticky;
CUresult sticky_error(void) {
    return __atomic_load_n(&sticky, __ATOMIC_ACQUIRE) ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}
void set_sticky_error(void) { __atomic_store_n(&sticky, true, __ATOMIC_RELEASE); }
EXPORT void fake_reset_error(void) { __atomic_store_n(&sticky, false, __ATOMIC_RELEASE); }

/* Existing streams. Structures are never freed, so that a stale handle is an error, not a crash. */
enum { MAX_STREAMS = 1 << 14 };
static CUstream streams[MAX_STREAMS];
static int stream_count;
static pthread_mutex_t streams_mutex = PTHREAD_MUTEX_INITIALIZER;

static CUstream stream_make(CUcontext context, unsigned flags) {
    CUstream made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->context = context;
    made->flags = flags;
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->changed, NULL);
    made->random = (uint64_t)knob(KNOB_SEED) * 0x9E3779B97F4A7C15u + (uint64_t)stream_count + 1;
    return made;
}

static bool stream_exists(CUstream handle) {
    int count = __atomic_load_n(&stream_count, __ATOMIC_ACQUIRE);
    for (int i = count - 1; i >= 0; i--)
        if (streams[i] == handle)
            return true;
    return false;
}

/* Find the stream of a handle. 0, 1 and 2 are streams of the context, or of the current one. */
CUresult stream_resolve(CUstream handle, CUcontext context, CUstream *stream) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((uintptr_t)handle > 2) {
        *stream = handle;
        return stream_exists(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    context = context ? context : current_context();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUstream *kept = (uintptr_t)handle == 2 ? &context->per_thread : &context->legacy;
    pthread_mutex_lock(&streams_mutex);
    if (!*kept)
        *kept = stream_make(context, 0);
    *stream = *kept;
    pthread_mutex_unlock(&streams_mutex);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Random delay between 0 and twice the delay of the knob. */
static unsigned jitter(CUstream stream) {
    uint64_t x = stream->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    stream->random = x;
    return (unsigned)(x % (2 * (uint64_t)knob(KNOB_DELAY_US) + 1));
}

/* Wait before a task begins. Only the thread of the stream calls this function. */
void stream_linger(CUstream stream) {
    while (knob(KNOB_HOLD))
        nap(100);
    unsigned delay = knob(KNOB_DELAY_US) > 0 ? jitter(stream) : 0;
    if (delay)
        nap(delay);
}

static void *work_off(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&stream->mutex);
    for (;;) {
        while (!stream->first && !stream->destroyed)
            pthread_cond_wait(&stream->changed, &stream->mutex);
        if (!stream->first)
            break;
        task *work = stream->first;
        stream->first = work->next;
        pthread_mutex_unlock(&stream->mutex);
        if (work->moves) {
            spans_poison(work);
            stream_linger(stream);
            spans_check(work);
        }
        work->run(work);
        spans_end(work);
        free(work);
        pthread_mutex_lock(&stream->mutex);
        stream->finished++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

/* Called with the stream's mutex held. */
static void start_worker(CUstream stream) {
    pthread_attr_t detached;
    pthread_t thread;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all); /* this thread must not handle signals of the application */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &detached, work_off, stream))
        abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    stream->started = true;
}

void stream_enqueue(CUstream stream, task *work) {
    work->next = NULL;
    pthread_mutex_lock(&stream->mutex);
    spans_announce(work);
    if (stream->first)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    stream->issued++;
    if (!stream->started)
        start_worker(stream);
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
    if (cuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUcontext context = current_context();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!phStream || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_mutex);
    int at = 0;
    while (at < stream_count && streams[at])
        at++;
    CUstream made = at < MAX_STREAMS ? stream_make(context, flags) : NULL;
    if (made) {
        streams[at] = made;
        if (at == stream_count)
            __atomic_store_n(&stream_count, at + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&streams_mutex);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *phStream = made;
    log_call("cuStreamCreate(stream=%p, flags=%u, priority=%d, device=%d)", (void *)made, flags,
             priority, context->ordinal);
    return CUDA_SUCCESS;
}

/* List the streams of a context, for callers that wait for all of them. */
int streams_of(CUcontext context, CUstream *found, int room) {
    int count = 0;
    pthread_mutex_lock(&streams_mutex);
    if (context->legacy && count < room)
        found[count++] = context->legacy;
    if (context->per_thread && count < room)
        found[count++] = context->per_thread;
    for (int i = 0; i < stream_count && count < room; i++)
        if (streams[i] && streams[i]->context == context)
            found[count++] = streams[i];
    pthread_mutex_unlock(&streams_mutex);
    return count;
}

EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    return cuStreamCreateWithPriority(phStream, Flags, 0);
}

/* Work that is on the stream still runs, as in CUDA. */
EXPORT CUresult cuStreamDestroy_v2(CUstream hStream) {
    if ((uintptr_t)hStream <= 2 || !stream_exists(hStream))
        return CUDA_ERROR_INVALID_HANDLE;
    log_call("cuStreamDestroy(stream=%p)", (void *)hStream);
    pthread_mutex_lock(&streams_mutex);
    for (int i = 0; i < stream_count; i++)
        if (streams[i] == hStream)
            streams[i] = NULL;
    pthread_mutex_unlock(&streams_mutex);
    pthread_mutex_lock(&hStream->mutex);
    hStream->destroyed = true;
    pthread_cond_broadcast(&hStream->changed);
    pthread_mutex_unlock(&hStream->mutex);
    return CUDA_SUCCESS;
}
