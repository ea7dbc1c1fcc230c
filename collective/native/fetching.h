/* Copies from the memory of another process of this host, by the kernel. */
#ifndef COLLECTIVE_FETCHING_H
#define COLLECTIVE_FETCHING_H

#include <stddef.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

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

#endif
