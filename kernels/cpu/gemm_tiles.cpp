// bfloat16 weights on AMX tiles: 16 x 16 float32 sums, 32 inputs at a time.
#include "following.h"
#include "gemm.h"
#include "tiles.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t STEP_BYTES = 2 * 16 * LINE;  // of 32 inputs of one panel in bfloat16
constexpr int64_t DEEP = 288;                  // inputs of a panel that stay in the first cache while rows go by
constexpr int64_t AHEAD = 2048;                // bytes of weights fetched ahead

inline void fetch(const uint8_t* block, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
}

// Tiles 0..3 are sums, 4 and 5 are rows of x (upper and lower half), 6 and 7 are weights.
TileConfig config_of(int64_t rows) {
    TileConfig config;
    uint8_t upper = (uint8_t)(rows > 16 ? 16 : rows), lower = (uint8_t)(rows > 16 ? rows - 16 : 1);
    config.rows[0] = config.rows[1] = config.rows[4] = upper;
    config.rows[2] = config.rows[3] = config.rows[5] = lower;
    return config;
}

template <bool BOTH>
inline void begin(const float* sums, bool fresh) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (BOTH) _tile_zero(2);
        if (BOTH) _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, PANEL * 4);
    _tile_loadd(1, sums + HALF, PANEL * 4);
    if (BOTH) _tile_loadd(2, sums + 16 * PANEL, PANEL * 4);
    if (BOTH) _tile_loadd(3, sums + 16 * PANEL + HALF, PANEL * 4);
}

template <bool BOTH>
inline void end(float* sums) {
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + HALF, PANEL * 4);
    if (BOTH) _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    if (BOTH) _tile_stored(3, sums + 16 * PANEL + HALF, PANEL * 4);
}

// One step of 32 inputs; x is of the upper 16 rows.
template <bool BOTH>
inline void multiply(const char* x, const Operand& o, const void* weights) {
    _tile_loadd(4, x, o.row_bytes);
    if (BOTH) _tile_loadd(5, x + o.tile_bytes, o.row_bytes);
    _tile_loadd(6, weights, LINE);
    _tile_loadd(7, (const char*)weights + 16 * LINE, LINE);
    _tile_dpbf16ps(0, 4, 6);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_dpbf16ps(3, 5, 7);
    if (!o.lower) return;
    _tile_loadd(4, x + o.lower, o.row_bytes);
    if (BOTH) _tile_loadd(5, x + o.lower + o.tile_bytes, o.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_dpbf16ps(3, 5, 7);
}

// Up to 32 rows: weights come from memory, and go from it to the tiles.
template <bool BOTH>
void few_rows(const Product& p, const uint8_t* panel, int64_t first, float* sums) {
    const char* x = (const char*)p.x.at(first, 0);
    begin<BOTH>(sums, true);
    for (int64_t b = 0; b < p.w.blocks(); b++, x += p.x.step_bytes, panel += STEP_BYTES) {
        fetch(panel, STEP_BYTES);
        multiply<BOTH>(x, p.x, panel);
    }
    end<BOTH>(sums);
}

void many_rows(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    alignas(64) static thread_local float sums[MOST_ROWS * PANEL];
    static const TileConfig full;
    const uint8_t* weights = p.weights(panel);
    Following following(p, panel, p.w.blocks() * (rows / ROWS));
    const int64_t parts = (p.w.k + DEEP - 1) / DEEP, depth = (p.w.blocks() + parts - 1) / parts * 32;
    load_config(full);
    for (int64_t i = 0; i < p.w.k; i += depth) {
        const int64_t inputs = std::min(depth, p.w.k - i);
        for (int64_t r = 0; r < rows; r += ROWS) {
            float* part = sums + r * PANEL;
            const char* x = (const char*)p.x.at(first + r, i / 32);
            const uint8_t* w = weights + i * PANEL * 2;
            begin<true>(part, i == 0);
            for (int64_t j = 0; j < inputs; j += 32, x += p.x.step_bytes, w += STEP_BYTES) {
                following.step();
                multiply<true>(x, p.x, w);
            }
            end<true>(part);
            if (i + inputs == p.w.k) p.give(slot, part, first + r, ROWS, panel);
        }
    }
}

}  // namespace

void panel_on_tiles(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    have_tiles();  // asks for them; a machine that refuses is given another library
    const int64_t tail = rows % ROWS, whole = rows - tail;
    alignas(64) float sums[ROWS * PANEL];
    if (whole > ROWS || (whole && tail)) {
        many_rows(p, panel, first, whole, slot);
    } else if (whole) {
        load_config(config_of(ROWS));
        few_rows<true>(p, p.weights(panel), first, sums);
        p.give(slot, sums, first, ROWS, panel);
    }
    if (tail) {
        load_config(config_of(tail));
        (tail > 16 ? few_rows<true> : few_rows<false>)(p, p.weights(panel), first + whole, sums);
        p.give(slot, sums, first + whole, tail, panel);
    }
    _tile_release();
}

#else

void panel_on_tiles(const Product&, int64_t, int64_t, int64_t, int) {}

#endif

}  // namespace specserve
