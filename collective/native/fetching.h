/* Copies from the memory of another process of this host, by the kernel.

   The kernel looks up each page of the other process. In pages of 4 KiB this takes longer than the copy,
   and two copies through memory that both processes share are quicker. In huge pages of 2 MiB it takes
   almost no time (docs/measurements/native.md has the figures). Usually long arrays lie in huge pages:
   NumPy asks for them from 4 MiB on, and some systems give them to all programs. */
#ifndef COLLECTIVE_FETCHING_H
#define COLLECTIVE_FETCHING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bytes of the shortest array that its rank leaves to its peers: for a shorter one the call of the kernel
   takes longer than what its copy saves. The tests set another number. */
#ifndef LEAST_LEFT
#define LEAST_LEFT ((size_t)1 << 20)
#endif

/* Copies nbytes from an address of a process to this one's memory; returns whether the kernel has done
   so. A single call of the kernel moves at most 2 GiB less a page. */
static inline int fetch_memory(long pid, void *to, const void *from, size_t nbytes)
{
    for (size_t done = 0; done < nbytes;) {
        struct iovec local = {(char *)to + done, nbytes - done};
        struct iovec remote = {(char *)from + done, nbytes - done};
        long copied = syscall(SYS_process_vm_readv, pid, &local, 1L, &remote, 1L, 0L);
        if (copied <= 0)
            return 0;
        done += (size_t)copied;
    }
    return 1;
}

/* struct pm_scan_arg of the kernel's interface, from linux/fs.h: its headers before 6.7 lack it. */
struct page_scan {
    uint64_t size, flags, from, to, reached, regions, most_regions, most_pages, inverted, all, any, shown;
};
#define SCAN_PAGES _IOWR('f', 16, struct page_scan)
#define IS_HUGE (UINT64_C(1) << 6)

/* Whether one page of this process is huge. */
static inline int is_huge(int page_map, uint64_t address)
{
    uint64_t region[3], page = address / 4096 * 4096;
    struct page_scan scan = {.size = sizeof scan, .from = page, .to = page + 4096,
                             .regions = (uintptr_t)region, .most_regions = 1, .all = IS_HUGE,
                             .shown = IS_HUGE};
    return ioctl(page_map, SCAN_PAGES, &scan) == 1;
}

/* Whether most of an array of this process lies in huge pages, as two of its pages tell. The descriptor is
   that of /proc/self/pagemap, or -1. Kernels before 6.7 do not tell, and count as if no page were huge. */
static inline int lies_in_huge_pages(int page_map, const void *array, size_t nbytes)
{
    uint64_t address = (uintptr_t)array;
    return page_map >= 0 && is_huge(page_map, address + nbytes / 4)
           && is_huge(page_map, address + nbytes / 4 * 3);
}

#endif
