#ifndef FOREWORD_KV_H
#define FOREWORD_KV_H

#include "foreword.h"

/* Round one head's key and value [head_dim] to the pool's type and put them into a slot. */
void fw_store_slot(const fw_model *, const fw_kv *, int32_t head, int32_t slot, const float *key, const float *value);

#endif
