/* What the ranks of one host share, and the collectives over it; see shared.c and staging.c. */
#ifndef COLLECTIVE_SHARED_H
#define COLLECTIVE_SHARED_H

#include "core.h"

/* One rank's shared memory. A counter is written by its rank alone, and only grows. */
struct stage {
    uint64_t *line;   /* its steps so far, and digests of the calls of even and odd steps */
    uint64_t *posted; /* blocks that the others may read; staging.c */
    uint64_t *folded; /* blocks of which this rank has put its folded piece into its area */
    uint64_t *read;   /* blocks of which this rank needs nothing any more */
    unsigned char *areas[2];
};

/* Waits until *word is at least value, for as long as it takes; returns 0, or a negative number if
   that will not be. Called when it has been looked at for a moment in vain. */
typedef int wait_function(void *context, int rank, const uint64_t *word, uint64_t value);

struct shared {
    int rank, size;
    size_t area_bytes;
    uint64_t blocks; /* of all staged calls so far, on all ranks: counters begin there */
    int looks;       /* at a word, before it is waited for */
    wait_function *wait;
    void *context;
    struct stage *stages; /* of each rank */
};

/* Returned where the ranks' digests differ: nothing has been written, and the ranks may go on. */
enum { DIFFERENT = 1 };

/* Each returns 0, or what wait returned: then the communicator is broken and not used again. Every
   rank calls the same. */

/* Makes a step: waits for all ranks and compares the digests of what they do. */
int shared_arrive(struct shared *shared, uint64_t step, uint64_t digest);

/* Arrives with an array of up to area_bytes, and folds those of all ranks into dst, which may be
   src. */
int shared_all_reduce(struct shared *shared, uint64_t step, uint64_t digest, fold_function *fold,
                      size_t item, const void *src, void *dst, size_t count);

/* Arrays of any length, when all have arrived. After it nobody reads this rank's areas. */
int stage_all_reduce(struct shared *shared, fold_function *fold, divide_function *divide,
                     size_t item, const void *src, void *dst, size_t count);
int stage_broadcast(struct shared *shared, int root, void *buffer, size_t nbytes);
int stage_all_gather(struct shared *shared, const void *src, void *dst, size_t nbytes);

/* Of shared.c, for staging.c. */
void announce(uint64_t *word, uint64_t value);
int await(struct shared *shared, int rank, const uint64_t *word, uint64_t value);

#endif
