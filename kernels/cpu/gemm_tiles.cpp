// All kinds of weights on AMX tiles: 16 x 16 float32 sums, 32 inputs in bfloat16 at a time.
//
// Quantised weights become bfloat16 on the way: scale * q (+ least) in float32, rounded to nearest even. Vectors and
// tiles do not overlap on the machines measured, and a block's sum of integers would have to leave the tile and be scaled
// in vectors for every 32 inputs, so this is several times faster where rows are many, and no slower than memory where
// they are few. Inputs stay bfloat16, which is also closer to the truth than 8 bits.
#include "gemm.h"
#include "half.h"
#include "tiles.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t STEP_BYTES = 2 * 16 * LINE;  // of 32 inputs of one panel in bfloat16
constexpr int64_t DEEP = 288;                  // inputs of a panel that stay in the first cache while rows go by
constexpr int64_t AHEAD = 2048;                // bytes of weights fetched ahead

// Scales of 16 outputs as lanes of (8 outputs x 2 inputs): the first eight, the last eight.
inline void spread(const uint8_t* halves, __m512& low, __m512& high) {
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 all = (__m512)load_half(halves);
    low = _mm512_permutexvar_ps(first, all);
    high = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), all);
}

inline void store_pair(bf16* to, __m512 low, __m512 high) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

inline void fetch(const uint8_t* block, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
}

// 32 inputs of one panel -> two tiles of bfloat16.
inline void dequantise_q8(const uint8_t* block, bf16* to) {
    fetch(block, SCALE_BYTES + Q8_BYTES);
    for (int half = 0; half < 2; half++) {
        __m512 low, high;
        spread(block + half * 32, low, high);
        const __m128i* q = (const __m128i*)(block + SCALE_BYTES + half * (Q8_BYTES / 2));
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++, to += 32) {
            __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(q + 2 * pair)));
            __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(q + 2 * pair + 1)));
            store_pair(to, _mm512_mul_ps(a, low), _mm512_mul_ps(b, high));
        }
    }
}

template <bool LEAST>
inline void dequantise_q4(const uint8_t* block, bf16* to) {
    constexpr int64_t numbers = LEAST ? 2 * SCALE_BYTES : SCALE_BYTES;
    const float first = LEAST ? 0.0f : -8.0f;
    const __m512 values = _mm512_add_ps(
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(first));
    fetch(block, numbers + Q4_BYTES);
    for (int half = 0; half < 2; half++) {
        __m512 scale[2], least[2];
        spread(block + half * 32, scale[0], scale[1]);
        if (LEAST) spread(block + SCALE_BYTES + half * 32, least[0], least[1]);
        for (int line = 0; line < 4; line++) {
            __m512i q = _mm512_load_si512(block + numbers + (half * 4 + line) * LINE);
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++, to += 32) {
                // Only the low four bits choose from the table.
                __m512 a = _mm512_permutexvar_ps(_mm512_srli_epi32(q, 8 * pair), values);
                __m512 b = _mm512_permutexvar_ps(_mm512_srli_epi32(q, 8 * pair + 4), values);
                if (LEAST)
                    store_pair(to, _mm512_fmadd_ps(a, scale[0], least[0]), _mm512_fmadd_ps(b, scale[1], least[1]));
                else
                    store_pair(to, _mm512_mul_ps(a, scale[0]), _mm512_mul_ps(b, scale[1]));
            }
        }
    }
}

inline void dequantise(int64_t kind, const uint8_t* block, bf16* to) {
    if (kind == Q8)
        dequantise_q8(block, to);
    else if (kind == Q4_0)
        dequantise_q4<false>(block, to);
    else
        dequantise_q4<true>(block, to);
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
}

// Up to 32 rows: weights come from memory, and go from it to the tiles.
template <bool BOTH>
void few_rows(const Product& p, const uint8_t* panel, int64_t first, float* sums) {
    // Tiles are loaded some blocks after their lines were stored: sooner, each load would wait for its stores.
    constexpr int64_t RING = 8, LAG = 2;
    alignas(64) bf16 ring[RING][PANEL * 32];
    const char* x = (const char*)p.x.at(first, 0);
    const int64_t bytes = p.w.block_bytes(), blocks = p.w.blocks(), kind = p.w.kind;
    begin<BOTH>(sums, true);
    if (kind == BF16) {
        for (int64_t b = 0; b < blocks; b++, x += p.x.step_bytes, panel += bytes) {
            fetch(panel, STEP_BYTES);
            multiply<BOTH>(x, p.x, panel);
        }
        return end<BOTH>(sums);
    }
    for (int64_t b = 0; b < blocks + LAG; b++, panel += bytes) {
        if (b < blocks) dequantise(kind, panel, ring[b % RING]);
        if (b < LAG) continue;
        multiply<BOTH>(x, p.x, ring[(b - LAG) % RING]);
        x += p.x.step_bytes;
    }
    end<BOTH>(sums);
}

// A panel in bfloat16 that many rows go by.
const uint8_t* whole_panel(const Product& p, int64_t panel) {
    static thread_local bf16* scratch = nullptr;
    static thread_local int64_t size = 0;
    const uint8_t* block = p.weights(panel);
    if (p.w.kind == BF16) return block;
    if (p.w.k > size) {
        ::operator delete[](scratch, std::align_val_t(64));
        scratch = (bf16*)::operator new[]((size_t)p.w.k * PANEL * sizeof(bf16), std::align_val_t(64));
        size = p.w.k;
    }
    for (int64_t b = 0; b < p.w.blocks(); b++, block += p.w.block_bytes())
        dequantise(p.w.kind, block, scratch + b * PANEL * 32);
    return (const uint8_t*)scratch;
}

// Fetches what follows a panel in memory while the panel is at work, a little at each step.
class Following {
  public:
    Following(const Product& p, int64_t panel, int64_t rows)
        : at_(p.weights(panel) + p.w.panel_bytes()), end_(at_ + p.w.panel_bytes()) {
        bytes_ = (p.w.panel_bytes() / (p.w.blocks() * (rows / ROWS)) + 63) / 64 * 64;
    }
    void step() {
        for (int64_t i = 0; i < bytes_ && at_ < end_; i += 64, at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    const uint8_t *at_, *end_;
    int64_t bytes_;
};

void many_rows(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    alignas(64) static thread_local float sums[512 * PANEL];
    static const TileConfig full;
    const uint8_t* weights = whole_panel(p, panel);
    Following following(p, panel, rows);
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
    if (whole > ROWS || (whole && tail)) {
        many_rows(p, panel, first, whole, slot);
    } else if (whole) {
        alignas(64) float sums[ROWS * PANEL];
        load_config(config_of(ROWS));
        few_rows<true>(p, p.weights(panel), first, sums);
        p.give(slot, sums, first, ROWS, panel);
    }
    if (tail) {
        alignas(64) float sums[ROWS * PANEL];
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
