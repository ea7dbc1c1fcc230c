/* NCCL's communication calls: they check the arguments, and add the operation to the group. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "numbers.h"

static bool is_root(const operation *o) { return o->comm->rank == o->root; }

/* Compute how many bytes a call reads and writes on this rank. */
static void sizes(const operation *o, size_t *in, size_t *out) {
    size_t b = o->bytes, all = b * (size_t)o->comm->size;
    *in = o->kind == REDUCE_SCATTER || o->kind == ALL_TO_ALL ? all : b;
    *out = o->kind == ALL_GATHER || o->kind == ALL_TO_ALL ? all : b;
    switch (o->kind) {
    case BROADCAST: *in = is_root(o) ? b : 0; break;
    case REDUCE: *out = is_root(o) ? b : 0; break;
    case GATHER: *out = is_root(o) ? all : 0; break;
    case SCATTER: *in = is_root(o) ? all : 0; break;
    case SEND: *out = 0; break;
    case RECV: *in = 0; break;
    default: break;
    }
}

/* Check that all bytes are in one allocation, on the device of the communicator. */
static ncclResult_t check_pointer(ncclComm_t comm, const char *call, const char *name,
                                  const void *address, size_t bytes) {
    allocation block;
    if (!bytes)
        return ncclSuccess;
    if (!address)
        return comm_complain(comm, ncclInvalidArgument, "%s: %s argument is NULL", call, name);
    if (!memory_find(address, &block))
        return knob(KNOB_HOST_POINTERS)
                   ? ncclSuccess
                   : comm_complain(comm, ncclInvalidArgument, "%s: %s %p is not a valid pointer",
                                   call, name, address);
    if (block.kind == MEMORY_DEVICE && block.context != comm->context)
        return comm_complain(comm, ncclInvalidArgument,
                             "%s: %s allocated on device %d mismatched with NCCL device %d", call,
                             name, block.context->ordinal, comm->context->ordinal);
    if ((uintptr_t)address + bytes > block.end)
        return comm_complain(comm, ncclInvalidArgument, "%s: %s ends %zu bytes behind its memory",
                             call, name, (size_t)((uintptr_t)address + bytes - block.end));
    return ncclSuccess;
}

/* NCCL works in place at one position only. Any other overlap is undefined, so refuse it. */
static bool overlaps_wrongly(const operation *o, size_t in, size_t out) {
    const char *recv = o->recv;
    if (!in || !out || o->send >= recv + out || recv >= o->send + in)
        return false;
    size_t own = (size_t)o->comm->rank * o->bytes;
    switch (o->kind) {
    case REDUCE_SCATTER:
    case SCATTER: return recv != o->send + own;
    case ALL_GATHER:
    case GATHER: return o->send != recv + own;
    case ALL_TO_ALL: return true;
    default: return o->send != recv;
    }
}

static ncclResult_t check_op(operation *o, const char *call) {
    int custom = o->op - ncclNumOps - o->comm->serial * MAX_USER_OPS;
    if (o->op < 0 || (o->op == ncclAvg && !VERSION_SINCE(2, 10, 3)))
        return comm_complain(o->comm, ncclInvalidArgument, "%s: invalid reduction operation %d",
                             call, o->op);
    if (o->op <= ncclAvg)
        return ncclSuccess;
    if (custom < 0 || custom >= MAX_USER_OPS || !o->comm->user_ops[custom].used)
        return comm_complain(o->comm, ncclInvalidArgument,
                             "%s: reduction operation %d unknown to this communicator", call, o->op);
    o->premultiplied = o->comm->user_ops[custom];
    o->op = FOLD_PREMUL_SUM;
    if (o->premultiplied.type != o->type)
        return comm_complain(o->comm, ncclInvalidArgument,
                             "%s: Data type supplied to user-created ncclRedOp_t does not match "
                             "type given to reduction operation",
                             call);
    return ncclSuccess;
}

static ncclResult_t issue(operation o, cudaStream_t handle, const char *call) {
    ncclResult_t code = comm_ready(o.comm, call);
    if (code)
        return code;
    size_t unit = number_size(o.type);
    if (!unit)
        return comm_complain(o.comm, ncclInvalidArgument, "%s: invalid type %d", call, o.type);
    bool rooted = o.kind == BROADCAST || o.kind == REDUCE || o.kind == GATHER || o.kind == SCATTER;
    if (o.root < (rooted ? 0 : -1) || o.root >= o.comm->size)
        return comm_complain(o.comm, ncclInvalidArgument, "%s: invalid root or peer %d (comm of %d)",
                             call, o.root, o.comm->size);
    if (o.count > ((size_t)1 << 46) / (size_t)o.comm->size)
        return comm_complain(o.comm, ncclInvalidArgument, "%s: count %zu", call, o.count);
    o.bytes = o.count * unit;
    bool folds = o.kind == ALL_REDUCE || o.kind == REDUCE || o.kind == REDUCE_SCATTER;
    if (folds && (code = check_op(&o, call)))
        return code;
    size_t in, out;
    sizes(&o, &in, &out);
    if ((code = check_pointer(o.comm, call, o.kind == RECV ? "recvbuff" : "sendbuff", o.send, in)) ||
        (code = check_pointer(o.comm, call, "recvbuff", o.recv, out)))
        return code;
    if (overlaps_wrongly(&o, in, out))
        return comm_complain(o.comm, ncclInvalidArgument, "%s: sendbuff and recvbuff overlap", call);
    if (stream_resolve(handle, o.comm->context, &o.stream) ||
        o.stream->context != o.comm->context)
        return comm_complain(o.comm, ncclUnhandledCudaError,
                             "%s: stream %p: invalid resource handle", call, (void *)handle);
    /* As in NCCL, an empty collective is dropped, but an empty message is sent. */
    if (!o.count && o.kind != SEND && o.kind != RECV)
        return ncclSuccess;
    return group_operation(&o);
}

