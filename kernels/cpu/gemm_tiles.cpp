// All kinds of weights on AMX tiles: 16 x 16 float32 sums, 32 inputs in bfloat16 at a time.
//
// Quantised weights become bfloat16 on the way: scale * q (+ least) in float32, rounded to nearest even. Vectors and
// tiles do not overlap on the machine measured, and a block's sum of integers would have to leave the tile and be scaled
// in vectors for every 32 inputs (bench/kernels.py measures the most that this could give). Where rows are few, making
// the weights bfloat16 costs more than reading them. Inputs stay bfloat16, which is closer to the truth than 8 bits.
#include "gemm.h"
#include "half.h"
#include "tiles.h"
#include "transpose.h"

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

// 32 inputs of one panel -> two tiles of bfloat16, [16 pairs of inputs][16 outputs].
inline void dequantise_q8(const uint8_t* block, bf16* to) {
    // A byte q + 128 becomes 1 + (q + 128) / 2^15 by its place in the fraction; all that follows is exact.
    const __m512i unit = _mm512_set1_epi32(0x3f800000), flip = _mm512_set1_epi8((char)0x80);
    const __m512i first = _mm512_setr_epi32(0x0000, 0x0100, 0x0200, 0x0300, 0x0400, 0x0500, 0x0600, 0x0700, 0x0800, 0x0900,
                                            0x0a00, 0x0b00, 0x0c00, 0x0d00, 0x0e00, 0x0f00);
    const __m512i places[4] = {first, _mm512_add_epi32(first, _mm512_set1_epi32(0x1000)),
                               _mm512_add_epi32(first, _mm512_set1_epi32(0x2000)),
                               _mm512_add_epi32(first, _mm512_set1_epi32(0x3000))};
    fetch(block, SCALE_BYTES + Q8_BYTES);
    for (int half = 0; half < 2; half++) {
        __m512 scale[2], zero[2];
        spread(block + half * 32, scale[0], scale[1]);
        for (int i = 0; i < 2; i++) {
            zero[i] = _mm512_mul_ps(scale[i], _mm512_set1_ps(-32896.0f));  // -(2^15 + 128)
            scale[i] = _mm512_mul_ps(scale[i], _mm512_set1_ps(32768.0f));
        }
        const uint8_t* lines = block + SCALE_BYTES + half * (Q8_BYTES / 2);
#pragma GCC unroll 8
        for (int line = 0; line < 8; line++, to += 64) {
            __m512i q = _mm512_xor_si512(_mm512_load_si512(lines + line * LINE), flip);
            __m512 w[4];
            for (int i = 0; i < 4; i++)
                w[i] = (__m512)_mm512_mask_permutexvar_epi8(unit, 0x2222222222222222, places[i], q);
            for (int i = 0; i < 4; i++) w[i] = _mm512_fmadd_ps(w[i], scale[i % 2], zero[i % 2]);
            store_pair(to, w[0], w[1]);
            store_pair(to + 32, w[2], w[3]);
        }
    }
}

// 32 inputs of one panel -> [32 outputs][32 inputs]: for each output a table of its 16 weights.
template <bool LEAST>
inline void dequantise_q4(const uint8_t* block, bf16* to) {
    constexpr int64_t numbers = LEAST ? 2 * SCALE_BYTES : SCALE_BYTES;
    const __m512 steps = _mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                       _mm512_set1_ps(LEAST ? 0.0f : -8.0f));
    const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
    alignas(64) float scale[PANEL], least[PANEL];
    for (int64_t i = 0; i < PANEL; i += W) {
        store(scale + i, load_half(block + 2 * i));
        if (LEAST) store(least + i, load_half(block + SCALE_BYTES + 2 * i));
    }
    auto table = [&](int i) {
        __m512 factor = _mm512_set1_ps(scale[i]);
        return LEAST ? _mm512_fmadd_ps(steps, factor, _mm512_set1_ps(least[i])) : _mm512_mul_ps(steps, factor);
    };
    fetch(block, numbers + Q4_BYTES);
#pragma GCC unroll 2
    for (int line = 0; line < 8; line++, to += 4 * 32) {
        __m512i q = _mm512_load_si512(block + numbers + line * LINE);
        for (int i = 0; i < 4; i += 2) {
            // The tables of two outputs side by side; five bits of a word choose.
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(table(4 * line + i + 1), table(4 * line + i));
            __m512i even = _mm512_and_si512(i ? _mm512_srli_epi16(q, 8) : q, nibble);
            __m512i odd = _mm512_srli_epi16(q, i ? 12 : 4);
            odd = _mm512_ternarylogic_epi32(odd, nibble, second, 0xea);  // (odd & nibble) | second
            _mm512_store_si512(to + i * 32, _mm512_permutexvar_epi16(even, both));
            _mm512_store_si512(to + (i + 1) * 32, _mm512_permutexvar_epi16(odd, both));
        }
    }
}

inline void dequantise_q4(const Linear& w, const uint8_t* block, bf16* to) {
    w.kind == Q4_0 ? dequantise_q4<false>(block, to) : dequantise_q4<true>(block, to);
}

