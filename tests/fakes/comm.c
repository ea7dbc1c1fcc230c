/* Communicators: state, errors, and the rendezvous of their ranks. */
#define _GNU_SOURCE
#include "comm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Communicators are kept after their end, so that a stale handle is an error, not a crash. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t *comms;
static int comm_count, comm_room, comm_serial;
static char last_error[TEXT_ROOM];

static void note_error(ncclComm_t comm, const char *text) {
    pthread_mutex_lock(&mutex);
    snprintf(last_error, sizeof last_error, "%s", text);
    if (comm)
        snprintf(comm->last_error, sizeof comm->last_error, "%s", text);
    pthread_mutex_unlock(&mutex);
    log_call("error: %s", text);
}

/* Keep the text of an error that a call returns. */
ncclResult_t comm_complain(ncclComm_t comm, ncclResult_t code, const char *format, ...) {
    char text[TEXT_ROOM];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    note_error(comm, text);
    return group_error(code);
}

/* Set an error that stays in the asynchronous state. */
void comm_fail(ncclComm_t comm, ncclResult_t code, const char *text) {
    int none = ncclSuccess;
    if (__atomic_compare_exchange_n(&comm->error, &none, (int)code, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE) &&
        text)
        note_error(comm, text);
}

ncclResult_t comm_state(ncclComm_t comm) {
    pthread_mutex_lock(&comm->mutex);
    int everybodys = segment_error(&comm->map);
    if (everybodys)
        comm_fail(comm, (ncclResult_t)everybodys, comm->map.head->error_text);
    int error = __atomic_load_n(&comm->error, __ATOMIC_ACQUIRE);
    bool busy = comm->busy > 0;
    pthread_mutex_unlock(&comm->mutex);
    return error ? (ncclResult_t)error : busy ? ncclInProgress : ncclSuccess;
}

bool comm_aborted(ncclComm_t comm) { return __atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE); }

bool comm_over(ncclComm_t comm) {
    return comm_aborted(comm) || __atomic_load_n(&comm->error, __ATOMIC_ACQUIRE) ||
           segment_error(&comm->map);
}

void comm_busy(ncclComm_t comm, int change) {
    pthread_mutex_lock(&comm->mutex);
    comm->busy += change;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
}

bool comm_alive(ncclComm_t comm) {
    bool found = false;
    pthread_mutex_lock(&mutex);
    for (int i = comm_count - 1; i >= 0 && !found; i--)
        found = comms[i] == comm;
    pthread_mutex_unlock(&mutex);
    return found && comm->alive;
}

ncclResult_t comm_ready(ncclComm_t comm, const char *call) {
    if (!comm)
        return comm_complain(NULL, ncclInvalidArgument, "%s: comm is NULL", call);
    if (!comm_alive(comm))
        return comm_complain(NULL, ncclInvalidArgument, "%s: comm %p is destroyed or unknown", call,
                             (void *)comm);
    if (comm->finalized)
        return comm_complain(comm, ncclInvalidArgument, "%s: comm has been finalized", call);
    ncclResult_t state = comm_state(comm);
    if (state == ncclInProgress)
        return comm_complain(comm, ncclInvalidArgument,
                             "%s: Attempt to use communicator before the previous operation "
                             "returned ncclSuccess",
                             call);
    return state ? group_error(state) : ncclSuccess;
}

/* Hash of the host name; NCCL_HOSTID replaces the name, as in NCCL. */
static uint64_t host_hash(void) {
    char name[256] = "";
    const char *given = getenv("NCCL_HOSTID");
    if (!given || !*given) {
        gethostname(name, sizeof name - 1);
        given = name;
    }
    uint64_t hash = 5381;
    for (; *given; given++)
        hash = hash * 33 ^ (unsigned char)*given;
    return hash;
}

ncclComm_t comm_new(int size, int rank, CUcontext context, bool blocking) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    size_t ranks = (size_t)size;
    if (!comm)
        abort();
    *comm = (struct ncclComm){.alive = true, .blocking = blocking, .rank = rank, .size = size,
                              .context = context, .host = host_hash(), .map = {.file = -1}};
    pthread_mutex_init(&comm->mutex, NULL);
    pthread_cond_init(&comm->changed, NULL);
    comm->sends_to = calloc(ranks, 1);
    comm->receives_from = calloc(ranks, 1);
    comm->sending = calloc(ranks, sizeof *comm->sending);
    comm->receiving = calloc(ranks, sizeof *comm->receiving);
    pthread_mutex_lock(&mutex);
    if (comm_count == comm_room) {
        comm_room = comm_room ? comm_room * 2 : 64;
        comms = realloc(comms, (size_t)comm_room * sizeof *comms);
    }
    if (!comms || !comm->sends_to || !comm->receives_from || !comm->sending || !comm->receiving)
        abort();
    comms[comm_count++] = comm;
    comm->serial = ++comm_serial;
    pthread_mutex_unlock(&mutex);
    return comm;
}

void comm_free(ncclComm_t comm) {
    comm->alive = false;
    pthread_mutex_lock(&comm->mutex);
    segment_detach(&comm->map);
    pthread_mutex_unlock(&comm->mutex);
}

