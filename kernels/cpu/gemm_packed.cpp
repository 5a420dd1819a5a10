// The work of a product dealt to threads: panels of weights by chunks of rows.
#include "gemm.h"

namespace specserve {

namespace {
// Rows whose inputs stay in a core's second cache while panels go by.
int64_t chunk_of(const Product& p) {
    int64_t rows = (int64_t(1) << 20) / ((p.w.takes_bf16() ? 2 : 1) * p.w.k) / ROWS * ROWS;
    return rows < ROWS ? ROWS : rows > 512 ? 512 : rows;
}
}  // namespace

void gemm(const Product& product, int threads) {
    if (product.rows == 0) return;
    Product p = product;
    p.turned = turn(p);
    auto run = TILES ? panel_on_tiles : p.w.kind == BF16 ? panel_bf16 : panel_dots;
    const int64_t panels = p.count(), chunk = chunk_of(p), chunks = (p.rows + chunk - 1) / chunk;
    ShardedClaims claims(chunks * panels, 1, threads);
    run_slots(threads, [&](int slot) {
        for (int64_t begin, end; claims.next(slot, begin, end);)
            for (int64_t unit = begin; unit < end; unit++) {
                int64_t first = unit / panels * chunk;
                run(p, unit % panels, first, std::min(chunk, p.rows - first), slot);
            }
    });
}

}  // namespace specserve
