/* In place of fetching.h, in programs whose ranks are threads: the copies are those of the process itself,
   so the sanitizers see them. Every other array counts as if it lay in huge pages, and in a process with an
   even number every fourth copy fails after a half. */
#ifndef COLLECTIVE_FETCHING_H
#define COLLECTIVE_FETCHING_H

#include <stddef.h>
#include <string.h>

static _Thread_local unsigned fetched, asked;

static inline int fetch_memory(long pid, void *to, const void *from, size_t nbytes)
{
    int refused = pid % 2 == 0 && ++fetched % 4 == 0;
    memcpy(to, from, refused ? nbytes / 2 : nbytes);
    return !refused;
}

static inline int lies_in_huge_pages(int page_map, const void *array, size_t nbytes)
{
    (void)page_map, (void)array, (void)nbytes;
    return ++asked % 2;
}

#endif
