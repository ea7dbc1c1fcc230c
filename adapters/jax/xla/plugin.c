/* MPI library for XLA whose calls are calls of collective: the plug-in for unmodified JAX programs.

   jaxlib contains MPItrampoline, which opens the library that MPITRAMPOLINE_LIB names when jaxlib is
   imported. XLA then uses 19 functions of it: those below. All others refuse by name (symbols.h).
   The layout of MPItrampoline's interface is its ABI 2.9: every handle is a pointer, every constant
   has 8 bytes.

   This library does not use Python's headers, and is not linked with Python: one file serves every
   Python. calls.py installs the functions that make the calls. XLA calls from several threads. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

typedef void *Handle; /* a communicator, datatype, operator or request of MPI */

/* Version of the functions that this library and Python call of each other; as in library.py. */
enum { INTERFACE = 2 };
EXPORTED const int collective_interface = INTERFACE;

EXPORTED const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 11,
                   mpiwrapper_version_patch = 0;
EXPORTED const int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
EXPORTED void mpiwrapper_export_fortran_constants_(void) {}

/* -- errors ---------------------------------------------------------------------------------- */

/* XLA's buffer for the text of an error has 512 bytes. XLA asks for the text at once, in the thread
   in which the call failed. Several requests of one thread can carry one error, so an error is a
   number of a text and not only the last text of its thread. */
enum { TEXTS = 64, TEXT_BYTES = 512, FIRST_ERROR = 1000 };
static char texts[TEXTS][TEXT_BYTES];
static atomic_uint failures;

/* Whether a KeyboardInterrupt ended the call that this thread makes in Python. */
static __thread int interrupted;

/* Keep a text, and return the error code that stands for it. */
static int fail(const char *text)
{
    unsigned i = atomic_fetch_add(&failures, 1) % TEXTS;
    snprintf(texts[i], TEXT_BYTES, "%s", text);
    return FIRST_ERROR + (int)i;
}

/* The same for Python. */
EXPORTED int collective_xla_fail(const char *text, int by_interrupt)
{
    interrupted = by_interrupt;
    return fail(text);
}

EXPORTED int MPIABI_Error_string(int code, char *text, int *length)
{
    int known = code >= FIRST_ERROR && code < FIRST_ERROR + TEXTS;
    snprintf(text, TEXT_BYTES, "%s", known ? texts[code - FIRST_ERROR] : "unknown error code");
    *length = (int)strlen(text);
    return 0;
}

/* -- names that XLA does not use ------------------------------------------------------------- */

#define CONSTANT(name, value) EXPORTED const int64_t name = value;
#define UNUSED(name) CONSTANT(name, 0x7000)
#define REFUSED(name)                                                                              \
    EXPORTED int name(void)                                                                        \
    {                                                                                              \
        return fail(#name ": collective's plug-in for XLA does not have this function of MPI. "    \
                          "Please report which program calls it.");                                \
    }
#include "symbols.h"

/* -- the function that makes the calls ------------------------------------------------------- */

/* The numbers are also in calls.py. */
enum { SPLIT, FREE, SIZE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE, FINALIZE };

/* Make a call. The result is ~ticket - value, and the value is 0 or an error code, for SIZE the size,
   for SPLIT the new handle. If an exception leaves a function that ctypes calls, its result is
   whatever was in memory. So the ticket differs from call to call.
   `count` is the number of elements of `dtype` in one piece; for EXCHANGE the number of bytes to
   send, and `received` the number of bytes to receive. A peer below 0 stands for no message. */
typedef int64_t call_function(int64_t ticket, int call, int64_t comm, const void *in, void *out,
                              int64_t count, int dtype, int op, int dst, int src, int64_t received);
static __thread uint64_t tickets; /* a signed number could not be shifted from 2^31 on */
static _Atomic(call_function *) caller;
static atomic_int begun, over;

/* Make the call of two numbers without Python, if the core can. The result is 0, or another number
   if the caller must have Python make the call, or report its failure; see
   collective/native/unlocked.c. */
typedef int run_function(int64_t first, int64_t second, const void *in, void *out);
static _Atomic(run_function *) runner;

EXPORTED void collective_xla_install(call_function *function, run_function *without_python)
{
    runner = without_python;
    caller = function;
}

/* The first number of a call for run_function; the second one is its count. As in calls.py. */
static int64_t number_of(int which, Handle comm, int dtype, int op)
{
    return ((intptr_t)comm & 0xffffffff) | (int64_t)which << 32 | (int64_t)dtype << 40
           | (int64_t)op << 48;
}

