/* NCCL's calls that make and end communicators. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"

enum { MEET_SPLIT = 1 };

EXPORT ncclResult_t ncclGetVersion(int *version) {
    if (!version)
        return comm_complain(NULL, ncclInvalidArgument, "GetVersion: version argument is NULL");
    *version = NCCL_FAKE_VERSION;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId) {
    static int count;
    uint64_t random = 0;
    log_call("ncclGetUniqueId()");
    if (!uniqueId)
        return comm_complain(NULL, ncclInvalidArgument, "GetUniqueId: out argument is NULL");
    segment_sweep();
    int source = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (source < 0 || read(source, &random, sizeof random) != sizeof random)
        return comm_complain(NULL, ncclSystemError, "GetUniqueId: no random numbers");
    close(source);
    memset(uniqueId, 0, sizeof *uniqueId);
    snprintf(uniqueId->internal, sizeof uniqueId->internal, "fake-nccl-%d-%016llx-%d",
             (int)getpid(), (unsigned long long)random, __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED));
    return ncclSuccess;
}

/* The current context; that of device 0 if there is none, as in CUDA's runtime. */
static CUcontext chosen_context(void) {
    CUcontext context = current_context();
    return context ? context : device_context(0);
}

#if VERSION_SINCE(2, 14, 3)
static ncclResult_t read_config(const ncclConfig_t *config, const char *call, bool *blocking) {
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_API_MAGIC ||
        config->size < offsetof(ncclConfig_t, blocking) + sizeof(int))
        return comm_complain(NULL, ncclInvalidArgument,
                             "%s: ncclConfig_t argument not initialized via "
                             "NCCL_CONFIG_INITIALIZER",
                             call);
    if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1)
        return comm_complain(NULL, ncclInvalidArgument, "%s: Invalid config blocking attribute %d",
                             call, config->blocking);
    if (config->blocking != NCCL_CONFIG_UNDEF_INT)
        *blocking = config->blocking;
    return ncclSuccess;
}
#endif

static ncclResult_t run_init(job *j) { return comm_attach(j->comm, j->argument); }

static job *new_job(ncclResult_t (*run)(job *), ncclComm_t comm) {
    job *made = calloc(1, sizeof *made);
    if (!made)
        abort();
    made->run = run;
    made->comm = comm;
    return made;
}

static ncclResult_t init_rank(ncclComm_t *comm, int nranks, const ncclUniqueId *id, int rank,
                              CUcontext context, bool blocking, const char *call) {
    if (!comm)
        return comm_complain(NULL, ncclInvalidArgument, "%s: comm argument is NULL", call);
    *comm = NULL;
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return comm_complain(NULL, ncclInvalidArgument, "%s: Invalid rank requested : %d/%d", call,
                             rank, nranks);
    if (strncmp(id->internal, "fake-nccl-", 10) || strchr(id->internal, '/') ||
        !memchr(id->internal, 0, NAME_ROOM))
        return comm_complain(NULL, ncclInvalidArgument, "%s: not a unique id", call);
    if (!context)
        return comm_complain(NULL, ncclUnhandledCudaError, "%s: CUDA is not initialised", call);
    ncclComm_t made = comm_new(nranks, rank, context, blocking);
    job *j = new_job(run_init, made);
    j->argument = strdup(id->internal);
    *comm = made;
    ncclResult_t code = group_job(j);
    if (code && code != ncclInProgress) {
        *comm = NULL;
        comm_end(made);
    }
    return code;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
    log_call("ncclCommInitRank(nranks=%d, rank=%d, id=%s)", nranks, rank, commId.internal);
    return init_rank(comm, nranks, &commId, rank, chosen_context(), true, "CommInitRank");
}

#if VERSION_SINCE(2, 14, 3)
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                                           int rank, ncclConfig_t *config) {
    bool blocking = true;
    log_call("ncclCommInitRankConfig(nranks=%d, rank=%d, id=%s, blocking=%d)", nranks, rank,
             commId.internal, config ? config->blocking : 1);
    ncclResult_t code = read_config(config, "CommInitRankConfig", &blocking);
    return code ? code
                : init_rank(comm, nranks, &commId, rank, chosen_context(), blocking,
                            "CommInitRankConfig");
}
#endif

/* Wait until no call and no work of the communicator is left, or until it is aborted. */
static void wait_until_idle(ncclComm_t comm, bool for_work) {
    pthread_mutex_lock(&comm->mutex);
    while (comm->busy > 0 || (for_work ? comm->pending > 0 && !comm->aborted : comm->running > 0))
        pthread_cond_wait(&comm->changed, &comm->mutex);
    pthread_mutex_unlock(&comm->mutex);
}

void comm_end(ncclComm_t comm) {
    pthread_mutex_lock(&comm->mutex);
    comm->alive = false;
    if (!comm->pending)
        segment_detach(&comm->map);
    pthread_mutex_unlock(&comm->mutex);
}

#if VERSION_SINCE(2, 14, 3)
static ncclResult_t run_finalize(job *j) {
    pthread_mutex_lock(&j->comm->mutex);
    while (j->comm->pending > 0 && !j->comm->aborted)
        pthread_cond_wait(&j->comm->changed, &j->comm->mutex);
    pthread_mutex_unlock(&j->comm->mutex);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    log_call("ncclCommFinalize(comm=%p)", (void *)comm);
    ncclResult_t code = comm_ready(comm, "CommFinalize");
    if (code)
        return code;
    comm->finalized = true;
    return group_job(new_job(run_finalize, comm));
}
#endif

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    log_call("ncclCommDestroy(comm=%p)", (void *)comm);
    if (!comm)
        return ncclSuccess;
    if (!comm_alive(comm))
        return comm_complain(NULL, ncclInvalidArgument, "CommDestroy: comm %p is destroyed or "
                                                        "unknown",
                             (void *)comm);
    wait_until_idle(comm, true);
    comm_end(comm);
    return ncclSuccess;
}

