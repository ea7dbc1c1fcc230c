/* How a rank that has waited for long sleeps, and is woken by what it waits for.

   A rank that naps says so in its line, and counts itself in one word of the segment. Whoever
   announces something looks at that word afterwards, which is in its cache as long as nobody naps,
   and wakes those that may wait for it. There is no fence between the two, which would cost every
   call more than the look: so a rank may nap when it was to be woken. It sleeps for as long as its
   nap is, a twentieth of the wait so far, and then looks for itself. */
#ifndef COLLECTIVE_SLEEPING_H
#define COLLECTIVE_SLEEPING_H

#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Of the segment: how many ranks nap. One that dies in its nap stays counted, to no harm. */
#define SLEEPERS_AT 64

/* Wakes a rank if it naps. */
static inline void wake(uint32_t *asleep)
{
    if (__atomic_load_n(asleep, __ATOMIC_RELAXED) == 0
        || __atomic_exchange_n(asleep, 0, __ATOMIC_RELAXED) == 0)
        return;
#if defined(__linux__)
    syscall(SYS_futex, asleep, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Sleeps until this rank is woken, or a signal comes, for some seconds at most. */
static inline void sleep_until_woken(uint32_t *asleep, double seconds)
{
    struct timespec most = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
#if defined(__linux__)
    syscall(SYS_futex, asleep, FUTEX_WAIT, 1, &most, NULL, 0);
#else
    (void)asleep;
    nanosleep(&most, NULL);
#endif
}

#endif
