#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#include <math.h>
#include <string.h>

#include "kernels.h"

#define NAME fw_kernels_portable
#define KERNELS_NAME "portable"

#include "simd_portable.h"
#include "kernels.inc.h"

static int supported(void) { return 1; }

#include "attention.inc.h"
