/* Attention over paged KV, included once per instruction set behind kernels.inc.h.
 *
 * A task stacks rows (tokens times the query heads of one KV head) and walks tiles of 128 key positions. Every tile's
 * softmax is made by itself (its own maximum and sum) and tiles are merged in ascending order, so a row's bits do not
 * depend on what it is stacked with nor on where chunks, caches and segments begin. (Online softmax: Milakov and
 * Gimelshein 2018; tiles and merging as in FlashAttention, Dao et al. 2022; stacked shared prefixes as in Hydragen,
 * Juravsky et al. 2024.) */

enum { SCORE_VECTORS = FW_SLOTS / W, MAX_TILE_BLOCKS = FW_TILE / FW_SLOTS };
#define STACK (W == 16 ? 12 : 6) /* rows computed at once */

/* Bytes of an element of the KV. */
INLINE int32_t element_bytes(const int kv_kind) { return kv_kind == FW_F32 ? 4 : kv_kind == FW_BF16 ? 2 : 1; }

/* Two rows of keys or values that lie side by side, W columns of each; of Q8 the bytes, without their scales. */
INLINE vf load_of_two(const int kv_kind, const char *rows, int32_t columns, int32_t column, const int second)
{
    if (kv_kind == FW_Q8) return v_load_bytes((const int8_t *)rows + second * columns + column);
    if (kv_kind == FW_BF16) return v_load_of_pairs((const uint16_t *)rows + 2 * column, second);
    return v_load((const float *)rows + second * columns + column);
}

typedef struct {
    int32_t group_size, dim, kv_kind;
    const fw_attention *plan;
    const fw_layer *layer;
    const char *keys, *values; /* of the task's KV head */
    int64_t block_bytes;
    float *query, *sum, *scores, *largest, *total; /* [R][dim] [R][dim] [R][128] [R] [R] */
    float *old_factor, *new_factor;                /* [R], of a merge */
    int32_t *low, *high;                           /* [R], positions of the tile that a row sees: low .. high - 1 */
} stack;

INLINE int32_t position_of(const stack *s, const fw_task *task, int32_t stacked_row)
{
    return s->plan->positions[s->plan->rows[task->row_begin + stacked_row / s->group_size]];
}

/* Scores of mr rows against the 16 keys of a block. */
INLINE void score_block(const int kv_kind, const int mr, const stack *s, int32_t row, const char *block, float *scores)
{
    vf acc[STACK][SCORE_VECTORS];
    const float *q = s->query + (int64_t)row * s->dim;
    const int32_t dim = s->dim;
    for (int r = 0; r < mr; ++r)
        for (int v = 0; v < SCORE_VECTORS; ++v) acc[r][v] = v_set(0);
    for (int32_t d = 0; d < dim; d += 2, block += 2 * FW_SLOTS * element_bytes(kv_kind))
#pragma GCC unroll 2
        for (int second = 0; second < 2; ++second) {
            vf keys[SCORE_VECTORS];
            for (int v = 0; v < SCORE_VECTORS; ++v) keys[v] = load_of_two(kv_kind, block, FW_SLOTS, W * v, second);
#pragma GCC unroll 16
            for (int r = 0; r < mr; ++r) v_add_products(SCORE_VECTORS, acc[r], q + r * dim + d + second, keys);
        }
    for (int r = 0; r < mr; ++r)
        for (int v = 0; v < SCORE_VECTORS; ++v) {
            if (kv_kind == FW_Q8) acc[r][v] = v_mul(acc[r][v], v_load((const float *)block + W * v)); /* the keys' scales */
            v_store(scores + r * FW_TILE + W * v, acc[r][v]);
        }
}

/* Give a row's weights of one tile the scales of the values. */
INLINE void scale_weights(const stack *s, int32_t row, const char *const *values, int32_t num_blocks)
{
    for (int32_t b = 0; b < num_blocks; ++b) {
        const float *scales = (const float *)(values[b] + FW_SLOTS * s->dim);
        float *weights = s->scores + (int64_t)row * FW_TILE + FW_SLOTS * b;
        for (int v = 0; v < SCORE_VECTORS; ++v)
            v_store(weights + W * v, v_mul(v_load(weights + W * v), v_load(scales + W * v)));
    }
}

