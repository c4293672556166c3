/* AVX2 + FMA + F16C: 8 floats a vector. */
#define W 8
typedef __m256 vf;
typedef __m256i vi;

#define INLINE static inline __attribute__((always_inline))

/* Keep a running sum in its register: without this gcc makes all products first, and spills them. */
#define KEEP(x) __asm__("" : "+x"(x))

INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* sums[i] += *x * factors[i], n vectors. Two of them are one block for gcc, which else loads ahead until the sums spill. */
INLINE void v_add_products(const int n, vf *sums, const float *x, const vf *factors)
{
    vf factor;
    if (n == 2)
        __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
                : "+&x"(sums[0]), "+x"(sums[1]), "=&x"(factor)
                : "m"(*x), "x"(factors[0]), "x"(factors[1]));
    else
        for (int i = 0; i < n; ++i) sums[i] = v_fma(v_set(*x), factors[i], sums[i]);
}
/* A NaN in the second operand comes through. */
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_zero_below(vf x, vf limit, vf y) /* y, and 0 where x < limit */
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
}
INLINE vf v_scale(vf x, vf whole) /* x * 2^whole, which has to be a normal number */
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23)));
}
INLINE float v_sum(vf a)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float v_largest(vf a)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
INLINE vf v_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
/* Of W pairs of bfloat16 the first, or the second if `odd`. */
INLINE vf v_load_of_pairs(const uint16_t *p, int odd)
{
    __m256i raw = _mm256_loadu_si256((const __m256i *)p);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(raw, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(raw, 16));
}
INLINE vf v_load_bytes(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE int v_any_nan(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
/* Whole numbers, -127 .. 127, as bytes. What a NaN becomes does not matter: its group's scale is NaN. */
INLINE void v_store_bytes(int8_t *p, vf x)
{
    __m256i whole = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}

/* --- products of byte weights with byte activations: 16 columns, one group of 32 inputs ------------------------- */

enum { ROWS_QUANTISED = 4, ROWS_FLOAT = 6 };
#define HALVES 2 /* vectors of 8 columns in a panel */

#define MM(operation) _mm256_##operation

INLINE vi i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi i_and(vi a, vi b) { return _mm256_and_si256(a, b); }

#include "bytes.inc.h"
