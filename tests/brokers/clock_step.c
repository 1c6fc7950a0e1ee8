/* A wall clock that a test can set. Load this library with LD_PRELOAD. ONWARD_CLOCK_FILE names a file with one 64-bit
   number, the offset in seconds. It changes the wall clock of this process only. A wait until a wall-clock time then ends
   by the new time, as it does in the kernel after the clock was set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 10000000L

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("ONWARD_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) offset_s = at;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = syscall(SYS_clock_gettime, clock, found);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}

static int wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *end) {
    for (;;) {
        struct timespec now, slice;
        clock_gettime(CLOCK_REALTIME, &now);
        int64_t left = (int64_t)(end->tv_sec - now.tv_sec) * 1000000000L + (end->tv_nsec - now.tv_nsec);
        if (left <= 0) return ETIMEDOUT;
        clock_gettime(CLOCK_MONOTONIC, &slice);
        slice.tv_nsec += left < SLICE_NS ? left : SLICE_NS;
        if (slice.tv_nsec >= 1000000000L) slice.tv_sec++, slice.tv_nsec -= 1000000000L;
        int ended = pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, &slice);
        if (ended != ETIMEDOUT) return ended;
    }
}

int cnd_timedwait(cnd_t *restrict cond, mtx_t *restrict mutex, const struct timespec *restrict end) {
    int ended = wait_until((pthread_cond_t *)cond, (pthread_mutex_t *)mutex, end);
    return ended == ETIMEDOUT ? thrd_timedout : ended ? thrd_error : thrd_success;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict end) {
    if (end->tv_sec > 1000000000L) return wait_until(cond, mutex, end); /* a small value is a time since boot */
    return pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, end);
}
