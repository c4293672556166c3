#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() ((void)0)
#endif

enum {
    SPINS_AT_BARRIER = 1000, /* then give the processor away at every look: a neighbour may need it to get here */
    SPINS_FOR_WORK = 4000,   /* about 0.1 ms; then sleep, so that an idle engine costs nothing */
    ALONE_NS = 200000000,    /* how long one thread works alone after a run that other programs disturbed */
    DISTURBED_PERCENT = 15,  /* of all threads' time spent without a processor */
    SHORT_RUN_NS = 2000000,  /* too short to tell */
};

typedef struct {
    _Atomic unsigned phase;
    char padding[60];
} padded;

struct fw_pool {
    int size, active; /* threads there are, and threads of this run */
    int64_t start, alone_until; /* of this run; until when the next ones have one thread */
    int disturbed;              /* the last run of all threads was, by other programs */
    pthread_t *threads;
    fw_job job;
    void *argument;
    _Atomic unsigned generation;
    _Atomic int stopping, sleepers;
    char padding0[64];
    _Atomic int arrived;
    char padding1[60];
    _Atomic unsigned phase;
    char padding2[60];
    _Atomic int64_t lost; /* nanoseconds of this run without a processor, all threads together */
    padded *own;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

typedef struct {
    fw_pool *pool;
    int number;
} worker_argument;

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void fw_pool_barrier(fw_pool *pool, int thread)
{
    const int active = pool->active; /* read before arriving: the next run, which the last one here may begin, sets it */
    if (active == 1) return;
    const unsigned next = atomic_load_explicit(&pool->own[thread].phase, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool->own[thread].phase, next, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == active - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->phase, next, memory_order_release);
        return;
    }
    for (int spins = 0; spins < SPINS_AT_BARRIER; ++spins) {
        if (atomic_load_explicit(&pool->phase, memory_order_acquire) == next) return;
        PAUSE();
    }
    while (atomic_load_explicit(&pool->phase, memory_order_acquire) != next) sched_yield();
}

static unsigned wait_for_work(fw_pool *pool, unsigned seen)
{
    for (int spins = 0; spins < SPINS_FOR_WORK; ++spins) {
        unsigned now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        if (now != seen) return now;
        PAUSE();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    unsigned now;
    while ((now = atomic_load(&pool->generation)) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
    return now;
}

/* Do this thread's part of a run. A thread that waits gives its processor away at every look and gets it back at once,
 * unless another program wants it: so what it lost, others had. */
static void take_part(fw_pool *pool, int thread)
{
    const int64_t used = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    pool->job(pool->argument, thread, pool->active);
    const int64_t wall = clock_ns(CLOCK_MONOTONIC) - pool->start;
    atomic_fetch_add_explicit(&pool->lost, wall - (clock_ns(CLOCK_THREAD_CPUTIME_ID) - used), memory_order_relaxed);
    fw_pool_barrier(pool, thread);
}

static void *worker(void *raw)
{
    worker_argument argument = *(worker_argument *)raw;
    fw_pool *pool = argument.pool;
    free(raw);
    for (unsigned seen = 0;;) {
        seen = wait_for_work(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        take_part(pool, argument.number);
    }
}

static void announce(fw_pool *pool)
{
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) == 0) return; /* one that is about to sleep looks again behind the mutex */
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

/* Where other programs hold the processors, threads that wait for each other lose more than they gain: two threads and
 * one busy neighbour on two cores took six times as long as one thread. So after two runs in a row in which threads often
 * had no processor (one may be an accident), and after one that follows a time alone, the next ones are done by one
 * thread for a while. No result depends on the number of threads. */
void fw_pool_run(fw_pool *pool, fw_job job, void *argument)
{
    pool->start = clock_ns(CLOCK_MONOTONIC);
    pool->active = pool->start < pool->alone_until ? 1 : pool->size;
    if (pool->active == 1) {
        job(argument, 0, 1);
        return;
    }
    pool->job = job;
    pool->argument = argument;
    atomic_store(&pool->lost, 0);
    announce(pool);
    take_part(pool, 0);
    const int64_t end = clock_ns(CLOCK_MONOTONIC), wall = end - pool->start;
    if (wall < SHORT_RUN_NS) return;
    const int disturbed = 100 * atomic_load(&pool->lost) > DISTURBED_PERCENT * pool->active * wall;
    if (disturbed && pool->disturbed) pool->alone_until = end + ALONE_NS;
    pool->disturbed = disturbed;
}

int fw_pool_size(const fw_pool *pool) { return pool->size; }

fw_pool *fw_pool_create(int num_threads)
{
    fw_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->size = 1;
    pool->own = calloc(num_threads, sizeof *pool->own);
    pool->threads = calloc(num_threads, sizeof *pool->threads);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int number = 1; pool->own && pool->threads && number < num_threads; ++number) {
        worker_argument *argument = malloc(sizeof *argument);
        if (!argument) break;
        *argument = (worker_argument){pool, number};
        if (pthread_create(&pool->threads[number], NULL, worker, argument)) {
            free(argument);
            break;
        }
        pool->size = number + 1;
    }
    return pool;
}

void fw_pool_destroy(fw_pool *pool)
{
    if (!pool) return;
    atomic_store(&pool->stopping, 1);
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int number = 1; number < pool->size; ++number) pthread_join(pool->threads[number], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->own);
    free(pool->threads);
    free(pool);
}
