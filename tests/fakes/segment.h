/* Shared memory of the ranks of a communicator, which are processes or threads. */
#ifndef FAKE_SEGMENT_H
#define FAKE_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NAME_ROOM = 96, TEXT_ROOM = 400, POSTS = 4 };

/* The n-th collective of a rank, to be compared with the n-th collective of the other ranks. */
typedef struct {
    uint64_t number; /* written last */
    uint64_t count;
    int kind, type, op, root;
} post;

/* The values of a rank in a call that all ranks make (split, window). */
typedef struct {
    uint64_t number; /* written last */
    int kind;
    int64_t a, b;
} proposal;

typedef struct {
    int taken, ready;
    int pid, physical;
    uint64_t host;
    int collective_wanted;
    post posts[POSTS];
    proposal proposals[2];
} member;

/* Ring buffer for bytes from one rank to another: one writer, one reader. */
typedef struct {
    uint64_t written;
    char apart[56];
    uint64_t read;
    char apart_too[56];
} ring;

typedef struct {
    int size; /* of the communicator; 0 until the first rank attaches */
    int attached;
    int error; /* a ncclResult_t: the first error of any rank */
    int error_lock;
    char error_text[TEXT_ROOM];
} shared;

typedef struct {
    char name[NAME_ROOM];
    int size, rank;
    int file; /* open and locked until all ranks are attached, then -1 */
    size_t bytes, ring_bytes;
    shared *head;
    member *members;
    unsigned char *wanted; /* [src][dst]: bit 1: the sender, bit 2: the receiver wants to connect */
    char *rings;
} segment;

enum lane { LANE_COLLECTIVE, LANE_MESSAGE };
enum attach { ATTACHED, ATTACH_NO_MEMORY, ATTACH_OTHER_SIZE, ATTACH_RANK_TAKEN };

void segment_sweep(void);
enum attach segment_attach(segment *, const char *name, int size, int rank);
bool segment_complete(segment *); /* whether all ranks are there; if so, unlinks the file */
void segment_detach(segment *);
/* Report an error to all ranks; the first error is kept. */
void segment_fail(segment *, int code, const char *text);
int segment_error(const segment *);

ring *segment_ring(const segment *, enum lane, int src, int dst);
size_t ring_write(const segment *, ring *, const void *from, size_t bytes);
size_t ring_read(const segment *, ring *, void *to, size_t bytes);
uint64_t ring_written(const ring *);
bool ring_read_up_to(const ring *, uint64_t position);

#endif
