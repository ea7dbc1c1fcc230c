/* The memory that the ranks of one host share, and the collectives over it; see shared.c and
   staging.c. */
#ifndef COLLECTIVE_SHARED_H
#define COLLECTIVE_SHARED_H

#include "core.h"
#include "sums.h"

/* backends/shm/compiled.py has the same numbers. */
enum operation {
    BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER,
    SCATTER, SCAN,
    OPERATIONS
};

/* The words of a rank's line. Only the rank itself writes its counters, and they only grow. The
   parity is that of the step, 0 or 1. */
enum word {
    STEP = 0, DIGEST = 1, /* + parity */
    ASLEEP = 3,           /* see sleeping.h */
    INLINE = 4,           /* + 2 * parity: an input of at most INLINE_BYTES */
    LOCATION = 8,         /* + 8 * parity: segment and offset of the input, then of the output */
    LAST_CALL = 34, DESCRIBED = 39, POSTED = 40, FOLDED = 48, READ = 56,
    SUMS = 57,            /* four words, in the cache line of READ; see announce_sums() */
    LINE_WORDS = 64
};

/* One rank's shared memory. */
struct stage {
    uint64_t *line;
    unsigned char *areas[2]; /* the second area begins where the first one ends */
};

/* A symmetric segment. */
struct segment {
    uint64_t number;
    size_t nbytes; /* of one rank's part */
    char *parts[]; /* by rank: where its part is mapped in this process */
};

/* Bytes of the longest input that travels in the rank's line, beside the step. */
#define INLINE_BYTES 16

/* Words that a rank announces of its result, and that peers read: the two sums, and a word that shows
   whether these were damaged on their way. */
enum { ANNOUNCED = 3 };

/* CALLS_KEPT: number of a rank's last calls that are described for its peers. CALL_BYTES: bytes of a
   description. As CALLS and CALL_BYTES in backends/shm/layout.py. */
enum { CALLS_KEPT = 64, CALL_BYTES = 256 };

/* Waits until *word has reached value (see reached()), for as long as it takes. Called after the
   word has been polled in vain. Returns 0, or a negative number if the value will not come. */
typedef int wait_function(void *context, int rank, const uint64_t *word, uint64_t value,
                          uint64_t most);

/* Called after this rank has announced its arrival: does work while the other ranks arrive. */
typedef void arrived_function(void *context);

struct shared {
    int rank, size;
    size_t area_bytes, least_long;
    int crowded;     /* whether ranks share cores */
    uint64_t *pids;       /* by rank: its process, if all ranks may read each other's memory; or NULL */
    int page_map;         /* for lies_in_huge_pages() */
    size_t ahead;    /* offset of the next short call's input in the two areas, if not small */
    uint64_t blocks; /* number of blocks of all staged calls so far, equal on all ranks; the
                        counters of the next staged call begin there */
    int unread;      /* whether peers may still read what the last staged call has posted */
    int looks;       /* how often a word is polled before wait is called */
    wait_function *wait;
    arrived_function *arrived;
    void *context;
    const uint64_t *broken; /* not 0 when a rank has failed; see is_broken() */
    uint32_t *sleepers;     /* number of ranks that nap, or NULL if ranks never nap */
    struct stage *stages;   /* by rank */
    const char **sources;   /* by rank: where its input is read in this call */
    char **results;         /* by rank: where its output is written in this call */
    struct segment **segments; /* by the address of this rank's part */
    size_t known, room;        /* number of segments, and of entries */
    /* The segment that contains the call's input [0] or output [1], or NULL; and the offset of the
       array in this rank's part. */
    const struct segment *inside[2];
    size_t offset[2];
    struct sums *sums; /* where the sums of this call's result are wanted, or NULL */
    /* If all ranks have announced the sums of their results in this call: these sums, ANNOUNCED words
       by rank. */
    uint64_t *announced;
    int all_announced;
    /* After DAMAGED: the rank that has written an impossible value, and a text about the value. After
       UNREADABLE: the rank whose memory the kernel does not read. */
    int damaging;
    const char *damage;
};

/* The part of a call that is common to all ranks: plans with equal digests are equal. Lengths are
   in elements. */