void *grown(void *array, int count, size_t size) {
    array = realloc(array, (size_t)(count + 1) * size);
    if (!array)
        abort();
    return array;
}

static unsigned longer(unsigned pause) { return pause < 500 ? pause * 2 : 1000; }

/* Refuse two ranks on one GPU of one host, unless a knob or variable allows that. */
static ncclResult_t check_devices(ncclComm_t comm) {
    const char *allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (knob(KNOB_MULTI_RANK_GPU) || (allowed && !strcmp(allowed, "1") && VERSION_SINCE(2, 30, 0)))
        return ncclSuccess;
    for (int i = 0; i < comm->size; i++)
        for (int j = 0; j < i; j++) {
            const member *a = &comm->map.members[j], *b = &comm->map.members[i];
            if (a->host == b->host && a->physical == b->physical)
                return comm_complain(comm, ncclInvalidUsage,
                                     "Duplicate GPU detected : rank %d and rank %d both on CUDA "
                                     "device %x",
                                     j, i, (unsigned)(a->physical + 1) << 12);
        }
    return ncclSuccess;
}

ncclResult_t comm_attach(ncclComm_t comm, const char *name) {
    snprintf(comm->id, sizeof comm->id, "%s", name);
    if (knob(KNOB_INIT_ERROR) &&
        (knob(KNOB_FAULT_RANK) < 0 || knob(KNOB_FAULT_RANK) == comm->rank))
        return comm_complain(comm, (ncclResult_t)knob(KNOB_INIT_ERROR),
                             "init: failed by FAKE_INIT_ERROR");
    segment map;
    enum attach code = segment_attach(&map, name, comm->size, comm->rank);
    if (code == ATTACH_OTHER_SIZE)
        return comm_complain(comm, ncclInvalidArgument, "init: ranks differ about nranks, here %d",
                             comm->size);
    if (code == ATTACH_RANK_TAKEN)
        return comm_complain(comm, ncclInvalidArgument, "init: rank %d is there twice", comm->rank);
    if (code)
        return comm_complain(comm, ncclSystemError, "init: no shared memory");
    pthread_mutex_lock(&comm->mutex);
    comm->map = map;
    pthread_mutex_unlock(&comm->mutex);
    member *self = &map.members[comm->rank];
    self->pid = getpid();
    self->physical = comm->context->physical;
    self->host = comm->host;
    __atomic_store_n(&self->ready, 1, __ATOMIC_RELEASE);
    unsigned pause = 50;
    while (!segment_complete(&comm->map)) {
        if (comm_aborted(comm))
            return ncclInternalError;
        nap(pause);
        pause = longer(pause);
    }
    ncclResult_t refused = check_devices(comm);
    for (;;) { /* the injected fault: in progress for some polls, or without end */
        long polls = knob(KNOB_INIT_POLLS);
        bool waits = polls < 0 || (!comm->blocking && __atomic_load_n(&comm->polls,
                                                                      __ATOMIC_ACQUIRE) < polls);
        if (!waits || refused || comm_aborted(comm))
            return comm_aborted(comm) ? ncclInternalError : refused;
        nap(200);
    }
}

bool comm_meet(ncclComm_t comm, int kind, int64_t a, int64_t b, proposal *all) {
    uint64_t number = ++comm->meetings;
    proposal *own = &comm->map.members[comm->rank].proposals[number % 2];
    own->kind = kind;
    own->a = a;
    own->b = b;
    __atomic_store_n(&own->number, number, __ATOMIC_RELEASE);
    unsigned pause = 50;
    for (int r = 0; r < comm->size; r++) {
        proposal *other = &comm->map.members[r].proposals[number % 2];
        while (__atomic_load_n(&other->number, __ATOMIC_ACQUIRE) != number) {
            if (comm_over(comm))
                return false;
            nap(pause);
            pause = longer(pause);
        }
        all[r] = *other;
        if (other->kind != kind) {
            segment_fail(&comm->map, ncclInvalidUsage, "ranks differ: split here, window there");
            return false;
        }
    }
    return true;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
    if (!comm_alive(comm) || !asyncError)
        return comm_complain(NULL, ncclInvalidArgument, "CommGetAsyncError: comm %p is destroyed or unknown, or NULL", (void *)comm);
    __atomic_add_fetch(&comm->polls, 1, __ATOMIC_ACQ_REL);
    *asyncError = comm_state(comm);
    return ncclSuccess;
}

#if VERSION_SINCE(2, 13, 4)
EXPORT const char *ncclGetLastError(ncclComm_t comm) {
    static __thread char text[TEXT_ROOM];
    pthread_mutex_lock(&mutex);
    snprintf(text, sizeof text, "%s", last_error);
    for (int i = 0; i < comm_count; i++)
        if (comms[i] == comm && comm->last_error[0])
            snprintf(text, sizeof text, "%s", comm->last_error);
    pthread_mutex_unlock(&mutex);
    return text;
}
#endif

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    switch ((int)result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
