/* Launch of a group's operations on their streams. One task runs all operations, once every stream
 * and every communicator of the group has reached this point. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "comm.h"

typedef struct {
    int stream_count, comm_count, operation_count;
    operation *operations;
    ncclComm_t *comms;
    uint64_t *tickets;
    CUstream *streams;
    mark **arrived, *done;
} launch;

typedef struct {
    task base;
    launch *what;
    mark *arrived, *done;
} launch_task;

static void wait_for_turn(ncclComm_t comm, uint64_t ticket) {
    pthread_mutex_lock(&comm->mutex);
    while (comm->served != ticket && !comm_aborted(comm))
        pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->running++;
    pthread_mutex_unlock(&comm->mutex);
}

static void give_turn(ncclComm_t comm, uint64_t ticket) {
    pthread_mutex_lock(&comm->mutex);
    if (comm->served < ticket + 1)
        comm->served = ticket + 1;
    comm->running--;
    comm->pending--;
    if (!comm->alive && !comm->pending)
        segment_detach(&comm->map);
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
}

static void run_launch(task *work) {
    launch *l = ((launch_task *)work)->what;
    for (int i = 1; i < l->stream_count; i++) {
        mark_wait(l->arrived[i]);
        mark_drop(l->arrived[i]);
    }
    for (int i = 0; i < l->comm_count; i++)
        wait_for_turn(l->comms[i], l->tickets[i]);
    spans_poison(work);
    stream_linger(l->streams[0]);
    spans_check(work);
    operations_run(l->operations, l->operation_count);
    spans_end(work);
    for (int i = 0; i < l->operation_count; i++)
        operation_release(&l->operations[i]);
    for (int i = 0; i < l->comm_count; i++)
        give_turn(l->comms[i], l->tickets[i]);
    mark_reach(l->done);
    mark_drop(l->done);
    free(l->operations);
    free(l->comms);
    free(l->tickets);
    free(l->streams);
    free(l->arrived);
    free(l);
}

/* The other streams of the group wait here until the group is done. */
static void run_arrival(task *work) {
    launch_task *arrival = (launch_task *)work;
    mark_reach(arrival->arrived);
    mark_drop(arrival->arrived);
    mark_wait(arrival->done);
    mark_drop(arrival->done);
}

static void add_span(task *work, span s) {
    if (!s.width)
        return;
    work->spans = grown(work->spans, work->span_count, sizeof *work->spans);
    work->spans[work->span_count++] = s;
}

static void add_spans(task *work, const operation *o) {
    size_t all = o->bytes * (size_t)o->comm->size;
    bool is_root = o->comm->rank == o->root;
    size_t in = o->bytes, out = o->bytes;
    switch (o->kind) {
    case ALL_REDUCE: break;
    case BROADCAST: in = is_root ? in : 0; break;
    case REDUCE: out = is_root ? out : 0; break;
    case REDUCE_SCATTER: in = all; break;
    case ALL_GATHER: out = all; break;
    case ALL_TO_ALL: in = out = all; break;
    case GATHER: out = is_root ? all : 0; break;
    case SCATTER: in = is_root ? all : 0; break;
    case SEND: out = 0; break;
    case RECV: in = 0; break;
    }
    add_span(work, span_of(o->send, in, false));
    add_span(work, span_of(o->recv, out, true));
}

static void find_streams(launch *l) {
    for (int i = 0; i < l->operation_count; i++) {
        int at = 0;
        while (at < l->stream_count && l->streams[at] != l->operations[i].stream)
            at++;
        if (at < l->stream_count)
            continue;
        l->streams = grown(l->streams, l->stream_count, sizeof *l->streams);
        l->streams[l->stream_count++] = l->operations[i].stream;
    }
}

static void find_comms(launch *l) {
    for (int i = 0; i < l->operation_count; i++) {
        int at = 0;
        while (at < l->comm_count && l->comms[at] != l->operations[i].comm)
            at++;
        if (at < l->comm_count)
            continue;
        l->comms = grown(l->comms, l->comm_count, sizeof *l->comms);
        l->comms[l->comm_count++] = l->operations[i].comm;
    }
}

static launch_task *new_task(void (*run)(task *), launch *l) {
    launch_task *work = calloc(1, sizeof *work);
    if (!work)
        abort();
    work->base.run = run;
    work->what = l;
    work->done = l->done;
    return work;
}

/* Tickets and positions on streams are assigned under one lock, so that no groups deadlock. */
void launch_enqueue(operation *operations, int count) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    launch *l = calloc(1, sizeof *l);
    if (!l)
        abort();
    l->operations = operations;
    l->operation_count = count;
    find_comms(l);
    find_streams(l);
    l->tickets = calloc((size_t)l->comm_count, sizeof *l->tickets);
    l->arrived = calloc((size_t)l->stream_count, sizeof *l->arrived);
    l->done = mark_new(l->stream_count);
    launch_task *leader = new_task(run_launch, l);
    for (int i = 0; i < l->operation_count; i++)
        add_spans(&leader->base, &l->operations[i]);
    int streams = l->stream_count;
    pthread_mutex_lock(&one_at_a_time);
    for (int i = 0; i < l->comm_count; i++) {
        pthread_mutex_lock(&l->comms[i]->mutex);
        l->tickets[i] = l->comms[i]->issued++;
        l->comms[i]->pending++;
        pthread_mutex_unlock(&l->comms[i]->mutex);
    }
    for (int i = 1; i < streams; i++) {
        launch_task *arrival = new_task(run_arrival, l);
        arrival->arrived = l->arrived[i] = mark_new(2);
        stream_enqueue(l->streams[i], &arrival->base);
    }
    stream_enqueue(l->streams[0], &leader->base); /* from here on the launch may be freed */
    pthread_mutex_unlock(&one_at_a_time);
}