/* Merge weighted values of one tile, columns d .., into a row. */
INLINE void merge_vector(const stack *s, int32_t row, int32_t d, vf values)
{
    float *to = s->sum + (int64_t)row * s->dim + d;
    vf kept = v_mul(v_load(to), v_set(s->old_factor[row]));
    v_store(to, v_fma(values, v_set(s->new_factor[row]), kept));
}

/* The weighted values of one tile that a row sees, columns d ... A weight of 0 silences no NaN, and what a row does not see
 * may hold one: a later token's, or what an earlier owner of the slot left. */
static void seen_values(int kv_kind, const stack *s, int32_t row, const char *const *blocks, int32_t d, vf *sum)
{
    vf acc = v_set(0);
    for (int32_t i = s->low[row]; i < s->high[row]; ++i) {
        const char *block = blocks[i / FW_SLOTS];
        const int32_t slot = i % FW_SLOTS;
        vf value = kv_kind == FW_Q8 ? v_load_bytes((const int8_t *)block + slot * s->dim + d)
                   : kv_kind == FW_BF16
                       ? v_load_of_pairs((const uint16_t *)block + slot / 2 * 2 * s->dim + 2 * d, slot % 2)
                       : v_load((const float *)block + slot * s->dim + d);
        acc = v_fma(v_set(s->scores[(int64_t)row * FW_TILE + i]), value, acc);
    }
    *sum = acc;
}

/* Merge the weighted values of one tile into mr rows, columns d .. d + nd * W. */
INLINE void merge_values(const int kv_kind, const int mr, const int nd, const stack *s, int32_t row,
                         const char *const *blocks, int32_t num_blocks, int32_t d)
{
    vf acc[STACK][2];
    const float *weights = s->scores + (int64_t)row * FW_TILE;
    for (int r = 0; r < mr; ++r)
        for (int v = 0; v < nd; ++v) acc[r][v] = v_set(0);
    for (int32_t b = 0; b < num_blocks; ++b)
        for (int32_t slot = 0; slot < FW_SLOTS; slot += 2) {
            const char *rows = blocks[b] + (int64_t)slot * s->dim * element_bytes(kv_kind);
            const float *w = weights + FW_SLOTS * b + slot;
#pragma GCC unroll 2
            for (int second = 0; second < 2; ++second) {
                vf values[2];
                for (int v = 0; v < nd; ++v) values[v] = load_of_two(kv_kind, rows, s->dim, d + W * v, second);
#pragma GCC unroll 16
                for (int r = 0; r < mr; ++r) v_add_products(nd, acc[r], w + r * FW_TILE + second, values);
            }
        }
    vf sums[STACK][2]; /* a copy: what a loop indexes and a pointer points to lives in memory */
#pragma GCC unroll 16
    for (int r = 0; r < mr; ++r)
        for (int v = 0; v < nd; ++v) sums[r][v] = acc[r][v];
    for (int r = 0; r < mr; ++r)
        for (int v = 0; v < nd; ++v) {
            if (v_any_nan(sums[r][v])) seen_values(kv_kind, s, row + r, blocks, d + W * v, &sums[r][v]);
            merge_vector(s, row + r, d + W * v, sums[r][v]);
        }
}

/* Take a tile's maximum and sum of weights into those of a row, and prepare the merge of its values. */
INLINE void merge_weights(const stack *s, int32_t row, float largest, float total)
{
    if (largest == -INFINITY) { /* nothing visible */
        s->old_factor[row] = 1;
        s->new_factor[row] = 0;
        return;
    }
    const float before = s->largest[row];
    const int larger = largest > before;
    float factor[W];
    v_store(factor, v_exp(v_set(larger ? before - largest : largest - before)));
    s->old_factor[row] = larger ? factor[0] : 1;
    s->new_factor[row] = larger ? 1 : factor[0];
    s->total[row] = s->total[row] * s->old_factor[row] + total * s->new_factor[row];
    s->largest[row] = larger ? largest : before;
}

