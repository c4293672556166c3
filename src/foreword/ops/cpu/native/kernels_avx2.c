#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define FW_VNNI 0
#define NAME fw_kernels_avx2
#define KERNELS_NAME "avx2"

#include "simd_avx2.h"
#include "kernels.inc.h"

static int supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#include "attention.inc.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
