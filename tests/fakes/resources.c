/* NCCL's memory, and the registrations, windows and operators of a communicator. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "numbers.h"

enum { MEET_WINDOW = 2, REGISTRATION_MAGIC = 0x52454749 };

/* Object of a handle. It is kept after its end, so that a stale handle is an error, not a crash. */
typedef struct {
    int magic;
    bool live, is_window;
    ncclComm_t comm;
} registration;

#if VERSION_SINCE(2, 11, 4)
static ncclResult_t check_range(ncclComm_t comm, const char *call, const void *address,
                                size_t size) {
    allocation block;
    if (!address || !size || !memory_find(address, &block) ||
        (uintptr_t)address + size > block.end || block.context != comm->context)
        return comm_complain(comm, ncclInvalidArgument,
                             "%s: %p + %zu is not memory of device %d", call, address, size,
                             comm->context->ordinal);
    return ncclSuccess;
}
#endif

#if VERSION_SINCE(2, 19, 1)
EXPORT ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
    CUcontext context = current_context() ? current_context() : device_context(0);
    if (!ptr || !size || !context)
        return comm_complain(NULL, ncclInvalidArgument, "MemAlloc: NULL pointer or no bytes");
    CUresult code = memory_allocate(context, MEMORY_DEVICE, size, true, ptr);
    log_call("ncclMemAlloc(size=%zu, device=%d) = %p", size, context->ordinal, code ? NULL : *ptr);
    return code ? comm_complain(NULL, ncclUnhandledCudaError, "MemAlloc: out of memory")
                : ncclSuccess;
}

EXPORT ncclResult_t ncclMemFree(void *ptr) {
    log_call("ncclMemFree(ptr=%p)", ptr);
    allocation block;
    if (!memory_find(ptr, &block) || block.start != (uintptr_t)ptr || !block.by_nccl)
        return comm_complain(NULL, ncclInvalidArgument, "MemFree: %p is not of ncclMemAlloc", ptr);
    spans_wait_for(ptr);
    memory_release(ptr, MEMORY_DEVICE);
    return ncclSuccess;
}

static registration *new_registration(ncclComm_t comm, bool is_window) {
    registration *made = calloc(1, sizeof *made);
    if (!made)
        abort();
    *made = (registration){REGISTRATION_MAGIC, true, is_window, comm};
    return made;
}

static ncclResult_t end_registration(ncclComm_t comm, registration *r, bool is_window,
                                     const char *call) {
    ncclResult_t code = comm_alive(comm) ? ncclSuccess : comm_ready(comm, call);
    if (code)
        return code;
    if (!r || r->magic != REGISTRATION_MAGIC || !r->live || r->is_window != is_window ||
        r->comm != comm)
        return comm_complain(comm, ncclInvalidArgument, "%s: unknown handle %p", call, (void *)r);
    r->live = false;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size,
                                     void **handle) {
    log_call("ncclCommRegister(comm=%p, buff=%p, size=%zu)", (void *)comm, buff, size);
    ncclResult_t code = comm_ready(comm, "CommRegister");
    if (code || (code = check_range(comm, "CommRegister", buff, size)))
        return code;
    if (!handle)
        return comm_complain(comm, ncclInvalidArgument, "CommRegister: handle argument is NULL");
    *handle = new_registration(comm, false);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    log_call("ncclCommDeregister(comm=%p, handle=%p)", (void *)comm, handle);
    return end_registration(comm, handle, false, "CommDeregister");
}
#endif

#if VERSION_SINCE(2, 27, 3)
typedef struct {
    ncclWindow_t *result;
    size_t size;
    int flags;
    bool suitable;
} window_request;