/* Turn a row's scores of a tile into weights, and prepare the merge. Positions visible: [low, high) of the tile. */
static void weigh(const stack *s, int32_t row, int32_t low, int32_t high, int32_t width)
{
    float *scores = s->scores + (int64_t)row * FW_TILE;
    s->low[row] = low = low < 0 ? 0 : low;
    s->high[row] = high = high > width ? width : high;
    if (s->layer->softcap > 0)
        for (int32_t i = 0; i < width; i += W)
            v_store(scores + i, v_mul(v_set(s->layer->softcap),
                                      v_tanh(v_mul(v_load(scores + i), v_set(1.0f / s->layer->softcap)))));
    for (int32_t i = 0; i < low && i < width; ++i) scores[i] = -INFINITY;
    for (int32_t i = high > 0 ? high : 0; i < width; ++i) scores[i] = -INFINITY;
    vf top = v_set(-INFINITY);
    for (int32_t i = 0; i < width; i += W) top = v_max(top, v_load(scores + i));
    float largest = v_largest(top);
    vf total[LANES] = {{0}};
    if (largest == -INFINITY) { /* nothing visible */
        for (int32_t i = 0; i < width; i += W) { /* 0 of -inf; a NaN, which is no maximum, stays */
            vf score = v_load(scores + i);
            v_store(scores + i, v_zero_below(score, v_set(0), score));
        }
    } else {
        for (int32_t i = 0; i < width; i += W * LANES)
#pragma GCC unroll 2
            for (int lane = 0; lane < LANES; ++lane) {
                vf weight = v_exp(v_sub(v_load(scores + i + W * lane), v_set(largest)));
                v_store(scores + i + W * lane, weight);
                total[lane] = v_add(total[lane], weight);
            }
    }
    merge_weights(s, row, largest, sum_lanes(total));
}

/* Ask for what the first rows will need two blocks later: without it scattered blocks are read at a third of the pace. */
INLINE void prefetch_block(const char *block, int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + line);
}

#define STACKED(MR)                                                                                              \
    case MR:                                                                                                     \
        if (phase == 0) {                                                                                        \
            for (int32_t b = 0; b < num_blocks; ++b) {                                                           \
                if (row == begin) {                                                                              \
                    prefetch_block(values[b], s->block_bytes);                                                   \
                    if (b + 2 < num_known) prefetch_block(s->keys + blocks[b + 2] * s->block_bytes, s->block_bytes); \
                }                                                                                                \
                score_block(kv_kind, MR, s, row, keys[b], s->scores + (int64_t)row * FW_TILE + FW_SLOTS * b);    \
            }                                                                                                    \
        } else {                                                                                                 \
            int32_t d = 0;                                                                                       \
            for (; d + 2 * W <= s->dim; d += 2 * W)                                                              \
                merge_values(kv_kind, MR, 2, s, row, values, num_blocks, d);                                     \
            for (; d < s->dim; d += W) merge_values(kv_kind, MR, 1, s, row, values, num_blocks, d);              \
        }                                                                                                        \
        break

/* How many of the rows that are left to take at once: the fewer there are, the longer a sum waits for its last addition. */
INLINE int32_t rows_stacked(int32_t left)
{
    if (W == 16) return left >= STACK ? STACK : left >= 8 ? 8 : left >= 4 ? 4 : left;
    return left >= 9 || left == 6 ? 6 : left == 5 ? 3 : left >= 4 ? 4 : left;
}

