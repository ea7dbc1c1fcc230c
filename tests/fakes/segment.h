/* The memory that the ranks of a communicator share: processes and threads alike. */
#ifndef FAKE_SEGMENT_H
#define FAKE_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NAME_ROOM = 96, TEXT_ROOM = 400, POSTS = 4 };

/* A rank's n-th collective, for comparison with the others' n-th. */
typedef struct {
    uint64_t number; /* written last */
    uint64_t count;
    int kind, type, op, root;
} post;

/* What a rank brings to a meeting of all (split, window). */
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

/* Bytes from one rank to another; one writer, one reader. */
typedef struct {
    uint64_t written;
    char apart[56];
    uint64_t read;
    char apart_too[56];
} ring;

typedef struct {
    int size; /* of the communicator; 0 until the first comes */
    int attached;
    int error; /* a ncclResult_t, the first that any rank found */
    int error_lock;
    char error_text[TEXT_ROOM];
} shared;

typedef struct {
    char name[NAME_ROOM];
    int size, rank;
    int file; /* open, and locked, until all are attached; then -1 */
    size_t bytes, ring_bytes;
    shared *head;
    member *members;
    unsigned char *wanted; /* [src][dst]: 1 the sender, 2 the receiver has asked to connect */
    char *rings;
} segment;

enum lane { LANE_COLLECTIVE, LANE_MESSAGE };
enum attach { ATTACHED, ATTACH_NO_MEMORY, ATTACH_OTHER_SIZE, ATTACH_RANK_TAKEN };

void segment_sweep(void);
enum attach segment_attach(segment *, const char *name, int size, int rank);
bool segment_complete(segment *); /* all are there; the file's name goes then */
void segment_detach(segment *);
/* Report an error to all ranks; the first is kept. */
void segment_fail(segment *, int code, const char *text);
int segment_error(const segment *);

ring *segment_ring(const segment *, enum lane, int src, int dst);
size_t ring_write(const segment *, ring *, const void *from, size_t bytes);
size_t ring_read(const segment *, ring *, void *to, size_t bytes);
uint64_t ring_written(const ring *);
bool ring_read_up_to(const ring *, uint64_t position);

#endif
