/* Collectives on ordinary memory, staged through memory that all ranks share.

   The array is cut into blocks. Of each block a rank posts what others need in its first area, and
   what it has folded in its second. Areas hold several blocks, as a ring, so that ranks work on
   different blocks at a time, each copying while others fold.

   The protocol is three counters a rank, which it alone writes, after what they announce: blocks
   that it has posted, folded, and read. A peer's block is read when it is announced. A block of its
   own a rank overwrites
   - in a broadcast or an all_gather, when all have announced that they have read it;
   - in an all_reduce, without asking. A rank posts one block ahead of what it folds, and areas hold
     two. When it posts block k + 1 over k - 1, it has collected k - 1, which all had folded by then:
     they need no more of what was posted of it. When it folds k over k - 2, all have posted k, which
     they do when they have collected k - 2.
   At the end of a call all have read all, and areas may be used for something else at once.
   tests/native/test_staging_model.py tries all interleavings, and finds what goes wrong if ranks
   post two blocks ahead, or areas hold one, or any one of these waits is left out. */

#include "shared.h"

#include <string.h>

/* Pieces of this size stay in the second-level cache until the peer reads them. */
#define PIECE_BYTES ((size_t)64 << 10)

enum counter { POSTED, READ };

static const uint64_t *counter_of(const struct shared *s, int rank, enum counter which)
{
    return which == POSTED ? s->stages[rank].posted : s->stages[rank].read;
}

/* Waits for all other ranks. */
static int await_all(struct shared *s, enum counter which, uint64_t value)
{
    for (int step = 1; step < s->size; step++) {
        int rank = (s->rank + step) % s->size, failed;
        if ((failed = await(s, rank, counter_of(s, rank, which), value)))
            return failed;
    }
    return 0;
}

