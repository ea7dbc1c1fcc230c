/* One copy by the kernel, or two through shared memory: a choice by what both have cost. */
#ifndef COLLECTIVE_WAYS_H
#define COLLECTIVE_WAYS_H

/* What a rank has measured with messages of similar lengths, or with moves. */
struct ways {
    double cost[2];   /* ns per byte, or per move: through shared memory, and fetched; 0: not known */
    int better;       /* whether fetching costs less */
    int left, pause;  /* messages until the other way is tried, or minus those that have tried it;
                         messages between two trials */
};

/* Messages after which the way that costs more is tried again; the number doubles up to the most as
   long as the same way is better. A trial has several messages: the first finds the caches cold, and
   another program may delay any. */
enum { FIRST_PAUSE = 8, MOST_PAUSE = 512, TRIAL = 4 };
/* A cost that seems to grow may be that of a peer that was late. So it grows by this factor at most,
   message by message, and falls at once. */
#define GROWTH 1.1
/* The ways change only if the other one costs less than this share. */
#define LESS 0.9

/* Notes what a message has cost; returns whether the next one is to be fetched. */
static inline int next_way(struct ways *w, int fetched, double cost)
{
    double *known = &w->cost[fetched];
    *known = *known == 0 || cost < GROWTH * *known ? cost : GROWTH * *known;
    int better = w->better ? w->cost[0] >= LESS * w->cost[1] : w->cost[1] < LESS * w->cost[0];
    if (better != w->better || w->pause == 0)
        w->left = w->pause = FIRST_PAUSE;
    w->better = better;
    if (--w->left >= 0)
        return better;
    if (w->left > -TRIAL)
        return !better;
    w->left = w->pause = w->pause < MOST_PAUSE ? 2 * w->pause : MOST_PAUSE;
    return !better;
}

#endif
