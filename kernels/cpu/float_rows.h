// Rows of bfloat16 as float32, for machines that multiply nothing narrower: made once for all outputs of a panel.
#pragma once
#include "gemm.h"
#include "lanes.h"

namespace specserve {

constexpr int64_t SPAN = 128;  // inputs of each row at a time

// Inputs [i, i + count) of R rows, with what their rounding left where that is something.
template <int R>
inline void float_rows(const Product& p, int64_t row, int64_t i, int64_t count, float (*to)[SPAN]) {
    const int64_t apart = p.x.lower / (int64_t)sizeof(bf16);
    for (int r = 0; r < R; r++) {
        const bf16* x = p.x.at(row + r, 0) + i;
        for (int64_t j = 0; j < count; j += LANES) {
            const lanes upper = load_lanes(x + j);
            store_lanes(to[r] + j, apart ? upper + load_lanes(x + j + apart) : upper);
        }
    }
}

}  // namespace specserve
