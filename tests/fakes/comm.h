/* Communicators, and operations on them. */
#ifndef FAKE_COMM_H
#define FAKE_COMM_H

#include "abi_nccl.h"
#include "fake.h"
#include "segment.h"

enum { MAX_USER_OPS = 64, DEAD_EXIT_STATUS = 86 };

typedef struct {
    bool used, on_device;
    ncclDataType_t type;
    char value[8];
    const void *address;
} user_op;

struct ncclComm {
    bool alive, blocking;
    bool finalized; /* by ncclCommFinalize */
    bool aborted;   /* its operations must end */
    bool dying;     /* by ncclCommAbort: running calls that make a child must end, too */
    ncclComm_t child; /* being made by a running call */
    int rank, size;
    CUcontext context;
    segment map;
    uint64_t host;
    char id[NAME_ROOM];
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int error;          /* of this rank; the error of all ranks is in the segment */
    int busy;           /* calls in progress behind ncclInProgress */
    long polls;         /* of the asynchronous state, since init began */
    int pending;        /* launches issued and not ended */
    int running;        /* launches in work by a stream's thread */
    uint64_t issued, served; /* launches, in order */
    uint64_t collectives, meetings;
    bool connected;
    unsigned char *sends_to, *receives_from; /* whether connected to each peer */
    uint64_t *sending, *receiving;           /* pass in which an earlier operation uses it */
    uint64_t collecting;
    user_op user_ops[MAX_USER_OPS];
    int serial;
    char last_error[TEXT_ROOM];
};

enum kind {
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECV,
};
extern const char *const kind_names[];

/* One direction of an operation with one peer. */
typedef struct {
    char *at;
    size_t left;
    uint64_t end; /* position in the ring after the last byte, once written */
} part;

enum phase { PHASE_NEW, PHASE_POSTED, PHASE_MOVING, PHASE_DRAINING, PHASE_DONE };

typedef struct {
    enum kind kind;
    ncclComm_t comm;
    CUstream stream;
    const char *send;
    char *recv;
    size_t count, bytes; /* of one block */
    ncclDataType_t type;
    int op, root; /* the root or the peer */
    user_op premultiplied;
    enum phase phase;
    part *outgoing, *incoming; /* by rank */
    char *scratch;             /* contributions to fold, by rank */
    char *scaled;              /* the input, multiplied */
    post head;                 /* head of a message */
    size_t head_left;          /* bytes of the head still to be sent or read */
} operation;

/* Errors. */
ncclResult_t comm_complain(ncclComm_t, ncclResult_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void comm_fail(ncclComm_t, ncclResult_t code, const char *text);
ncclResult_t comm_state(ncclComm_t); /* its error, ncclInProgress or ncclSuccess */
bool comm_alive(ncclComm_t);
ncclResult_t comm_ready(ncclComm_t, const char *call);
bool comm_over(ncclComm_t); /* aborted, or in error */
bool comm_aborted(ncclComm_t);
void comm_busy(ncclComm_t, int change);

/* Calls that need other ranks. They run in a thread, so that a call can be in progress. */
typedef struct job job;
struct job {
    ncclResult_t (*run)(job *);
    ncclComm_t comm;   /* its state is "in progress" meanwhile */
    ncclComm_t made;   /* the new communicator, if any */
    ncclComm_t *result;
    void *argument;
    int integers[4];
    mark *done;
    ncclResult_t code;
};
ncclResult_t group_job(job *); /* takes the job; runs at once, or at the end of the group */
ncclResult_t group_operation(const operation *);
ncclResult_t group_error(ncclResult_t code); /* keep the error for the end of the group */

ncclComm_t comm_new(int size, int rank, CUcontext context, bool blocking);
void comm_free(ncclComm_t); /* a communicator that no caller has got */
ncclResult_t comm_attach(ncclComm_t, const char *name); /* connect to the other ranks; blocks */
void comm_end(ncclComm_t); /* later calls are refused */
/* Wait until all ranks have made a proposal; all[] gets them. False if the communicator ended. */
bool comm_meet(ncclComm_t, int kind, int64_t a, int64_t b, proposal *all);

void in_thread(void *(*run)(void *), void *argument);
void launch_enqueue(operation *operations, int count); /* takes the operations */

void *grown(void *array, int count, size_t size); /* the array, with room for one more element */

/* Run operations until all have ended, or their communicators are aborted. */
void operations_run(operation *operations, int count);
void operation_release(operation *);

#endif
