/* Plain C with the compilers' vector types: any processor; 8 floats a vector. Sums are never contracted into fused
 * ones (-ffp-contract=off), so that a result does not hang on what the optimiser inlined where. */
#define W 8
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

INLINE vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf v_set(float x) { return (vf){x, x, x, x, x, x, x, x}; }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_div(vf a, vf b) { return a / b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE void v_add_products(const int n, vf *sums, const float *x, const vf *factors) /* sums[i] += *x * factors[i] */
{
    for (int i = 0; i < n; ++i) sums[i] = v_fma(v_set(*x), factors[i], sums[i]);
}
/* A NaN in the second operand comes through. */
INLINE vf v_max(vf a, vf b) { return v_choose(a > b, a, b); }
INLINE vf v_min(vf a, vf b) { return v_choose(a < b, a, b); }
INLINE vf v_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
INLINE vf v_round(vf a) /* to the nearest whole number, |a| < 2^22 */
{
    const vf shift = v_set(12582912.0f); /* 1.5 * 2^23 */
    return (a + shift) - shift;
}
INLINE vf v_zero_below(vf x, vf limit, vf y) { return v_choose(x < limit, v_set(0), y); }
INLINE vf v_scale(vf x, vf whole) /* x * 2^whole, which has to be a normal number */
{
    vi exponent;
    for (int i = 0; i < W; ++i) exponent[i] = whole[i] == whole[i] ? (int32_t)whole[i] : 0;
    return (vf)((vi)x + exponent * (1 << 23));
}
INLINE float v_sum(vf a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
INLINE float v_largest(vf a)
{
    float best = a[0];
    for (int i = 1; i < W; ++i) best = a[i] > best ? a[i] : best;
    return best;
}
INLINE float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023, bits;
    if (exponent == 0) { /* zero and subnormal numbers: fraction * 2^-24 */
        float value = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE vf v_load_half(const uint16_t *p)
{
    vf x;
    for (int i = 0; i < W; ++i) x[i] = half_to_float(p[i]);
    return x;
}
/* Of W pairs of bfloat16 the first, or the second if `odd`. */
INLINE vf v_load_of_pairs(const uint16_t *p, int odd)
{
    vi x;
    for (int i = 0; i < W; ++i) x[i] = (int32_t)((uint32_t)p[2 * i + odd] << 16);
    return (vf)x;
}
INLINE vf v_load_bytes(const int8_t *p)
{
    typedef int8_t bytes __attribute__((vector_size(W)));
    typedef int16_t words __attribute__((vector_size(2 * W)));
    bytes x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, words), vi), vf); /* step by step */
}
INLINE int v_any_nan(vf a)
{
    int any = 0;
    for (int i = 0; i < W; ++i) any |= a[i] != a[i];
    return any;
}
/* Whole numbers, -127 .. 127, as bytes. What a NaN becomes does not matter: its group's scale is NaN. */
INLINE void v_store_bytes(int8_t *p, vf whole)
{
    for (int i = 0; i < W; ++i) p[i] = whole[i] == whole[i] ? (int8_t)whole[i] : 0;
}

/* --- products of byte weights with byte activations: 16 columns, one group of 32 inputs ------------------------- */

enum { ROWS_QUANTISED = 4, ROWS_FLOAT = 6 };
#define HALVES 2

INLINE void dot_q4(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   vf sums[][HALVES])
{
    for (int r = 0; r < mr; ++r) {
        int32_t total[FW_PANEL] = {0};
        for (int j = 0; j < 4; ++j)
            for (int c = 0; c < FW_PANEL; ++c)
                for (int i = 0; i < 4; ++i) {
                    uint8_t both = w[64 * j + 4 * c + i];
                    total[c] += (both & 15) * x[r][4 * j + i] + (both >> 4) * x[r][4 * j + 16 + i];
                }
        for (int h = 0; h < halves; ++h)
            for (int c = 0; c < W; ++c) sums[r][h][c] = (float)total[W * (first + h) + c];
    }
}

INLINE void dot_q8(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   const int32_t *totals, vf sums[][HALVES])
{
    for (int r = 0; r < mr; ++r) {
        int32_t total[FW_PANEL];
        for (int c = 0; c < FW_PANEL; ++c) total[c] = -128 * totals[r];
        for (int j = 0; j < 8; ++j)
            for (int c = 0; c < FW_PANEL; ++c)
                for (int i = 0; i < 4; ++i) total[c] += w[64 * j + 4 * c + i] * x[r][4 * j + i];
        for (int h = 0; h < halves; ++h)
            for (int c = 0; c < W; ++c) sums[r][h][c] = (float)total[W * (first + h) + c];
    }
}