/* All ranks make this call. For memory not from ncclMemAlloc it makes no window and no error. */
static ncclResult_t run_window(job *j) {
    window_request *request = j->argument;
    proposal *all = calloc((size_t)j->comm->size, sizeof *all);
    if (!all)
        abort();
    bool met = comm_meet(j->comm, MEET_WINDOW, (int64_t)request->size, request->flags, all);
    bool same = true;
    for (int r = 0; met && r < j->comm->size; r++)
        same &= all[r].a == (int64_t)request->size && all[r].b == request->flags;
    free(all);
    if (!met)
        return comm_over(j->comm) && comm_state(j->comm) != ncclInProgress && comm_state(j->comm)
                   ? comm_state(j->comm)
                   : ncclInternalError;
    if (!same && (request->flags & NCCL_WIN_COLL_SYMMETRIC))
        return comm_complain(j->comm, ncclInvalidUsage,
                             "CommWindowRegister: ranks differ about size or flags, here %zu, %d",
                             request->size, request->flags);
    if (request->suitable)
        __atomic_store_n(request->result, (ncclWindow_t)(void *)new_registration(j->comm, true),
                         __ATOMIC_RELEASE);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size,
                                           ncclWindow_t *win, int winFlags) {
    log_call("ncclCommWindowRegister(comm=%p, buff=%p, size=%zu, winFlags=%d)", (void *)comm, buff,
             size, winFlags);
    ncclResult_t code = comm_ready(comm, "CommWindowRegister");
    if (code || (code = check_range(comm, "CommWindowRegister", buff, size)))
        return code;
    if (!win || (uintptr_t)buff % NCCL_WIN_REQUIRED_ALIGNMENT)
        return comm_complain(comm, ncclInvalidArgument,
                             "CommWindowRegister: win is NULL, or %p not aligned to %d bytes", buff,
                             NCCL_WIN_REQUIRED_ALIGNMENT);
    allocation block;
    job *j = calloc(1, sizeof *j);
    window_request *request = malloc(sizeof *request);
    if (!j || !request || !memory_find(buff, &block))
        abort();
    *win = NULL;
    *request = (window_request){win, size, winFlags, block.by_nccl};
    j->run = run_window;
    j->comm = comm;
    j->argument = request;
    return group_job(j);
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
    log_call("ncclCommWindowDeregister(comm=%p, win=%p)", (void *)comm, (void *)win);
    return win ? end_registration(comm, (registration *)(void *)win, true, "CommWindowDeregister")
               : ncclSuccess;
}
#endif

#if VERSION_SINCE(2, 11, 4)
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                             ncclScalarResidence_t residence, ncclComm_t comm) {
    log_call("ncclRedOpCreatePreMulSum(scalar=%p, datatype=%d, residence=%d, comm=%p)", scalar,
             datatype, residence, (void *)comm);
    ncclResult_t code = comm_ready(comm, "RedOpCreatePreMulSum");
    if (code)
        return code;
    size_t size = number_size(datatype);
    if (!op || !scalar || !size || (unsigned)residence > ncclScalarHostImmediate)
        return comm_complain(comm, ncclInvalidArgument,
                             "RedOpCreatePreMulSum: NULL, or datatype %d, or residence %d", datatype,
                             residence);
    bool on_device = residence == ncclScalarDevice;
    if (on_device && (code = check_range(comm, "RedOpCreatePreMulSum", scalar, size)))
        return code;
    int unused = 0;
    while (unused < MAX_USER_OPS && comm->user_ops[unused].used)
        unused++;
    if (unused == MAX_USER_OPS)
        return comm_complain(comm, ncclInvalidUsage, "RedOpCreatePreMulSum: more than %d operators",
                             MAX_USER_OPS);
    user_op *made = &comm->user_ops[unused];
    *made = (user_op){.used = true, .on_device = on_device, .type = datatype, .address = scalar};
    if (!on_device)
        memcpy(made->value, scalar, size);
    *op = (ncclRedOp_t)(ncclNumOps + comm->serial * MAX_USER_OPS + unused);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    log_call("ncclRedOpDestroy(op=%d, comm=%p)", op, (void *)comm);
    ncclResult_t code = comm_ready(comm, "RedOpDestroy");
    if (code)
        return code;
    int at = (int)op - ncclNumOps - comm->serial * MAX_USER_OPS;
    if (at < 0 || at >= MAX_USER_OPS || !comm->user_ops[at].used)
        return comm_complain(comm, ncclInvalidArgument, "RedOpDestroy: operator %d unknown to this "
                                                        "communicator",
                             op);
    comm->user_ops[at].used = false;
    return ncclSuccess;
}
#endif
