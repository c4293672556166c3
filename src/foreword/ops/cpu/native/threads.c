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
    ALONE_NS = 200000000,    /* how long one thread works alone after the others kept it waiting */
    TOO_LONG_PERCENT = 35,   /* of all threads' time spent waiting: other programs hold the processors */
};

typedef struct {
    _Atomic int phase;
    char padding[60];
} padded;

struct fw_pool {
    int size, active; /* threads there are, and threads of this run */
    int64_t alone_until;
    pthread_t *threads;
    fw_job job;
    void *argument;
    _Atomic int generation, stopping, sleepers;
    char padding0[64];
    _Atomic int arrived;
    char padding1[60];
    _Atomic int phase;
    char padding2[60];
    _Atomic int64_t waited; /* nanoseconds at barriers in this run, all threads together */
    padded *own;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

typedef struct {
    fw_pool *pool;
    int number;
} worker_argument;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void fw_pool_barrier(fw_pool *pool, int thread)
{
    if (pool->active == 1) return;
    int next = atomic_load_explicit(&pool->own[thread].phase, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool->own[thread].phase, next, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->active - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->phase, next, memory_order_release);
        return;
    }
    for (int spins = 0; spins < SPINS_AT_BARRIER; ++spins) {
        if (atomic_load_explicit(&pool->phase, memory_order_acquire) == next) return;
        PAUSE();
    }
    const int64_t start = now_ns();
    while (atomic_load_explicit(&pool->phase, memory_order_acquire) != next) sched_yield();
    atomic_fetch_add_explicit(&pool->waited, now_ns() - start, memory_order_relaxed);
}

static int wait_for_work(fw_pool *pool, int seen)
{
    for (int spins = 0; spins < SPINS_FOR_WORK; ++spins) {
        int now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        if (now != seen) return now;
        PAUSE();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    int now;
    while ((now = atomic_load(&pool->generation)) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
    return now;
}

static void *worker(void *raw)
{
    worker_argument argument = *(worker_argument *)raw;
    fw_pool *pool = argument.pool;
    free(raw);
    for (int seen = 0;;) {
        seen = wait_for_work(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        pool->job(pool->argument, argument.number, pool->active);
        fw_pool_barrier(pool, argument.number);
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
 * one busy neighbour on two cores took six times as long as one thread. So when a run was mostly waiting, the next ones
 * are done by one thread for a while. No result depends on the number of threads. */
void fw_pool_run(fw_pool *pool, fw_job job, void *argument)
{
    const int64_t start = now_ns();
    pool->active = start < pool->alone_until ? 1 : pool->size;
    if (pool->active == 1) {
        job(argument, 0, 1);
        return;
    }
    pool->job = job;
    pool->argument = argument;
    atomic_store(&pool->waited, 0);
    announce(pool);
    job(argument, 0, pool->active);
    fw_pool_barrier(pool, 0);
    const int64_t end = now_ns(), waited = atomic_load(&pool->waited);
    if (100 * waited > TOO_LONG_PERCENT * pool->active * (end - start) && waited > 1000000) pool->alone_until = end + ALONE_NS;
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
        pool->size = number + 1; /* workers read it only after the first announcement */
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
