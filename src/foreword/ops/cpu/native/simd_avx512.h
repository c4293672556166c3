/* AVX-512 (F, BW, VL, DQ), with VNNI if FW_VNNI: 16 floats a vector. */
#define W 16
typedef __m512 vf;
typedef __m512i vi;

#define INLINE static inline __attribute__((always_inline))

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* A NaN in the second operand comes through. */
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_zero_below(vf x, vf limit, vf y) /* y, and 0 where x < limit */
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
INLINE vf v_power_of_two(vf whole) /* 2^whole, -127 < whole < 128 */
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23));
}
INLINE float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float v_largest(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vf v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
/* W pairs of bfloat16: the first of each pair, and the second. */
INLINE void v_load_pairs(const uint16_t *p, vf *first, vf *second)
{
    __m512i raw = _mm512_loadu_si512(p);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000)));
}
/* Rounds to bytes: -127 .. 127; returns nothing of a NaN, which the scale carries. */
INLINE void v_store_bytes(int8_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

/* --- products of byte weights with byte activations: 16 columns, one group of 32 inputs ------------------------- */

enum { ROWS_QUANTISED = 8, ROWS_FLOAT = 12 };
#define HALVES 1

INLINE vi bytes_at(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

/* Keep a running sum in its register: without this gcc makes all products first, and spills them. */
#define KEEP(x) __asm__("" : "+v"(x))

#if FW_VNNI

INLINE void dot_q4(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   vf sums[][HALVES])
{
    (void)first, (void)halves;
    const __m512i low = _mm512_set1_epi8(15);
    __m512i acc[ROWS_QUANTISED];
    for (int r = 0; r < mr; ++r) acc[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i raw = _mm512_loadu_si512(w + 64 * j);
        __m512i even = _mm512_and_si512(raw, low), odd = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r) {
            acc[r] = _mm512_dpbusd_epi32(acc[r], even, bytes_at(x[r] + 4 * j));
            acc[r] = _mm512_dpbusd_epi32(acc[r], odd, bytes_at(x[r] + 4 * j + 16));
            KEEP(acc[r]);
        }
    }
    for (int r = 0; r < mr; ++r) sums[r][0] = _mm512_cvtepi32_ps(acc[r]);
}

INLINE void dot_q8(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   const int32_t *totals, vf sums[][HALVES])
{
    (void)first, (void)halves;
    __m512i acc[ROWS_QUANTISED];
    for (int r = 0; r < mr; ++r) acc[r] = _mm512_set1_epi32(-128 * totals[r]); /* weights are stored plus 128 */
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        __m512i raw = _mm512_loadu_si512(w + 64 * j);
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r) {
            acc[r] = _mm512_dpbusd_epi32(acc[r], raw, bytes_at(x[r] + 4 * j));
            KEEP(acc[r]);
        }
    }
    for (int r = 0; r < mr; ++r) sums[r][0] = _mm512_cvtepi32_ps(acc[r]);
}

#else

/* 4-bit weights are 0 .. 15 and activations -127 .. 127, so eight products fit a signed 16-bit lane. */
INLINE void dot_q4(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   vf sums[][HALVES])
{
    (void)first, (void)halves;
    const __m512i low = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
    __m512i acc[ROWS_QUANTISED];
    for (int r = 0; r < mr; ++r) acc[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i raw = _mm512_loadu_si512(w + 64 * j);
        __m512i even = _mm512_and_si512(raw, low), odd = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r) {
            acc[r] = _mm512_add_epi16(acc[r], _mm512_maddubs_epi16(even, bytes_at(x[r] + 4 * j)));
            acc[r] = _mm512_add_epi16(acc[r], _mm512_maddubs_epi16(odd, bytes_at(x[r] + 4 * j + 16)));
            KEEP(acc[r]);
        }
    }
    for (int r = 0; r < mr; ++r) sums[r][0] = _mm512_cvtepi32_ps(_mm512_madd_epi16(acc[r], ones));
}

/* A byte weight is split into its halves, both handled as above: maddubs on whole bytes would saturate. */
INLINE void dot_q8(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   const int32_t *totals, vf sums[][HALVES])
{
    (void)first, (void)halves;
    const __m512i low = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1), sixteens = _mm512_set1_epi16(16);
    __m512i small[ROWS_QUANTISED], large[ROWS_QUANTISED];
    for (int r = 0; r < mr; ++r) small[r] = large[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        __m512i raw = _mm512_loadu_si512(w + 64 * j);
        __m512i even = _mm512_and_si512(raw, low), odd = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r) {
            __m512i four = bytes_at(x[r] + 4 * j);
            small[r] = _mm512_add_epi16(small[r], _mm512_maddubs_epi16(even, four));
            large[r] = _mm512_add_epi16(large[r], _mm512_maddubs_epi16(odd, four));
            KEEP(small[r]);
            KEEP(large[r]);
        }
    }
    for (int r = 0; r < mr; ++r) {
        __m512i total = _mm512_add_epi32(_mm512_madd_epi16(small[r], ones), _mm512_madd_epi16(large[r], sixteens));
        total = _mm512_sub_epi32(total, _mm512_set1_epi32(128 * totals[r])); /* weights are stored plus 128 */
        sums[r][0] = _mm512_cvtepi32_ps(total);
    }
}

#endif