inline void dequantise(const Linear& w, const uint8_t* block, bf16* to) {
    if (w.kind == Q8) return dequantise_q8(block, to);
    dequantise_q4(w, block, to);
    for (int half = 0; half < 2; half++, to += 16 * 32) {
        vuint rows[16];
        std::memcpy(rows, to, sizeof rows);
        transpose(rows);
        std::memcpy(to, rows, sizeof rows);
    }
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

// Tiles are loaded some blocks after their lines were stored: sooner, each load would wait for its stores.
constexpr int64_t RING = 8, LAG = 2;
constexpr int64_t TURNED = 2 * 16 * 16;  // pairs of 32 inputs of 32 rows

// Sums [16 outputs][16 rows] -> [rows][32 outputs].
void turn_back(const uint32_t (*out)[16], int64_t rows, float* sums) {
    if (rows <= 4) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < HALF; i++) std::memcpy(sums + r * PANEL + i, &out[i][r], 4);
        return;
    }
    vuint lines[16];
    std::memcpy(lines, out, sizeof lines);
    transpose(lines);
    for (int64_t r = 0; r < rows; r++) std::memcpy(sums + r * PANEL, &lines[r], LINE);
}

// Up to 32 rows by Q4: the weights are the left side, which takes them as they come out of their tables.
template <bool BOTH>
void few_turned(const Product& p, const uint8_t* panel, int64_t rows, float* sums) {
    alignas(64) bf16 ring[RING][PANEL * 32];
    alignas(64) uint32_t out[4][16][16];
    const int64_t bytes = p.w.block_bytes(), blocks = p.w.blocks();
    begin<BOTH>(sums, true);
    for (int64_t b = 0; b < blocks + LAG; b++, panel += bytes) {
        if (b < blocks) dequantise_q4(p.w, panel, ring[b % RING]);
        if (b < LAG) continue;
        const uint32_t* x = p.turned + (b - LAG) * TURNED;
        const bf16* weights = ring[(b - LAG) % RING];
        _tile_loadd(4, x, LINE);
        if (BOTH) _tile_loadd(5, x + 256, LINE);
        _tile_loadd(6, weights, LINE);
        _tile_loadd(7, weights + HALF * 32, LINE);
        _tile_dpbf16ps(0, 6, 4);
        if (BOTH) _tile_dpbf16ps(2, 6, 5);
        _tile_dpbf16ps(1, 7, 4);
        if (BOTH) _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(0, out[0], LINE);
    _tile_stored(1, out[1], LINE);
    if (BOTH) _tile_stored(2, out[2], LINE);
    if (BOTH) _tile_stored(3, out[3], LINE);
    for (int64_t i = 0; i < (BOTH ? 4 : 2); i++)
        turn_back(out[i], std::min<int64_t>(16, rows - i / 2 * 16), sums + i / 2 * 16 * PANEL + i % 2 * HALF);
}

// Sums [32 outputs, rows] of inputs [16 pairs, rows].
TileConfig turned_config(int64_t rows) {
    TileConfig config;
    const int64_t upper = rows > 16 ? 16 : rows, lower = rows > 16 ? rows - 16 : 1;
    config.column_bytes[0] = config.column_bytes[1] = config.column_bytes[4] = (uint16_t)(4 * upper);
    config.column_bytes[2] = config.column_bytes[3] = config.column_bytes[5] = (uint16_t)(4 * lower);
    return config;
}

// Up to 32 rows: weights come from memory, and go from it to the tiles.
template <bool BOTH>
void few_rows(const Product& p, const uint8_t* panel, int64_t first, float* sums) {
    alignas(64) bf16 ring[RING][PANEL * 32];
    const char* x = (const char*)p.x.at(first, 0);
    const int64_t bytes = p.w.block_bytes(), blocks = p.w.blocks();
    begin<BOTH>(sums, true);
    if (p.w.kind == BF16) {
        for (int64_t b = 0; b < blocks; b++, x += p.x.step_bytes, panel += bytes) {
            fetch(panel, STEP_BYTES);
            multiply<BOTH>(x, p.x, panel);
        }
        return end<BOTH>(sums);
    }
    for (int64_t b = 0; b < blocks + LAG; b++, panel += bytes) {
        if (b < blocks) dequantise(p.w, panel, ring[b % RING]);
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
        dequantise(p.w, block, scratch + b * PANEL * 32);
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
    alignas(64) float sums[ROWS * PANEL];
    if (p.turned) {
        load_config(turned_config(rows));
        (rows > 16 ? few_turned<true> : few_turned<false>)(p, p.weights(panel), rows, sums);
        p.give(slot, sums, first, rows, panel);
        return _tile_release();
    }
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

const uint32_t* turn(const Product& p) {
    static thread_local uint32_t* memory = nullptr;
    static thread_local int64_t size = 0;
    if (p.rows > ROWS || (p.w.kind != Q4_0 && p.w.kind != Q4_1)) return nullptr;
    if (p.w.blocks() > size) {
        ::operator delete[](memory, std::align_val_t(64));
        memory = (uint32_t*)::operator new[]((size_t)p.w.blocks() * TURNED * sizeof(uint32_t), std::align_val_t(64));
        size = p.w.blocks();
    }
    for (int64_t b = 0; b < p.w.blocks(); b++)
        for (int64_t first = 0; first < p.rows; first += 16) {
            uint32_t* to = memory + b * TURNED + first * 16;
            const int64_t count = std::min<int64_t>(16, p.rows - first);
            if (count <= 4) {
                for (int64_t r = 0; r < count; r++)
                    for (int64_t i = 0; i < 16; i++) std::memcpy(to + i * 16 + r, p.x.at(first + r, b) + 2 * i, 4);
                continue;
            }
            vuint rows[16] = {};
            for (int64_t r = 0; r < count; r++) std::memcpy(&rows[r], p.x.at(first + r, b), sizeof rows[r]);
            transpose(rows);
            std::memcpy(to, rows, sizeof rows);
        }
    return memory;
}

#else

const uint32_t* turn(const Product&) { return nullptr; }
void panel_on_tiles(const Product&, int64_t, int64_t, int64_t, int) {}

#endif

}  // namespace specserve