struct plan {
    enum operation operation;
    int root;
    fold_function *fold;
    size_t folded; /* bytes of an element that fold takes */
    divide_function *divide; /* divides by the number of ranks; NULL if the call does not */
    uint64_t digest;
    /* If the call splits or joins arrays: where the piece of each rank begins, and at [size] the
       length of the whole. Otherwise NULL, and the ranks share any work evenly. */
    uint64_t *starts;
    uint64_t longest; /* length of the longest piece */
    /* Set for each call: an element's bytes and alignment, and the number of elements of the whole. */
    size_t item, alignment, count;
};

/* The results of a call other than 0. After DIFFERENT nothing has been written, and the ranks may
   go on. After any other result the communicator is broken or must be broken, and the caller does
   not use the struct shared again. */
enum { DIFFERENT = 1, BROKEN = -2, DAMAGED = -3, UNREADABLE = -5, /* or the result of wait */ };

/* Whether a peer's counter has reached value. No undamaged counter is above most. The unsigned
   differences make a counter above most count as not reached, so that the rank that waits for it
   runs into wait, which detects the damage. */
static inline int reached(const uint64_t *word, uint64_t value, uint64_t most)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - value <= most - value;
}

/* Whether some rank has failed. If not, the memory of the peers was still valid during all reads
   before this call: the fence keeps those reads before the load of the flag. The thread sanitizer
   does not support fences. */
static inline int is_broken(const struct shared *s)
{
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
    return __atomic_load_n(s->broken, __ATOMIC_RELAXED) != 0;
}

/* shared_call makes a call, together with all other ranks. If their plans differ, so do the
   digests, and the call returns DIFFERENT on every rank. Before it the caller calls shared_locate,
   which finds the segments that contain the arrays, while no thread changes the segments. */
void shared_locate(struct shared *shared, const struct plan *plan, const void *src,
                   const void *dst);
int shared_call(struct shared *shared, const struct plan *plan, const void *src, void *dst);

/* Whether an operation is one of those in a set of bits. */
static inline int is_one_of(const struct plan *p, unsigned operations)
{
    return (operations >> p->operation & 1) != 0;
}

/* Whether only the root has an input. */
static inline int from_root(const struct plan *p)
{
    return is_one_of(p, 1u << BROADCAST | 1u << SCATTER);
}

/* Whether a rank gets only its piece of an input; whether its output joins pieces of several
   ranks. */
static inline int splits(const struct plan *p)
{
    return is_one_of(p, 1u << REDUCE_SCATTER | 1u << ALL_TO_ALL | 1u << SCATTER);
}

static inline int joins(const struct plan *p)
{
    return is_one_of(p, 1u << ALL_GATHER | 1u << GATHER | 1u << ALL_TO_ALL);
}

/* Whether this rank has an input, whether it gets an output, and the bytes of both. */
static inline int sends(const struct shared *s, const struct plan *p)
{
    return p->operation != BARRIER && (!from_root(p) || s->rank == p->root);
}

static inline int takes(const struct shared *s, const struct plan *p)
{
    return p->operation != BARRIER
           && (!is_one_of(p, 1u << REDUCE | 1u << GATHER) || s->rank == p->root);
}

/* Whether peers read the input of a rank. The root of a gather copies its own input directly. */
static inline int is_read(const struct plan *p, int rank)
{
    return from_root(p) ? rank == p->root : p->operation != GATHER || rank != p->root;
}

size_t input_bytes(const struct shared *shared, const struct plan *plan);
size_t output_bytes(const struct shared *shared, const struct plan *plan);

/* Returns the number of segments in which this rank's part begins at or before an address. */
size_t segments_until(const struct shared *shared, const char *address);

/* Functions that shared.c and staging.c have for each other. */
size_t start_of(const struct shared *shared, const struct plan *plan, int rank);
size_t length_of(const struct shared *shared, const struct plan *plan, int rank);
void announce(struct shared *shared, enum word word, uint64_t value);
int await(struct shared *shared, int rank, enum word word, uint64_t value);
int await_all(struct shared *shared, enum word word, uint64_t value);
size_t touched_bytes(const struct shared *shared, const struct plan *plan, int in_place);
int stage(struct shared *shared, const struct plan *plan, const char *src, char *dst);

#endif
