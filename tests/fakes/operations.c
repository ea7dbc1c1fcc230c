/* Execution of operations: each is a state machine, so that all operations of a group progress. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "numbers.h"

const char *const kind_names[] = {
    "AllReduce", "Broadcast", "Reduce",  "ReduceScatter", "AllGather",
    "AlltoAll",  "Gather",    "Scatter", "Send",          "Recv",
};

static const char *op_name(int op) {
    static const char *const names[] = {"sum", "prod", "max", "min", "avg", "premul_sum", "none"};
    return names[op < 0 || op > FOLD_PREMUL_SUM ? FOLD_PREMUL_SUM + 1 : op];
}

void operation_release(operation *o) {
    free(o->outgoing);
    free(o->incoming);
    free(o->scratch);
    free(o->scaled);
    o->outgoing = o->incoming = NULL;
    o->scratch = o->scaled = NULL;
}

static bool is_message(const operation *o) { return o->kind == SEND || o->kind == RECV; }

/* Inject the faults of the knobs, counted over the operations of the ranks in FAULT_RANK. */
static void misbehave(operation *o) {
    long rank = knob(KNOB_FAULT_RANK);
    if (rank >= 0 && rank != o->comm->rank)
        return;
    if (knob_strikes(KNOB_DIE_AT))
        _exit(DEAD_EXIT_STATUS);
    if (knob_strikes(KNOB_REMOTE_ERROR_AT))
        comm_fail(o->comm, ncclRemoteError, "remote error by FAKE_REMOTE_ERROR_AT");
}

/* Plan which bytes go to and come from each rank. finish() moves the data of the rank itself. */
static void plan(operation *o) {
    int size = o->comm->size, self = o->comm->rank;
    size_t ranks = (size_t)size, b = o->bytes;
    bool is_root = self == o->root;
    o->outgoing = calloc(ranks, sizeof(part));
    o->incoming = calloc(ranks, sizeof(part));
    bool folds = o->kind == ALL_REDUCE || o->kind == REDUCE_SCATTER || (o->kind == REDUCE && is_root);
    o->scratch = folds ? malloc(ranks * b) : NULL;
    if (!o->outgoing || !o->incoming || (folds && !o->scratch))
        abort();
    for (int r = 0; r < size; r++) {
        part *to = &o->outgoing[r], *from = &o->incoming[r];
        size_t at = (size_t)r * b;
        char *whole = (char *)(uintptr_t)o->send, *block = whole + at;
        if (r == self && !is_message(o))
            continue;
        switch (o->kind) {
        case ALL_REDUCE: *to = (part){whole, b, 0}; break;
        case REDUCE_SCATTER:
        case ALL_TO_ALL: *to = (part){block, b, 0}; break;
        case ALL_GATHER: *to = (part){whole, b, 0}; break;
        case BROADCAST: *to = (part){whole, is_root ? b : 0, 0}; break;
        case SCATTER: *to = (part){block, is_root ? b : 0, 0}; break;
        case SEND:
        case REDUCE:
        case GATHER: *to = (part){whole, r == o->root ? b : 0, 0}; break;
        case RECV: break;
        }
        switch (o->kind) {
        case ALL_REDUCE:
        case REDUCE_SCATTER: *from = (part){o->scratch + at, b, 0}; break;
        case REDUCE: *from = (part){o->scratch + at, is_root ? b : 0, 0}; break;
        case ALL_GATHER:
        case ALL_TO_ALL: *from = (part){o->recv + at, b, 0}; break;
        case GATHER: *from = (part){o->recv + at, is_root ? b : 0, 0}; break;
        case BROADCAST:
        case SCATTER:
        case RECV: *from = (part){o->recv, r == o->root ? b : 0, 0}; break;
        case SEND: break;
        }
    }
}

/* Fold the contributions in the order of the ranks. */
static void fold_all(operation *o, const char *own) {
    int size = o->comm->size;
    char factor[8];
    int op = o->op;
    memcpy(o->scratch + (size_t)o->comm->rank * o->bytes, own, o->bytes);
    if (op == ncclAvg && number_is_float(o->type)) {
        reciprocal(factor, o->type, size);
        for (int r = 0; r < size; r++)
            scale(o->scratch + (size_t)r * o->bytes, o->count, o->type, factor);
    }
    for (int r = 1; r < size; r++)
        fold(o->scratch, o->scratch + (size_t)r * o->bytes, o->count, o->type,
             op >= ncclAvg ? ncclSum : op);
    if (op == ncclAvg && !number_is_float(o->type))
        divide(o->scratch, o->count, o->type, size);
    memcpy(o->recv, o->scratch, o->bytes);
}

