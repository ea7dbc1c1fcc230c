/* Calls on ordinary memory of any length, staged through areas that all ranks share.

   The arrays are cut into blocks. For each block, a rank posts the data that its peers need in its
   first area, and its folded piece in its second area. If the call folds nothing, the two areas
   count as one. An area is a ring of many blocks. So ranks can work on different blocks at a time,
   and one rank copies while another folds. Also, when a place in the ring is written again, other
   writes have driven its cache lines out of the caches of single cores: see short_call() in
   shared.c.

   There are two kinds of block. If the input is split, a block has a piece for each rank, and that
   rank folds the piece or copies it. An all_reduce and a reduce are of this kind: the ranks share
   the folding and then collect the results. If all ranks want the same data, a block has one piece.

   The protocol has three counters per rank: the blocks that the rank has posted, folded and read.
   Only the rank itself writes its counters, and it writes a counter after the data that the counter
   announces. A rank reads a peer's block after the peer has announced it. A rank overwrites a block
   in its own area after all ranks have announced that they have read the old one.

   A rank leaves the call when it has posted and read all its blocks. It does not wait for slower
   peers, which may read its area for longer. The next staged call begins with the arrival of all
   ranks, which have left this one by then. A short call writes before that, so it waits for READ.

   tests/native/test_staging_model.py tries all interleavings, and shows what goes wrong if any one
   of these waits is left out. */

#include "shared.h"

#include "copying.h"

#include <string.h>

/* Bytes of the longest piece: a rank announces its data after at most this many. */
#define PIECE_BYTES ((size_t)64 << 10)

/* One staged call, cut into blocks. */
struct staging {
    struct shared *shared;
    const struct plan *plan;
    const char *src;
    char *dst;
    int pieces;             /* pieces of a block that a rank posts: one for each peer, or one */
    uint64_t first, number; /* the counters before the call, and the number of its blocks */
    uint64_t depth, origin; /* blocks that an area holds; the first block's place among them */
    size_t piece;           /* elements of a piece, at most */
    int around;             /* whether results are written around the caches */
};

static int is_shared_work(const struct plan *p)
{
    return p->operation == ALL_REDUCE || p->operation == REDUCE;
}

/* Whether a block has a piece for each rank. */
static int is_cut(const struct plan *p)
{
    return splits(p) || is_shared_work(p);
}

/* Returns the bytes of all arrays that the ranks together read and write in a call. */
size_t touched_bytes(const struct shared *s, const struct plan *p, int in_place)
{
    int one_output = p->operation == REDUCE || p->operation == GATHER
                     || (splits(p) && p->operation != ALL_TO_ALL);
    int one_input = (joins(p) && !splits(p)) || p->operation == BROADCAST
                    || p->operation == SCATTER;
    size_t outputs = one_output ? 1 : (size_t)s->size, inputs = one_input ? 1 : (size_t)s->size;
    return p->item * p->count * (in_place ? (inputs > outputs ? inputs : outputs)
                                          : inputs + outputs);
}

/* Cuts a call into blocks. An area has room for at least two blocks. */
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
    /* A short array is cut into two blocks, so that one is copied while the other is folded. */
    size_t half = ((longest + 1) / 2 + 63) / 64 * 64;
    c.piece = smaller(smaller(room, PIECE_BYTES / p->item), half > 0 ? half : 1);
    c.number = (longest + c.piece - 1) / c.piece;
    c.depth = area / (c.pieces * c.piece * p->item);
    c.origin = c.first % c.depth;
    s->blocks += c.number;
    return c;
}

/* Finds the elements of a block that belong to one rank: returns the first, and sets the count. */
static size_t span(const struct staging *c, int rank, uint64_t block, size_t *count)
{
    const struct plan *p = c->plan;
    int part = p->starts != NULL || is_shared_work(p);
    size_t length = part ? length_of(c->shared, p, rank) : p->count;
    size_t from = smaller(block * c->piece, length);
    *count = smaller(c->piece, length - from);
    /* If pieces are joined, the input of a rank is its piece alone, so the piece begins at 0. */
    return from + (part && !(joins(p) && !splits(p)) ? start_of(c->shared, p, rank) : 0);
}

/* Returns the address of a piece of a block in a rank's area. */
static char *piece_at(const struct staging *c, int rank, int area, uint64_t block, int index)
{
    size_t slot = (c->origin + block) % c->depth * (area == 0 ? c->pieces : 1) + index;
    return (char *)c->shared->stages[rank].areas[area] + slot * c->piece * c->plan->item;
}

/* Returns the address where a rank posts the piece for a reader. The pieces are in rank order, and
   the rank posts none for itself. */
static char *posted_at(const struct staging *c, int rank, uint64_t block, int reader)
{
    int each = is_cut(c->plan);
    return piece_at(c, rank, 0, block, each ? reader - (reader > rank) : 0);
}

/* Posts this rank's pieces of a block, after all ranks have read the block that was there before.
   Does nothing behind the last block, or if no peer needs the input. */
