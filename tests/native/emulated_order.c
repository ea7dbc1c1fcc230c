/* Two threads store 1 each and then load the other's word, all sequentially consistent. At least
   one of them must see the other's store. QEMU on x86 fails here: see
   docs/decisions/0072-aarch64-emulated.md. Nothing of the native core is in this program.

   Usage: emulated_order TRIALS [BARRIER]; with any second argument a barrier follows each store */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

struct line {
    long value;
    char rest[504]; /* the two words are in different cache lines */
};

static long trials;
static int has_barrier;
static struct line words[2], begun[2];
static long seen[2], missed;
static pthread_barrier_t together;

static void *thread_main(void *argument)
{
    int mine = argument != NULL, other = !mine;
    for (long trial = 1; trial <= trials; trial++) {
        __atomic_store_n(&begun[mine].value, trial, __ATOMIC_RELEASE);
        while (__atomic_load_n(&begun[other].value, __ATOMIC_ACQUIRE) < trial)
            continue;
        __atomic_store_n(&words[mine].value, trial, __ATOMIC_SEQ_CST);
        if (has_barrier)
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
        seen[mine] = __atomic_load_n(&words[other].value, __ATOMIC_SEQ_CST);
        pthread_barrier_wait(&together);
        if (mine == 0)
            missed += seen[0] < trial && seen[1] < trial;
        pthread_barrier_wait(&together);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    pthread_t threads[2];
    if (count < 2)
        return 2;
    trials = atol(arguments[1]);
    has_barrier = count > 2;
    pthread_barrier_init(&together, NULL, 2);
    pthread_create(&threads[0], NULL, thread_main, NULL);
    pthread_create(&threads[1], NULL, thread_main, &trials);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    printf("both loads missed the other store in %ld of %ld trials\n", missed, trials);
    return missed > 0;
}
