// One product with packed weights as a call of its own, for tests and for timing: the forward has its own ways to make
// the rows and to use the sums.
#include <chrono>
#include <cmath>
#include <memory>

#include "operand.h"

namespace specserve {

namespace {

struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
};

// Rows of bfloat16 made into what the weights take.
class MadeRows {
  public:
    MadeRows(const Linear& w, const bf16* x, int64_t rows) {
        const int64_t whole = (rows + 15) / 16 * 16, blocks = rows * w.blocks();
        int64_t bytes = 0;
        auto part = [&](int64_t size) { return bytes += (size + 63) / 64 * 64, bytes - (size + 63) / 64 * 64; };
        const int64_t at_x = part(whole * w.k * (int64_t)sizeof(bf16)), at_q = part(Limbs::bytes(rows, w.k));
        const int64_t at_scale = part(blocks * 4), at_sum = part(blocks * 4), at_total = part(blocks * 4);
        uint8_t* base = (uint8_t*)::operator new[]((size_t)bytes, std::align_val_t(64));
        memory_.reset(base);
        std::memset(base, 0, (size_t)bytes);
        Inputs to{(bf16*)(base + at_x), nullptr, (int8_t*)(base + at_q), (float*)(base + at_scale), (float*)(base + at_sum),
                  (int32_t*)(base + at_total)};
        for (int64_t r = 0; r < rows; r++) make_row(to, w, r, [&](int64_t i) { return load(x + r * w.k + i); });
        operand = to.operand(w);
    }

    Operand operand;

  private:
    std::unique_ptr<uint8_t[], Free> memory_;
};

struct Output {
    float* to;  // [rows, n]
    int64_t n;
};

void store_sums(const void* context, int, const float* sums, int64_t row, int64_t rows, int64_t column) {
    const Output& o = *(const Output*)context;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL && column + i < o.n; i += W)
            store_some(o.to + (row + r) * o.n + column + i, load(sums + r * PANEL + i), o.n - column - i);
}

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// x [rows, k], packed of kind BF16 or quantised -> out [rows, n]. Rows are quantised where the weights take them so.
void ss_gemm_packed(int64_t kind, int64_t n, int64_t k, const uint8_t* packed, const bf16* x, float* out, int64_t rows,
                    int threads) {
    const Linear w{kind, n, k, packed, nullptr};
    const MadeRows made(w, x, rows);
    const Output to{out, n};
    gemm(Product{w, made.operand, rows, store_sums, &to, nullptr, 0}, threads);
}

// Seconds for the product with each of `copies` weights that lie one after the other, the rows made beforehand.
double ss_bench_gemm(int64_t kind, int64_t n, int64_t k, const uint8_t* packed, int64_t copies, const bf16* x,
                     float* out, int64_t rows, int threads) {
    Linear w{kind, n, k, packed, nullptr};
    const MadeRows made(w, x, rows);
    const Output to{out, n};
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < copies; i++, w.packed += w.panels() * w.panel_bytes())
        gemm(Product{w, made.operand, rows, store_sums, &to, nullptr, 0}, threads);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}
