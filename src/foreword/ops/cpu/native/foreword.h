/* The CPU kernels' interface: plain structs and pointers, called from Python through ctypes (see library.py, which
 * mirrors the structs). No object here owns memory that Python gave it. */
#ifndef FOREWORD_H
#define FOREWORD_H

#include <stddef.h>
#include <stdint.h>

#define FW_API __attribute__((visibility("default")))

enum {
    FW_VERSION = 5, /* of this interface: library.py wants the same */
    FW_PANEL = 16, /* columns (outputs) that lie side by side in a packed weight */
    FW_GROUP = 32, /* inputs that share a scale, in weights and in activations */
    FW_SLOTS = 16, /* token slots that lie side by side in the KV pool */
    FW_TILE = 128, /* key positions whose softmax is made together: core.config.ATTENTION_TILE */
};

/* How a weight is stored, and with it how its activations are encoded. */
enum { FW_F32 = 0, FW_BF16 = 1, FW_Q8 = 2, FW_Q4 = 3, FW_KINDS = 4 };

/* A packed weight [n, k]: panels of FW_PANEL outputs, each
 *   F32   [k][16] float
 *   BF16  [k/2][16][2] bfloat16
 *   Q8    scales [k/32][16] half, then [k/4][16][4] uint8, the weight plus 128
 *   Q4    scales and minima [k/32][2][16] half, then [k/8][16][4] uint8: of a group of 32 inputs, byte block j (of 4)
 *         holds inputs 4j.. in the low halves and 16 + 4j.. in the high ones. */
typedef struct {
    int32_t kind, n, k;
    const void *panels;
    const float *bias; /* [n] or NULL */
} fw_linear;

typedef struct {
    fw_linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm;           /* [hidden] */
    const float *attention_post_norm, *mlp_post_norm; /* [hidden] or NULL */
    const float *query_norm, *key_norm;               /* [head_dim] or NULL */
    const float *cos, *sin;                           /* [max_positions, head_dim / 2] or NULL: not rotated */
    float softcap;                                    /* 0: none */
    int32_t window;                                   /* positions visible, the query's included; 0: all */
} fw_layer;

typedef struct {
    int32_t num_layers, hidden, inner, num_heads, num_kv_heads, head_dim;
    int32_t gelu;     /* activation: 0 silu, 1 gelu_tanh */
    int32_t kv_kind;  /* FW_F32, FW_BF16 or FW_Q8 */
    float eps, scale; /* of the norms; of the attention scores */
    const fw_layer *layers;
    const float *final_norm;
} fw_model;

/* Rows [row_begin, row_end) of fw_attention.rows meet the KV tiles [tile_begin, tile_end) that lie at
 * blocks[first_block + 8 * tile ..]. */
typedef struct {
    int32_t row_begin, row_end, tile_begin, tile_end, first_block;
} fw_segment;

/* Rows computed together; every row's segments cover its tiles once, in ascending order. With first_part >= 0 there is one
 * row and one segment, which may be a part of the row's tiles: what each tile gives is kept for fw_split. */
typedef struct {
    int32_t row_begin, row_end, segment_begin, segment_end, first_part;
} fw_task;

/* A row whose tiles several tasks compute: parts [first_part, first_part + num_parts) are its tiles in ascending order. */
typedef struct {
    int32_t row, first_part, num_parts;
} fw_split;

typedef struct {
    int32_t num_tasks, num_splits, num_parts, num_tokens;
    const int32_t *rows;      /* rows of the flat batch */
    const int32_t *positions; /* [num_tokens], of each row of the flat batch */
    const fw_segment *segments;
    const fw_task *tasks;
    const fw_split *splits;
    const int32_t *blocks; /* groups of FW_SLOTS slots */
} fw_attention;

/* One layer's KV: two arrays [num_kv_heads][slots / 16] of groups of 16 slots. A group of keys is
 *   F32 [head_dim][16], BF16 [head_dim / 2][16][2]; one of values F32 [16][head_dim], BF16 [8][head_dim][2];
 *   Q8 the bytes as F32 the floats, signed, and behind them the slots' scales, [16] float. */
typedef struct {
    void *key, *value;
    int64_t head_stride; /* bytes from one KV head to the next */
} fw_kv;

typedef struct {
    const fw_attention *attention;
    const int32_t *slots; /* [num_tokens], where each token's KV goes */
    const fw_kv *kv;      /* [num_layers] */
    float *hidden;        /* [num_tokens, hidden]: embeddings in, normalised hidden states of the outputs out, in front */
    const int32_t *outputs; /* [num_outputs], rows whose hidden states are wanted, strictly ascending */
    int32_t num_outputs;
} fw_batch;

/* Kernels, a pool of threads and its buffers. It serves one call at a time. */
typedef struct fw_context fw_context;

FW_API int32_t fw_abi(void); /* FW_VERSION and the sizes of the structs above in one number */
FW_API void fw_kernels_available(char *names, int32_t size); /* the best first, separated by blanks */
FW_API fw_context *fw_create(const char *kernels, int32_t num_threads);
FW_API void fw_destroy(fw_context *);

FW_API int fw_forward(fw_context *, const fw_model *, const fw_batch *);
FW_API int fw_apply(fw_context *, const fw_linear *, const float *x, int32_t rows, float *out);
FW_API int fw_attend(fw_context *, const fw_model *, const fw_layer *, const fw_attention *, const fw_kv *,
                     const float *query, int64_t query_stride, float *out);
FW_API void fw_store_kv(const fw_model *, const fw_kv *, const int32_t *slots, int32_t rows, const float *key,
                        const float *value, int64_t stride);
FW_API void fw_copy_slots(const fw_model *, const fw_kv *, int32_t num_layers, int32_t source, int32_t target,
                          int32_t count);
FW_API void fw_argmax(fw_context *, const float *x, int32_t rows, int64_t n, int32_t *out);

/* Pack rows 0 .. n - 1 of a weight; a row is k floats or bfloat16, or k / 32 blocks as GGUF files hold them:
 * Q8: Q8_0 (half scale, 32 int8); Q4: Q4_1 (half scale, half minimum, 16 bytes: inputs 0 .. 15 low, 16 .. 31 high). */
FW_API int64_t fw_packed_bytes(int32_t kind, int32_t n, int32_t k);
FW_API void fw_pack(int32_t kind, const void *rows, int32_t n, int32_t k, void *panels);

#endif
