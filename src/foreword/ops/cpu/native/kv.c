/* Writing and copying slots of the KV pool; see fw_kv for how a group of 16 slots is laid out. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "kv.h"

static uint16_t to_bf16(float value) /* to nearest, ties to even; a NaN stays one */
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The group of FW_Q8 that a slot of a head is in. */
static int8_t *group_of_bytes(char *head, int32_t slot, int32_t dim)
{
    return (int8_t *)head + slot / FW_SLOTS * fw_slots_bytes(FW_Q8, dim);
}

/* Give a row the bytes row[0], row[step], .. and its scale; as ops/kv_int8.py does, to the bit. */
static void store_bytes(const float *x, int32_t dim, int8_t *row, int32_t step, float *scale)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: added, it leaves no room for fractions */
    float largest = 0, poison = 0;
    for (int32_t d = 0; d < dim; ++d) {
        const float size = x[d] < 0 ? -x[d] : x[d];
        largest = size > largest ? size : largest;
        poison += x[d] * 0; /* NaN if a value is NaN or infinite */
    }
    const int finite = poison == poison;
    const float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
    for (int32_t d = 0; d < dim; ++d) row[d * step] = finite ? (int8_t)((x[d] * inverse + shift) - shift) : 0;
    *scale = finite ? largest / 127 : NAN;
}

void fw_store_slot(const fw_model *model, const fw_kv *kv, int32_t head, int32_t slot, const float *key,
                   const float *value)
{
    const int32_t dim = model->head_dim, lane = slot % FW_SLOTS;
    const int64_t first = (int64_t)(slot - lane) * dim;
    char *keys = (char *)kv->key + head * kv->head_stride, *values = (char *)kv->value + head * kv->head_stride;
    if (model->kv_kind == FW_Q8) {
        int8_t *k = group_of_bytes(keys, slot, dim), *v = group_of_bytes(values, slot, dim);
        store_bytes(key, dim, k + lane, FW_SLOTS, (float *)(k + FW_SLOTS * dim) + lane);
        store_bytes(value, dim, v + lane * dim, 1, (float *)(v + FW_SLOTS * dim) + lane);
    } else if (model->kv_kind == FW_BF16) {
        uint16_t *k = (uint16_t *)keys + first + 2 * lane, *v = (uint16_t *)values + first + lane / 2 * 2 * dim + lane % 2;
        for (int32_t d = 0; d < dim; ++d) {
            k[d / 2 * 2 * FW_SLOTS + d % 2] = to_bf16(key[d]);
            v[2 * d] = to_bf16(value[d]);
        }
    } else {
        float *k = (float *)keys + first + lane, *v = (float *)values + first + (int64_t)lane * dim;
        for (int32_t d = 0; d < dim; ++d) k[d * FW_SLOTS] = key[d];
        memcpy(v, value, 4 * (size_t)dim);
    }
}

static void copy_slot(const fw_model *model, const fw_kv *kv, int32_t head, int32_t source, int32_t target)
{
    const int32_t dim = model->head_dim, from_lane = source % FW_SLOTS, to_lane = target % FW_SLOTS;
    const int64_t from = (int64_t)(source - from_lane) * dim, to = (int64_t)(target - to_lane) * dim;
    char *keys = (char *)kv->key + head * kv->head_stride, *values = (char *)kv->value + head * kv->head_stride;
    if (model->kv_kind == FW_Q8) {
        const int8_t *k = group_of_bytes(keys, source, dim), *v = group_of_bytes(values, source, dim);
        int8_t *new_k = group_of_bytes(keys, target, dim), *new_v = group_of_bytes(values, target, dim);
        for (int32_t d = 0; d < dim; ++d) new_k[to_lane + d * FW_SLOTS] = k[from_lane + d * FW_SLOTS];
        memcpy(new_v + to_lane * dim, v + from_lane * dim, (size_t)dim);
        memcpy(new_k + FW_SLOTS * dim + 4 * to_lane, k + FW_SLOTS * dim + 4 * from_lane, 4);
        memcpy(new_v + FW_SLOTS * dim + 4 * to_lane, v + FW_SLOTS * dim + 4 * from_lane, 4);
    } else if (model->kv_kind == FW_BF16) {
        uint16_t *k = (uint16_t *)keys, *v = (uint16_t *)values;
        for (int32_t d = 0; d < dim; ++d) {
            const int64_t pair = (int64_t)d / 2 * 2 * FW_SLOTS + d % 2;
            k[to + 2 * to_lane + pair] = k[from + 2 * from_lane + pair];
            v[to + to_lane / 2 * 2 * dim + to_lane % 2 + 2 * d] = v[from + from_lane / 2 * 2 * dim + from_lane % 2 + 2 * d];
        }
    } else {
        float *k = (float *)keys, *v = (float *)values;
        for (int32_t d = 0; d < dim; ++d) k[to + to_lane + d * FW_SLOTS] = k[from + from_lane + d * FW_SLOTS];
        memcpy(v + to + (int64_t)to_lane * dim, v + from + (int64_t)from_lane * dim, 4 * (size_t)dim);
    }
}

void fw_copy_slots(const fw_model *model, const fw_kv *kv, int32_t num_layers, int32_t source, int32_t target,
                   int32_t count)
{
    const int64_t group_bytes = fw_slots_bytes(model->kv_kind, model->head_dim);
    for (int32_t layer = 0; layer < num_layers; ++layer) {
        for (int32_t head = 0; head < model->num_kv_heads; ++head) {
            int32_t done = 0;
            for (; (source + done) % FW_SLOTS == 0 && (target + done) % FW_SLOTS == 0 && done + FW_SLOTS <= count;
                 done += FW_SLOTS) {
                const int64_t from = (source + done) / FW_SLOTS * group_bytes + head * kv[layer].head_stride;
                const int64_t to = (target + done) / FW_SLOTS * group_bytes + head * kv[layer].head_stride;
                memcpy((char *)kv[layer].key + to, (char *)kv[layer].key + from, (size_t)group_bytes);
                memcpy((char *)kv[layer].value + to, (char *)kv[layer].value + from, (size_t)group_bytes);
            }
            for (; done < count; ++done) copy_slot(model, kv + layer, head, source + done, target + done);
        }
    }
}
