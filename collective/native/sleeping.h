/* Sleeping and waking: a rank that has waited for long naps, and its peers wake it.

   A rank that naps sets a word in its line, and counts itself in one word of the segment, the
   number of sleepers. A rank that announces something loads that number afterwards, and wakes the
   ranks that may wait for the announcement. While no rank naps, the number stays in the caches of
   all ranks, so the load is cheap.

   There is no fence between the announcement and the load. A fence would cost every call more than
   the load does. Without it the processor may load the number before peers can see the
   announcement. So a rank may miss its wake-up. Then it sleeps until its nap ends and polls again.
   A nap lasts a twentieth of the wait so far. */
#ifndef COLLECTIVE_SLEEPING_H
#define COLLECTIVE_SLEEPING_H

#include <stdint.h>
#include <time.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Values of the kernel's interface, from linux/futex.h. A machine with musl may lack that header. */
#ifndef FUTEX_WAIT
#define FUTEX_WAIT 0
#define FUTEX_WAKE 1
#endif

/* Offset in the segment of the number of ranks that nap. A rank that dies in its nap stays counted.
   This does no harm. */
#define SLEEPERS_AT 64

/* Wakes a rank if it naps. */
static inline void wake(uint32_t *asleep)
{
    if (__atomic_load_n(asleep, __ATOMIC_RELAXED) == 0
        || __atomic_exchange_n(asleep, 0, __ATOMIC_RELAXED) == 0)
        return;
    syscall(SYS_futex, asleep, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Announces a nap. Then the rank looks once more for what it waits for, and sleeps only if that is not
   there: a peer that acts between an earlier look and this announcement would wake nobody, but the last
   look sees what the peer did. */
static inline void announce_nap(uint32_t *asleep, uint32_t *sleepers)
{
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
}

/* Ends a nap; returns whether a peer has woken this rank. */
static inline int end_nap(uint32_t *asleep, uint32_t *sleepers)
{
    int woken = __atomic_exchange_n(asleep, 0, __ATOMIC_SEQ_CST) == 0;
    __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    return woken;
}

/* Sleeps until a peer wakes this rank or a signal arrives, for the given seconds at most. */
static inline void sleep_until_woken(uint32_t *asleep, double seconds)
{
    struct timespec most = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, asleep, FUTEX_WAIT, 1, &most, NULL, 0);
}

#endif
