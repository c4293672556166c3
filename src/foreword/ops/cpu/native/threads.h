/* One pool of threads that run a function together, with a barrier between its phases. */
#ifndef FOREWORD_THREADS_H
#define FOREWORD_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct fw_pool fw_pool;
typedef void (*fw_job)(void *argument, int thread, int num_threads);

fw_pool *fw_pool_create(int num_threads);
void fw_pool_destroy(fw_pool *);
int fw_pool_size(const fw_pool *);
/* Run job on every thread, the caller's as number 0; returns when all have ended. */
void fw_pool_run(fw_pool *, fw_job, void *argument);
/* Inside a job: wait until every thread has come here. */
void fw_pool_barrier(fw_pool *, int thread);

#endif
