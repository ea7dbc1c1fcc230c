/* How ranks arrive at a call, and the ways of a call that need no more than that.

   A rank has a line: how many steps it has made, and a digest of what it does in the even and in
   the odd ones. Before its step it writes the digest, and into an area what others need of it. No
   rank makes a step before all have made the one before. So whoever writes for step s knows that
   all have made s - 1, and so are through with what they read at s - 2; and what they may still be
   reading, of s - 1, is elsewhere: in the place of the other parity, or before this one, or, if one
   of both is small and the other is not, in another part of the area.

   A store with release order makes what was written before visible to whoever loads the new value
   with acquire order: also on processors, such as ARM's, that reorder more than x86 does.

   A short call writes its input into its area, arrives, and reads those of the others. A long one
   says before it arrives where its arrays are. If all of them are in one symmetric segment, they
   are read there, with a second step when all have read; if not, the call is staged (staging.c). */

#include "shared.h"
#include "sleeping.h"

#include <string.h>

void announce(struct shared *s, enum word word, uint64_t value)
{
    __atomic_store_n(s->stages[s->rank].line + word, value, __ATOMIC_RELEASE);
    if (s->sleepers != NULL && __atomic_load_n(s->sleepers, __ATOMIC_RELAXED))
        for (int rank = 0; rank < s->size; rank++)
            wake((uint32_t *)(s->stages[rank].line + ASLEEP));
}

int await(struct shared *s, int rank, enum word which, uint64_t value)
{
    const uint64_t *word = s->stages[rank].line + which;
    /* A peer may be a step ahead, and has staged no block that this rank has not counted. */
    uint64_t most = which == STEP ? value + 1 : s->blocks;
    for (int i = 0; i < s->looks; i++) {
        if (reached(word, value, most))
            return 0;
        relax();
    }
    return s->wait(s->context, rank, word, value, most);
}

/* Waits for all other ranks. */
int await_all(struct shared *s, enum word word, uint64_t value)
{
    for (int i = 1; i < s->size; i++) {
        int failed = await(s, (s->rank + i) % s->size, word, value);
        if (failed)
            return failed;
    }
    return 0;
}

static int arrive(struct shared *s, uint64_t step, uint64_t digest)
{
    int which = DIGEST + (int)(step & 1), failed;
    s->stages[s->rank].line[which] = digest;
    announce(s, STEP, step);
    s->arrived(s->context);
    if ((failed = await_all(s, STEP, step)))
        return failed;
    for (int rank = 0; rank < s->size; rank++)
        if (s->stages[rank].line[which] != digest)
            return DIFFERENT;
    return 0;
}

/* A further step of the same call. Without this rank's no other can have come to the end of it: one
   that has failed since it arrived has left, and its memory may be in use again. */
static int depart(struct shared *s)
{
    uint64_t step = s->stages[s->rank].line[STEP] + 1;
    if (is_broken(s))
        return BROKEN;
    announce(s, STEP, step);
    return await_all(s, STEP, step);
}

/* -- operations ----------------------------------------------------------------------------- */

static int from_root(const struct plan *p)
{
    return p->operation == BROADCAST || p->operation == SCATTER;
}

int splits(const struct plan *p)
{
    return p->operation == REDUCE_SCATTER || p->operation == ALL_TO_ALL || p->operation == SCATTER;
}

int joins(const struct plan *p)
{
    return p->operation == ALL_GATHER || p->operation == GATHER || p->operation == ALL_TO_ALL;
}

int sends(const struct shared *s, const struct plan *p)
{
    return p->operation != BARRIER && (!from_root(p) || s->rank == p->root);
}

int takes(const struct shared *s, const struct plan *p)
{
    int to_root = p->operation == REDUCE || p->operation == GATHER;
    return p->operation != BARRIER && (!to_root || s->rank == p->root);
}

size_t start_of(const struct shared *s, const struct plan *p, int rank)
{
    size_t more = p->count % s->size;
    if (p->starts != NULL)
        return p->starts[rank];
    return p->count / s->size * rank + ((size_t)rank < more ? (size_t)rank : more);
}

size_t length_of(const struct shared *s, const struct plan *p, int rank)
{
    return start_of(s, p, rank + 1) - start_of(s, p, rank);
}

/* Of the input of a rank that has one. */
static size_t input_length(const struct shared *s, const struct plan *p, int rank)
{
    return joins(p) && !splits(p) ? length_of(s, p, rank) : p->count;
}

/* Of the rank that has most. */
static size_t longest_input(const struct plan *p)
{
    return p->item * (joins(p) && !splits(p) ? p->longest : p->count);
}

