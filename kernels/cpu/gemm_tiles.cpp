// bfloat16 weights on AMX tiles: 16 x 16 float32 sums, 32 inputs at a time.
#include "following.h"
#include "gemm.h"
#include "tiles.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t STEP_BYTES = 2 * 16 * LINE;  // of 32 inputs of one panel in bfloat16
constexpr int64_t DEEP = 576;                  // inputs of a panel that stay in the first cache while rows go by
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
inline void begin() {
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) _tile_zero(2);
    if (BOTH) _tile_zero(3);
}

template <bool BOTH>
inline void end(float* sums) {
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + HALF, PANEL * 4);
    if (BOTH) _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    if (BOTH) _tile_stored(3, sums + 16 * PANEL + HALF, PANEL * 4);
}

// One step of 32 inputs; x is of the upper 16 rows.
template <bool BOTH, bool WIDE>
inline void multiply(const char* x, const Operand& o, const void* weights) {
    _tile_stream_loadd(4, x, o.row_bytes);
    if (BOTH) _tile_stream_loadd(5, x + o.tile_bytes, o.row_bytes);
    _tile_loadd(6, weights, LINE);
    _tile_loadd(7, (const char*)weights + 16 * LINE, LINE);
    _tile_dpbf16ps(0, 4, 6);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_dpbf16ps(3, 5, 7);
    if (!WIDE) return;
    _tile_stream_loadd(4, x + o.lower, o.row_bytes);
    if (BOTH) _tile_stream_loadd(5, x + o.lower + o.tile_bytes, o.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_dpbf16ps(3, 5, 7);
}

// The same for 32 rows and the first of some steps, while the last products for the rows before are still under way: their
// sums are kept in `before` unless that is null. Sums go on from `sums`, or begin with zeros where that is null.
template <bool WIDE>
inline void first_step(const char* x, const Operand& o, const uint8_t* weights, float* before, const float* sums) {
// The instructions name their tiles.
#define TURN(AT, PLACE)                                        \
    if (before) _tile_stored(AT, before + (PLACE), PANEL * 4); \
    if (sums) _tile_loadd(AT, sums + (PLACE), PANEL * 4);      \
    if (!sums) _tile_zero(AT);
    _tile_stream_loadd(4, x, o.row_bytes);
    _tile_loadd(6, weights, LINE);
    TURN(0, 0)
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(5, x + o.tile_bytes, o.row_bytes);
    TURN(2, 16 * PANEL)
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + 16 * LINE, LINE);
    TURN(1, HALF)
    _tile_dpbf16ps(1, 4, 7);
    TURN(3, 16 * PANEL + HALF)
    _tile_dpbf16ps(3, 5, 7);
#undef TURN
    if (!WIDE) return;
    _tile_stream_loadd(4, x + o.lower, o.row_bytes);
    _tile_stream_loadd(5, x + o.lower + o.tile_bytes, o.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

// Up to 32 rows: weights come from memory, and go from it to the tiles.
template <bool BOTH, bool WIDE>
void few_rows(const Product& p, const uint8_t* panel, int64_t first, float* sums) {
    const char* x = (const char*)p.x.at(first, 0);
    begin<BOTH>();
    for (int64_t b = 0; b < p.w.blocks(); b++, x += p.x.step_bytes, panel += STEP_BYTES) {
        fetch(panel, STEP_BYTES);
        multiply<BOTH, WIDE>(x, p.x, panel);
    }
    end<BOTH>(sums);
}

// Hands the sums of 32 rows on, some at each step of the next rows' products: all at once, the products would wait.
class Giving {
  public:
    Giving(const Product& p, int64_t panel, int slot, int64_t steps)
        : p_(p), panel_(panel), each_((ROWS + steps - 1) / steps), slot_(slot) {}

    void begin(const float* sums, int64_t row) { sums_ = sums, row_ = row, left_ = ROWS; }
    void step() { some(each_ < left_ ? each_ : left_); }
    void end() { some(left_); }

  private:
    void some(int64_t rows) {
        if (rows == 0) return;
        p_.give(slot_, sums_, row_, rows, panel_);
        sums_ += rows * PANEL, row_ += rows, left_ -= rows;
    }

    const Product& p_;
    const float* sums_ = nullptr;
    int64_t panel_, each_, row_ = 0, left_ = 0;
    int slot_;
};

template <bool WIDE>
void many_rows(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    alignas(64) static thread_local float sums[MOST_ROWS * PANEL];
    static const TileConfig full;
    const uint8_t* weights = p.weights(panel);
    Following following(p, panel, p.w.blocks() * (rows / ROWS));
    const int64_t parts = (p.w.k + DEEP - 1) / DEEP, depth = (p.w.blocks() + parts - 1) / parts * 32;
    load_config(full);
    // Few, where sums need not wait for the next part: what is written drives weights out of the first cache.
    auto sums_at = [&](int64_t r) { return sums + (parts == 1 ? r % (2 * ROWS) : r) * PANEL; };
    float* before = nullptr;
    for (int64_t i = 0; i < p.w.k; i += depth) {
        const int64_t inputs = std::min(depth, p.w.k - i);
        const bool last = i + inputs == p.w.k;
        Giving giving(p, panel, slot, inputs / 32);
        for (int64_t r = 0; r < rows; r += ROWS) {
            float* part = sums_at(r);
            const char* x = (const char*)p.x.at(first + r, i / 32);
            const uint8_t* w = weights + i * PANEL * 2;
            following.step();
            first_step<WIDE>(x, p.x, w, before, i ? part : nullptr);
            before = part;
            if (last && r) giving.begin(sums_at(r - ROWS), first + r - ROWS);
            for (int64_t j = 32; j < inputs; j += 32) {
                x += p.x.step_bytes, w += STEP_BYTES;
                following.step();
                multiply<true, WIDE>(x, p.x, w);
                giving.step();
            }
            giving.end();
        }
    }
    end<true>(before);
    p.give(slot, before, first + rows - ROWS, ROWS, panel);
}

template <bool WIDE>
void on_tiles(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    const int64_t tail = rows % ROWS, whole = rows - tail;
    alignas(64) float sums[ROWS * PANEL];
    if (whole > ROWS || (whole && tail)) {
        many_rows<WIDE>(p, panel, first, whole, slot);
    } else if (whole) {
        load_config(config_of(ROWS));
        few_rows<true, WIDE>(p, p.weights(panel), first, sums);
        p.give(slot, sums, first, ROWS, panel);
    }
    if (tail) {
        load_config(config_of(tail));
        (tail > 16 ? few_rows<true, WIDE> : few_rows<false, WIDE>)(p, p.weights(panel), first + whole, sums);
        p.give(slot, sums, first + whole, tail, panel);
    }
    _tile_release();
}

}  // namespace

void panel_on_tiles(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    have_tiles();  // asks for them; a machine that refuses is given another library
    (p.x.lower ? on_tiles<true> : on_tiles<false>)(p, panel, first, rows, slot);
}

#else

void panel_on_tiles(const Product&, int64_t, int64_t, int64_t, int) {}

#endif

}  // namespace specserve