static int64_t call(int which, Handle comm, const void *in, void *out, int64_t count, int dtype,
                    int op, int dst, int src, int64_t received)
{
    /* XLA frees its communicators after Python has ended, when no callback may run any more. */
    if (over)
        return which < ALL_REDUCE ? 0 : fail("a call of XLA after MPI_Finalize");
    call_function *function = caller;
    if (function == NULL)
        return which < ALL_REDUCE
                   ? 0
                   : fail("collective could not be imported when XLA called MPI_Init. Standard "
                          "error has the reason.");
    run_function *run = runner;
    if (run != NULL && which >= ALL_REDUCE && which <= REDUCE_SCATTER
        && run(number_of(which, comm, dtype, op), count, in, out) == 0)
        return 0;
    uint64_t ticket = ++tickets << 32;
    interrupted = 0;
    uint64_t value = ~ticket
                     - (uint64_t)function((int64_t)ticket, which, (intptr_t)comm, in, out, count,
                                          dtype, op, dst, src, received);
    if (interrupted)
        raise(SIGINT); /* JAX raises an ordinary error. Python raises the interrupt after it. */
    if (value > UINT32_MAX)
        return which < ALL_REDUCE ? 0 : fail("a call was interrupted and left no error");
    return (int64_t)value;
}

/* -- begin and end --------------------------------------------------------------------------- */

/* Import the Python side, which installs its function. The library finds Python's functions in the
   process at run time. The Python side may be another version of this package. So it gets the
   version of the interface first, and does not look for the library by the name of a file. */
static void import_python_side(void)
{
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*run)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    if (ensure == NULL || release == NULL || run == NULL)
        return;
    char program[256];
    snprintf(program, sizeof program,
             "from collective.adapters.jax.xla.calls import begin\n"
             "begin(%d, %llu, %llu)\ndel begin\n",
             INTERFACE, (unsigned long long)(uintptr_t)collective_xla_fail,
             (unsigned long long)(uintptr_t)collective_xla_install);
    int state = ensure();
    run(program);
    release(state);
}

EXPORTED int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided)
{
    (void)argc, (void)argv, (void)required;
    *provided = 3; /* MPI_THREAD_MULTIPLE */
    if (!atomic_exchange(&begun, 1))
        import_python_side();
    return 0; /* XLA ignores the result: begin() keeps what failed, and the first program raises it */
}

EXPORTED int MPIABI_Initialized(int *flag) { *flag = begun; return 0; }
EXPORTED int MPIABI_Finalized(int *flag) { *flag = over; return 0; }

EXPORTED int MPIABI_Finalize(void)
{
    int failed = (int)call(FINALIZE, NULL, NULL, NULL, 0, 0, 0, -1, -1, 0);
    over = 1;
    return failed;
}

/* XLA's other MPI libraries allow calls from one thread only. Here every thread may call. */
EXPORTED int MPIABI_Is_thread_main(int *flag) { *flag = 1; return 0; }
EXPORTED int MPIABI_Get_version(int *version, int *subversion)
{
    *version = 3, *subversion = 1;
    return 0;
}

EXPORTED int MPIABI_Get_library_version(char *text, int *length)
{
    *length = sprintf(text, "collective's plug-in for XLA");
    return 0;
}

/* -- communicators --------------------------------------------------------------------------- */

/* A handle has the number of the communicator in its lower half, and this process's rank plus one
   in its upper half. XLA needs the right rank even of a communicator that could not be made: it
   copies this process's own piece without a call. */
EXPORTED int MPIABI_Comm_split(Handle comm, int color, int key, Handle *split)
{
    uint64_t number = (uint64_t)call(SPLIT, comm, NULL, NULL, 0, 0, 0, color, key, 0);
    *split = (Handle)(number | (uint64_t)(unsigned)(key + 1) << 32);
    return 0; /* XLA ignores the result: calls over a refused communicator fail */
}

EXPORTED int MPIABI_Comm_rank(Handle comm, int *rank)
{
    *rank = (int)((uint64_t)comm >> 32) - 1;
    return 0;
}

EXPORTED int MPIABI_Comm_size(Handle comm, int *size)
{
    int rank;
    MPIABI_Comm_rank(comm, &rank);
    *size = (int)call(SIZE, comm, NULL, NULL, 0, 0, 0, -1, -1, 0);
    /* Without Python the size is unknown. XLA makes a list of that length and passes the address of
       its first item. It has to make the call, which fails, and not only copy its own piece. */
    if (*size < 1)
        *size = rank < 1 ? 2 : rank + 1;
    return 0;
}

EXPORTED int MPIABI_Comm_free(Handle *comm)
{
    int failed = (int)call(FREE, *comm, NULL, NULL, 0, 0, 0, -1, -1, 0);
    *comm = NULL;
    return failed;
}

/* -- collectives ----------------------------------------------------------------------------- */

static const int element_bytes[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 8, 16};
enum { DTYPES = sizeof element_bytes / sizeof *element_bytes };

static int dtype_of(Handle handle)
{
    intptr_t value = (intptr_t)handle;
    return value >> 8 == 1 && (value & 0xff) < DTYPES ? (int)(value & 0xff) : -1;
}

static int op_of(Handle handle)
{
    intptr_t value = (intptr_t)handle;
    return value >> 8 == 2 ? (int)(value & 0xff) : -1;
}

static int unknown(const char *function)
{
    char text[TEXT_BYTES];
    snprintf(text, sizeof text, "%s: XLA uses a dtype or operator that is unknown here", function);
    return fail(text);
}