size_t input_bytes(const struct shared *s, const struct plan *p)
{
    return sends(s, p) ? p->item * input_length(s, p, s->rank) : 0;
}

size_t output_bytes(const struct shared *s, const struct plan *p)
{
    if (!takes(s, p))
        return 0;
    if (p->operation == ALL_TO_ALL)
        return p->item * length_of(s, p, s->rank) * s->size;
    return p->item * (splits(p) ? length_of(s, p, s->rank) : p->count);
}

/* -- reading -------------------------------------------------------------------------------- */

/* Folds elements of s->sources, in rank order, into out, which may be this rank's among these. */
static void fold_sources(struct shared *s, const struct plan *p, size_t from, size_t count,
                         char *out, char *scratch)
{
    int last = p->operation == SCAN ? s->rank : s->size - 1;
    size_t chunk = s->least_long / p->item; /* intermediate results stay in cache */
    for (size_t at = 0; at < count; at += chunk) {
        size_t number = count - at < chunk ? count - at : chunk, offset = (from + at) * p->item;
        char *result = out + at * p->item;
        const char *value = s->sources[0] + offset;
        for (int rank = 1; rank <= last; rank++) {
            char *to = rank == last ? result : scratch;
            p->fold(value, s->sources[rank] + offset, to, number);
            value = to;
        }
        if (value != result)
            memcpy(result, value, number * p->item);
        if (p->divide != NULL)
            p->divide(result, number, s->size);
    }
}

/* Sets dst to what this rank gets of s->sources. */
static void read_sources(struct shared *s, const struct plan *p, char *dst, char *scratch)
{
    size_t from = splits(p) ? start_of(s, p, s->rank) : 0;
    size_t piece = length_of(s, p, s->rank);
    if (!takes(s, p))
        return;
    if (p->fold != NULL) {
        fold_sources(s, p, from, splits(p) ? piece : p->count, dst, scratch);
        return;
    }
    for (int i = 0; i < s->size; i++) {
        int rank = (s->rank + i) % s->size;
        size_t count = splits(p) ? piece : input_length(s, p, rank);
        size_t at = !joins(p) ? 0 : splits(p) ? rank * piece : p->starts[rank];
        const char *source = s->sources[rank] + from * p->item;
        if ((from_root(p) && rank != p->root) || source == dst + at * p->item)
            continue;
        memcpy(dst + at * p->item, source, count * p->item);
    }
}

/* -- ways of a call ------------------------------------------------------------------------- */

/* Makes a call through the areas, taken for one. A small one goes where the last but one has been,
   so that its few lines stay in the nearest cache. What is longer goes behind the last one, and
   begins anew at the end, behind the two places of small ones: by the time it is written there
   again other calls have driven it out of the caches of single cores, into the one that they share.
   To write a line that is still in another core's own cache, and to fetch it from there, takes about
   three times as long; docs/decisions.md has the figures. What is of some bytes goes into the line
   that says that the rank has arrived: another one takes as long again to come from there. */
static int short_call(struct shared *s, const struct plan *p, uint64_t step, const char *src,
                      char *dst)
{
    size_t longest = longest_input(p), small = s->least_long / 6 / 64 * 64, at;
    int parity = (int)(step & 1), is_inline = longest <= INLINE_BYTES, failed;
    int goes_on = longest > small && !is_inline;
    if (!goes_on)
        at = parity * (is_inline ? INLINE_BYTES : small);
    else
        at = s->ahead < 2 * small || s->ahead + longest > 2 * s->area_bytes ? 2 * small : s->ahead;
    for (int rank = 0; rank < s->size; rank++) {
        const struct stage *stage = s->stages + rank;
        s->sources[rank] = (is_inline ? (char *)(stage->line + INLINE) : (char *)stage->areas[0]) + at;
    }
    if (sends(s, p))
        memcpy((char *)s->sources[s->rank], src, input_bytes(s, p));
    if ((failed = arrive(s, step, p->digest)))
        return failed;
    if (goes_on) /* now that all ranks make this call, it is the same on all of them */
        s->ahead = at + (longest + 63) / 64 * 64;
    /* The root of a broadcast in place has its result, in memory that may be read-only. */
    if (p->operation == BROADCAST && s->rank == p->root && src == dst)
        return 0;
    /* No input is in dst, so that it takes intermediate results too. */
    read_sources(s, p, dst, dst);
    return 0;
}

/* Finds the segment that an array is in, if any. */
static void locate(struct shared *s, int which, const char *array, size_t nbytes)
{
    s->inside[which] = NULL;
    for (int i = 0; i < SEGMENTS; i++) {
        const struct segment *segment = &s->segments[i];
        if (segment->number == 0 || array < segment->parts[s->rank])
            continue;
        s->offset[which] = (size_t)(array - segment->parts[s->rank]);
        if (s->offset[which] + nbytes <= segment->nbytes) {
            s->inside[which] = segment;
            return;
        }
    }
}

