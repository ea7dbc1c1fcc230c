/* The arrival of ranks at a call, and the kinds of call that need little more: short calls, long calls
   in symmetric memory, and those in which the kernel copies from a peer's array.

   Each rank has a line of words in shared memory. The line holds the number of steps that the rank
   has made, and two digests: of its call in even steps and of its call in odd steps. Before a rank
   announces a step it writes the digest, and it writes the data that its peers need into an area.

   No rank makes step s before all ranks have made step s - 1. So a rank that writes for step s
   knows two things. First, all ranks have made step s - 1, so they have finished all their reads of
   step s - 2. Second, a slow peer may still be reading the data of step s - 1. The writer does not
   touch that data: it is in the place of the other parity, or before the place that is written now,
   or, if one of the two inputs is small and the other is not, in another part of the area.

   A step is announced by a store with release order. A peer that loads the new value with acquire
   order sees everything that the rank wrote before the store. This also holds on processors that
   reorder more than x86 does, such as ARM's.

   In a short call a rank writes its input into its area, arrives, and reads the inputs of the other
   ranks. In a long call a rank announces the places of its arrays when it arrives. If the arrays of
   all ranks are in one symmetric segment, the ranks read them there, and a second step tells that
   all ranks have read. It is the same if the kernel copies quickly from all inputs (is_left()). If not,
   the call goes on as a short one, if all inputs have been written ahead of the arrival
   (writes_ahead()), or it is staged (staging.c). */

#include "shared.h"
#include "copying.h"
#include "fetching.h"
#include "sleeping.h"

#include <string.h>

/* An input that is written ahead has at most this many eighths of an area. So three of them and the
   places of small ones fit into the two areas: where one is written, the last one does not lie. */
#define MOST_EIGHTHS_AHEAD 5
/* Bytes of all inputs in a call that folds what was written ahead, at most. */
#define MOST_FOLDED_AHEAD ((size_t)256 << 10)
/* In place of the number of a segment: the input is left to the kernel, and the next word is its address
   in the memory of its rank. */
#define LEFT UINT64_MAX

/* Announces a value of one of this rank's counters, and wakes the ranks that nap. There is no fence
   between the store and the load of sleepers, for the reason in sleeping.h. */
void announce(struct shared *s, enum word word, uint64_t value)
{
    __atomic_store_n(s->stages[s->rank].line + word, value, __ATOMIC_RELEASE);
    if (s->sleepers != NULL && __atomic_load_n(s->sleepers, __ATOMIC_RELAXED))
        for (int rank = 0; rank < s->size; rank++)
            wake((uint32_t *)(s->stages[rank].line + ASLEEP));
}

/* Waits until a word of one rank has reached a value. */
int await(struct shared *s, int rank, enum word which, uint64_t value)
{
    const uint64_t *word = s->stages[rank].line + which;
    /* The highest value that an undamaged counter can have. A peer may be one step ahead. No peer
       has staged more blocks than this rank has counted, since all ranks count the blocks of the
       current call before they stage it. */
    uint64_t most = which == STEP ? value + 1 : s->blocks;
    for (int i = 0; i < s->looks; i++) {
        if (reached(word, value, most))
            return 0;
        relax();
    }
    return s->wait(s->context, rank, word, value, most);
}

/* Waits until the same word of every other rank has reached a value. */
int await_all(struct shared *s, enum word word, uint64_t value)
{
    for (int i = 1, rank = s->rank; i < s->size; i++) {
        rank = rank + 1 < s->size ? rank + 1 : 0; /* a division takes as long as a look */
        int failed = await(s, rank, word, value);
        if (failed)
            return failed;
    }
    return 0;
}

/* Makes the first step of a call: waits for all ranks, and returns DIFFERENT if a digest differs. A
   peer's digest can be loaded without atomics here. The peer wrote it before it announced the step,
   and a peer that is one step ahead has written its next digest to the word of the other parity. */
static int arrive(struct shared *s, uint64_t step, uint64_t digest)
{
    int which = DIGEST + (int)(step & 1), failed;
    s->stages[s->rank].line[which] = digest;
    announce(s, STEP, step);
    s->arrived(s->context);
    if ((failed = await_all(s, STEP, step)))
        return failed;
    s->unread = 0; /* all ranks have left the last call */
    for (int rank = 0; rank < s->size; rank++)
        if (s->stages[rank].line[which] != digest)
            return DIFFERENT;
    return 0;
}

/* Makes a further step of the same call: tells the peers that this rank has finished with their
   memory, and waits until all ranks have done so.

   No rank can finish the call before this rank makes the step. A rank that has failed since it
   arrived has left the call all the same, and may use its memory again. Then the data that this
   rank read there may be wrong, so the broken flag is checked before the step. */
