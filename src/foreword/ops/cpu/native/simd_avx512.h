/* AVX-512 (F, BW, VL, DQ), with VNNI if FW_VNNI: 16 floats a vector. */
#define W 16
typedef __m512 vf;
typedef __m512i vi;

#define INLINE static inline __attribute__((always_inline))

#define KEEP(x) __asm__("" : "+v"(x)) /* see simd_avx2.h */

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE void v_add_products(const int n, vf *sums, const float *x, const vf *factors) /* sums[i] += *x * factors[i] */
{
    for (int i = 0; i < n; ++i) sums[i] = v_fma(v_set(*x), factors[i], sums[i]);
}
/* A NaN in the second operand comes through. */
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_zero_below(vf x, vf limit, vf y) /* y, and 0 where x < limit */
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
INLINE vf v_scale(vf x, vf whole) { return _mm512_scalef_ps(x, whole); } /* x * 2^whole */
INLINE float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float v_largest(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vf v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
/* Of W pairs of bfloat16 the first, or the second if `odd`. */
INLINE vf v_load_of_pairs(const uint16_t *p, int odd)
{
    __m512i raw = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(raw, 16));
}
INLINE vf v_load_bytes(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE int v_any_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
/* Whole numbers, -127 .. 127, as bytes. What a NaN becomes does not matter: its group's scale is NaN. */
INLINE void v_store_bytes(int8_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

/* --- products of byte weights with byte activations: 16 columns, one group of 32 inputs ------------------------- */

enum { ROWS_QUANTISED = 8, ROWS_FLOAT = 12 };
#define HALVES 1

#define MM(operation) _mm512_##operation

INLINE vi i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }

#include "bytes.inc.h"
