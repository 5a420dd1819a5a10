// Rows of weights, in the order in which files hold them, into panels; and float rows into quantised rows.
//
// Quantised rows are GGUF's: Q8_0 blocks { float16 scale; int8[32] }, Q4_0 blocks { float16 scale; nibbles[16] } and
// Q4_1 blocks { float16 scale, least; nibbles[16] }, where byte i holds input i low and input i + 16 high.
#include <cmath>

#include "half.h"
#include "packed.h"
#include "pool.h"

namespace specserve {

namespace {

// Of one row in a file.
int64_t row_bytes(const Linear& w) {
    switch (w.kind) {
        case F32: return w.k * 4;
        case BF16: return w.k * 2;
        case Q8: return w.blocks() * 34;
        case Q4_0: return w.blocks() * 18;
        default: return w.blocks() * 20;
    }
}

void pack_f32(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t i = 0; i < w.k; i++) std::memcpy(panel + (i * PANEL + column) * 4, row + i * 4, 4);
}

void pack_bf16(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t i = 0; i < w.k; i += 2) {
        int64_t pair = i / 32 * 32 + column / HALF * 16 + i % 32 / 2;
        std::memcpy(panel + (pair * HALF + column % HALF) * 4, row + i * 2, 4);
    }
}

// Where the weight of one output and one input of a block goes.
int64_t place_q8(int64_t column, int64_t i) {
    return column / HALF * (Q8_BYTES / 2) + (i / 4 * HALF + column % HALF) * 4 + i % 4;
}

void pack_q8(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    for (int64_t b = 0; b < w.blocks(); b++) {
        const uint8_t* from = row + b * (2 + BLOCK);
        uint8_t* to = panel + b * w.block_bytes();
        std::memcpy(to + column * 2, from, 2);
        for (int64_t i = 0; i < BLOCK; i++) to[SCALE_BYTES + place_q8(column, i)] = from[2 + i];
    }
}

// The same for nibbles: the byte, and whether it is the high one.
int64_t place_q4(int64_t column, int64_t i, bool& high) {
    high = column / HALF;
    return (i / 4 * HALF + column % HALF) * 4 + i % 4;
}

void pack_q4(const uint8_t* row, uint8_t* panel, int64_t column, const Linear& w) {
    const int64_t numbers = w.kind == Q4_1 ? 2 : 1;  // float16 ahead of a block's nibbles
    for (int64_t b = 0; b < w.blocks(); b++) {
        const uint8_t* from = row + b * (2 * numbers + 16);
        uint8_t* to = panel + b * w.block_bytes();
        for (int64_t i = 0; i < numbers; i++) std::memcpy(to + i * SCALE_BYTES + column * 2, from + 2 * i, 2);
        for (int64_t i = 0; i < BLOCK; i++) {
            int q = i < 16 ? from[2 * numbers + i] & 15 : from[2 * numbers + i - 16] >> 4;
            bool high;
            uint8_t& byte = to[numbers * SCALE_BYTES + place_q4(column, i, high)];
            byte = (uint8_t)(high ? (byte & 0x0f) | q << 4 : (byte & 0xf0) | q);
        }
    }
}

// The greatest power of two of which no weight of one output has 2^15 or more, also where its scales are rounded to whole
// units; NaN where a number of its blocks is not finite.
float unit_of(const uint8_t* panel, int64_t column, const Linear& w) {
    float most = 0.0f;
    for (int64_t b = 0; b < w.blocks(); b++) {
        uint16_t scale, least = 0;
        std::memcpy(&scale, panel + b * w.block_bytes() + column * 2, 2);
        if (w.kind == Q4_1) std::memcpy(&least, panel + b * w.block_bytes() + SCALE_BYTES + column * 2, 2);
        const float step = float_of(scale), low = float_of(least);
        if (!std::isfinite(step) || !std::isfinite(low)) return NAN;
        most = std::fmax(most, w.kind == Q8 ? std::fabs(step * 128.0f) : std::fabs(w.kind == Q4_0 ? step * 8.0f : low));
        if (w.kind == Q4_1) most = std::fmax(most, std::fabs(low + 15.0f * step));
    }
    return most > 0.0f ? std::ldexp(1.0f, std::ilogb(most * 1.004f) - 14) : 1.0f;  // 64 units: half of one, 128 times
}

void pack_panel(const uint8_t* rows, uint8_t* packed, int64_t p, const Linear& w) {
    uint8_t* panel = packed + p * w.panel_bytes();
    std::memset(panel, 0, w.panel_bytes());
    float* units = (float*)panel;
    panel += w.unit_bytes();
    auto pack = w.kind == F32 ? pack_f32 : w.kind == BF16 ? pack_bf16 : w.kind == Q8 ? pack_q8 : pack_q4;
    for (int64_t c = 0; c < PANEL && p * PANEL + c < w.n; c++)
        pack(rows + (p * PANEL + c) * row_bytes(w), panel, c, w);
    for (int64_t c = 0; w.kind >= Q8 && c < PANEL && p * PANEL + c < w.n; c++) units[c] = unit_of(panel, c, w);
}

// Scale of the greatest magnitude to 127, as in GGUF's Q8_0.
void quantise_q8(const float* x, uint8_t* out) {
    float most = 0.0f;
    for (int64_t i = 0; i < BLOCK; i++) most = std::fmax(most, std::fabs(x[i]));
    uint16_t half = half_of(most / 127.0f);
    float scale = float_of(half), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    std::memcpy(out, &half, 2);
    for (int64_t i = 0; i < BLOCK; i++) {
        float q = std::nearbyint(x[i] * inverse);
        out[2 + i] = (uint8_t)(int8_t)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
    }
}

