/* Declarations that all C files of the fake share: knobs, log, devices, memory, streams. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi_cuda.h"

/* Only the functions of the two ABIs and fake_* are visible (-fvisibility=hidden). */
#define EXPORT __attribute__((visibility("default")))

enum { POISON = 0xCB, MAX_DEVICES = 64 };

/* Knobs, in the order of their names in knobs.c. */
enum knob {
    KNOB_DEVICES,
    KNOB_DELAY_US,
    KNOB_HOLD, /* while not 0, no work that moves data begins */
    KNOB_SEED,
    KNOB_POISON,
    KNOB_LOG,
    KNOB_DRIVER_VERSION,
    KNOB_MEMORY_BYTES,
    KNOB_ALLOC_FAIL_AT,
    KNOB_HOST_POINTERS,
    KNOB_MULTI_RANK_GPU,
    KNOB_LAZY_CONNECT,
    KNOB_INIT_POLLS,
    KNOB_INIT_ERROR,
    KNOB_REMOTE_ERROR_AT,
    KNOB_DIE_AT,
    KNOB_FAULT_RANK,
    KNOBS,
};

long knob(enum knob which);
/* Count down a knob that names the N-th event; return true once, at the N-th event. */
bool knob_strikes(enum knob which);

void log_call(const char *format, ...) __attribute__((format(printf, 1, 2)));
void nap(unsigned microseconds);

/* Devices and memory. */
typedef struct device device;
struct CUctx_st {
    int ordinal;
    int physical;
    int retained;
    CUstream legacy, per_thread;
    size_t allocated;
};

CUresult cuda_ready(void);               /* CUDA_ERROR_NOT_INITIALIZED before cuInit */
CUcontext current_context(void);         /* NULL if there is none */
CUcontext device_context(int ordinal);   /* NULL if there is no such device */
int device_count(void);

enum memory_kind { MEMORY_UNKNOWN, MEMORY_DEVICE, MEMORY_PINNED };
typedef struct {
    uintptr_t start, end;
    CUcontext context;
    enum memory_kind kind;
    uint64_t id; /* unique, so that later memory at the same address has another id */
    bool by_nccl;
} allocation;

CUresult memory_allocate(CUcontext context, enum memory_kind kind, size_t bytes, bool by_nccl,
                         void **address);
bool memory_find(const void *address, allocation *found);
/* Forget and poison the block that starts at address; false if no block of that kind does. */
bool memory_release(const void *address, enum memory_kind kind);

/* Point in the work of a stream that other streams and threads can wait for. */
typedef struct mark mark;
mark *mark_new(int references);
void mark_reach(mark *);
void mark_wait(mark *);
bool mark_reached(mark *);
mark *mark_keep(mark *);
void mark_drop(mark *);

/* Memory that a task reads or writes: rows of width bytes at a distance of pitch bytes. */
typedef struct {
    uintptr_t start;
    size_t width, pitch, rows;
    bool writes, poison_late;
    uint64_t id; /* of the allocation that contains it, 0 for other memory */
} span;

typedef struct task task;
struct task {
    void (*run)(task *);
    bool moves; /* it moves data, so it runs after a delay */
    int span_count;
    span *spans; /* freed with the task */
    task *next;
    task *pending_before, *pending_after;
};

span span_of(const void *address, size_t bytes, bool writes);
/* Record the memory that a task uses, and poison its outputs: now, or when the task begins. */
void spans_announce(task *);
void spans_poison(task *); /* the outputs that earlier work still used */
void spans_check(task *);  /* set the sticky error if memory was freed meanwhile */
void spans_end(task *);
/* Wait until no task uses the block that contains address. */
void spans_wait_for(const void *address);

struct CUstream_st {
    CUcontext context;
    unsigned flags;
    bool destroyed;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    task *first, *last;
    uint64_t issued, finished;
    bool started;
    uint64_t random;
};

CUresult stream_resolve(CUstream handle, CUcontext context, CUstream *stream);
void stream_enqueue(CUstream stream, task *);
void stream_drain(CUstream stream);
void stream_linger(CUstream stream);
int streams_of(CUcontext context, CUstream *found, int room);
CUresult sticky_error(void);
void set_sticky_error(void);

#endif
