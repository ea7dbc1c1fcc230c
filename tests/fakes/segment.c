/* A file in /dev/shm, named by the unique id. It is unlinked once all ranks have opened it. */
#define _GNU_SOURCE
#include "segment.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char folder[] = "/dev/shm";
static const char prefix[] = "fake-nccl-";

static void path_of(char *path, size_t room, const char *name) {
    snprintf(path, room, "%s/%s", folder, name);
}

static bool is_at(const char *path, int file) {
    struct stat named, opened;
    return !stat(path, &named) && !fstat(file, &opened) && named.st_ino == opened.st_ino &&
           named.st_dev == opened.st_dev;
}

/* Remove the files of killed ranks. A rank that still waits holds a shared lock on its file. */
void segment_sweep(void) {
    DIR *listing = opendir(folder);
    struct dirent *entry;
    while (listing && (entry = readdir(listing))) {
        char path[512];
        if (strncmp(entry->d_name, prefix, sizeof prefix - 1))
            continue;
        path_of(path, sizeof path, entry->d_name);
        int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (file < 0)
            continue;
        if (!flock(file, LOCK_EX | LOCK_NB) && is_at(path, file))
            unlink(path);
        close(file);
    }
    if (listing)
        closedir(listing);
}

/* Open and lock the file; repeat if a sweep has removed the file in between. */
static int open_shared(const char *path) {
    for (;;) {
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (file < 0)
            return -1;
        while (flock(file, LOCK_SH) && errno == EINTR)
            ;
        if (is_at(path, file))
            return file;
        close(file);
    }
}

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void lay_out(segment *map, char *start) {
    size_t ranks = (size_t)map->size;
    size_t members = round_up(sizeof(shared));
    size_t wanted = members + round_up(ranks * sizeof(member));
    size_t rings = wanted + round_up(ranks * ranks);
    map->ring_bytes = ranks <= 4 ? 1 << 16 : ranks <= 16 ? 1 << 14 : 1 << 12;
    map->bytes = rings + 2 * ranks * ranks * (sizeof(ring) + map->ring_bytes);
    map->head = (shared *)(void *)start;
    if (start) {
        map->members = (member *)(void *)(start + members);
        map->wanted = (unsigned char *)start + wanted;
        map->rings = start + rings;
    }
}

enum attach segment_attach(segment *map, const char *name, int size, int rank) {
    char path[512];
    *map = (segment){.size = size, .rank = rank, .file = -1};
    snprintf(map->name, sizeof map->name, "%s", name);
    path_of(path, sizeof path, name);
    lay_out(map, NULL);
    map->file = open_shared(path);
    if (map->file < 0)
        return ATTACH_NO_MEMORY;
    struct stat before;
    /* A smaller file grows, filled with zeros. A file in use is never shrunk. */
    if (fstat(map->file, &before) ||
        ((size_t)before.st_size < map->bytes && ftruncate(map->file, (off_t)map->bytes))) {
        segment_detach(map);
        return ATTACH_NO_MEMORY;
    }
    void *start = mmap(NULL, map->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, map->file, 0);
    if (start == MAP_FAILED) {
        segment_detach(map);
        return ATTACH_NO_MEMORY;
    }
    lay_out(map, start);
    int none = 0, unused = 0;
    enum attach code = ATTACHED;
    if (!__atomic_compare_exchange_n(&map->head->size, &none, size, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE) &&
        none != size)
        code = ATTACH_OTHER_SIZE;
    else if (!__atomic_compare_exchange_n(&map->members[rank].taken, &unused, 1, false,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        code = ATTACH_RANK_TAKEN;
    if (code) { /* the file belongs to other ranks, so do not unlink it */
        close(map->file);
        map->file = -1;
        segment_detach(map);
    }
    return code;
}

bool segment_complete(segment *map) {
    for (int r = 0; r < map->size; r++)
        if (!__atomic_load_n(&map->members[r].ready, __ATOMIC_ACQUIRE))
            return false;
    if (map->file >= 0) {
        char path[512];
        path_of(path, sizeof path, map->name);
        if (is_at(path, map->file))
            unlink(path);
        close(map->file);
        map->file = -1;
    }
    return true;
}

void segment_detach(segment *map) {
    if (map->file >= 0) { /* not all ranks came: unlink, so that no rank finds half a rendezvous */
        char path[512];
        path_of(path, sizeof path, map->name);
        if (is_at(path, map->file))
            unlink(path);
        close(map->file);
        map->file = -1;
    }
    if (map->head)
        munmap(map->head, map->bytes);
    map->head = NULL;
}

void segment_fail(segment *map, int code, const char *text) {
    int open_yet = 0;
    if (!__atomic_compare_exchange_n(&map->head->error_lock, &open_yet, 1, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    snprintf(map->head->error_text, TEXT_ROOM, "%s", text);
    __atomic_store_n(&map->head->error, code, __ATOMIC_RELEASE);
}

int segment_error(const segment *map) {
    return map->head ? __atomic_load_n(&map->head->error, __ATOMIC_ACQUIRE) : 0;
}

ring *segment_ring(const segment *map, enum lane lane, int src, int dst) {
    size_t ranks = (size_t)map->size;
    size_t at = ((size_t)lane * ranks + (size_t)src) * ranks + (size_t)dst;
    return (ring *)(void *)(map->rings + at * (sizeof(ring) + map->ring_bytes));
}

/* Copy between a ring at a position and plain memory; a wrap makes two copies. */
static void ring_copy(const segment *map, ring *r, uint64_t position, char *memory, size_t bytes,
                      bool into_ring) {
    char *data = (char *)(r + 1);
    size_t at = position % map->ring_bytes;
    size_t first = bytes < map->ring_bytes - at ? bytes : map->ring_bytes - at;
    if (into_ring) {
        memcpy(data + at, memory, first);
        memcpy(data, memory + first, bytes - first);
    } else {
        memcpy(memory, data + at, first);
        memcpy(memory + first, data, bytes - first);
    }
}

size_t ring_write(const segment *map, ring *r, const void *from, size_t bytes) {
    uint64_t written = r->written;
    size_t room = map->ring_bytes - (size_t)(written - __atomic_load_n(&r->read, __ATOMIC_ACQUIRE));
    size_t moved = bytes < room ? bytes : room;
    if (moved) {
        ring_copy(map, r, written, (char *)(uintptr_t)from, moved, true);
        __atomic_store_n(&r->written, written + moved, __ATOMIC_RELEASE);
    }
    return moved;
}

size_t ring_read(const segment *map, ring *r, void *to, size_t bytes) {
    uint64_t done = r->read;
    size_t there = (size_t)(__atomic_load_n(&r->written, __ATOMIC_ACQUIRE) - done);
    size_t moved = bytes < there ? bytes : there;
    if (moved) {
        ring_copy(map, r, done, to, moved, false);
        __atomic_store_n(&r->read, done + moved, __ATOMIC_RELEASE);
    }
    return moved;
}

uint64_t ring_written(const ring *r) { return r->written; }

bool ring_read_up_to(const ring *r, uint64_t position) {
    return __atomic_load_n(&r->read, __ATOMIC_ACQUIRE) >= position;
}