#if VERSION_SINCE(2, 4, 2)
static void abort_work(ncclComm_t comm) {
    pthread_mutex_lock(&comm->mutex);
    __atomic_store_n(&comm->aborted, true, __ATOMIC_RELEASE);
    ncclComm_t child = __atomic_load_n(&comm->child, __ATOMIC_ACQUIRE);
    if (child)
        __atomic_store_n(&child->aborted, true, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
    wait_until_idle(comm, false);
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    log_call("ncclCommAbort(comm=%p)", (void *)comm);
    if (!comm)
        return ncclSuccess;
    if (!comm_alive(comm))
        return comm_complain(NULL, ncclInvalidArgument,
                             "CommAbort: comm %p is destroyed or unknown", (void *)comm);
    __atomic_store_n(&comm->dying, true, __ATOMIC_RELEASE);
    abort_work(comm);
    comm_end(comm);
    return ncclSuccess;
}
#endif

#if VERSION_SINCE(2, 18, 1)
/* Make the name of a child's segment; all ranks of the child compute the same name. */
static void child_name(char *name, ncclComm_t parent, char how, uint64_t which, uint64_t what) {
    uint64_t hash = 14695981039346656037u;
    char text[NAME_ROOM + 64];
    int pid = atoi(parent->id + strlen("fake-nccl-"));
    snprintf(text, sizeof text, "%s%c%llu.%llx", parent->id, how, (unsigned long long)which,
             (unsigned long long)what);
    for (const char *c = text; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    snprintf(name, NAME_ROOM, "fake-nccl-%d-%016llx-%c", pid, (unsigned long long)hash, how);
}

/* Make a new communicator from an old one; the pointer is set when the child is complete. */
static ncclResult_t make_child(job *j, int size, int rank, const char *name) {
    ncclComm_t child = comm_new(size, rank, j->comm->context, j->integers[2]);
    ncclResult_t code = ncclSuccess;
    child->host = j->comm->host;
    /* An abort of the parent also ends the wait for the other ranks of the child. */
    __atomic_store_n(&j->comm->child, child, __ATOMIC_RELEASE);
    if (__atomic_load_n(&j->comm->dying, __ATOMIC_ACQUIRE))
        __atomic_store_n(&child->aborted, true, __ATOMIC_RELEASE);
    code = comm_attach(child, name);
    __atomic_store_n(&j->comm->child, NULL, __ATOMIC_RELEASE);
    if (code)
        comm_end(child);
    else
        __atomic_store_n(j->result, child, __ATOMIC_RELEASE);
    return code;
}

static ncclResult_t run_split(job *j) {
    ncclComm_t parent = j->comm;
    int color = j->integers[0], size = 0, rank = 0;
    proposal *all = calloc((size_t)parent->size, sizeof *all);
    char name[NAME_ROOM];
    if (!all)
        abort();
    if (!comm_meet(parent, MEET_SPLIT, color, j->integers[1], all)) {
        free(all);
        return comm_state(parent) > ncclSuccess && comm_state(parent) != ncclInProgress
                   ? comm_state(parent)
                   : ncclInternalError;
    }
    for (int r = 0; r < parent->size; r++) {
        if (all[r].a != color)
            continue;
        size++; /* ordered by key, then by old rank */
        rank += all[r].b < j->integers[1] || (all[r].b == j->integers[1] && r < parent->rank);
    }
    free(all);
    if (color == NCCL_SPLIT_NOCOLOR)
        return ncclSuccess;
    child_name(name, parent, 's', parent->meetings, (uint64_t)color);
    return make_child(j, size, rank, name);
}

static ncclResult_t child_job(job *j, ncclComm_t *newcomm, ncclConfig_t *config, const char *call) {
    bool blocking = j->comm->blocking;
    ncclResult_t code = read_config(config, call, &blocking);
    if (code) {
        free(j->argument);
        free(j);
        return code;
    }
    *newcomm = NULL;
    j->result = newcomm;
    j->integers[2] = blocking;
    return group_job(j);
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                  ncclConfig_t *config) {
    log_call("ncclCommSplit(comm=%p, color=%d, key=%d)", (void *)comm, color, key);
    ncclResult_t code = comm_ready(comm, "CommSplit");
    if (code)
        return code;
    if (!newcomm || color < NCCL_SPLIT_NOCOLOR)
        return comm_complain(comm, ncclInvalidArgument, "CommSplit: newcomm NULL or color %d",
                             color);
    job *j = new_job(run_split, comm);
    j->integers[0] = color;
    j->integers[1] = key;
    return child_job(j, newcomm, config, "CommSplit");
}
#endif

static ncclResult_t ask(ncclComm_t comm, int *answer, int value, const char *call) {
    ncclResult_t code = comm_ready(comm, call);
    if (code)
        return code;
    if (!answer)
        return comm_complain(comm, ncclInvalidArgument, "%s: NULL argument", call);
    *answer = value;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    return ask(comm, count, comm ? comm->size : 0, "CommCount");
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    return ask(comm, device, comm ? comm->context->ordinal : 0, "CommCuDevice");
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    return ask(comm, rank, comm ? comm->rank : 0, "CommUserRank");
}
