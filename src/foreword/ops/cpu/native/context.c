/* Which kernels there are, and what a context holds. */
#include "context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fw_kernels *const *kernel_list(void)
{
    static const fw_kernels *const all[] = {
#if defined(__x86_64__)
        &fw_kernels_avx512_vnni, &fw_kernels_avx512, &fw_kernels_avx2,
#endif
        &fw_kernels_portable, NULL,
    };
    return all;
}

int32_t fw_abi(void)
{
    return FW_VERSION << 16 ^ (int32_t)(sizeof(fw_model) + 7 * sizeof(fw_layer) + 31 * sizeof(fw_batch) +
                                        127 * sizeof(fw_attention) + 511 * sizeof(fw_kv));
}

void fw_kernels_available(char *names, int32_t size)
{
    int32_t used = 0;
    names[0] = 0;
    for (const fw_kernels *const *k = kernel_list(); *k; ++k)
        if ((*k)->supported()) used += snprintf(names + used, size - used, "%s%s", used ? " " : "", (*k)->name);
}

fw_context *fw_create(const char *name, int32_t num_threads)
{
    const fw_kernels *const *k = kernel_list();
    while (*k && !((*k)->supported() && strcmp((*k)->name, name) == 0)) ++k;
    fw_context *context = *k ? calloc(1, sizeof *context) : NULL;
    if (!context) return NULL;
    context->kernels = *k;
    context->pool = fw_pool_create(num_threads);
    if (!context->pool) {
        free(context);
        return NULL;
    }
    return context;
}

void fw_destroy(fw_context *context)
{
    if (!context) return;
    fw_pool_destroy(context->pool);
    free(context->memory);
    free(context);
}

int fw_reserve(fw_context *context, size_t bytes)
{
    if (bytes <= context->memory_bytes) return 1;
    void *grown = NULL;
    if (posix_memalign(&grown, 64, bytes)) return 0;
    free(context->memory);
    context->memory = grown;
    context->memory_bytes = bytes;
    return 1;
}

void *fw_carve(char **at, int64_t bytes)
{
    void *here = *at;
    *at += (bytes + 63) & ~(int64_t)63;
    return here;
}
