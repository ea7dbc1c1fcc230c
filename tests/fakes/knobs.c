/* Settings of a test (from the environment, later through fake_knob), and the log. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

static struct {
    const char *name;
    long value;
} knobs[KNOBS] = {
    [KNOB_DEVICES] = {"FAKE_DEVICES", 4},
    [KNOB_DELAY_US] = {"FAKE_DELAY_US", 40},
    [KNOB_HOLD] = {"FAKE_HOLD", 0},
    [KNOB_SEED] = {"FAKE_SEED", 1},
    [KNOB_POISON] = {"FAKE_POISON", 1},
    [KNOB_LOG] = {"FAKE_LOG", 1},
    [KNOB_DRIVER_VERSION] = {"FAKE_DRIVER_VERSION", 13000},
    [KNOB_MEMORY_BYTES] = {"FAKE_MEMORY_BYTES", 1L << 32},
    [KNOB_ALLOC_FAIL_AT] = {"FAKE_ALLOC_FAIL_AT", 0},
    [KNOB_HOST_POINTERS] = {"FAKE_HOST_POINTERS", 0},
    [KNOB_MULTI_RANK_GPU] = {"FAKE_MULTI_RANK_GPU", 0},
    [KNOB_LAZY_CONNECT] = {"FAKE_LAZY_CONNECT", 2},
    [KNOB_INIT_POLLS] = {"FAKE_INIT_POLLS", 0},
    [KNOB_INIT_ERROR] = {"FAKE_INIT_ERROR", 0},
    [KNOB_REMOTE_ERROR_AT] = {"FAKE_REMOTE_ERROR_AT", 0},
    [KNOB_DIE_AT] = {"FAKE_DIE_AT", 0},
    [KNOB_FAULT_RANK] = {"FAKE_FAULT_RANK", -1},
};

static pthread_once_t read_once = PTHREAD_ONCE_INIT;

static void read_environment(void) {
    for (int i = 0; i < KNOBS; i++) {
        const char *text = getenv(knobs[i].name);
        if (text && *text)
            knobs[i].value = strtol(text, NULL, 0);
    }
}

long knob(enum knob which) {
    pthread_once(&read_once, read_environment);
    return __atomic_load_n(&knobs[which].value, __ATOMIC_RELAXED);
}

bool knob_strikes(enum knob which) {
    long left = knob(which);
    while (left > 0)
        if (__atomic_compare_exchange_n(&knobs[which].value, &left, left - 1, false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return left == 1;
    return false;
}

EXPORT int fake_knob(const char *name, long value) {
    pthread_once(&read_once, read_environment);
    for (int i = 0; i < KNOBS; i++)
        if (!strcmp(knobs[i].name, name) || !strcmp(knobs[i].name + strlen("FAKE_"), name)) {
            __atomic_store_n(&knobs[i].value, value, __ATOMIC_RELAXED);
            return 0;
        }
    return -1;
}

void nap(unsigned microseconds) {
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000L};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* The log: one line of text for each call, the oldest first. A full log drops new lines. */
enum { LOG_CAPACITY = 8 << 20 };
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static char *log_text;
static size_t log_used, log_room;

void log_call(const char *format, ...) {
    if (!knob(KNOB_LOG))
        return;
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    pthread_mutex_lock(&log_mutex);
    if (log_used + length > log_room && log_room < LOG_CAPACITY) {
        size_t room = log_room ? log_room * 2 : 1 << 14;
        char *grown = realloc(log_text, room);
        if (grown) {
            log_text = grown;
            log_room = room;
        }
    }
    if (log_used + length <= log_room) {
        memcpy(log_text + log_used, line, length);
        log_used += length;
    }
    pthread_mutex_unlock(&log_mutex);
}

EXPORT size_t fake_log_size(void) {
    pthread_mutex_lock(&log_mutex);
    size_t used = log_used;
    pthread_mutex_unlock(&log_mutex);
    return used;
}

/* Copy at most capacity bytes of the log; return the number of bytes copied. */
EXPORT size_t fake_log_read(char *text, size_t capacity) {
    pthread_mutex_lock(&log_mutex);
    size_t copied = log_used < capacity ? log_used : capacity;
    if (copied)
        memcpy(text, log_text, copied);
    pthread_mutex_unlock(&log_mutex);
    return copied;
}

EXPORT void fake_log_clear(void) {
    pthread_mutex_lock(&log_mutex);
    log_used = 0;
    pthread_mutex_unlock(&log_mutex);
}
