/* Products of byte weights with byte activations: 16 columns, one group of 32 inputs. For the instruction sets of x86,
 * whose simd_*.h say how intrinsics of their width are called, MM(..); ROWS_QUANTISED rows at once and HALVES vectors of
 * columns fit their registers. */

INLINE vi bytes_at(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return MM(set1_epi32)(four);
}

/* dot_q4 and dot_q8: sums[r][h] are columns W * (first + h).. of row r, as floats. */

#if FW_VNNI

INLINE void dot_q4(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   vf sums[][HALVES])
{
    const vi low = MM(set1_epi8)(15);
    vi acc[ROWS_QUANTISED][HALVES];
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) acc[r][h] = MM(set1_epi32)(0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
        for (int h = 0; h < halves; ++h) {
            vi raw = i_load(w + 64 * j + 4 * W * (first + h));
            vi even = i_and(raw, low), odd = i_and(MM(srli_epi16)(raw, 4), low);
#pragma GCC unroll 16
            for (int r = 0; r < mr; ++r) {
                acc[r][h] = MM(dpbusd_epi32)(acc[r][h], even, bytes_at(x[r] + 4 * j));
                acc[r][h] = MM(dpbusd_epi32)(acc[r][h], odd, bytes_at(x[r] + 4 * j + 16));
                KEEP(acc[r][h]);
            }
        }
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) sums[r][h] = MM(cvtepi32_ps)(acc[r][h]);
}

INLINE void dot_q8(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   const int32_t *totals, vf sums[][HALVES])
{
    vi acc[ROWS_QUANTISED][HALVES];
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) acc[r][h] = MM(set1_epi32)(-128 * totals[r]); /* weights are stored plus 128 */
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
        for (int h = 0; h < halves; ++h) {
            vi raw = i_load(w + 64 * j + 4 * W * (first + h));
#pragma GCC unroll 16
            for (int r = 0; r < mr; ++r) {
                acc[r][h] = MM(dpbusd_epi32)(acc[r][h], raw, bytes_at(x[r] + 4 * j));
                KEEP(acc[r][h]);
            }
        }
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) sums[r][h] = MM(cvtepi32_ps)(acc[r][h]);
}

#else

/* 4-bit weights are 0 .. 15 and activations -127 .. 127, so eight products fit a signed 16-bit lane:
 * 8 * 2 * 15 * 127 = 30480. */
INLINE void dot_q4(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   vf sums[][HALVES])
{
    const vi low = MM(set1_epi8)(15), ones = MM(set1_epi16)(1);
    vi acc[ROWS_QUANTISED][HALVES];
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) acc[r][h] = MM(set1_epi32)(0);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) { /* low halves of byte blocks 0 .. 3, then high ones */
        vi nibbles[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < halves; ++h) {
            vi raw = i_load(w + 64 * (j % 4) + 4 * W * (first + h));
            nibbles[h] = i_and(j < 4 ? raw : MM(srli_epi16)(raw, 4), low);
        }
#pragma GCC unroll 16
        for (int r = 0; r < mr; ++r) {
            vi four = bytes_at(x[r] + 4 * j);
#pragma GCC unroll 2
            for (int h = 0; h < halves; ++h) {
                acc[r][h] = MM(add_epi16)(acc[r][h], MM(maddubs_epi16)(nibbles[h], four));
                KEEP(acc[r][h]);
            }
        }
    }
    for (int r = 0; r < mr; ++r)
        for (int h = 0; h < halves; ++h) sums[r][h] = MM(cvtepi32_ps)(MM(madd_epi16)(acc[r][h], ones));
}

/* A byte weight is split into its halves, both handled as above: maddubs on whole bytes would saturate. */
INLINE void dot_q8(const int mr, const int first, const int halves, const uint8_t *w, const int8_t *const *x,
                   const int32_t *totals, vf sums[][HALVES])
{
    const vi low = MM(set1_epi8)(15), ones = MM(set1_epi16)(1), sixteens = MM(set1_epi16)(16);
    for (int h = 0; h < halves; ++h) {
        vi small[ROWS_QUANTISED], large[ROWS_QUANTISED];
        for (int r = 0; r < mr; ++r) small[r] = large[r] = MM(set1_epi32)(0);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            vi raw = i_load(w + 64 * j + 4 * W * (first + h));
            vi even = i_and(raw, low), odd = i_and(MM(srli_epi16)(raw, 4), low);
#pragma GCC unroll 16
            for (int r = 0; r < mr; ++r) {
                vi four = bytes_at(x[r] + 4 * j);
                small[r] = MM(add_epi16)(small[r], MM(maddubs_epi16)(even, four));
                large[r] = MM(add_epi16)(large[r], MM(maddubs_epi16)(odd, four));
                KEEP(small[r]);
                KEEP(large[r]);
            }
        }
        for (int r = 0; r < mr; ++r) {
            vi total = MM(add_epi32)(MM(madd_epi16)(small[r], ones), MM(madd_epi16)(large[r], sixteens));
            total = MM(sub_epi32)(total, MM(set1_epi32)(128 * totals[r])); /* weights are stored plus 128 */
            sums[r][h] = MM(cvtepi32_ps)(total);
        }
    }
}

#endif