/* Complete an operation: all data has arrived, and all data of this rank has been written. */
static void finish(operation *o) {
    size_t b = o->bytes, at = (size_t)o->comm->rank * b;
    bool is_root = o->comm->rank == o->root;
    switch (o->kind) {
    case ALL_REDUCE: fold_all(o, o->send); break;
    case REDUCE_SCATTER: fold_all(o, o->send + at); break;
    case REDUCE:
        if (is_root)
            fold_all(o, o->send);
        break;
    case ALL_GATHER: memmove(o->recv + at, o->send, b); break;
    case ALL_TO_ALL: memmove(o->recv + at, o->send + at, b); break;
    case BROADCAST:
        if (is_root)
            memmove(o->recv, o->send, b);
        break;
    case GATHER:
        if (is_root)
            memmove(o->recv + at, o->send, b);
        break;
    case SCATTER:
        if (is_root)
            memmove(o->recv, o->send + at, b);
        break;
    case SEND:
    case RECV: break;
    }
}

/* Multiply the input by the factor, whose value is read when the operation runs. */
static void premultiply(operation *o) {
    if (is_message(o) || o->op != FOLD_PREMUL_SUM)
        return;
    size_t blocks = o->kind == REDUCE_SCATTER ? (size_t)o->comm->size : 1;
    char *scaled = malloc(blocks * o->bytes);
    if (!scaled)
        abort();
    memcpy(scaled, o->send, blocks * o->bytes);
    const user_op *by = &o->premultiplied;
    scale(scaled, blocks * o->count, o->type, by->on_device ? by->address : by->value);
    o->send = o->scaled = scaled;
}

static void post_it(operation *o) {
    uint64_t number = ++o->comm->collectives;
    post *own = &o->comm->map.members[o->comm->rank].posts[number % POSTS];
    own->count = o->count;
    own->kind = o->kind;
    own->type = o->type;
    own->op = o->op;
    own->root = o->root;
    __atomic_store_n(&own->number, number, __ATOMIC_RELEASE);
}

static void disagree(operation *o, int other, const post *theirs) {
    char text[TEXT_ROOM];
    int low = o->comm->rank < other ? o->comm->rank : other;
    int high = o->comm->rank < other ? other : o->comm->rank;
    post own = {0, o->count, o->kind, o->type, o->op, o->root};
    const post *first = low == other ? theirs : &own, *second = low == other ? &own : theirs;
    const post *both[] = {first, second};
    char calls[2][160];
    for (int i = 0; i < 2; i++)
        snprintf(calls[i], sizeof calls[i], "%s(count=%llu, datatype=%s, op=%s, root=%d)",
                 kind_names[both[i]->kind], (unsigned long long)both[i]->count,
                 number_name((ncclDataType_t)both[i]->type), op_name(both[i]->op), both[i]->root);
    snprintf(text, sizeof text, "ranks differ: rank %d called %s, rank %d %s", low, calls[0], high,
             calls[1]);
    segment_fail(&o->comm->map, ncclInvalidUsage, text);
}

/* Whether all ranks have posted this collective, with the same call. */
static bool all_posted(operation *o) {
    uint64_t number = o->comm->collectives;
    for (int r = 0; r < o->comm->size; r++) {
        const post *p = &o->comm->map.members[r].posts[number % POSTS];
        if (__atomic_load_n(&p->number, __ATOMIC_ACQUIRE) != number)
            return false;
        if (p->kind != (int)o->kind || p->count != o->count || p->type != (int)o->type ||
            p->op != o->op || p->root != o->root) {
            disagree(o, r, p);
            return false;
        }
    }
    return true;
}