/* Rows [begin, end) of the stack against one tile; `last`: no other tile of the segment follows. */
INLINE void walk_tile(const int kv_kind, const stack *s, const fw_task *task, int32_t begin, int32_t end, int32_t tile,
                      const int32_t *blocks, int last)
{
    const int32_t window = s->layer->window, start = tile * FW_TILE;
    int32_t visible = 0, lowest = FW_TILE;
    for (int32_t row = begin; row < end; row += s->group_size) {
        int32_t position = position_of(s, task, row), low = window ? position - window + 1 - start : 0;
        int32_t high = position + 1 - start;
        visible = high > visible ? high : visible;
        lowest = low < lowest ? low : lowest;
    }
    if (visible <= 0 || lowest >= FW_TILE) return;
    visible = visible > FW_TILE ? FW_TILE : visible;
    int32_t num_blocks = (visible + FW_SLOTS - 1) / FW_SLOTS;
    const int32_t num_known = last ? num_blocks : num_blocks + 2;
    const char *keys[MAX_TILE_BLOCKS], *values[MAX_TILE_BLOCKS];
    for (int32_t b = 0; b < num_blocks; ++b) {
        keys[b] = s->keys + blocks[b] * s->block_bytes;
        values[b] = s->values + blocks[b] * s->block_bytes;
    }
    for (int phase = 0; phase < 2; ++phase) {
        for (int32_t row = begin, step; row < end; row += step) {
            step = rows_stacked(end - row);
            switch (step) {
                STACKED(1);
                STACKED(2);
                STACKED(3);
                STACKED(4);
#if W == 16
                STACKED(8);
#endif
                STACKED(STACK);
            }
        }
        if (phase == 1) break;
        for (int32_t row = begin; row < end; ++row) {
            int32_t position = position_of(s, task, row);
            weigh(s, row, window ? position - window + 1 - start : 0, position + 1 - start, num_blocks * FW_SLOTS);
            if (kv_kind == FW_Q8) scale_weights(s, row, values, num_blocks);
        }
    }
}

static void walk_f32(const stack *s, const fw_task *task, int32_t begin, int32_t end, int32_t tile,
                      const int32_t *blocks, int last)
{
    walk_tile(FW_F32, s, task, begin, end, tile, blocks, last);
}

static void walk_bf16(const stack *s, const fw_task *task, int32_t begin, int32_t end, int32_t tile,
                      const int32_t *blocks, int last)
{
    walk_tile(FW_BF16, s, task, begin, end, tile, blocks, last);
}

static void walk_q8(const stack *s, const fw_task *task, int32_t begin, int32_t end, int32_t tile, const int32_t *blocks,
                    int last)
{
    walk_tile(FW_Q8, s, task, begin, end, tile, blocks, last);
}

INLINE void reset(const stack *s, int32_t rows)
{
    for (int64_t i = 0; i < (int64_t)rows * s->dim; i += W) v_store(s->sum + i, v_set(0));
    for (int32_t row = 0; row < rows; ++row) {
        s->largest[row] = -INFINITY;
        s->total[row] = 0;
    }
}

INLINE stack stack_in(float *scratch, const fw_model *model, int32_t rows)
{
    stack s = {model->num_heads / model->num_kv_heads, model->head_dim, model->kv_kind};
    s.query = scratch;
    s.sum = s.query + (int64_t)rows * s.dim;
    s.scores = s.sum + (int64_t)rows * s.dim;
    s.largest = s.scores + (int64_t)rows * FW_TILE;
    s.total = s.largest + rows;
    s.old_factor = s.total + rows;
    s.new_factor = s.old_factor + rows;
    s.low = (int32_t *)(s.new_factor + rows);
    s.high = s.low + rows;
    return s;
}

/* The rows' results: their weighted values over the sums of their weights. */
INLINE void finish_rows(const stack *s, const fw_model *model, const fw_attention *plan, int32_t first_row, int32_t rows,
                        int32_t kv_head, float *out)
{
    for (int32_t row = 0; row < rows; ++row) {
        int32_t token = plan->rows[first_row + row / s->group_size], head = kv_head * s->group_size + row % s->group_size;
        float *to = out + ((int64_t)token * model->num_heads + head) * s->dim;
        vf total = v_set(s->total[row]);
        for (int32_t d = 0; d < s->dim; d += W) v_store(to + d, v_div(v_load(s->sum + (int64_t)row * s->dim + d), total));
    }
}

