// Weights as the native GEMM reads them, made once at load.
//
// A panel is 32 outputs (columns of the product); the last one is filled up with zeros. Within a panel, k in ascending
// order and 16 outputs side by side, so that one load serves 16 sums and a tile register is 16 lines in a row:
//
//   F32   [panel][k][32]
//   BF16  [panel][k / 32][2 halves][16 pairs of k][16 outputs][2]
//   Q8    [panel][k / block]{ float16 scale[32]; int8 [2 halves][block / 4][16 outputs][4] }
//   Q4_0  [panel][k / 32]{ float16 scale[32]; nibbles [8][16 outputs][4] }             w = scale * (q - 8)
//   Q4_1  [panel][k / 32]{ float16 scale[32], least[32]; nibbles [8][16 outputs][4] }  w = scale * q + least
//
// A byte of nibbles holds an output of the first half in its low four bits and of the second half in its high four.
#pragma once
#include <cstdint>
#include <cstring>

namespace specserve {

enum Kind : int64_t { F32 = 0, BF16 = 1, Q8 = 2, Q4_0 = 3, Q4_1 = 4 };

constexpr int64_t PANEL = 32, HALF = 16;
constexpr int64_t Q4_BLOCK = 32, Q4_BYTES = 512, SCALE_BYTES = 64;

// One linear layer y = x W^T + b. `n` outputs, `k` inputs (a multiple of 32, of `block` where there are blocks).
struct Linear {
    int64_t kind, n, k;
    int64_t block;  // inputs that share a scale: 32 or 64 for Q8, 32 for Q4, otherwise 0
    const uint8_t* packed;
    const float* bias;  // [n] or null

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    // Bytes of the inputs of one panel that share a scale, scales included (for F32 and BF16: of 32 inputs).
    int64_t block_bytes() const {
        switch (kind) {
            case F32: return 32 * PANEL * 4;
            case BF16: return 32 * PANEL * 2;
            case Q8: return SCALE_BYTES + block * PANEL;
            case Q4_0: return SCALE_BYTES + Q4_BYTES;
            default: return 2 * SCALE_BYTES + Q4_BYTES;
        }
    }
    int64_t inputs_per_block() const { return kind == F32 || kind == BF16 ? 32 : block; }
    int64_t panel_bytes() const { return k / inputs_per_block() * block_bytes(); }
    const uint8_t* panel(int64_t p) const { return packed + p * panel_bytes(); }
    bool quantised() const { return kind >= Q8; }
};

}  // namespace specserve