EXPORTED int MPIABI_Allreduce(const void *in, void *out, int n, Handle type, Handle op, Handle comm)
{
    int dtype = dtype_of(type), fold = op_of(op);
    if (dtype < 0 || fold < 0)
        return unknown("MPI_Allreduce");
    return (int)call(ALL_REDUCE, comm, in, out, n, dtype, fold, -1, -1, 0);
}

EXPORTED int MPIABI_Allgather(const void *in, int n, Handle type, void *out, int m, Handle type2,
                              Handle comm)
{
    int dtype = dtype_of(type);
    if (dtype < 0 || type2 != type || m != n)
        return unknown("MPI_Allgather");
    return (int)call(ALL_GATHER, comm, in, out, n, dtype, 0, -1, -1, 0);
}

EXPORTED int MPIABI_Reduce_scatter(const void *in, void *out, const int *counts, Handle type,
                                   Handle op, Handle comm)
{
    int dtype = dtype_of(type), fold = op_of(op);
    if (dtype < 0 || fold < 0)
        return unknown("MPI_Reduce_scatter");
    /* XLA's pieces all have one length. */
    return (int)call(REDUCE_SCATTER, comm, in, out, counts[0], dtype, fold, -1, -1, 0);
}

EXPORTED int MPIABI_Sendrecv(const void *in, int n, Handle type, int dst, int tag, void *out, int m,
                             Handle type2, int src, int tag2, Handle comm, void *status)
{
    (void)tag, (void)tag2, (void)status;
    int sent = dtype_of(type), received = dtype_of(type2);
    if (sent < 0 || received < 0)
        return unknown("MPI_Sendrecv");
    return (int)call(EXCHANGE, comm, in, out, (int64_t)n * element_bytes[sent], 0, 0, dst, src,
                     (int64_t)m * element_bytes[received]);
}

/* XLA's collective permute is at most one Irecv, at most one Isend, then a Wait for each, all in one
   thread. The two messages have to travel at once, or two ranks that send to each other would both
   wait. So the plug-in keeps the requests of a thread, and exchanges the messages at the first
   Wait. */
struct request {
    const void *in;
    void *out;
    int64_t nbytes;
    int receives, peer, failed, is_done;
    Handle comm;
    struct request *next;
};
static __thread struct request *pending;

/* Drop the requests that this thread has kept: XLA does not wait for them after a failure. */
static void drop_pending(void)
{
    while (pending != NULL) {
        struct request *next = pending->next;
        free(pending);
        pending = next;
    }
}

static int keep(int receives, const void *in, void *out, int n, Handle type, int peer, Handle comm,
                Handle *request)
{
    int dtype = dtype_of(type);
    if (dtype < 0) {
        drop_pending();
        return unknown(receives ? "MPI_Irecv" : "MPI_Isend");
    }
    struct request *kept = calloc(1, sizeof *kept);
    if (kept == NULL) {
        drop_pending();
        return fail("out of memory");
    }
    *kept = (struct request){in,   out, (int64_t)n * element_bytes[dtype], receives, peer, 0, 0,
                             comm, pending};
    pending = kept;
    *request = kept;
    return 0;
}

EXPORTED int MPIABI_Isend(const void *in, int n, Handle type, int dst, int tag, Handle comm,
                          Handle *request)
{
    (void)tag;
    return keep(0, in, NULL, n, type, dst, comm, request);
}

EXPORTED int MPIABI_Irecv(void *out, int n, Handle type, int src, int tag, Handle comm,
                          Handle *request)
{
    (void)tag;
    return keep(1, NULL, out, n, type, src, comm, request);
}

/* Exchange the messages that this thread has kept. */
static void exchange_pending(void)
{
    struct request *sent = NULL, *received = NULL;
    int failed = 0;
    for (struct request *r = pending; r != NULL; r = r->next) {
        struct request **same = r->receives ? &received : &sent;
        if (*same != NULL || r->comm != pending->comm)
            failed = fail("MPI_Wait: several messages in one direction, or over several "
                          "communicators, which XLA never makes");
        *same = r;
    }
    if (!failed)
        failed = (int)call(EXCHANGE, pending->comm, sent ? sent->in : NULL,
                           received ? received->out : NULL, sent ? sent->nbytes : 0, 0, 0,
                           sent ? sent->peer : -1, received ? received->peer : -1,
                           received ? received->nbytes : 0);
    for (struct request *r = pending; r != NULL; r = r->next)
        r->is_done = 1, r->failed = failed;
    pending = NULL;
}

EXPORTED int MPIABI_Wait(Handle *request, void *status)
{
    (void)status;
    struct request *kept = *request;
    if (kept == NULL)
        return 0;
    if (!kept->is_done)
        exchange_pending();
    int failed = kept->failed;
    if (!kept->is_done)
        failed = fail("MPI_Wait: XLA waits in another thread than it began in");
    free(kept);
    *request = NULL;
    return failed;
}