/* Keep what one tile gave: from a fresh stack the merge left it as it is. */
INLINE void keep_part(const stack *s, const fw_model *model, float *part)
{
    for (int32_t row = 0; row < s->group_size; ++row, part += fw_part_floats(model)) {
        memcpy(part, s->sum + (int64_t)row * s->dim, sizeof(float) * (size_t)s->dim);
        part[s->dim] = s->total[row];
        part[s->dim + 1] = s->largest[row];
    }
}

static void attend(const fw_model *model, const fw_layer *layer, const fw_attention *plan, const fw_task *task,
                   int32_t kv_head, const fw_kv *kv, const float *query, int64_t query_stride, float *out, float *parts,
                   float *scratch)
{
    const int32_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim;
    const int32_t stacked = (task->row_end - task->row_begin) * group;
    void (*const walk)(const stack *, const fw_task *, int32_t, int32_t, int32_t, const int32_t *, int) =
        model->kv_kind == FW_Q8 ? walk_q8 : model->kv_kind == FW_BF16 ? walk_bf16 : walk_f32;
    stack s = stack_in(scratch, model, stacked);
    s.plan = plan;
    s.layer = layer;
    s.keys = (const char *)kv->key + kv_head * kv->head_stride;
    s.values = (const char *)kv->value + kv_head * kv->head_stride;
    s.block_bytes = fw_slots_bytes(model->kv_kind, dim);
    vf scale = v_set(model->scale);
    for (int32_t row = 0; row < stacked; ++row) {
        int32_t token = plan->rows[task->row_begin + row / group], head = kv_head * group + row % group;
        const float *from = query + token * query_stride + (int64_t)head * dim;
        for (int32_t d = 0; d < dim; d += W) v_store(s.query + (int64_t)row * dim + d, v_mul(v_load(from + d), scale));
    }
    reset(&s, stacked);
    for (int32_t i = task->segment_begin; i < task->segment_end; ++i) {
        const fw_segment *segment = plan->segments + i;
        int32_t begin = (segment->row_begin - task->row_begin) * group;
        int32_t end = (segment->row_end - task->row_begin) * group;
        for (int32_t tile = segment->tile_begin; tile < segment->tile_end; ++tile) {
            const int32_t *blocks = plan->blocks + segment->first_block + tile * MAX_TILE_BLOCKS;
            walk(&s, task, begin, end, tile, blocks, tile + 1 == segment->tile_end);
            if (task->first_part < 0) continue;
            keep_part(&s, model, parts + fw_part_at(model, task->first_part + tile - segment->tile_begin, kv_head));
            reset(&s, stacked);
        }
    }
    if (task->first_part < 0) finish_rows(&s, model, plan, task->row_begin, stacked, kv_head, out);
}

static void merge(const fw_model *model, const fw_attention *plan, const fw_split *split, int32_t kv_head,
                  const float *parts, float *out, float *scratch)
{
    const int32_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim;
    stack s = stack_in(scratch, model, group);
    reset(&s, group);
    for (int32_t i = 0; i < split->num_parts; ++i) {
        const float *part = parts + fw_part_at(model, split->first_part + i, kv_head);
        for (int32_t row = 0; row < group; ++row, part += fw_part_floats(model)) {
            merge_weights(&s, row, part[dim + 1], part[dim]);
            for (int32_t d = 0; d < dim; d += W) merge_vector(&s, row, d, v_load(part + d));
        }
    }
    finish_rows(&s, model, plan, split->row, group, kv_head, out);
}

const fw_kernels NAME = {
    KERNELS_NAME, supported, rms_norm, gated, rotate, encode, act_bytes, linear, attend, merge, argmax,
};
