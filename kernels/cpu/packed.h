// Weights as the native GEMM reads them, made once at load.
//
// A panel is 32 outputs (columns of the product); the last one is filled up with zeros. Within a panel, k in ascending
// order and 16 outputs side by side, so that one load serves 16 sums and a tile register is 16 lines in a row:
//
//   F32   [panel][k][32]
//   BF16  [panel][k / 32][2 halves][16 pairs of k][16 outputs][2]
//   Q8    [panel][k / 32]{ float16 scale[32]; int8 weights[1024] }                   w = scale * q
//   Q4_0  [panel][k / 32]{ float16 scale[32]; nibbles[512] }                         w = scale * (q - 8)
//   Q4_1  [panel][k / 32]{ float16 scale[32], least[32]; nibbles[512] }              w = scale * q + least
//
// The weights of a block lie as the library's instructions take them ("layout"):
//
//   amx    Q8 [2 halves][16 pairs of k][16 outputs][2]. Q4 [8][32 of k][4 outputs]: nibble j of word i of line l is k i of
//          output 4 * l + j.
//   dots   Q8 [2 halves][8][16 outputs][4 of k]. Q4 [8][16 outputs][4 of k], low nibbles the first half, high the second.
#pragma once
#include <cstdint>
#include <cstring>

namespace specserve {

enum Kind : int64_t { F32 = 0, BF16 = 1, Q8 = 2, Q4_0 = 3, Q4_1 = 4 };

#ifdef __AMX_BF16__
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif

constexpr int64_t PANEL = 32, HALF = 16;
constexpr int64_t BLOCK = 32;  // inputs that share a scale
constexpr int64_t Q8_BYTES = 1024, Q4_BYTES = 512, SCALE_BYTES = 64;

// One linear layer y = x W^T + b. `n` outputs, `k` inputs (a multiple of 32).
struct Linear {
    int64_t kind, n, k;
    const uint8_t* packed;
    const float* bias;  // [n] or null

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    // Bytes of 32 inputs of one panel, scales included.
    int64_t block_bytes() const {
        switch (kind) {
            case F32: return BLOCK * PANEL * 4;
            case BF16: return BLOCK * PANEL * 2;
            case Q8: return SCALE_BYTES + Q8_BYTES;
            case Q4_0: return SCALE_BYTES + Q4_BYTES;
            default: return 2 * SCALE_BYTES + Q4_BYTES;
        }
    }
    int64_t blocks() const { return k / BLOCK; }
    int64_t panel_bytes() const { return blocks() * block_bytes(); }
    const uint8_t* panel(int64_t p) const { return packed + p * panel_bytes(); }
    // Whether inputs are bfloat16; otherwise they are quantised in blocks of 32.
    bool takes_bf16() const { return TILES || kind == BF16; }
};

}  // namespace specserve
