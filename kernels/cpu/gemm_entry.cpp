// One product with packed weights as a call of its own, for tests and for timing: the forward has its own ways to make
// the rows and to use the sums.
#include <chrono>
#include <cmath>
#include <memory>

#include "sinks.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace specserve {

namespace {

constexpr size_t HUGE_PAGE = 2 << 20;

struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(HUGE_PAGE)); }
};

// Memory for the rows of one operand, on huge pages as the forward's is.
class Room {
  public:
    Room(const Linear& w, int64_t rows) {
        const int64_t whole = (rows + 15) / 16 * 16, blocks = rows * w.blocks();
        int64_t bytes = 0;
        auto part = [&](int64_t size) { return bytes += (size + 63) / 64 * 64, bytes - (size + 63) / 64 * 64; };
        const int64_t at_x = part(whole * w.k * (int64_t)sizeof(bf16)), at_q = part(Limbs::bytes(rows, w.k));
        const int64_t at_scale = part(blocks * SHARES * 4), at_sum = part(blocks * 4), at_start = part(blocks * SHARES * 4);
        uint8_t* base = (uint8_t*)::operator new[]((size_t)bytes, std::align_val_t(HUGE_PAGE));
        memory_.reset(base);
#ifdef MADV_HUGEPAGE
        madvise(base, (size_t)bytes, MADV_HUGEPAGE);
#endif
        std::memset(base, 0, (size_t)bytes);
        inputs = {(bf16*)(base + at_x), nullptr, (int8_t*)(base + at_q), (float*)(base + at_scale), (float*)(base + at_sum),
                  (int32_t*)(base + at_start)};
    }

    Inputs inputs;

  private:
    std::unique_ptr<uint8_t[], Free> memory_;
};

// Rows of bfloat16 made into what the weights take.
struct MadeRows : Room {
    MadeRows(const Linear& w, const bf16* x, int64_t rows) : Room(w, rows), operand(inputs.operand(w)) {
        for (int64_t r = 0; r < rows; r++) make_row(inputs, w, r, [&](int64_t i) { return load(x + r * w.k + i); });
    }

    Operand operand;
};

constexpr Sink SINKS[] = {store_sums, add_sums, gate_sums};

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// x [rows, k], packed of kind BF16 or quantised -> out [rows, n]. Rows are quantised where the weights take them so.
void ss_gemm_packed(int64_t kind, int64_t n, int64_t k, const uint8_t* packed, const bf16* x, float* out, int64_t rows,
                    int threads) {
    const Linear w{kind, n, k, packed, nullptr};
    const MadeRows made(w, x, rows);
    const Output to{w, out, n, nullptr, {}, nullptr};
    gemm(Product{w, made.operand, rows, store_sums, &to, nullptr, 0}, threads);
}

// Seconds for the product with each of `copies` weights that lie one after the other, the rows made beforehand. Its sums go
// where a forward has them: `use` is 0 to store them, 1 to add them to `out`, both [rows, n], 2 for those of a gate.
double ss_bench_gemm(int64_t kind, int64_t n, int64_t k, const uint8_t* packed, int64_t copies, const bf16* x,
                     float* out, int64_t rows, int64_t use, int threads) {
    Linear w{kind, n, k, packed, nullptr};
    const Linear next{kind, 0, n / 2, nullptr, nullptr};
    const MadeRows made(w, x, rows);
    const Room inner(next, rows);
    const Output to{w, out, n, &next, inner.inputs, out};
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < copies; i++, w.packed += w.panels() * w.panel_bytes())
        gemm(Product{w, made.operand, rows, SINKS[use], &to, nullptr, 0}, threads);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}