static int post(const struct staging *c, uint64_t block)
{
    struct shared *s = c->shared;
    const struct plan *p = c->plan;
    int failed, each = is_cut(p);
    if (block >= c->number || !is_read(p, s->rank))
        return 0;
    if (block >= c->depth && (failed = await_all(s, READ, c->first + block - c->depth + 1)))
        return failed;
    for (int i = 1; i <= c->pieces; i++) {
        int rank = each ? (s->rank + i) % s->size : s->rank;
        size_t count, from = span(c, rank, block, &count);
        copy(posted_at(c, s->rank, block, rank), c->src + from * p->item, count * p->item);
    }
    announce(s, POSTED, c->first + block + 1);
    return 0;
}

/* Copies a part of the result to dst, and adds it to the sums of the result, if these are wanted. The
   part is at most PIECE_BYTES long, so it is still in the caches then. The sums are those of dst as
   the processor sees it after the copy. Stores around the caches would have to be read from memory
   again, so there the sums are those of the source. */
static void put(const struct staging *c, char *to, const char *from, size_t nbytes)
{
    struct sums *sums = c->shared->sums;
    if (sums != NULL && c->around) {
        copy_around_summed(sums, (size_t)(to - c->dst), to, from, nbytes);
        return;
    }
    copy_to_result(to, from, nbytes, c->around);
    if (sums != NULL)
        add_to_sums(sums, (size_t)(to - c->dst), to, nbytes);
}

/* Folds this rank's piece of a block, in rank order, and copies the result to dst. The fold writes
   to memory of its own and not to dst: dst may be this rank's input, which is still needed. Nor does it
   write to the second area, whose old lines a peer still holds: a fold's stores wait for each of them,
   and a long copy does not. */
static int fold_block(const struct staging *c, uint64_t block)
{
    struct shared *s = c->shared;
    const struct plan *p = c->plan;
    int last = p->operation == SCAN ? s->rank : s->size - 1, each = p->operation != SCAN, failed;
    size_t count, from = span(c, s->rank, block, &count);
    _Alignas(64) char result[PIECE_BYTES];
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
            copy(result, value, count * p->item);
        p->divide(result, count, s->size);
    }
    if (is_shared_work(p)) {
        copy(piece_at(c, s->rank, 1, block, 0), value, count * p->item);
        announce(s, FOLDED, c->first + block + 1);
    } else if (each)
        from = block * c->piece;
    if (takes(s, p) && c->dst + from * p->item != value)
        put(c, c->dst + from * p->item, value, count * p->item);
    return 0;
}

/* Copies to dst what this rank gets of a block: pieces of the inputs, if announced is POSTED, or
   the pieces that the peers have folded, if it is FOLDED. */
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
        put(c, c->dst + at * p->item, source, count * p->item);
    }
    return 0;
}

/* Writes the sums of this rank's result for the peers. READ, which the rank announces next,
   publishes them. So the peers have them at the end of the call, without another message. The fourth
   word tells to which call they belong, since a peer may want no sums, and write none.

   No peer still reads the words of an earlier call. This rank has received a block of this call from
   each peer, and a peer begins no call before it has read the words of the last one. */
static void announce_sums(const struct staging *c)
{
    const struct sums *sums = c->shared->sums;
    uint64_t *words = c->shared->stages[c->shared->rank].line + SUMS;
    words[0] = sums->total;
    words[1] = sums->placed;
    words[2] = ~(sums->total ^ sums->placed);
    words[ANNOUNCED] = c->shared->blocks;
}

/* Reads the sums of all ranks, after all of them have read all blocks. If a rank has announced none,
   no rank finds those of all. */
static void read_sums(const struct staging *c)
{
    struct shared *s = c->shared;
    s->all_announced = 1;
    for (int rank = 0; rank < s->size; rank++) {
        const uint64_t *words = s->stages[rank].line + SUMS;
        s->all_announced &= words[ANNOUNCED] == s->blocks;
        memcpy(s->announced + ANNOUNCED * rank, words, ANNOUNCED * sizeof *words);
    }
}

int stage(struct shared *s, const struct plan *p, const char *src, char *dst)
{
    struct staging c = cut(s, p, src, dst);
    int failed = post(&c, 0), is_summed = s->sums != NULL && p->operation == ALL_REDUCE;
    for (uint64_t block = 0; block < c.number && !failed; block++) {
        /* Post one block ahead, for peers that are ahead of this rank. This is safe in place, too:
           in each rank's piece, the posted elements lie behind all that have been written. */
        if ((failed = post(&c, block + 1)))
            return failed;
        failed = p->fold != NULL ? fold_block(&c, block) : copy_block(&c, block, POSTED);
        if (!failed && is_shared_work(p))
            failed = copy_block(&c, block, FOLDED);
        if (!failed && is_summed && block + 1 == c.number)
            announce_sums(&c);
        if (!failed)
            announce(s, READ, c.first + block + 1);
    }
    if (failed)
        return failed;
    /* The next call begins to count at s->blocks, so all counters advance to that, also those that
       this call has not used. No peer waits for these before the next call. */
    announce(s, POSTED, s->blocks);
    announce(s, FOLDED, s->blocks);
    s->unread = 1;
    if (is_summed) {
        if ((failed = await_all(s, READ, s->blocks)))
            return failed;
        read_sums(&c);
    }
    /* Only the flag shows that a peer has given up; the counters do not. */
    return is_broken(s) ? BROKEN : 0;
}
