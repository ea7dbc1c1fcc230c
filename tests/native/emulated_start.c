/* Prints the start of a process in /proc/PID/stat, as the process itself and as its child read it.
   Both must be equal. QEMU makes up the line of the process itself, and fails here: see
   docs/decisions/0072-aarch64-emulated.md. Nothing of this library is in this program. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Field 22, in ticks since the machine's start. The name before it may contain spaces. */
static long long start_of(pid_t pid)
{
    char name[64], line[4096];
    snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(name, "r");
    if (file == NULL)
        exit(2);
    line[fread(line, 1, sizeof line - 1, file)] = 0;
    fclose(file);
    char *place = strrchr(line, ')');
    for (int field = 2; place != NULL && field < 22; field++)
        place = strchr(place + 1, ' ');
    return place == NULL ? -1 : atoll(place);
}

int main(void)
{
    pid_t self = getpid();
    long long own = start_of(self);
    pid_t child = fork();
    if (child == 0) {
        long long seen = start_of(self);
        printf("a process read its start as %lld, and its child as %lld\n", own, seen);
        return seen != own;
    }
    int status;
    waitpid(child, &status, 0);
    return !WIFEXITED(status) || WEXITSTATUS(status);
}
