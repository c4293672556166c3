#include <string.h>

#include "kernels.h"

int64_t fw_packed_bytes(int32_t kind, int32_t n, int32_t k)
{
    return (n + FW_PANEL - 1) / FW_PANEL * fw_panel_bytes(kind, k);
}

static void pack_f32(const float *row, int32_t k, int32_t column, float *panel)
{
    for (int32_t i = 0; i < k; ++i) panel[i * FW_PANEL + column] = row[i];
}

static void pack_bf16(const uint16_t *row, int32_t k, int32_t column, uint16_t *panel)
{
    for (int32_t i = 0; i < k; ++i) panel[(i / 2 * FW_PANEL + column) * 2 + i % 2] = row[i];
}

static void pack_q8(const uint8_t *row, int32_t k, int32_t column, uint8_t *panel)
{
    enum { BLOCK = 2 + FW_GROUP };
    uint8_t *body = panel + fw_header_bytes(FW_Q8, k);
    for (int32_t g = 0; g < k / FW_GROUP; ++g, row += BLOCK) {
        memcpy(panel + 2 * (g * FW_PANEL + column), row, 2);
        uint8_t *to = body + (int64_t)g * FW_GROUP * FW_PANEL + 4 * column;
        for (int32_t i = 0; i < FW_GROUP; ++i) to[i / 4 * 4 * FW_PANEL + i % 4] = (uint8_t)(row[2 + i] ^ 0x80);
    }
}

static void pack_q4(const uint8_t *row, int32_t k, int32_t column, uint8_t *panel)
{
    enum { BLOCK = 4 + FW_GROUP / 2 };
    uint8_t *body = panel + fw_header_bytes(FW_Q4, k);
    for (int32_t g = 0; g < k / FW_GROUP; ++g, row += BLOCK) {
        memcpy(panel + 2 * (2 * g * FW_PANEL + column), row, 2);
        memcpy(panel + 2 * ((2 * g + 1) * FW_PANEL + column), row + 2, 2);
        uint8_t *to = body + (int64_t)g * (FW_GROUP / 2) * FW_PANEL + 4 * column;
        for (int32_t i = 0; i < FW_GROUP / 2; i += 4) memcpy(to + i * FW_PANEL, row + 4 + i, 4);
    }
}

void fw_pack(int32_t kind, const void *rows, int32_t n, int32_t k, void *panels)
{
    static const int64_t bits[FW_KINDS] = {32 * 32, 32 * 16, 34 * 8, 20 * 8}; /* of 32 weights in a row */
    memset(panels, 0, fw_packed_bytes(kind, n, k));
    for (int32_t j = 0; j < n; ++j) {
        const char *row = (const char *)rows + j * (k * bits[kind] / (8 * 32));
        char *panel = (char *)panels + j / FW_PANEL * fw_panel_bytes(kind, k);
        switch (kind) {
        case FW_F32: pack_f32((const float *)row, k, j % FW_PANEL, (float *)panel); break;
        case FW_BF16: pack_bf16((const uint16_t *)row, k, j % FW_PANEL, (uint16_t *)panel); break;
        case FW_Q8: pack_q8((const uint8_t *)row, k, j % FW_PANEL, (uint8_t *)panel); break;
        default: pack_q4((const uint8_t *)row, k, j % FW_PANEL, (uint8_t *)panel);
        }
    }
}