static int depart(struct shared *s)
{
    uint64_t step = s->stages[s->rank].line[STEP] + 1;
    if (is_broken(s))
        return BROKEN;
    announce(s, STEP, step);
    return await_all(s, STEP, step);
}

/* -- operations ----------------------------------------------------------------------------- */

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

/* Elements of the input of a rank that has one. */
static size_t input_length(const struct shared *s, const struct plan *p, int rank)
{
    return joins(p) && !splits(p) ? length_of(s, p, rank) : p->count;
}

/* Bytes of the longest input of all ranks. */
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

/* Folds elements of s->sources into out, in rank order. Intermediate results go to scratch, so out may
   be this rank's own source: it is written after the last source has been read. Without scratch they go
   to out. */
static void fold_sources(struct shared *s, const struct plan *p, size_t from, size_t count,
                         char *out, char *scratch)
{
    int last = p->operation == SCAN ? s->rank : s->size - 1;
    /* Intermediate results stay in cache. A short call has one chunk, and makes no division: that would
       take as long as its fold. */
    size_t chunk = count * p->item <= s->least_long ? count : s->least_long / p->item;
    for (size_t at = 0; at < count; at += chunk) {
        size_t number = count - at < chunk ? count - at : chunk, offset = (from + at) * p->item;
        char *result = out + at * p->item;
        const char *value = s->sources[0] + offset;
        for (int rank = 1; rank <= last; rank++) {
            char *to = rank == last || scratch == NULL ? result : scratch;
            p->fold(value, s->sources[rank] + offset, to, number);
            value = to;
        }
        if (value != result)
            copy(result, value, number * p->item);
        if (p->divide != NULL)
            p->divide(result, number, s->size);
    }
}

/* Sets dst to this rank's result, which is read or folded from s->sources. With pids, the sources are
   addresses in the processes of their ranks. Returns 0, or UNREADABLE. */
static int read_sources(struct shared *s, const struct plan *p, char *dst, char *scratch,
                        const uint64_t *pids)
{
    int around = pids != NULL && beyond_caches(touched_bytes(s, p, 0), 0);
    size_t from = splits(p) ? start_of(s, p, s->rank) : 0;
    size_t piece = splits(p) ? length_of(s, p, s->rank) : 0;
    if (!takes(s, p))
        return 0;
    if (p->fold != NULL) {
        fold_sources(s, p, from, splits(p) ? piece : p->count, dst, scratch);
        return 0;
    }
    for (int i = 0; i < s->size; i++) {
        int rank = (s->rank + i) % s->size;
        size_t count = splits(p) ? piece : input_length(s, p, rank);
        size_t at = !joins(p) ? 0 : splits(p) ? rank * piece : p->starts[rank];
        const char *source = s->sources[rank] + from * p->item;
        if (from_root(p) && rank != p->root)
            continue;
        if (pids == NULL || rank == s->rank) {
            if (source != dst + at * p->item)
                copy_to_result(dst + at * p->item, source, count * p->item, around);
        } else if (!fetch_memory((long)pids[rank], dst + at * p->item, source, count * p->item)) {
            s->damaging = rank;
            return UNREADABLE;
        }
    }
    return 0;
}

/* -- kinds of call -------------------------------------------------------------------------- */

/* Finds where the inputs of this step go, at the same place in the areas of all ranks, and sets
   s->sources to them. Returns the place where the next step's input goes if it is not small. The two
   areas of a rank count as one area here.

   A small input goes to the place of the step's parity, which the last call but one has used. So
   its few cache lines stay in the nearest cache.

   A longer input goes behind the previous one. When the area is full, the place wraps to the first
   byte behind the two places of small inputs. Before a place is written again, other calls have
   driven its cache lines out of the caches of single cores, into the cache that the cores share. If
   a line were still in another core's own cache, it would take about three times as long to write
   it and to fetch it from there; docs/measurements/native.md has the figures.

   An input of at most INLINE_BYTES goes into the same cache line as the step, which the peers fetch
   in any case. A second cache line would take as long again to arrive. */
static size_t place_inputs(struct shared *s, const struct plan *p, uint64_t step)
{
    size_t longest = longest_input(p), small = s->least_long / 6 / 64 * 64, at;
    int parity = (int)(step & 1), is_inline = longest <= INLINE_BYTES;
    int goes_on = longest > small && !is_inline;
    if (!goes_on)
        at = parity * (is_inline ? INLINE_BYTES : small);
    else
        at = s->ahead < 2 * small || s->ahead + longest > 2 * s->area_bytes ? 2 * small : s->ahead;
    for (int rank = 0; rank < s->size; rank++) {
        const struct stage *stage = s->stages + rank;
        s->sources[rank] = (is_inline ? (char *)(stage->line + INLINE) : (char *)stage->areas[0]) + at;
    }
    return goes_on ? at + (longest + 63) / 64 * 64 : s->ahead;
}