/* Move the data that can be moved now. True when all data has been sent and received. */
static bool move(operation *o, bool *moved) {
    enum lane lane = is_message(o) ? LANE_MESSAGE : LANE_COLLECTIVE;
    const segment *map = &o->comm->map;
    bool all = true;
    for (int r = 0; r < o->comm->size; r++) {
        part *to = &o->outgoing[r], *from = &o->incoming[r];
        if (to->left) {
            ring *out = segment_ring(map, lane, o->comm->rank, r);
            size_t gone = ring_write(map, out, to->at, to->left);
            to->at += gone;
            to->left -= gone;
            to->end = ring_written(out);
            *moved |= gone > 0;
        }
        if (from->left) {
            ring *in = segment_ring(map, lane, r, o->comm->rank);
            size_t got = ring_read(map, in, from->at, from->left);
            from->at += got;
            from->left -= got;
            *moved |= got > 0;
        }
        all &= !to->left && !from->left;
    }
    return all;
}

static bool drained(const operation *o) {
    enum lane lane = is_message(o) ? LANE_MESSAGE : LANE_COLLECTIVE;
    for (int r = 0; r < o->comm->size; r++)
        if (o->outgoing[r].end &&
            !ring_read_up_to(segment_ring(&o->comm->map, lane, o->comm->rank, r),
                             o->outgoing[r].end))
            return false;
    return true;
}

/* A message begins with a head that describes it, so that the receiver can compare. */
static bool move_head(operation *o) {
    const segment *map = &o->comm->map;
    char *at = (char *)&o->head + sizeof o->head - o->head_left;
    ring *way = o->kind == SEND ? segment_ring(map, LANE_MESSAGE, o->comm->rank, o->root)
                                : segment_ring(map, LANE_MESSAGE, o->root, o->comm->rank);
    o->head_left -= o->kind == SEND ? ring_write(map, way, at, o->head_left)
                                    : ring_read(map, way, at, o->head_left);
    if (o->head_left)
        return false;
    if (o->kind == SEND)
        o->outgoing[o->root].end = ring_written(way);
    else if (o->head.count != o->count || o->head.type != (int)o->type)
        disagree(o, o->root, &o->head);
    return true;
}

static void begin(operation *o) {
    misbehave(o);
    if (comm_over(o->comm))
        return;
    premultiply(o);
    plan(o);
    if (is_message(o)) {
        o->head_left = sizeof o->head;
        o->head = (post){0, o->count, o->kind, o->type, o->op, o->comm->rank};
        if (o->kind == RECV)
            memset(&o->head, 0, sizeof o->head);
    } else {
        post_it(o);
    }
    o->phase = PHASE_POSTED;
}

static void step(operation *o, bool *moved) {
    enum phase before = o->phase;
    if (o->phase == PHASE_NEW)
        begin(o);
    if (o->phase == PHASE_POSTED && (is_message(o) ? move_head(o) : all_posted(o)))
        o->phase = PHASE_MOVING;
    if (comm_over(o->comm))
        return;
    if (o->phase == PHASE_MOVING && move(o, moved)) {
        finish(o);
        o->phase = PHASE_DRAINING;
    }
    if (o->phase == PHASE_DRAINING && drained(o))
        o->phase = PHASE_DONE;
    *moved |= o->phase != before;
}

/* Whether an earlier operation of this pass uses the connection; if not, reserve it. */
static bool must_wait(operation *o, uint64_t pass) {
    uint64_t *way = o->kind == SEND   ? &o->comm->sending[o->root]
                    : o->kind == RECV ? &o->comm->receiving[o->root]
                                      : &o->comm->collecting;
    bool taken = *way == pass;
    *way = pass;
    return taken;
}

void operations_run(operation *operations, int count) {
    static uint64_t passes;
    unsigned idle = 0;
    for (bool all = false; !all;) {
        uint64_t pass = __atomic_add_fetch(&passes, 1, __ATOMIC_RELAXED);
        bool moved = false;
        all = true;
        for (int i = 0; i < count; i++) {
            operation *o = &operations[i];
            if (o->phase == PHASE_DONE)
                continue;
            if (comm_aborted(o->comm)) {
                o->phase = PHASE_DONE;
                continue;
            }
            all = false;
            if (comm_over(o->comm)) {
                comm_state(o->comm); /* an error: as in NCCL, only an abort ends the operation */
                continue;
            }
            if (!must_wait(o, pass))
                step(o, &moved);
        }
        idle = moved || all ? 0 : idle + 1;
        if (idle > 50)
            nap(idle < 200 ? 50 : 1000);
        else if (idle)
            sched_yield();
    }
}
