/* Stress test of the two libraries for XLA: threads call them as XLA does, and a function of this
   program stands for Python. The numbers of the calls begin at START, and their lengths are random.
   threads.py builds and runs the program, with the sources of both libraries in it.

   Usage: xla_threads THREADS CALLS BYTES SEED START */

#include "../../adapters/jax/xla/plugin.c"
#define collective_interface collective_interface_of_handler
#define fail fail_in_handler
#define number_of number_in_handler
#define tickets tickets_of_handler
#define interrupted interrupted_in_handler
#define call_function call_function_of_handler
#define run_function run_function_of_handler
#undef EXPORTED
#include "../../adapters/jax/handler.c"
#undef fail
#undef tickets
#undef interrupted

#include <pthread.h>

enum { MOST_THREADS = 16, WORLD = 7 };

static int threads, calls;
static size_t most_bytes;
static uint64_t begin_at;
static unsigned seed;

static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static void check(int right, const char *what, int number)
{
    if (!right) {
        fprintf(stderr, "%s: call %d is wrong\n", what, number);
        exit(1);
    }
}

/* Copies the first bytes of a call. Calls of no elements fail with a text, and some are interrupted:
   then the result is whatever was in memory. */
static int64_t make_for_xla(int64_t ticket, int which, int64_t comm, const void *in, void *out,
                            int64_t count, int dtype, int op, int dst, int src, int64_t received)
{
    int64_t value = which == SPLIT ? WORLD : which == SIZE ? threads : 0;
    (void)comm, (void)op, (void)src;
    if (which >= ALL_REDUCE && which <= EXCHANGE) {
        if (dst == 99)
            return INT64_MIN; /* as if an exception had left it */
        if (count == 0)
            return ~ticket - collective_xla_fail("no elements", 0);
        size_t item = which == EXCHANGE ? 1 : (size_t)element_bytes[dtype];
        size_t nbytes = which == EXCHANGE && received < count ? (size_t)received : (size_t)count * item;
        if (in != NULL && out != NULL)
            memcpy(out, in, nbytes);
    }
    return ~ticket - value;
}

/* Makes every third call of the plug-in without Python. */
static int make_without_python(int64_t first, int64_t second, const void *in, void *out)
{
    if (second % 3 || second <= 0 || first < 0)
        return 1;
    memcpy(out, in, (size_t)second);
    return 0;
}

static int64_t make_for_jit(int64_t ticket, int64_t number, const void *in, void *out)
{
    if (number % 5 == 4) {
        collective_ffi_fail("a failure", 0);
        return ticket;
    }
    memcpy(out, in, 8);
    return ~ticket;
}

static void *create_error(ErrorArguments *arguments)
{
    return strdup(arguments->message);
}

static void call_plugin(uint32_t *state, int number, char *in, char *out)
{
    /* Bytes, of which a call may have none; and handles as in symbols.h. */
    int n = (int)(draw(state) % (uint32_t)most_bytes), size, rank;
    Handle type = (Handle)(intptr_t)261, op = (Handle)(intptr_t)512, comm;
    memset(in, number, most_bytes);
    memset(out, ~number, most_bytes);
    MPIABI_Comm_split(NULL, 0, number % threads, &comm);
    MPIABI_Comm_rank(comm, &rank);
    MPIABI_Comm_size(comm, &size);
    check(rank == number % threads && size == threads, "a communicator", number);
    int failed = draw(state) % 2 ? MPIABI_Allreduce(in, out, n, type, op, comm)
                                 : MPIABI_Allgather(in, n, type, out, n, type, comm);
    char text[TEXT_BYTES];
    MPIABI_Error_string(failed, text, &size);
    check((failed != 0) == (n == 0) && (n > 0 || size > 0), "an error", number);
    check(memcmp(in, out, (size_t)n) == 0, "a collective", number);
    Handle requests[2];
    MPIABI_Irecv(out, n, type, 0, 0, comm, &requests[0]);
    MPIABI_Isend(in, n, type, draw(state) % 8 ? 1 : 99, 0, comm, &requests[1]);
    int first = MPIABI_Wait(&requests[0], NULL), second = MPIABI_Wait(&requests[1], NULL);
    check(first == second && requests[0] == NULL, "two messages", number);
    MPIABI_Comm_free(&comm);
}

static void call_handler(int number)
{
    static const Name name = {"call", 4};
    const Name *names[] = {&name};
    int64_t value = number, in = number, out = -1;
    Scalar scalar = {INT64, &value};
    void *values[] = {&scalar};
    int types[] = {SCALAR};
    Buffer buffers[] = {{.data = &in}, {.data = &out}};
    Buffer *pointers[] = {&buffers[0], &buffers[1]};
    Api api = {.create_error = create_error};
    Frame frame = {.api = &api, .stage = EXECUTE, .arguments = {.size = 1, .buffers = pointers},
                   .results = {.size = 1, .buffers = pointers + 1},
                   .attributes = {.size = 1, .types = types, .names = (Name **)names,
                                  .values = values}};
    char *error = collective_ffi_call(&frame);
    check((error != NULL) == (number % 5 == 4), "an error of the handler", number);
    check(error != NULL || out == in, "a call of the handler", number);
    free(error);
}

static void *thread_main(void *argument)
{
    uint32_t state = seed * 2654435761u + 1 + (unsigned)(intptr_t)argument;
    char *in = malloc(most_bytes), *out = malloc(most_bytes);
    tickets = begin_at;
    tickets_of_handler = begin_at;
    for (int number = 0; number < calls; number++) {
        call_plugin(&state, number, in, out);
        call_handler(number);
    }
    free(in);
    free(out);
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    threads = atoi(arguments[1]);
    calls = atoi(arguments[2]);
    most_bytes = (size_t)atol(arguments[3]);
    seed = (unsigned)atol(arguments[4]);
    begin_at = strtoull(arguments[5], NULL, 10);
    collective_xla_install(make_for_xla, make_without_python);
    collective_ffi_install(make_for_jit, NULL);
    pthread_t started[MOST_THREADS];
    for (intptr_t i = 0; i < threads; i++)
        pthread_create(&started[i], NULL, thread_main, (void *)i);
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    printf("%d calls of %d ranks\n", calls, threads);
    return 0;
}
