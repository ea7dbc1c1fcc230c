/* Calls on ordinary memory of any length, staged through areas that all ranks share.

   The arrays are cut into blocks. Of each block a rank posts in its first area what others need,
   and in its second one what it has folded; where nothing is folded both are one. Areas hold many
   blocks, as a ring, so that ranks work on different blocks at a time, each copying while others
   fold; and so that what is written again has been driven out of the caches of single cores: see
   short_call() in shared.c.

   Either the input is split, a block has a piece for each rank, which folds it or just takes it; an
   all_reduce and a reduce are such, whose ranks share the work and then collect the results. Or all
   want the same, and a block has one piece.

   The protocol is three counters a rank, which it alone writes, after what they announce: blocks
   that it has posted, folded, and read. A peer's block is read when it is announced, and a block of
   one's own overwritten when all have announced that they have read what was there. At the end of a
   call all have read all, and areas may be used for something else at once.
   tests/native/test_staging_model.py tries all interleavings, and finds what goes wrong if any one
   of these waits is left out. */

#include "shared.h"

#include "copying.h"

#include <string.h>

/* After this much a peer is let know. */
#define PIECE_BYTES ((size_t)64 << 10)

/* What is staged in one call. */
struct staging {
    struct shared *shared;
    const struct plan *plan;
    const char *src;
    char *dst;
    int pieces;             /* that a rank posts of a block: one for each other rank, or one */
    uint64_t first, number; /* counters before the call, and how many blocks it has */
    uint64_t depth;         /* how many an area holds */
    size_t piece;           /* elements of a piece, at most */
    int around;             /* whether results go around the caches */
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int is_shared_work(const struct plan *p)
{
    return p->operation == ALL_REDUCE || p->operation == REDUCE;
}

/* Whether a block has a piece for each rank. */
static int is_cut(const struct plan *p)
{
    return splits(p) || is_shared_work(p);
}

/* How many bytes the arrays have that all ranks read and write in a call. */
static size_t touched_bytes(const struct shared *s, const struct plan *p, int in_place)
{
    int one_output = p->operation == REDUCE || p->operation == GATHER
                     || (splits(p) && p->operation != ALL_TO_ALL);
    int one_input = (joins(p) && !splits(p)) || p->operation == BROADCAST
                    || p->operation == SCATTER;
    size_t outputs = one_output ? 1 : (size_t)s->size, inputs = one_input ? 1 : (size_t)s->size;
    return p->item * p->count * (in_place ? (inputs > outputs ? inputs : outputs)
                                          : inputs + outputs);
}

/* Cuts a call into blocks, of which at least two are in an area, if there are as many. */
static struct staging cut(struct shared *s, const struct plan *p, const char *src, char *dst)
{
    struct staging c = {.shared = s, .plan = p, .src = src, .dst = dst, .first = s->blocks,
                        .around = beyond_caches(touched_bytes(s, p, src == dst),
                                                p->fold != NULL && src == dst)};
    int each = is_cut(p);
    size_t longest = p->starts != NULL ? p->longest : each ? length_of(s, p, 0) : p->count;
    c.pieces = each ? s->size - 1 : 1;
    size_t area = p->fold != NULL ? s->area_bytes : 2 * s->area_bytes;
    size_t room = area / 2 / (c.pieces * p->item);
    /* What is short in two blocks, so that one is copied while the other is folded. */
    size_t half = ((longest + 1) / 2 + 63) / 64 * 64;
    c.piece = smaller(smaller(room, PIECE_BYTES / p->item), half > 0 ? half : 1);
    c.number = (longest + c.piece - 1) / c.piece;
    c.depth = area / (c.pieces * c.piece * p->item);
    s->blocks += c.number;
    return c;
}

/* The elements of a block that are one rank's: the first, and how many. */
static size_t span(const struct staging *c, int rank, uint64_t block, size_t *count)
{
    const struct plan *p = c->plan;
    int part = p->starts != NULL || is_shared_work(p);
    size_t length = part ? length_of(c->shared, p, rank) : p->count;
    size_t from = smaller(block * c->piece, length);
    *count = smaller(c->piece, length - from);
    /* Of what is joined a rank's input is its own piece, and begins with it. */
    return from + (part && !(joins(p) && !splits(p)) ? start_of(c->shared, p, rank) : 0);
}

/* Where a piece of a block is in a rank's area. */
static char *piece_at(const struct staging *c, int rank, int area, uint64_t block, int index)
{
    size_t slot = (c->first + block) % c->depth * (area == 0 ? c->pieces : 1) + index;
    return (char *)c->shared->stages[rank].areas[area] + slot * c->piece * c->plan->item;
}

/* Where a rank has posted what this one needs: pieces are in rank order, without its own. */
static char *posted_at(const struct staging *c, int rank, uint64_t block, int reader)
{
    int each = is_cut(c->plan);
    return piece_at(c, rank, 0, block, each ? reader - (reader > rank) : 0);
}

/* Whether others need what this rank has: what the root of a gather has it takes where it is. */
static int posts(const struct shared *s, const struct plan *p)
{
    return sends(s, p) && !(p->operation == GATHER && s->rank == p->root);
}

/* Posts this rank's pieces of a block, when all have read what was there. */
static int post(const struct staging *c, uint64_t block)
{
    struct shared *s = c->shared;
    const struct plan *p = c->plan;
    int failed, each = is_cut(p);
    if (block >= c->number || !posts(s, p))
        return 0;
    if (block >= c->depth && (failed = await_all(s, READ, c->first + block - c->depth + 1)))
        return failed;
    for (int i = 1; i <= c->pieces; i++) {
        int rank = each ? (s->rank + i) % s->size : s->rank;
        size_t count, from = span(c, rank, block, &count);
        memcpy(posted_at(c, s->rank, block, rank), c->src + from * p->item, count * p->item);
    }
    announce(s, POSTED, c->first + block + 1);
    return 0;
}

/* Folds this rank's piece of a block, in rank order. What it folds into is no rank's input, as dst
   may be. */
static int fold_block(const struct staging *c, uint64_t block)
{
    struct shared *s = c->shared;
    const struct plan *p = c->plan;
    int last = p->operation == SCAN ? s->rank : s->size - 1, each = p->operation != SCAN, failed;
    size_t count, from = span(c, s->rank, block, &count);
    char *result = piece_at(c, s->rank, 1, block, 0);
    const char *value = NULL;
    for (int rank = 0; rank <= last; rank++) {
        const char *input = c->src + from * p->item;
        if (rank != s->rank) {
            if ((failed = await(s, rank, POSTED, c->first + block + 1)))
                return failed;
            input = posted_at(c, rank, block, s->rank);
        }
        if (rank > 0)
            p->fold(value, input, result, count);
        value = rank > 0 ? result : input;
    }
    if (p->divide != NULL) {
        if (value != result)
            memcpy(result, value, count * p->item);
        p->divide(result, count, s->size);
    }
    if (is_shared_work(p))
        announce(s, FOLDED, c->first + block + 1);
    else if (each)
        from = block * c->piece;
    if (takes(s, p) && c->dst + from * p->item != value)
        copy_to_result(c->dst + from * p->item, value, count * p->item, c->around);
    return 0;
}

/* Copies what this rank gets of a block, of inputs, or of what others have folded. */
static int copy_block(const struct staging *c, uint64_t block, enum word announced)
{
    struct shared *s = c->shared;
    const struct plan *p = c->plan;
    for (int i = 0; i < s->size && takes(s, p); i++) {
        int rank = (s->rank + i) % s->size, failed;
        size_t count, from = span(c, splits(p) ? s->rank : rank, block, &count);
        size_t at = from;
        const char *source = c->src + from * p->item;
        if ((p->operation == BROADCAST || p->operation == SCATTER) && rank != p->root)
            continue;
        if (announced == POSTED && p->operation != BROADCAST)
            at = block * c->piece + (p->operation == ALL_TO_ALL ? rank * length_of(s, p, s->rank)
                                     : joins(p) ? p->starts[rank] : 0);
        if (rank != s->rank) {
            if ((failed = await(s, rank, announced, c->first + block + 1)))
                return failed;
            source = announced == POSTED ? posted_at(c, rank, block, s->rank)
                                         : piece_at(c, rank, 1, block, 0);
        } else if (announced == FOLDED || c->dst + at * p->item == source) {
            continue;
        }
        copy_to_result(c->dst + at * p->item, source, count * p->item, c->around);
    }
    return 0;
}

int stage(struct shared *s, const struct plan *p, const char *src, char *dst)
{
    struct staging c = cut(s, p, src, dst);
    int failed = post(&c, 0);
    for (uint64_t block = 0; block < c.number && !failed; block++) {
        /* A block ahead, for peers that are. In place that is no danger: what is posted is behind
           all that has been written of each rank's piece. */
        if ((failed = post(&c, block + 1)))
            return failed;
        failed = p->fold != NULL ? fold_block(&c, block) : copy_block(&c, block, POSTED);
        if (!failed && is_shared_work(p))
            failed = copy_block(&c, block, FOLDED);
        if (!failed)
            announce(s, READ, c.first + block + 1);
    }
    if (failed)
        return failed;
    /* Counters that this call has not used go along with those it has, for the next one. No peer
       waits for them before it. */
    announce(s, POSTED, s->blocks);
    announce(s, FOLDED, s->blocks);
    if ((failed = await_all(s, READ, s->blocks)))
        return failed;
    return is_broken(s) ? BROKEN : 0; /* a peer that has given up has told nobody else */
}
