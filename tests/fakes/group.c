/* Groups: the calls since the outermost start are launched together at its end. A single call
 * is a group by itself. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "comm.h"

typedef struct {
    job **jobs;
    operation *operations;
    ncclComm_t *comms; /* without duplicates */
    int job_count, operation_count, comm_count;
    bool nonblocking;
} batch;

static __thread int depth;
static __thread ncclResult_t failed;
static __thread batch collected;

ncclResult_t group_error(ncclResult_t code) {
    if (depth && code && !failed)
        failed = code;
    return code;
}

static void add_comm(batch *b, ncclComm_t comm) {
    for (int i = 0; i < b->comm_count; i++)
        if (b->comms[i] == comm)
            return;
    b->comms = grown(b->comms, b->comm_count, sizeof *b->comms);
    b->comms[b->comm_count++] = comm;
    b->nonblocking |= !comm->blocking;
}

/* On the first use of a connection the host connects, and waits for the peer. */
static bool unconnected(const operation *o) {
    if (!knob(KNOB_LAZY_CONNECT))
        return false;
    if (o->kind == SEND)
        return !o->comm->sends_to[o->root];
    if (o->kind == RECV)
        return !o->comm->receives_from[o->root];
    return VERSION_SINCE(2, 22, 3) && !o->comm->connected && o->comm->size > 1;
}

static unsigned char *wanted(const operation *o) {
    int self = o->comm->rank, src = o->kind == SEND ? self : o->root;
    return &o->comm->map.wanted[src * o->comm->size + (o->kind == SEND ? o->root : self)];
}

static bool connected(const operation *o) {
    if (o->kind == SEND || o->kind == RECV)
        return __atomic_load_n(wanted(o), __ATOMIC_ACQUIRE) == 3;
    for (int r = 0; r < o->comm->size; r++)
        if (!__atomic_load_n(&o->comm->map.members[r].collective_wanted, __ATOMIC_ACQUIRE))
            return false;
    return true;
}

static ncclResult_t connect_all(batch *b) {
    bool wait = knob(KNOB_LAZY_CONNECT) > 1;
    for (int i = 0; i < b->operation_count; i++) {
        operation *o = &b->operations[i];
        if (o->kind == SEND || o->kind == RECV)
            __atomic_or_fetch(wanted(o), o->kind == SEND ? 1 : 2, __ATOMIC_ACQ_REL);
        else
            __atomic_store_n(&o->comm->map.members[o->comm->rank].collective_wanted, 1,
                             __ATOMIC_RELEASE);
    }
    for (int i = 0; i < b->operation_count; i++) {
        operation *o = &b->operations[i];
        bool first = unconnected(o);
        unsigned pause = 50;
        while (first && wait && !connected(o)) {
            for (int c = 0; c < b->comm_count; c++)
                if (comm_over(b->comms[c])) {
                    ncclResult_t state = comm_state(b->comms[c]);
                    return state && state != ncclInProgress ? state : ncclInternalError;
                }
            nap(pause);
            pause = pause < 500 ? pause * 2 : 1000;
        }
        if (o->kind == SEND)
            o->comm->sends_to[o->root] = 1;
        else if (o->kind == RECV)
            o->comm->receives_from[o->root] = 1;
        else
            o->comm->connected = true;
    }
    return ncclSuccess;
}

static void *run_job(void *argument) {
    job *j = argument;
    j->code = j->run(j);
    mark_reach(j->done);
    return NULL;
}

void in_thread(void *(*run)(void *), void *argument) {
    pthread_attr_t detached;
    pthread_t thread;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, run, argument))
        abort();
    pthread_attr_destroy(&detached);
}

static ncclResult_t run_jobs(batch *b) {
    ncclResult_t code = ncclSuccess;
    for (int i = 1; i < b->job_count; i++)
        in_thread(run_job, b->jobs[i]);
    if (b->job_count)
        run_job(b->jobs[0]);
    for (int i = 0; i < b->job_count; i++) {
        job *j = b->jobs[i];
        mark_wait(j->done);
        mark_drop(j->done);
        if (j->code) {
            code = code ? code : j->code;
            comm_fail(j->comm, j->code, NULL);
        }
    }
    return code;
}

static void discard(batch *b) {
    for (int i = 0; i < b->job_count; i++) {
        free(b->jobs[i]->argument);
        free(b->jobs[i]);
    }
    for (int i = 0; b->operations && i < b->operation_count; i++)
        operation_release(&b->operations[i]);
    free(b->jobs);
    free(b->operations);
    free(b->comms);
    *b = (batch){0};
}

static ncclResult_t run_batch(batch *b) {
    ncclResult_t code = run_jobs(b);
    if (!code)
        code = connect_all(b);
    if (!code && b->operation_count) {
        launch_enqueue(b->operations, b->operation_count);
        b->operations = NULL;
    }
    for (int i = 0; i < b->comm_count; i++) {
        if (code && b->nonblocking)
            comm_fail(b->comms[i], code, NULL);
        comm_busy(b->comms[i], -1);
    }
    discard(b);
    return code;
}

static void *run_batch_later(void *argument) {
    batch *b = argument;
    nap(200); /* long enough to expose a caller that does not wait */
    run_batch(b);
    free(b);
    return NULL;
}

/* Messages from a rank to itself need both ends in the same group. */
static ncclResult_t check_own_messages(const batch *b) {
    for (int c = 0; c < b->comm_count; c++) {
        int sends = 0, receives = 0;
        for (int i = 0; i < b->operation_count; i++) {
            const operation *o = &b->operations[i];
            bool own = o->comm == b->comms[c] && o->root == o->comm->rank;
            sends += own && o->kind == SEND;
            receives += own && o->kind == RECV;
        }
        if (sends != receives)
            return comm_complain(b->comms[c], ncclInvalidUsage,
                                 "Trying to send to self without a matching recv");
    }
    return ncclSuccess;
}

static ncclResult_t dispatch(void) {
    batch b = collected;
    ncclResult_t code = failed;
    collected = (batch){0};
    failed = ncclSuccess;
    if (!code)
        code = check_own_messages(&b);
    if (code) {
        discard(&b);
        return code;
    }
    bool slow = b.job_count > 0;
    for (int i = 0; i < b.operation_count; i++)
        slow |= unconnected(&b.operations[i]);
    for (int i = 0; i < b.comm_count; i++)
        comm_busy(b.comms[i], 1);
    if (!b.nonblocking || !slow)
        return run_batch(&b);
    batch *kept = malloc(sizeof *kept);
    if (!kept)
        abort();
    *kept = b;
    in_thread(run_batch_later, kept);
    return ncclInProgress;
}

ncclResult_t group_job(job *j) {
    j->done = mark_new(1);
    batch *b = &collected;
    b->jobs = grown(b->jobs, b->job_count, sizeof *b->jobs);
    b->jobs[b->job_count++] = j;
    add_comm(b, j->comm);
    return depth ? ncclSuccess : dispatch();
}

ncclResult_t group_operation(const operation *o) {
    batch *b = &collected;
    b->operations = grown(b->operations, b->operation_count, sizeof *b->operations);
    b->operations[b->operation_count++] = *o;
    add_comm(b, o->comm);
    return depth ? ncclSuccess : dispatch();
}

EXPORT ncclResult_t ncclGroupStart(void) {
    log_call("ncclGroupStart()");
    depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    log_call("ncclGroupEnd()");
    if (!depth)
        return comm_complain(NULL, ncclInvalidUsage,
                             "ncclGroupEnd: not in a group call.");
    return --depth ? ncclSuccess : dispatch();
}
