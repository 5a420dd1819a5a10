// Weights as the native GEMM reads them, made once at load.
//
// A panel is 32 outputs (columns of the product); the last one is filled up with zeros. Within a panel, k in ascending
// order and 16 outputs side by side, so that one load serves 16 sums and a tile register is 16 lines in a row:
//
//   F32   [panel][k][32]
//   BF16  [panel][k / 32][2 halves][16 pairs of k][16 outputs][2]
//   Q8    [panel]{ float unit[32]; [k / 32]{ float16 scale[32]; int8 weights[1024] } }               w = scale * q
//   Q4_0  [panel]{ float unit[32]; [k / 32]{ float16 scale[32]; nibbles[512] } }                     w = scale * (q - 8)
//   Q4_1  [panel]{ float unit[32]; [k / 32]{ float16 scale[32], least[32]; nibbles[512] } }          w = scale * q + least
//
// The weights of a block lie as the instructions for sums of four products take them: Q8 [2 halves][8][16 outputs][4 of k],
// Q4 [8][16 outputs][4 of k], low nibbles the first half, high the second. The unit of an output is a power of two: its
// weights are less than 2^15 units (gemm_limbs.cpp).
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
constexpr int64_t BLOCK = 32;  // weights that share a scale
// Inputs that share one: half as many where the instructions for sums leave time for it, as the outputs are nearer then.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int64_t SHARE = BLOCK / 2;
#else
constexpr int64_t SHARE = BLOCK;
#endif
constexpr int64_t SHARES = BLOCK / SHARE;
constexpr int64_t Q8_BYTES = 1024, Q4_BYTES = 512, SCALE_BYTES = 64, UNIT_BYTES = 128;
constexpr int64_t MOST_LIMBS = 32768;  // inputs at most where sums of bytes are kept in 32 bits

// What a kind of weights multiplies: bfloat16; 8 bits with a scale every SHARE inputs; 16 bits in two bytes ("limbs") with a
// scale for each row.
enum class Takes { BFLOAT16, BLOCKS, LIMBS };

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
    int64_t unit_bytes() const { return kind >= Q8 ? UNIT_BYTES : 0; }
    int64_t panel_bytes() const { return unit_bytes() + blocks() * block_bytes(); }
    // The blocks of a panel; its units.
    const uint8_t* panel(int64_t p) const { return packed + p * panel_bytes() + unit_bytes(); }
    const float* units(int64_t p) const { return (const float*)(packed + p * panel_bytes()); }
    Takes takes() const { return kind <= BF16 ? Takes::BFLOAT16 : TILES ? Takes::LIMBS : Takes::BLOCKS; }
};

}  // namespace specserve
