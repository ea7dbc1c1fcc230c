/* Memory allocated by the fake, and the pending work that uses it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake.h"

/* Freed memory stays mapped and poisoned for a while: a late use is an error, not a crash. */
enum { QUARANTINE_BLOCKS = 256, QUARANTINE_BYTES = 64 << 20 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static allocation *blocks; /* ordered by address */
static size_t block_count, block_room;
static uint64_t last_id;
static struct {
    void *address;
    size_t bytes;
} quarantine[QUARANTINE_BLOCKS];
static size_t quarantine_first, quarantine_count, quarantine_bytes;

/* The position of the first block that ends after address. Called with the mutex held. */
static size_t position(uintptr_t address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool find_locked(uintptr_t address, allocation *found) {
    size_t at = position(address);
    if (at == block_count || blocks[at].start > address)
        return false;
    *found = blocks[at];
    return true;
}

bool memory_find(const void *address, allocation *found) {
    pthread_mutex_lock(&mutex);
    bool there = find_locked((uintptr_t)address, found);
    pthread_mutex_unlock(&mutex);
    return there;
}

CUresult memory_allocate(CUcontext context, enum memory_kind kind, size_t bytes, bool by_nccl,
                         void **address) {
    if (!bytes || !address)
        return CUDA_ERROR_INVALID_VALUE;
    if (knob_strikes(KNOB_ALLOC_FAIL_AT))
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t step = by_nccl || kind == MEMORY_PINNED ? 4096 : 512;
    size_t size = (bytes + step - 1) / step * step;
    pthread_mutex_lock(&mutex);
    bool fits = kind == MEMORY_PINNED || context->allocated + size <= (size_t)knob(KNOB_MEMORY_BYTES);
    void *memory = fits ? aligned_alloc(step, size) : NULL;
    if (memory && block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 64;
        allocation *grown = realloc(blocks, room * sizeof *blocks);
        if (!grown) {
            free(memory);
            memory = NULL;
        } else {
            blocks = grown;
            block_room = room;
        }
    }
    if (memory) {
        uintptr_t start = (uintptr_t)memory;
        size_t at = position(start);
        memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
        blocks[at] = (allocation){start, start + bytes, context, kind, ++last_id, by_nccl};
        block_count++;
        context->allocated += kind == MEMORY_DEVICE ? size : 0;
    }
    pthread_mutex_unlock(&mutex);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, POISON, size);
    *address = memory;
    return CUDA_SUCCESS;
}

/* Called with the mutex held. */
static void quarantine_add(void *address, size_t bytes) {
    while (quarantine_count == QUARANTINE_BLOCKS ||
           (quarantine_count && quarantine_bytes + bytes > QUARANTINE_BYTES)) {
        quarantine_bytes -= quarantine[quarantine_first].bytes;
        free(quarantine[quarantine_first].address);
        quarantine_first = (quarantine_first + 1) % QUARANTINE_BLOCKS;
        quarantine_count--;
    }
    size_t at = (quarantine_first + quarantine_count++) % QUARANTINE_BLOCKS;
    quarantine[at].address = address;
    quarantine[at].bytes = bytes;
    quarantine_bytes += bytes;
}

bool memory_release(const void *address, enum memory_kind kind) {
    uintptr_t start = (uintptr_t)address;
    pthread_mutex_lock(&mutex);
    size_t at = position(start);
    bool there = at < block_count && blocks[at].start == start && blocks[at].kind == kind;
    if (there) {
        allocation block = blocks[at];
        size_t step = block.by_nccl || kind == MEMORY_PINNED ? 4096 : 512;
        size_t bytes = block.end - block.start;
        block_count--;
        memmove(blocks + at, blocks + at + 1, (block_count - at) * sizeof *blocks);
        if (kind == MEMORY_DEVICE)
            block.context->allocated -= (bytes + step - 1) / step * step;
        memset((void *)start, POISON, bytes);
        quarantine_add((void *)start, bytes);
    }
    pthread_mutex_unlock(&mutex);
    return there;
}

/* Pending work. */
static pthread_mutex_t pending_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pending_changed = PTHREAD_COND_INITIALIZER;
static task *pending;

span span_of(const void *address, size_t bytes, bool writes) {
    return (span){.start = (uintptr_t)address, .width = bytes, .rows = 1, .writes = writes};
}

static uintptr_t span_end(const span *s) {
    return s->rows && s->width ? s->start + (s->rows - 1) * s->pitch + s->width : s->start;
}

static bool overlap(const span *a, const span *b) {
    return a->start < span_end(b) && b->start < span_end(a);
}

static void poison(const span *s) {
    for (size_t row = 0; row < s->rows; row++)
        memset((void *)(s->start + row * s->pitch), POISON, s->width);
}

static bool read_by(const task *work, const span *output) {
    for (int i = 0; i < work->span_count; i++)
        if (!work->spans[i].writes && overlap(&work->spans[i], output))
            return true;
    return false;
}

static bool touched_by_pending(const span *output) {
    for (const task *other = pending; other; other = other->pending_after)
        for (int i = 0; i < other->span_count; i++)
            if (overlap(&other->spans[i], output))
                return true;
    return false;
}

void spans_announce(task *work) {
    if (!work->span_count)
        return;
    bool poisons = knob(KNOB_POISON);
    pthread_mutex_lock(&pending_mutex);
    for (int i = 0; i < work->span_count; i++) {
        span *s = &work->spans[i];
        allocation block;
        if (s->width && memory_find((void *)s->start, &block))
            s->id = block.id;
        if (!s->writes || !poisons || read_by(work, s))
            continue;
        /* Earlier work may still use the output; then it is poisoned when this task begins. */
        s->poison_late = touched_by_pending(s);
        if (!s->poison_late)
            poison(s);
    }
    work->pending_before = NULL;
    work->pending_after = pending;
    if (pending)
        pending->pending_before = work;
    pending = work;
    pthread_mutex_unlock(&pending_mutex);
}

static bool is_gone(const span *s) {
    allocation block;
    return s->id && (!memory_find((void *)s->start, &block) || block.id != s->id);
}

void spans_poison(task *work) {
    for (int i = 0; i < work->span_count; i++)
        if (work->spans[i].poison_late && !is_gone(&work->spans[i]))
            poison(&work->spans[i]);
}

void spans_check(task *work) {
    for (int i = 0; i < work->span_count; i++)
        if (is_gone(&work->spans[i])) {
            log_call("use after free(address=%#lx)", (unsigned long)work->spans[i].start);
            set_sticky_error();
        }
}

void spans_end(task *work) {
    if (!work->span_count)
        return;
    pthread_mutex_lock(&pending_mutex);
    if (work->pending_before)
        work->pending_before->pending_after = work->pending_after;
    else
        pending = work->pending_after;
    if (work->pending_after)
        work->pending_after->pending_before = work->pending_before;
    work->span_count = 0;
    free(work->spans);
    work->spans = NULL;
    pthread_cond_broadcast(&pending_changed);
    pthread_mutex_unlock(&pending_mutex);
}

void spans_wait_for(const void *address) {
    allocation block;
    if (!memory_find(address, &block))
        return;
    span whole = span_of((void *)block.start, block.end - block.start, true);
    pthread_mutex_lock(&pending_mutex);
    while (touched_by_pending(&whole))
        pthread_cond_wait(&pending_changed, &pending_mutex);
    pthread_mutex_unlock(&pending_mutex);
}