#define LOG_FOLD(NAME, COUNT, ROOT)                                                             \
    log_call(NAME "(sendbuff=%p, recvbuff=%p, " COUNT "=%zu, datatype=%d, op=%d, root=%d, "     \
                  "comm=%p, stream=%p)",                                                        \
             sendbuff, recvbuff, count, datatype, op, ROOT, (void *)comm, (void *)stream)
#define LOG_MOVE(NAME, COUNT, ROOT)                                                             \
    log_call(NAME "(sendbuff=%p, recvbuff=%p, " COUNT "=%zu, datatype=%d, root=%d, comm=%p, "   \
                  "stream=%p)",                                                                 \
             sendbuff, recvbuff, count, datatype, ROOT, (void *)comm, (void *)stream)
#define OPERATION(KIND, SEND_FROM, RECV_TO, OP, ROOT)                                           \
    ((operation){.kind = KIND, .comm = comm, .send = SEND_FROM, .recv = RECV_TO,                \
                 .count = count, .type = datatype, .op = OP, .root = ROOT})
enum { NO_OP = -1, NO_ROOT = -1 };

EXPORT ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
    LOG_FOLD("ncclAllReduce", "count", NO_ROOT);
    return issue(OPERATION(ALL_REDUCE, sendbuff, recvbuff, (int)op, NO_ROOT), stream, "AllReduce");
}

EXPORT ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                               ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                               cudaStream_t stream) {
    LOG_FOLD("ncclReduce", "count", root);
    return issue(OPERATION(REDUCE, sendbuff, recvbuff, (int)op, root), stream, "Reduce");
}

EXPORT ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
    size_t count = recvcount;
    LOG_FOLD("ncclReduceScatter", "recvcount", NO_ROOT);
    return issue(OPERATION(REDUCE_SCATTER, sendbuff, recvbuff, (int)op, NO_ROOT), stream,
                 "ReduceScatter");
}

EXPORT ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    LOG_MOVE("ncclBroadcast", "count", root);
    return issue(OPERATION(BROADCAST, sendbuff, recvbuff, NO_OP, root), stream, "Broadcast");
}

EXPORT ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                  ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    size_t count = sendcount;
    LOG_MOVE("ncclAllGather", "sendcount", NO_ROOT);
    return issue(OPERATION(ALL_GATHER, sendbuff, recvbuff, NO_OP, NO_ROOT), stream, "AllGather");
}

#if VERSION_SINCE(2, 28, 3)
EXPORT ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count,
                                 ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    LOG_MOVE("ncclAlltoAll", "count", NO_ROOT);
    return issue(OPERATION(ALL_TO_ALL, sendbuff, recvbuff, NO_OP, NO_ROOT), stream, "AlltoAll");
}

EXPORT ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count,
                               ncclDataType_t datatype, int root, ncclComm_t comm,
                               cudaStream_t stream) {
    LOG_MOVE("ncclGather", "count", root);
    return issue(OPERATION(GATHER, sendbuff, recvbuff, NO_OP, root), stream, "Gather");
}

EXPORT ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count,
                                ncclDataType_t datatype, int root, ncclComm_t comm,
                                cudaStream_t stream) {
    LOG_MOVE("ncclScatter", "count", root);
    return issue(OPERATION(SCATTER, sendbuff, recvbuff, NO_OP, root), stream, "Scatter");
}
#endif

#if VERSION_SINCE(2, 7, 3)
EXPORT ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    log_call("ncclSend(sendbuff=%p, count=%zu, datatype=%d, peer=%d, comm=%p, stream=%p)", sendbuff,
             count, datatype, peer, (void *)comm, (void *)stream);
    if (peer < 0 || (comm_alive(comm) && peer >= comm->size))
        return comm_complain(comm, ncclInvalidArgument, "Send: invalid peer %d", peer);
    return issue(OPERATION(SEND, sendbuff, NULL, NO_OP, peer), stream, "Send");
}

EXPORT ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    log_call("ncclRecv(recvbuff=%p, count=%zu, datatype=%d, peer=%d, comm=%p, stream=%p)", recvbuff,
             count, datatype, peer, (void *)comm, (void *)stream);
    if (peer < 0 || (comm_alive(comm) && peer >= comm->size))
        return comm_complain(comm, ncclInvalidArgument, "Recv: invalid peer %d", peer);
    return issue(OPERATION(RECV, NULL, recvbuff, NO_OP, peer), stream, "Recv");
}
#endif