/* Writes this rank's input for its peers, who may still read the blocks of a staged call. */
static int write_input(struct shared *s, const struct plan *p, const char *src)
{
    int failed = s->unread && longest_input(p) > INLINE_BYTES ? await_all(s, READ, s->blocks) : 0;
    if (!failed)
        copy((char *)s->sources[s->rank], src, input_bytes(s, p));
    return failed;
}

/* Reads the inputs of all ranks, after all have written them. So it is certain now that all ranks make
   this call, and s->ahead stays equal on them. */
static int read_inputs(struct shared *s, const struct plan *p, size_t ahead, const char *src, char *dst)
{
    s->ahead = ahead;
    /* In a broadcast in place the root has its result already. Its array may be read-only. */
    if (p->operation == BROADCAST && s->rank == p->root && src == dst)
        return 0;
    /* The inputs are read from the areas, never from dst, so dst may hold intermediate results. */
    return read_sources(s, p, dst, NULL, NULL);
}

static int short_call(struct shared *s, const struct plan *p, uint64_t step, const char *src,
                      char *dst)
{
    size_t ahead = place_inputs(s, p, step);
    int failed = sends(s, p) ? write_input(s, p, src) : 0;
    if (!failed)
        failed = arrive(s, step, p->digest);
    return failed ? failed : read_inputs(s, p, ahead, src, dst);
}

size_t segments_until(const struct shared *s, const char *address)
{
    size_t from = 0, stop = s->known;
    while (from < stop) {
        size_t middle = (from + stop) / 2;
        if (s->segments[middle]->parts[s->rank] <= address)
            from = middle + 1;
        else
            stop = middle;
    }
    return from;
}

/* Finds the symmetric segment that contains an array, if any. */
static void locate(struct shared *s, int which, const char *array, size_t nbytes)
{
    size_t until = segments_until(s, array);
    const struct segment *last = until > 0 ? s->segments[until - 1] : NULL;
    s->offset[which] = last != NULL ? (size_t)(array - last->parts[s->rank]) : 0;
    s->inside[which] = last != NULL && s->offset[which] + nbytes <= last->nbytes ? last : NULL;
}

void shared_locate(struct shared *s, const struct plan *p, const void *src, const void *dst)
{
    s->inside[0] = s->inside[1] = NULL;
    if (longest_input(p) < s->least_long)
        return;
    /* Where only the root has an input, the other ranks announce the place of their output. */
    if (sends(s, p))
        locate(s, 0, src, input_bytes(s, p));
    else
        locate(s, 0, dst, output_bytes(s, p));
    if (p->operation == ALL_REDUCE)
        locate(s, 1, dst, output_bytes(s, p));
}

/* Bytes of the array whose place a rank announces first: its input, or its output if it has no
   input. */
static size_t announced_bytes(const struct shared *s, const struct plan *p, int rank)
{
    if (from_root(p) && rank != p->root)
        return p->item * (splits(p) ? length_of(s, p, rank) : p->count);
    return p->item * input_length(s, p, rank);
}

/* Finds the addresses of all ranks' arrays, if all ranks announce the same segment. Returns whether
   they do, with the same answer on all ranks, or DAMAGED.

   The words of a peer are not trusted. Each word is loaded once, since the peer might change it
   between the check and the use. A place is valid if the whole array is in the peer's part of the
   segment, and if it is aligned as views.c requires of this rank's own arrays. */
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
        if (nbytes > mine->nbytes || offset > mine->nbytes - nbytes || offset % p->alignment) {
            s->damaging = rank;
            s->damage = "an array's place is misaligned or outside of its symmetric memory";
            return DAMAGED;
        }
        addresses[rank] = mine->parts[rank] + offset;
    }
    return 1;
}

/* Makes a call in symmetric memory: all ranks read the inputs where they are. In an all_reduce each
   rank folds one piece for all ranks. Only this rank reads that piece of the inputs and writes that
   piece of the outputs, so the output of a rank may be its input. */
static int in_place(struct shared *s, const struct plan *p, char *dst)
{
    char *scratch = (char *)s->stages[s->rank].areas[0];
    if (p->operation != ALL_REDUCE) {
        read_sources(s, p, dst, scratch, NULL);
        return depart(s);
    }
    size_t chunk = s->least_long / p->item, stop = start_of(s, p, s->rank + 1);
    for (size_t at = start_of(s, p, s->rank); at < stop; at += chunk) {
        size_t count = stop - at < chunk ? stop - at : chunk, offset = at * p->item;
        fold_sources(s, p, at, count, dst + offset, scratch);
        /* A peer that has given up may use its memory again, so nothing may be written there. */
        if (is_broken(s))
            return BROKEN;
        for (int i = 1; i < s->size; i++) {
            int rank = (s->rank + i) % s->size;
            copy(s->results[rank] + offset, dst + offset, count * p->item);
        }
    }
    return depart(s);
}

