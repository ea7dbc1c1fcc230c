/* Handler of XLA's foreign function interface (FFI): one call of collective inside a compiled
   program. traced.py registers it, and installs the functions that make the calls.

   XLA's header xla/ffi/api/c_api.h fixes the layouts below as a binary interface: versions 0.3
   (jaxlib 0.10.2) and 0.5 (jaxlib 0.12) agree in every field that this file reads. Fields behind
   those are left out. So one build serves all versions, and Python's headers are not needed. */

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* Version of the functions that this library and Python call of each other; as in library.py. */
EXPORTED const int collective_interface = 2;

typedef struct Extension {
    size_t struct_size;
    int type;
    struct Extension *next;
} Extension;
enum { METADATA = 1 };

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    int major, minor;
} Version;

typedef struct {
    size_t struct_size;
    Version api_version;
    uint32_t traits;
} Metadata;

typedef struct {
    Extension base;
    Metadata *metadata;
} MetadataExtension;

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    const char *message;
    int code;
} ErrorArguments;
enum { INTERNAL = 13 };

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    Version api_version;
    const void *internal;
    void *(*create_error)(ErrorArguments *);
} Api;

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    int dtype;
    void *data;
} Buffer;

typedef struct { /* of arguments or of results */
    size_t struct_size;
    Extension *extension_start;
    int64_t size;
    int *types;
    Buffer **buffers;
} Buffers;

typedef struct {
    const char *text;
    size_t length;
} Name;

typedef struct {
    int dtype;
    void *value;
} Scalar;

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    int64_t size;
    int *types;
    Name **names;
    void **values;
} Attributes;
enum { SCALAR = 3, INT64 = 5 };

typedef struct {
    size_t struct_size;
    Extension *extension_start;
    const Api *api;
    void *context;
    int stage;
    Buffers arguments, results;
    Attributes attributes;
} Frame;
enum { EXECUTE = 3 };

/* Make the call of this number. The result is ~ticket if the call was made; else the function has
   called collective_ffi_fail(). If an exception leaves a function that ctypes calls, its result is
   whatever was in memory. So the ticket differs from call to call. */
typedef int64_t call_function(int64_t ticket, int64_t number, const void *in, void *out);
static call_function *make_call;
static __thread uint64_t tickets;
/* Text of the last error of a call in this thread, or NULL, and whether it was a
   KeyboardInterrupt. */
static __thread char *failure;
static __thread int interrupted;

/* Keep the text of an error for XLA. Python's own memory of a thread that Python did not start is
   gone before XLA reads the text. */
EXPORTED void collective_ffi_fail(const char *text, int by_interrupt)
{
    free(failure);
    failure = strdup(text);
    interrupted = by_interrupt;
}

/* Make the call of two numbers without Python, if the core can. The result is 0, or another number
   if make_call must make the call, or report its failure; see collective/native/unlocked.c. */
typedef int run_function(int64_t first, int64_t second, const void *in, void *out);
static run_function *run;

EXPORTED void collective_ffi_install(call_function *function, run_function *without_python)
{
    run = without_python;
    make_call = function;
}

static void *fail(const Api *api, const char *text)
{
    ErrorArguments arguments = {sizeof arguments, NULL, text, INTERNAL};
    return api->create_error(&arguments); /* copies the text */
}

/* Return the number of the call, or -1. */
static int64_t number_of(const Attributes *attributes)
{
    static const char name[] = "call";
    for (int64_t i = 0; i < attributes->size; i++) {
        const Name *its = attributes->names[i];
        const Scalar *scalar = attributes->values[i];
        if (its->length == sizeof name - 1 && !memcmp(its->text, name, sizeof name - 1))
            return attributes->types[i] == SCALAR && scalar->dtype == INT64
                       ? *(const int64_t *)scalar->value
                       : -1;
    }
    return -1;
}

/* Operand 0 and result 0 are arrays. The ordered effect's tokens are behind them. */
EXPORTED void *collective_ffi_call(Frame *frame)
{
    const Extension *extension = frame->extension_start;
    if (extension != NULL && extension->type == METADATA) {
        Metadata *metadata = ((const MetadataExtension *)extension)->metadata;
        /* XLA accepts a handler of its own version. It has no api when it only asks. */
        metadata->api_version.major = frame->api ? frame->api->api_version.major : 0;
        metadata->api_version.minor = frame->api ? frame->api->api_version.minor : 3;
        metadata->traits = 0;
        return NULL;
    }
    if (frame->stage != EXECUTE)
        return NULL;
    int64_t number = number_of(&frame->attributes);
    if (number < 0 || make_call == NULL || frame->arguments.size < 1 || frame->results.size < 1)
        return fail(frame->api, "collective: a call that this process did not compile. Let JAX "
                                "compile the program instead of loading an executable.");
    const void *in = frame->arguments.buffers[0]->data;
    void *out = frame->results.buffers[0]->data;
    if (run != NULL && run(number, -1, in, out) == 0)
        return NULL;
    int64_t ticket = (int64_t)++tickets;
    if (make_call(ticket, number, in, out) == ~ticket)
        return NULL;
    if (interrupted)
        raise(SIGINT); /* JAX raises an ordinary error. Python raises the interrupt after it. */
    void *error = fail(frame->api, failure != NULL
                                       ? failure
                                       : "collective: a call failed and left no text: it was "
                                         "interrupted, or there is no memory");
    free(failure);
    failure = NULL;
    interrupted = 0;
    return error;
}