void shared_locate(struct shared *s, const struct plan *p, const void *src, const void *dst)
{
    s->inside[0] = s->inside[1] = NULL;
    if (longest_input(p) < s->least_long)
        return;
    /* Of what the root alone has the others say where they want it. */
    if (sends(s, p))
        locate(s, 0, src, input_bytes(s, p));
    else
        locate(s, 0, dst, output_bytes(s, p));
    if (p->operation == ALL_REDUCE)
        locate(s, 1, dst, output_bytes(s, p));
}

/* Bytes of the array whose place a rank announces first: its input, or else its output. */
static size_t announced_bytes(const struct shared *s, const struct plan *p, int rank)
{
    if (from_root(p) && rank != p->root)
        return p->item * (splits(p) ? length_of(s, p, rank) : p->count);
    return p->item * input_length(s, p, rank);
}

/* Sets addresses to those of all ranks' arrays, if every rank says that its array is in one segment.
   Returns whether it does, alike on all ranks, or DAMAGED.

   A peer's words are not trusted. Each is loaded once, since the peer might change it between a
   check and a use. A place counts if the whole array is in the peer's part of the segment, and
   aligned as views.c wants it of this rank's arrays. */
static int find_arrays(struct shared *s, const struct plan *p, int which, int location,
                       char **addresses)
{
    const struct segment *mine = s->inside[which];
    if (mine == NULL)
        return 0;
    for (int rank = 0; rank < s->size; rank++) {
        const uint64_t *words = s->stages[rank].line + location + 2 * which;
        uint64_t offset = s->offset[which];
        if (rank != s->rank) {
            if (__atomic_load_n(words, __ATOMIC_RELAXED) != mine->number)
                return 0;
            offset = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
        }
        size_t nbytes = which == 0 ? announced_bytes(s, p, rank) : p->item * p->count;
        if (nbytes > mine->nbytes || offset > mine->nbytes - nbytes
            || offset % (p->item > 8 ? 8 : p->item)) {
            s->damaging = rank;
            s->damage = "an array's place that is not in its symmetric memory";
            return DAMAGED;
        }
        addresses[rank] = mine->parts[rank] + offset;
    }
    return 1;
}

/* Reads all inputs where they are. Each rank folds a piece of an all_reduce for all ranks: of that
   piece it alone reads inputs and writes outputs, so that these may be the same. */
static int in_place(struct shared *s, const struct plan *p, char *dst)
{
    char *scratch = (char *)s->stages[s->rank].areas[0];
    if (p->operation != ALL_REDUCE) {
        read_sources(s, p, dst, scratch);
        return depart(s);
    }
    size_t chunk = s->least_long / p->item, stop = start_of(s, p, s->rank + 1);
    for (size_t at = start_of(s, p, s->rank); at < stop; at += chunk) {
        size_t count = stop - at < chunk ? stop - at : chunk, offset = at * p->item;
        fold_sources(s, p, at, count, dst + offset, scratch);
        if (is_broken(s)) /* a peer that has given up may have its memory back */
            return BROKEN;
        for (int i = 1; i < s->size; i++) {
            int rank = (s->rank + i) % s->size;
            memcpy(s->results[rank] + offset, dst + offset, count * p->item);
        }
    }
    return depart(s);
}

static int long_call(struct shared *s, const struct plan *p, uint64_t step, const char *src,
                     char *dst)
{
    int location = LOCATION + 8 * (int)(step & 1), failed, mapped;
    uint64_t *words = s->stages[s->rank].line + location;
    for (int which = 0; which < 2; which++) {
        words[2 * which] = s->inside[which] ? s->inside[which]->number : 0;
        words[2 * which + 1] = s->offset[which];
    }
    if ((failed = arrive(s, step, p->digest)))
        return failed;
    mapped = find_arrays(s, p, 0, location, (char **)s->sources);
    if (mapped > 0 && p->operation == ALL_REDUCE)
        mapped = find_arrays(s, p, 1, location, s->results);
    if (mapped < 0)
        return mapped;
    /* What a scan writes may be what others still read. */
    return mapped && p->operation != SCAN ? in_place(s, p, dst) : stage(s, p, src, dst);
}

int shared_call(struct shared *s, const struct plan *p, const void *src, void *dst)
{
    uint64_t step = s->stages[s->rank].line[STEP] + 1;
    if (is_broken(s))
        return BROKEN;
    return longest_input(p) < s->least_long ? short_call(s, p, step, src, dst)
                                            : long_call(s, p, step, src, dst);
}
