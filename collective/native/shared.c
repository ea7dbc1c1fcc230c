/* How ranks arrive at a call, and small calls, which are made of nothing else.

   A rank has a line: how many steps it has made, and a digest of what it does in the even and in
   the odd ones. Before its step it writes the digest, and into its area of the step's parity what
   others need of it. No rank makes a step before all have made the one before. So whoever writes for step s knows
   that all have made s - 1, and so are through with what they read at s - 2, the last step of that
   parity; and what they may still be reading, of s - 1, is of the other parity.

   A store with release order makes what was written before visible to whoever loads the new value
   with acquire order: also on processors, such as ARM's, that reorder more than x86 does. */

#include "shared.h"

#include <string.h>

void announce(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

int await(struct shared *s, int rank, const uint64_t *word, uint64_t value)
{
    for (int i = 0; i < s->looks; i++)
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= value)
            return 0;
    return s->wait(s->context, rank, word, value);
}

int shared_arrive(struct shared *s, uint64_t step, uint64_t digest)
{
    uint64_t *mine = s->stages[s->rank].line;
    int which = 1 + (int)(step & 1), different = 0;
    mine[which] = digest;
    announce(mine, step);
    for (int i = 1; i < s->size; i++) {
        int rank = (s->rank + i) % s->size, failed;
        const uint64_t *line = s->stages[rank].line;
        if ((failed = await(s, rank, line, step)))
            return failed;
        different |= line[which] != digest;
    }
    return different ? DIFFERENT : 0;
}

int shared_all_reduce(struct shared *s, uint64_t step, uint64_t digest, fold_function *fold,
                      size_t item, const void *src, void *dst, size_t count)
{
    int parity = (int)(step & 1), failed;
    memcpy(s->stages[s->rank].areas[parity], src, count * item);
    if ((failed = shared_arrive(s, step, digest)))
        return failed;
    const void *value = s->stages[0].areas[parity];
    for (int rank = 1; rank < s->size; rank++) {
        fold(value, s->stages[rank].areas[parity], dst, count);
        value = dst;
    }
    return 0;
}