// The error of 32 values on the grid scale * (0..15) + least, and their places on it.
float place_q4(const float* x, float scale, float least, int* q) {
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f, error = 0.0f;
    for (int64_t i = 0; i < BLOCK; i++) {
        float place = std::nearbyint((x[i] - least) * inverse);
        q[i] = place < 0.0f ? 0 : place > 15.0f ? 15 : (int)place;
        float e = scale * (float)q[i] + least - x[i];
        error += e * e;
    }
    return error;
}

// Of the grids from slightly within to slightly beyond the range of the values, the one of the least squared error.
void quantise_q4_1(const float* x, uint8_t* out) {
    float low = x[0], high = x[0], best = INFINITY;
    for (int64_t i = 1; i < BLOCK; i++) low = std::fmin(low, x[i]), high = std::fmax(high, x[i]);
    int chosen[BLOCK] = {}, q[BLOCK];
    uint16_t numbers[2] = {};
    for (int step = 0; step <= 8; step++) {
        float inset = 0.02f * (float)step * (high - low);
        uint16_t scale = half_of((high - low - inset) / 15.0f), least = half_of(low + inset / 2);
        float error = place_q4(x, float_of(scale), float_of(least), q);
        if (!(error < best)) continue;
        best = error, numbers[0] = scale, numbers[1] = least;
        std::memcpy(chosen, q, sizeof q);
    }
    std::memcpy(out, numbers, 4);
    for (int64_t i = 0; i < 16; i++) out[4 + i] = (uint8_t)(chosen[i] | chosen[i + 16] << 4);
}

// One output's weights, as numbers.
void unpack_row(const uint8_t* panel, float* out, int64_t column, const Linear& w) {
    for (int64_t i = 0; i < w.k; i++) {
        const uint8_t* block = panel + i / BLOCK * w.block_bytes();
        if (w.kind == F32) {
            std::memcpy(out + i, panel + (i * PANEL + column) * 4, 4);
        } else if (w.kind == BF16) {
            int64_t pair = i / 32 * 32 + column / HALF * 16 + i % 32 / 2;
            uint16_t high[2] = {};
            std::memcpy(high + 1, panel + (pair * HALF + column % HALF) * 4 + i % 2 * 2, 2);
            std::memcpy(out + i, high, 4);
        } else {
            uint16_t scale, least = 0;
            std::memcpy(&scale, block + column * 2, 2);
            if (w.kind == Q4_1) std::memcpy(&least, block + SCALE_BYTES + column * 2, 2);
            const uint8_t* weights = block + (w.kind == Q4_1 ? 2 : 1) * SCALE_BYTES;
            bool high = false;
            int64_t at = w.kind == Q8 ? place_q8(column, i % BLOCK) : place_q4(column, i % BLOCK, high);
            int q = w.kind == Q8 ? (int8_t)weights[at] : (high ? weights[at] >> 4 : weights[at] & 15);
            float product = float_of(scale) * (float)(w.kind == Q4_0 ? q - 8 : q);
            out[i] = w.kind == Q4_1 ? product + float_of(least) : product;
        }
    }
}

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// Bytes of a packed layer; 0 where the kernels do not take the shape.
int64_t ss_packed_bytes(int64_t kind, int64_t n, int64_t k, int64_t block) {
    Linear w{kind, n, k, nullptr, nullptr};
    if (kind < F32 || kind > Q4_1 || n <= 0 || k <= 0 || k % BLOCK || (kind >= Q8 && block != BLOCK)) return 0;
    if (w.takes() == Takes::LIMBS && k > MOST_LIMBS) return 0;
    return w.panels() * w.panel_bytes();
}
// rows: n rows of the kind as files hold them -> packed.
void ss_pack(int64_t kind, int64_t n, int64_t k, int64_t, const uint8_t* rows, uint8_t* packed, int threads) {
    Linear w{kind, n, k, nullptr, nullptr};
    parallel_for(w.panels(), 1, threads, [&](int64_t p) { pack_panel(rows, packed, p, w); });
}
// float32 rows [n, k] -> rows of kind Q8 or Q4_1.
void ss_quantise_rows(int64_t kind, int64_t n, int64_t k, int64_t, const float* x, uint8_t* rows, int threads) {
    Linear w{kind, n, k, nullptr, nullptr};
    int64_t bytes = row_bytes(w) / w.blocks();
    parallel_for(n, 4, threads, [&](int64_t r) {
        for (int64_t b = 0; b < w.blocks(); b++) {
            uint8_t* out = rows + r * row_bytes(w) + b * bytes;
            kind == Q8 ? quantise_q8(x + r * k + b * BLOCK, out) : quantise_q4_1(x + r * k + b * BLOCK, out);
        }
    });
}
// packed -> float32 [n, k], for those who compare.
void ss_unpack(int64_t kind, int64_t n, int64_t k, int64_t, const uint8_t* packed, float* out, int threads) {
    Linear w{kind, n, k, packed, nullptr};
    parallel_for(n, 4, threads, [&](int64_t r) {
        unpack_row(w.panel(r / PANEL), out + r * k, r % PANEL, w);
    });
}
}