/* Whether the ranks write their inputs before they arrive, as in a short call, if these are not in
   symmetric memory. Each rank then waits once, and folds all of its result alone. A staged call waits
   for its first block, too, but its ranks share the fold, and copy in and out at the same time. Ranks
   that share cores do nothing at the same time. In an all_gather each rank has one input to copy in, and
   those of all its peers to copy out. */
static int writes_ahead(const struct shared *s, const struct plan *p)
{
    size_t most = s->area_bytes / 8 * MOST_EIGHTHS_AHEAD;
    if (p->fold != NULL)
        most = s->crowded ? smaller(most, MOST_FOLDED_AHEAD / (size_t)s->size) : 0;
    else if (!s->crowded && p->operation != ALL_GATHER)
        most = 0;
    return longest_input(p) <= most;
}

/* Whether all ranks that have an input have written it. */
static int have_written(const struct shared *s, const struct plan *p, int location)
{
    int written = 1;
    for (int rank = 0; rank < s->size; rank++)
        if (!from_root(p) || rank == p->root)
            written &= __atomic_load_n(s->stages[rank].line + location, __ATOMIC_RELAXED) == 0;
    return written;
}

/* Whether this rank leaves its input to the kernel, which copies it once to each peer. In a broadcast and
   a gather beyond the caches two copies are quicker: there the one rank's copies take all the time, and
   those of a staged call bypass the caches. */
static int is_left(const struct shared *s, const struct plan *p, const char *src)
{
    size_t nbytes = input_bytes(s, p);
    int one_array = is_one_of(p, 1u << BROADCAST | 1u << GATHER);
    return s->pids != NULL && p->fold == NULL && is_read(p, s->rank) && nbytes >= LEAST_LEFT
           && !(one_array && beyond_caches(touched_bytes(s, p, 0), 0))
           && lies_in_huge_pages(s->page_map, src, nbytes);
}

/* Sets s->sources to the addresses of the inputs, if all that are read are left to the kernel. Returns
   whether they are, with the same answer on all ranks. An address need not be checked: at worst the
   kernel reads the wrong memory of the peer that has written it. */
static int find_left(struct shared *s, const struct plan *p, const char *src, int location)
{
    if (s->pids == NULL || p->fold != NULL)
        return 0;
    for (int rank = 0; rank < s->size; rank++) {
        const uint64_t *words = s->stages[rank].line + location;
        if (is_read(p, rank) && __atomic_load_n(words, __ATOMIC_RELAXED) != LEFT)
            return 0;
        s->sources[rank] = (const char *)(uintptr_t)__atomic_load_n(words + 1, __ATOMIC_RELAXED);
    }
    s->sources[s->rank] = src;
    return 1;
}

/* Makes a call in which each rank has the kernel copy what it needs from the inputs of its peers. If the
   kernel refuses since a peer has died, the wait notices that. */
static int fetch(struct shared *s, const struct plan *p, char *dst)
{
    int unread = read_sources(s, p, dst, NULL, s->pids), failed = depart(s);
    return failed ? failed : unread;
}

static int long_call(struct shared *s, const struct plan *p, uint64_t step, const char *src,
                     char *dst)
{
    int location = LOCATION + 8 * (int)(step & 1), failed, mapped, writes = writes_ahead(s, p);
    uint64_t *words = s->stages[s->rank].line + location;
    size_t ahead = writes ? place_inputs(s, p, step) : s->ahead;
    for (int which = 0; which < 2; which++) {
        words[2 * which] = s->inside[which] ? s->inside[which]->number : 0;
        words[2 * which + 1] = s->offset[which];
    }
    if (s->inside[0] == NULL && is_left(s, p, src)) {
        words[0] = LEFT;
        words[1] = (uintptr_t)src;
    }
    if (writes && sends(s, p) && words[0] == 0 && (failed = write_input(s, p, src)))
        return failed;
    if ((failed = arrive(s, step, p->digest)))
        return failed;
    if (writes && have_written(s, p, location))
        return read_inputs(s, p, ahead, src, dst);
    if (find_left(s, p, src, location))
        return fetch(s, p, dst);
    mapped = find_arrays(s, p, 0, location, (char **)s->sources);
    if (mapped > 0 && p->operation == ALL_REDUCE)
        mapped = find_arrays(s, p, 1, location, s->results);
    if (mapped < 0)
        return mapped;
    /* A scan is staged: in place, this rank's output could be an input that peers still read. */
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
