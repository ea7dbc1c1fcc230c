/* What the ranks of one host share, and the collectives over it; see shared.c and staging.c. */
#ifndef COLLECTIVE_SHARED_H
#define COLLECTIVE_SHARED_H

#include "core.h"

/* The numbers are known to backends/shm/compiled.py. */
enum operation {
    BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER,
    SCATTER, SCAN,
    OPERATIONS
};

/* The words of a rank's line. A counter is written by its rank alone, and only grows. */
enum word {
    STEP = 0, DIGEST = 1, /* + parity */
    ASLEEP = 3,           /* see sleeping.h */
    INLINE = 4,           /* + 2 * parity: an input that is no longer */
    LOCATION = 8,         /* + 8 * parity: segment and offset of the input; of the output */
    NOTED = 34, NOTES = 39, POSTED = 40, FOLDED = 48, READ = 56,
    LINE_WORDS = 64
};

/* One rank's shared memory. */
struct stage {
    uint64_t *line;
    unsigned char *areas[2]; /* the second one is right behind the first */
};

/* A symmetric segment: where the ranks' parts of it are mapped here. */
struct segment {
    uint64_t number; /* 0 if there is none */
    size_t nbytes;   /* of a part */
    char **parts;
};

/* Bytes of an input that travels with the step. */
#define INLINE_BYTES 16

/* How many of a rank's calls are described for peers that wonder, as in backends/shm/layout.py, and
   how many segments known. */
enum { NOTES_KEPT = 64, SEGMENTS = 64 };

/* Waits until *word has come to value, see reached(), for as long as it takes; returns 0, or a
   negative number if that will not be. Called after some looks in vain. */
typedef int wait_function(void *context, int rank, const uint64_t *word, uint64_t value,
                          uint64_t most);

/* Does what can be done while the others arrive. */
typedef void arrived_function(void *context);

struct shared {
    int rank, size;
    size_t area_bytes, least_long;
    size_t ahead;    /* in both areas taken for one: where the next call of middling length goes */
    uint64_t blocks; /* of all staged calls so far, on all ranks: counters begin there */
    int looks;       /* at a word, before it is waited for */
    wait_function *wait;
    arrived_function *arrived;
    void *context;
    const uint64_t *broken; /* not 0 when a rank has failed; see is_broken() */
    uint32_t *sleepers;     /* how many ranks nap, or NULL if nobody does */
    struct stage *stages;   /* of each rank */
    const char **sources;   /* of each rank, where its input is read in this call */
    char **results;         /* of each rank, where its output is written in this call */
    struct segment segments[SEGMENTS];
    /* Of a call's input and output: the segment that it is in, or NULL, and where. */
    const struct segment *inside[2];
    size_t offset[2];
    /* After DAMAGED: the rank that has written what no rank writes, and what that is. */
    int damaging;
    const char *damage;
};

/* What all ranks do in a call; equal on them if the digests are. Numbers are of elements. */
struct plan {
    enum operation operation;
    int root;
    fold_function *fold;
    size_t folded; /* bytes of an element that it folds */
    divide_function *divide; /* by the number of ranks, or NULL */
    uint64_t digest;
    /* Of what is split or joined, where each rank's piece begins, and at [size] the whole. Of other
       calls NULL: what their ranks share they share evenly. */
    uint64_t *starts;
    uint64_t longest; /* of these pieces */
    /* Of one call: bytes of an element, and how many the whole has. */
    size_t item, count;
};

/* What a call returns if it is not 0. After DIFFERENT nothing has been written, and the ranks may go
   on. After the others the communicator is broken or has to be, and this is not used again. */
enum { DIFFERENT = 1, BROKEN = -2, DAMAGED = -3, /* or what wait returned, -1 */ };

/* Whether a peer's counter has come to value. Above most it cannot be: such a word is damaged, and
   never counts as reached, so that whoever waits for it finds out. */
static inline int reached(const uint64_t *word, uint64_t value, uint64_t most)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - value <= most - value;
}

/* Whether a rank has failed. If not, what has been read of its memory before was still there: reads
   keep their order with this one. The sanitizer for threads knows no fences. */
static inline int is_broken(const struct shared *s)
{
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
    return __atomic_load_n(s->broken, __ATOMIC_RELAXED) != 0;
}

/* Every rank calls the same, with the same plan but for its digest. Before it, and while nobody
   changes the segments, it is found out in which of them the arrays are. */
void shared_locate(struct shared *shared, const struct plan *plan, const void *src,
                   const void *dst);
int shared_call(struct shared *shared, const struct plan *plan, const void *src, void *dst);

/* Whether this rank has an input, and gets an output; how many bytes these have. */
int sends(const struct shared *shared, const struct plan *plan);
int takes(const struct shared *shared, const struct plan *plan);
size_t input_bytes(const struct shared *shared, const struct plan *plan);
size_t output_bytes(const struct shared *shared, const struct plan *plan);

/* Whether a rank gets a piece of an input; whether it gets pieces of several. */
int splits(const struct plan *plan);
int joins(const struct plan *plan);

/* Of shared.c, for staging.c, and the other way round. */
size_t start_of(const struct shared *shared, const struct plan *plan, int rank);
size_t length_of(const struct shared *shared, const struct plan *plan, int rank);
void announce(struct shared *shared, enum word word, uint64_t value);
int await(struct shared *shared, int rank, enum word word, uint64_t value);
int await_all(struct shared *shared, enum word word, uint64_t value);
int stage(struct shared *shared, const struct plan *plan, const char *src, char *dst);

#endif
