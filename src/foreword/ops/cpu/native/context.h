#ifndef FOREWORD_CONTEXT_H
#define FOREWORD_CONTEXT_H

#include "kernels.h"
#include "threads.h"

struct fw_context {
    fw_pool *pool;
    const fw_kernels *kernels;
    void *memory; /* the shared buffers of a pass, kept for the next */
    size_t memory_bytes;
};

/* Have `bytes` in context->memory; 0 if the system has none. What was there is lost. */
int fw_reserve(fw_context *, size_t bytes);
/* Hand out `bytes` from `*at`, on a cache line of its own. */
void *fw_carve(char **at, int64_t bytes);

#endif
