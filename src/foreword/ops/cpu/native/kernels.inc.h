/* The kernels, in terms of one simd_*.h. Included once per instruction set, with NAME defined. */

/* Relative error below 2e-7; 1 at 0, 0 below -87.3, no larger above 88.37; a NaN stays one. The argument is reduced as in
 * Cephes' expf, the polynomial is the best of its degree, of those that are 1 at 0, between -ln(2)/2 and ln(2)/2. */
INLINE vf v_exp(vf x)
{
    const vf lowest = v_set(-87.3f);
    vf bounded = v_min(v_set(88.37f), v_max(lowest, x)); /* the largest whose power of two is finite */
    vf whole = v_round(v_mul(bounded, v_set(1.44269504f)));
    vf r = v_fma(whole, v_set(-0.693359375f), bounded);
    r = v_fma(whole, v_set(2.12194440e-4f), r);
    vf p = v_set(8.290272206e-3f);
    p = v_fma(p, r, v_set(4.189816117e-2f));
    p = v_fma(p, r, v_set(1.666763872e-1f));
    p = v_fma(p, r, v_set(4.999914765e-1f));
    p = v_fma(p, r, v_set(9.999997020e-1f));
    p = v_fma(p, r, v_set(1.0f));
    return v_zero_below(x, lowest, v_scale(p, whole));
}

INLINE vf v_tanh(vf x) /* 1 - 2 / (exp(2x) + 1) */
{
    vf twice = v_exp(v_max(v_set(-40.0f), v_min(v_set(40.0f), v_add(x, x))));
    return v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(twice, v_set(1.0f))));
}

/* Long sums run in 16 lanes on every instruction set, so that AVX2 and AVX-512 give the same bits. */
enum { LANES = 16 / W };

INLINE float sum_lanes(const vf *lanes) { return v_sum(LANES == 1 ? lanes[0] : v_add(lanes[0], lanes[LANES - 1])); }

/* --- rows: n is a multiple of 16 ---------------------------------------------------------------------------------- */

static void rms_norm(const float *x, const float *weight, float eps, int32_t n, float *out)
{
    vf squares[LANES] = {{0}};
    for (int32_t i = 0; i < n; i += W) {
        vf part = v_load(x + i);
        squares[i / W % LANES] = v_fma(part, part, squares[i / W % LANES]);
    }
    vf factor = v_set(1.0f / sqrtf(sum_lanes(squares) / (float)n + eps));
    for (int32_t i = 0; i < n; i += W) v_store(out + i, v_mul(v_mul(v_load(x + i), factor), v_load(weight + i)));
}

static void gated(const float *gate_up, int32_t n, int32_t gelu, float *out)
{
    for (int32_t i = 0; i < n; i += W) {
        vf x = v_load(gate_up + i), y;
        if (gelu) {
            vf inner = v_mul(v_set(0.7978845608f), v_fma(v_mul(v_mul(x, x), x), v_set(0.044715f), x));
            y = v_mul(v_mul(v_set(0.5f), x), v_add(v_set(1.0f), v_tanh(inner)));
        } else {
            y = v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_set(0), x))));
        }
        v_store(out + i, v_mul(y, v_load(gate_up + n + i)));
    }
}

