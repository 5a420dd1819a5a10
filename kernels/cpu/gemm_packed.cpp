// The work of a product dealt to threads: panels of weights by chunks of rows.
#include "gemm.h"

namespace specserve {

namespace {
// Rows whose inputs stay in a core's second cache while panels go by. Where there are many, each thread has its own ones,
// which it also made and goes on with.
int64_t chunk_of(const Product& p, int threads) {
    int64_t rows = (int64_t(1) << 20) / ((p.w.takes() == Takes::BLOCKS ? 1 : 2) * p.w.k) / ROWS * ROWS;
    if (p.rows >= 128 * threads) rows = std::min(rows, (p.rows / threads + ROWS - 1) / ROWS * ROWS);
    return rows < ROWS ? ROWS : std::min(rows, MOST_ROWS);
}
}  // namespace

void gemm(const Product& p, int threads) {
    if (p.rows == 0 || few_limbs(p, threads)) return;
    auto run = p.w.takes() == Takes::LIMBS    ? panel_limbs
               : p.w.takes() == Takes::BLOCKS ? panel_dots
               : TILES                        ? panel_on_tiles
                                              : panel_bf16;
    const int64_t panels = p.count(), chunk = chunk_of(p, threads), chunks = (p.rows + chunk - 1) / chunk;
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
