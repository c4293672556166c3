/* The table of one instruction set's kernels. A row of a result depends on that row's inputs alone: every sum has a
 * fixed order, whatever the number of rows and whichever thread computes it. */
#ifndef FOREWORD_KERNELS_H
#define FOREWORD_KERNELS_H

#include "foreword.h"

typedef struct {
    const char *name;
    int (*supported)(void);
    /* out = x / rms(x) * weight, n floats */
    void (*rms_norm)(const float *x, const float *weight, float eps, int32_t n, float *out);
    /* out = act(gate_up[0 .. n)) * gate_up[n .. 2n) */
    void (*gated)(const float *gate_up, int32_t n, int32_t gelu, float *out);
    /* x[i] = x[i] * cos - x[i + n/2] * sin, and the other half, in place */
    void (*rotate)(float *x, const float *cos, const float *sin, int32_t n);
    /* One row of activations in the form that weights of `kind` want; act_bytes() long. */
    void (*encode)(int32_t kind, const float *x, int32_t k, void *row);
    int64_t (*act_bytes)(int32_t kind, int32_t k);
    /* out[r][j] (+)= row r . output j for panels [begin, end); act rows are `stride` bytes apart, out rows n floats. */
    void (*linear)(const fw_linear *, const void *act, int64_t stride, int32_t rows, int32_t begin, int32_t end,
                   float *out, int accumulate);
    /* All segments of a task for one KV head; scratch has fw_attend_scratch() floats. */
    void (*attend)(const fw_model *, const fw_layer *, const fw_attention *, const fw_task *, int32_t kv_head,
                   const fw_kv *, const float *query, int64_t query_stride, float *out, float *parts, float *scratch);
    /* Merge the parts of a split row for one KV head; as attend does, tile by tile. */
    void (*merge)(const fw_model *, const fw_attention *, const fw_split *, int32_t kv_head, const float *parts, float *out,
                  float *scratch);
    /* The first of the largest; -1 if that is infinite, or any is NaN. */
    int32_t (*argmax)(const float *x, int64_t n);
} fw_kernels;

extern const fw_kernels fw_kernels_portable;
#if defined(__x86_64__)
extern const fw_kernels fw_kernels_avx2, fw_kernels_avx512, fw_kernels_avx512_vnni;
#endif

/* Scales of a quantised panel of k inputs, and the whole panel. */
static inline int64_t fw_header_bytes(int32_t kind, int32_t k)
{
    if (kind != FW_Q4 && kind != FW_Q8) return 0;
    return ((int64_t)(k / FW_GROUP) * FW_PANEL * (kind == FW_Q4 ? 4 : 2) + 63) & ~(int64_t)63;
}

static inline int64_t fw_panel_bytes(int32_t kind, int32_t k)
{
    const int64_t weights = (int64_t)FW_PANEL * k;
    const int64_t body = kind == FW_F32 ? 4 * weights : kind == FW_BF16 ? 2 * weights : kind == FW_Q8 ? weights : weights / 2;
    return fw_header_bytes(kind, k) + body;
}

/* A group of FW_SLOTS slots in the KV pool: the keys, or the values, of one head. */
static inline int64_t fw_slots_bytes(int32_t kv_kind, int32_t head_dim)
{
    return (int64_t)FW_SLOTS * (kv_kind == FW_F32 ? 4 * head_dim : kv_kind == FW_BF16 ? 2 * head_dim : head_dim + 4);
}

/* Floats of what one tile gives for one query head: the weighted values, then the sum of the weights and the maximum. */
static inline int64_t fw_part_floats(const fw_model *model) { return model->head_dim + 16; }

/* Where the parts of a tile begin for a KV head. */
static inline int64_t fw_part_at(const fw_model *model, int32_t part, int32_t kv_head)
{
    return ((int64_t)part * model->num_heads + kv_head * (model->num_heads / model->num_kv_heads)) * fw_part_floats(model);
}

static inline int64_t fw_attend_scratch(const fw_model *model, int32_t rows)
{
    int64_t stacked = (int64_t)rows * (model->num_heads / model->num_kv_heads);
    return stacked * (2 * model->head_dim + FW_TILE + 6) + 64;
}

#endif