static void rotate(float *x, const float *cosine, const float *sine, int32_t n)
{
    int32_t half = n / 2, i = 0;
    for (; i + W <= half; i += W) {
        vf a = v_load(x + i), b = v_load(x + half + i), c = v_load(cosine + i), s = v_load(sine + i);
        v_store(x + i, v_sub(v_mul(a, c), v_mul(b, s)));
        v_store(x + half + i, v_add(v_mul(b, c), v_mul(a, s)));
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

static int32_t argmax(const float *x, int64_t n)
{
    vf best = v_set(-INFINITY), poison = v_set(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vf part = v_load(x + i);
        best = v_max(best, part);
        poison = v_fma(part, v_set(0), poison); /* NaN if a value is NaN or infinite */
    }
    float largest = v_largest(best);
    int bad = v_any_nan(poison);
    for (; i < n; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        bad |= x[i] != x[i];
    }
    if (bad)
        for (i = 0; i < n; ++i)
            if (x[i] != x[i]) return -1;
    if (isinf(largest)) return -1;
    for (i = 0; x[i] != largest; ++i) {}
    return (int32_t)i;
}

/* --- activations -------------------------------------------------------------------------------------------------- */

/* A quantised row: k bytes, then per group of 32 the scale (float), scale times the sum of the bytes (float) and that
 * sum (int32). */
static int64_t act_bytes(int32_t kind, int32_t k)
{
    return kind == FW_Q4 || kind == FW_Q8 ? (int64_t)k + 3 * 4 * (k / FW_GROUP) : 4 * (int64_t)k;
}

static void encode(int32_t kind, const float *x, int32_t k, void *row)
{
    if (kind != FW_Q4 && kind != FW_Q8) {
        memcpy(row, x, 4 * (size_t)k);
        return;
    }
    int32_t groups = k / FW_GROUP;
    int8_t *bytes = row;
    float *scales = (float *)(bytes + k), *weighted = scales + groups;
    int32_t *totals = (int32_t *)(weighted + groups);
    for (int32_t g = 0; g < groups; ++g) {
        const float *from = x + g * FW_GROUP;
        vf largest = v_set(0), poison = v_set(0), sum = v_set(0);
        for (int i = 0; i < FW_GROUP; i += W) {
            vf part = v_load(from + i);
            largest = v_max(largest, v_abs(part));
            poison = v_fma(part, v_set(0), poison); /* NaN if a value is NaN or infinite */
        }
        float top = v_largest(largest);
        vf inverse = v_set(top > 1e-30f ? 127.0f / top : 0.0f);
        for (int i = 0; i < FW_GROUP; i += W) {
            vf whole = v_round(v_mul(v_load(from + i), inverse));
            sum = v_add(sum, whole);
            v_store_bytes(bytes + g * FW_GROUP + i, whole);
        }
        float total = v_sum(sum), scale = v_any_nan(poison) ? NAN : top / 127.0f;
        scales[g] = scale;
        weighted[g] = scale * total;
        totals[g] = total == total ? (int32_t)total : 0;
    }
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

typedef struct {
    const fw_linear *linear;
    const char *act;
    int64_t stride;
    int32_t rows;
    float *out;
    int accumulate;
    int64_t ahead_256ths; /* bytes of the next panel times 256, per group of a row and a vector of columns */
} product;

/* Add the bias or the residual, and cut what lies beyond the last output. */
INLINE void finish(const product *p, int32_t row, int32_t column, vf value)
{
    const fw_linear *linear = p->linear;
    float *to = p->out + (int64_t)row * linear->n + column;
    if (column + W <= linear->n) {
        if (linear->bias) value = v_add(value, v_load(linear->bias + column));
        if (p->accumulate) value = v_add(value, v_load(to));
        v_store(to, value);
        return;
    }
    float lanes[W];
    v_store(lanes, value);
    for (int i = 0; column + i < linear->n; ++i) {
        float y = linear->bias ? lanes[i] + linear->bias[column + i] : lanes[i];
        to[i] = p->accumulate ? y + to[i] : y;
    }
}

/* mr rows, columns first * W .. (first + halves) * W of a panel. */
INLINE void tile_quantised(const int kind, const int mr, const int first, const int halves, const product *p,
                           int32_t panel, int32_t row)
{
    int32_t k = p->linear->k, groups = k / FW_GROUP;
    const int scale_size = kind == FW_Q4 ? 2 * FW_PANEL : FW_PANEL, body_size = kind == FW_Q4 ? 256 : 512;
    const char *start = (const char *)p->linear->panels + (int64_t)panel * fw_panel_bytes(kind, k);
    const uint16_t *scales = (const uint16_t *)start;
    const uint8_t *body = (const uint8_t *)(start + fw_header_bytes(kind, k));
    const int64_t share = p->ahead_256ths * mr * halves >> 8; /* bytes of the next panel that each group asks for */
    const char *next = start + fw_panel_bytes(kind, k) + ((p->ahead_256ths * (row * HALVES + first * mr) >> 8) * groups);
    const int8_t *x[ROWS_QUANTISED];
    const float *row_scales[ROWS_QUANTISED];
    vf acc[ROWS_QUANTISED][HALVES];
    for (int r = 0; r < mr; ++r) {
        x[r] = (const int8_t *)(p->act + (row + r) * p->stride);
        row_scales[r] = (const float *)(x[r] + k);
        for (int h = 0; h < halves; ++h) acc[r][h] = v_set(0);
    }
    for (int32_t g = 0; g < groups; ++g) {
        for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(next + line, 0, 2);
        next += share;
        if (mr == ROWS_QUANTISED && g % 2 == 0) /* many rows do not stay in the first-level cache: ask for the next tile's */
            for (int r = 0; r < mr; ++r) __builtin_prefetch(x[r] + mr * p->stride);
        vf sums[ROWS_QUANTISED][HALVES];
        if (kind == FW_Q4) {
            dot_q4(mr, first, halves, body, x, sums);
        } else {
            int32_t totals[ROWS_QUANTISED];
            for (int r = 0; r < mr; ++r) memcpy(totals + r, row_scales[r] + 2 * groups + g, 4);
            dot_q8(mr, first, halves, body, x, totals, sums);
        }
#pragma GCC unroll 2
        for (int h = 0; h < halves; ++h) {
            vf d = v_load_half(scales + W * (first + h));
#pragma GCC unroll 16
            for (int r = 0; r < mr; ++r) acc[r][h] = v_fma(sums[r][h], v_mul(d, v_set(row_scales[r][g])), acc[r][h]);
            if (kind == FW_Q4) {
                vf m = v_load_half(scales + FW_PANEL + W * (first + h));
#pragma GCC unroll 16
                for (int r = 0; r < mr; ++r) acc[r][h] = v_fma(m, v_set(row_scales[r][groups + g]), acc[r][h]);
            }
        }
        for (int r = 0; r < mr; ++r) x[r] += FW_GROUP;
        scales += scale_size;
        body += body_size;
    }
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) finish(p, row + r, panel * FW_PANEL + W * (first + h), acc[r][h]);
}

INLINE void tile_float(const int kind, const int mr, const product *p, int32_t panel, int32_t row)
{
    const int halves = FW_PANEL / W;
    int32_t k = p->linear->k;
    const char *w = (const char *)p->linear->panels + (int64_t)panel * fw_panel_bytes(kind, k);
    const float *x[ROWS_FLOAT];
    vf acc[ROWS_FLOAT][FW_PANEL / W];
    for (int r = 0; r < mr; ++r) {
        x[r] = (const float *)(p->act + (row + r) * p->stride);
        for (int h = 0; h < halves; ++h) acc[r][h] = v_set(0);
    }
    for (int32_t i = 0; i < k; i += 2) {
        vf one[FW_PANEL / W], two[FW_PANEL / W];
        for (int h = 0; h < halves; ++h) {
            if (kind == FW_BF16) {
                one[h] = v_load_of_pairs((const uint16_t *)w + 2 * (FW_PANEL / 2 * i + W * h), 0);
                two[h] = v_load_of_pairs((const uint16_t *)w + 2 * (FW_PANEL / 2 * i + W * h), 1);
            } else {
                one[h] = v_load((const float *)w + FW_PANEL * i + W * h);
                two[h] = v_load((const float *)w + FW_PANEL * (i + 1) + W * h);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r)
            for (int h = 0; h < halves; ++h) {
                acc[r][h] = v_fma(v_set(x[r][i]), one[h], acc[r][h]);
                acc[r][h] = v_fma(v_set(x[r][i + 1]), two[h], acc[r][h]);
            }
    }
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) finish(p, row + r, panel * FW_PANEL + W * h, acc[r][h]);
}

/* mr and kind are constants in every copy, so that the sums stay in registers. */
#define QUANTISED(KIND, MR)                                                                             \
    case MR:                                                                                            \
        if (MR == 1 || KIND == FW_Q4) {                                                                 \
            tile_quantised(KIND, MR, 0, HALVES, &p, panel, row);                                        \
        } else {                                                                                        \
            for (int h = 0; h < HALVES; ++h) tile_quantised(KIND, MR, h, 1, &p, panel, row);            \
        }                                                                                               \
        break
#define FLOATS(KIND, MR)                    \
    case MR:                                \
        tile_float(KIND, MR, &p, panel, row); \
        break

/* As many rows at once as fit the registers; what is left over in powers of two. */
INLINE int32_t rows_at_once(int32_t left, int32_t most) { return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

#define PANELS(FUNCTION, ROWS, CASES)                                              \
    static void FUNCTION(product p, int32_t rows, int32_t begin, int32_t end)      \
    {                                                                              \
        for (int32_t panel = begin; panel < end; ++panel) {                        \
            for (int32_t row = 0, step; row < rows; row += step) {                 \
                step = rows_at_once(rows - row, ROWS);                             \
                switch (step) { CASES }                                            \
            }                                                                      \
        }                                                                          \
    }

#if W == 16
#define CASES_QUANTISED(KIND) QUANTISED(KIND, 1); QUANTISED(KIND, 2); QUANTISED(KIND, 4); QUANTISED(KIND, 8);
#define CASES_FLOAT(KIND) FLOATS(KIND, 1); FLOATS(KIND, 2); FLOATS(KIND, 4); FLOATS(KIND, 12);
#else
#define CASES_QUANTISED(KIND) QUANTISED(KIND, 1); QUANTISED(KIND, 2); QUANTISED(KIND, 4);
#define CASES_FLOAT(KIND) FLOATS(KIND, 1); FLOATS(KIND, 2); FLOATS(KIND, 4); FLOATS(KIND, 6);
#endif

PANELS(panels_q4, ROWS_QUANTISED, CASES_QUANTISED(FW_Q4))
PANELS(panels_q8, ROWS_QUANTISED, CASES_QUANTISED(FW_Q8))
PANELS(panels_f32, ROWS_FLOAT, CASES_FLOAT(FW_F32))
PANELS(panels_bf16, ROWS_FLOAT, CASES_FLOAT(FW_BF16))

static void linear(const fw_linear *weight, const void *act, int64_t stride, int32_t rows, int32_t begin, int32_t end,
                   float *out, int accumulate)
{
    product p = {weight, act, stride, rows, out, accumulate, 0};
    /* Memory sets the pace while a panel comes in, so it comes in while the one before is computed: every group of every
     * tile asks for an equal share of it. */
    if (weight->kind == FW_Q4 || weight->kind == FW_Q8)
        p.ahead_256ths = 256 * fw_panel_bytes(weight->kind, weight->k) / ((int64_t)rows * HALVES * (weight->k / FW_GROUP));
    switch (weight->kind) {
    case FW_Q4: panels_q4(p, rows, begin, end); break;
    case FW_Q8: panels_q8(p, rows, begin, end); break;
    case FW_BF16: panels_bf16(p, rows, begin, end); break;
    default: panels_f32(p, rows, begin, end);
    }
}