/* Blocks of one call. Each has a piece for each rank, of this many elements, the last ones fewer. */
struct blocks {
    uint64_t first, number; /* counters before the call, and how many blocks it has */
    uint64_t depth;         /* how many an area holds */
    size_t item, count, piece;
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Cuts count elements into blocks of which at least two are in an area, if there are as many. */
static struct blocks cut(struct shared *s, size_t item, size_t count, size_t pieces,
                         size_t pieces_in_area)
{
    size_t room = s->area_bytes / 2 / (pieces_in_area * item);
    size_t piece = smaller(room, PIECE_BYTES / item);
    /* A short array in two blocks, so that one is copied while the other is folded. */
    size_t half = (count + 2 * pieces - 1) / (2 * pieces);
    half = (half + 63) / 64 * 64;
    piece = smaller(piece, half > 0 ? half : 1);
    struct blocks b = {.first = s->blocks, .item = item, .count = count, .piece = piece};
    b.number = (count + pieces * piece - 1) / (pieces * piece);
    b.depth = s->area_bytes / (pieces_in_area * piece * item);
    s->blocks += b.number;
    return b;
}

/* Where a piece is in an area. */
static size_t place(const struct blocks *b, uint64_t block, size_t pieces_in_area, size_t index)
{
    return ((b->first + block) % b->depth * pieces_in_area + index) * b->piece * b->item;
}

/* -- all_reduce ---------------------------------------------------------------------------- */

/* The elements of a rank's piece of a block: from, and how many. */
static size_t piece_of(const struct shared *s, const struct blocks *b, uint64_t block, int rank,
                       size_t *count)
{
    size_t from = smaller((block * s->size + rank) * b->piece, b->count);
    *count = smaller(b->piece, b->count - from);
    return from;
}

/* Posts this rank's part of a block: a piece for each peer, at the peer's index without its own. */
static void post(struct shared *s, const struct blocks *b, uint64_t block, const char *src)
{
    struct stage *mine = &s->stages[s->rank];
    for (int step = 1; step < s->size; step++) {
        int rank = (s->rank + step) % s->size;
        size_t count, from = piece_of(s, b, block, rank, &count);
        size_t at = place(b, block, s->size - 1, rank - (rank > s->rank));
        memcpy(mine->areas[0] + at, src + from * b->item, count * b->item);
    }
    announce(mine->posted, b->first + block + 1);
}

/* Folds this rank's piece of a block, in rank order, into its results and into dst. What it folds
   into is no rank's input, as dst may be. */
static int fold_block(struct shared *s, const struct blocks *b, uint64_t block,
                      fold_function *fold, divide_function *divide, const char *src, char *dst)
{
    struct stage *mine = &s->stages[s->rank];
    int failed;
    if ((failed = await_all(s, POSTED, b->first + block + 1)))
        return failed;
    size_t count, from = piece_of(s, b, block, s->rank, &count);
    unsigned char *result = mine->areas[1] + place(b, block, 1, 0);
    const void *value = NULL;
    for (int rank = 0; rank < s->size; rank++) {
        size_t at = place(b, block, s->size - 1, s->rank - (s->rank > rank));
        const void *input = rank == s->rank ? (const void *)(src + from * b->item)
                                            : (const void *)(s->stages[rank].areas[0] + at);
        if (rank > 0)
            fold(value, input, result, count);
        value = rank > 0 ? (const void *)result : input;
    }
    if (divide != NULL)
        divide(result, count, s->size);
    memcpy(dst + from * b->item, result, count * b->item);
    announce(mine->folded, b->first + block + 1);
    return 0;
}

static int collect(struct shared *s, const struct blocks *b, uint64_t block, char *dst)
{
    for (int step = 1; step < s->size; step++) {
        int rank = (s->rank + step) % s->size, failed;
        if ((failed = await(s, rank, s->stages[rank].folded, b->first + block + 1)))
            return failed;
        size_t count, from = piece_of(s, b, block, rank, &count);
        memcpy(dst + from * b->item, s->stages[rank].areas[1] + place(b, block, 1, 0),
               count * b->item);
    }
    announce(s->stages[s->rank].read, b->first + block + 1);
    return 0;
}

int stage_all_reduce(struct shared *s, fold_function *fold, divide_function *divide, size_t item,
                     const void *src, void *dst, size_t count)
{
    struct blocks b = cut(s, item, count, s->size, s->size - 1);
    int failed;
    if (b.number)
        post(s, &b, 0, src);
    for (uint64_t block = 0; block < b.number; block++) {
        /* For peers that are ahead. In place that is no danger: what is posted is behind all that
           has been written. */
        if (block + 1 < b.number)
            post(s, &b, block + 1, src);
        if ((failed = fold_block(s, &b, block, fold, divide, src, dst)))
            return failed;
        if ((failed = collect(s, &b, block, dst)))
            return failed;
    }
    return await_all(s, READ, s->blocks);
}

/* -- broadcast, all_gather ------------------------------------------------------------------ */

/* Puts a block of what this rank has into its area, when all have read what was there. */
static int put(struct shared *s, const struct blocks *b, uint64_t block, const char *src)
{
    struct stage *mine = &s->stages[s->rank];
    int failed;
    if (block >= b->depth && (failed = await_all(s, READ, b->first + block - b->depth + 1)))
        return failed;
    size_t from = block * b->piece, count = smaller(b->piece, b->count - from);
    memcpy(mine->areas[0] + place(b, block, 1, 0), src + from, count);
    announce(mine->posted, b->first + block + 1);
    return 0;
}

static int take(struct shared *s, const struct blocks *b, uint64_t block, int rank, char *dst)
{
    int failed;
    if ((failed = await(s, rank, s->stages[rank].posted, b->first + block + 1)))
        return failed;
    size_t from = block * b->piece, count = smaller(b->piece, b->count - from);
    memcpy(dst + from, s->stages[rank].areas[0] + place(b, block, 1, 0), count);
    return 0;
}

/* Counters that a call has not used go along with those it has, for the next one. No peer waits
   for them before it. */
static void skip(struct shared *s)
{
    struct stage *mine = &s->stages[s->rank];
    announce(mine->posted, s->blocks);
    announce(mine->folded, s->blocks);
    announce(mine->read, s->blocks);
}

int stage_broadcast(struct shared *s, int root, void *buffer, size_t nbytes)
{
    struct blocks b = cut(s, 1, nbytes, 1, 1);
    int failed;
    for (uint64_t block = 0; block < b.number; block++) {
        if (s->rank == root) {
            if ((failed = put(s, &b, block, buffer)))
                return failed;
        } else {
            if ((failed = take(s, &b, block, root, buffer)))
                return failed;
            announce(s->stages[s->rank].read, b.first + block + 1);
        }
    }
    skip(s);
    /* Others than the root have given nothing away. */
    return s->rank == root ? await_all(s, READ, s->blocks) : 0;
}

int stage_all_gather(struct shared *s, const void *src, void *dst, size_t nbytes)
{
    struct blocks b = cut(s, 1, nbytes, 1, 1);
    char *own = (char *)dst + s->rank * nbytes;
    int failed;
    if (own != (const char *)src)
        memmove(own, src, nbytes);
    if (b.number && (failed = put(s, &b, 0, own)))
        return failed;
    for (uint64_t block = 0; block < b.number; block++) {
        if (block + 1 < b.number && (failed = put(s, &b, block + 1, own)))
            return failed;
        for (int step = 1; step < s->size; step++) {
            int rank = (s->rank + step) % s->size;
            if ((failed = take(s, &b, block, rank, (char *)dst + rank * nbytes)))
                return failed;
        }
        announce(s->stages[s->rank].read, b.first + block + 1);
    }
    skip(s);
    return await_all(s, READ, s->blocks);
}
