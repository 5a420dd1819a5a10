// Quantised weights where there are AMX tiles: sums that are exact over all inputs, whatever computes them.
//
// Scales become whole multiples of an output's unit, inputs 16-bit multiples of a row's scale, both of them powers of two:
//   scale = m * unit, least = c * unit          y = unit * scale of the row * sum over k of (m * q + c) * x
// The sum is a whole number. Few rows take it block by block, m * (sum of q * x) + c * (sum of x), with the instructions for
// sums of four products, as fast as weights come from memory. Many rows go by tiles: m * q + c fits 16 bits, and products of
// two bytes each are four products of bytes, kept apart for all of k. No sum leaves a tile before its last input, as it
// would have to every 32 inputs with scales of floats.
#include <memory>
#include <vector>

#include "dot.h"
#include "following.h"
#include "half.h"
#include "operand.h"
#include "tiles.h"

namespace specserve {

#ifdef __AMX_BF16__

namespace {

constexpr int64_t LINE = 64, TILE = 1024;
constexpr int64_t AHEAD = 2048;  // bytes of weights fetched ahead
constexpr int64_t FEW = 8;       // rows at most that go by vectors
constexpr int64_t STREAMS = 2;
constexpr int64_t DEEP = 9;      // steps of 64 inputs of 16 outputs that stay in the first cache while rows go by

// 2^16 * high + low in units of the output times the row's scale; low is from 0 to 2^16 - 1.
inline __m512 finish(__m512i high, __m512i low, __m512 unit, float scale) {
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(low));
    return _mm512_mul_ps(sum, _mm512_mul_ps(unit, _mm512_set1_ps(scale)));
}

// 16 float16 as multiples of the units whose inverses are given.
inline __m512i multiples(const uint8_t* halves, __m512 inverse) {
    return _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load_half(halves), inverse));
}

inline __m512 inverse_of(const float* units) { return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(units)); }

// Sums of 16 outputs in 64 bits: of those in even lanes and of those in odd ones.
struct Exact {
    __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();

    void add(__m512i sums, __m512i factor) {
        even = _mm512_add_epi64(even, _mm512_mul_epi32(sums, factor));
        odd = _mm512_add_epi64(odd, _mm512_mul_epi32(_mm512_srli_epi64(sums, 32), _mm512_srli_epi64(factor, 32)));
    }
    __m512 value(__m512 unit, float scale) const {
        __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 16), 0xaaaa, _mm512_slli_epi64(odd, 16));
        __m512i low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
        return finish(high, _mm512_and_si512(low, _mm512_set1_epi32(0xffff)), unit, scale);
    }
};

inline int32_t four_at(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return four;
}

// Sums of 32 inputs of up to FEW rows, [rows, k / 32]. Kept until the thread's next call.
const int32_t* totals_of(const Product& p) {
    static thread_local std::vector<int32_t> totals;
    const int64_t blocks = p.w.blocks();
    totals.resize((size_t)(FEW * blocks));
    const __m256i ones = _mm256_set1_epi8(1);
    auto sum = [&](const int8_t* x) {
        return _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, _mm256_loadu_si256((const __m256i*)x));
    };
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            const int8_t* x = p.x.q + Limbs::row(r, p.w.k) + b / 2 * Limbs::STEP_BYTES + b % 2 * BLOCK;
            __m256i v = _mm256_add_epi32(_mm256_slli_epi32(sum(x), 8), sum(x + Limbs::LOW));
            totals[(size_t)(r * blocks + b)] = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(v));
        }
    return totals.data();
}

// What one block of weights adds to the sums of R rows from `row` on; m and c are its scales and leasts in units.
template <int64_t KIND, int R>
inline void add_block(const Product& p, const int32_t* totals, const uint8_t* weights, int64_t row, int64_t b,
                      const __m512i* m, const __m512i* c, Exact (*exact)[2]) {
    const int8_t* x[R];
    int32_t total[R];
    vint high[R][2] = {}, low[R][2];
    for (int r = 0; r < R; r++) {
        x[r] = p.x.q + Limbs::row(row + r, p.w.k) + b / 2 * Limbs::STEP_BYTES + b % 2 * BLOCK;
        total[r] = totals[(row + r) * p.w.blocks() + b];
        low[r][0] = vint{} - (int32_t)offset_of(KIND) * total[r];
        low[r][1] = low[r][0] << SHIFT<KIND>;
    }
#pragma GCC unroll 8
    for (int64_t group = 0; group < BLOCK / 4; group++) {
        vbytes left, right;
        weights_of<KIND>(weights, group, left, right);
        for (int r = 0; r < R; r++) {
            const int32_t upper = four_at(x[r] + group * 4), lower = four_at(x[r] + Limbs::LOW + group * 4);
            high[r][0] = dot4<KIND>(high[r][0], left, upper), high[r][1] = dot4<KIND>(high[r][1], right, upper);
            low[r][0] = dot4<KIND>(low[r][0], left, lower), low[r][1] = dot4<KIND>(low[r][1], right, lower);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            vint sums = (high[r][half] << 8) + low[r][half];
            if (half) sums >>= SHIFT<KIND>;
            exact[r][half].add((__m512i)sums, m[half]);
            if (KIND == Q4_1) exact[r][half].add(_mm512_set1_epi32(total[r]), c[half]);
        }
}

// Up to FEW rows by `count` panels side by side: each is a stream of memory of its own, and a core reads two faster than
// one.
template <int64_t KIND>
void by_vectors(const Product& p, const int32_t* totals, const int64_t* panels, int64_t count, int slot) {
    Exact exact[STREAMS][FEW][2];
    __m512 inverse[STREAMS][2];
    for (int64_t s = 0; s < count; s++)
        for (int half = 0; half < 2; half++) inverse[s][half] = inverse_of(p.units(panels[s]) + half * HALF);
    for (int64_t b = 0; b < p.w.blocks(); b++)
        for (int64_t s = 0; s < count; s++) {
            const uint8_t *block = p.weights(panels[s]) + b * Block<KIND>::bytes, *weights = block + Block<KIND>::numbers;
            for (int64_t i = 0; i < Block<KIND>::bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
            __m512i m[2], c[2] = {};
            for (int half = 0; half < 2; half++) {
                m[half] = multiples(block + half * 32, inverse[s][half]);
                if (KIND == Q4_1) c[half] = multiples(block + SCALE_BYTES + half * 32, inverse[s][half]);
            }
            int64_t r = 0;
            for (; r + 4 <= p.rows; r += 4) add_block<KIND, 4>(p, totals, weights, r, b, m, c, exact[s] + r);
            if (r + 2 <= p.rows) add_block<KIND, 2>(p, totals, weights, r, b, m, c, exact[s] + r), r += 2;
            if (r < p.rows) add_block<KIND, 1>(p, totals, weights, r, b, m, c, exact[s] + r);
        }
    alignas(64) float sums[FEW * PANEL];
    for (int64_t s = 0; s < count; s++) {
        for (int64_t r = 0; r < p.rows; r++)
            for (int half = 0; half < 2; half++)
                _mm512_store_ps(sums + r * PANEL + half * HALF,
                                exact[s][r][half].value(_mm512_loadu_ps(p.units(panels[s]) + half * HALF), p.x.scale[r]));
        p.give(slot, sums, 0, p.rows, panels[s]);
    }
}

// The lower bytes of 16-bit numbers of even inputs and of odd ones, and the upper bytes, inputs in turn.
inline void store_limbs(uint8_t* to, __m512i even, __m512i odd) {
    const __m512i swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    _mm512_store_si512(to, _mm512_mask_shuffle_epi8(odd, 0x5555555555555555, even, swap));
    _mm512_store_si512(to + TILE, _mm512_mask_shuffle_epi8(even, 0xaaaaaaaaaaaaaaaa, odd, swap));
}

// Weights of 16 outputs and 32 inputs in units -> 8 lines of a tile of upper bytes and of one of lower bytes behind it.
template <int64_t KIND>
inline void widen(const uint8_t* block, int half, __m512 inverse, uint8_t* to) {
    const __m512i byte = _mm512_set1_epi16(255), nibble = _mm512_set1_epi16(15);
    auto words = [](__m512i v) { return _mm512_mask_mov_epi16(v, 0xaaaaaaaa, _mm512_slli_epi32(v, 16)); };
    const __m512i m = words(multiples(block + half * 32, inverse));
    const __m512i c = KIND == Q4_1 ? words(multiples(block + SCALE_BYTES + half * 32, inverse))
                                   : _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_slli_epi16(m, KIND == Q8 ? 7 : 3));
    const uint8_t* weights = block + Block<KIND>::numbers + (KIND == Q8 ? half * (Q8_BYTES / 2) : 0);
#pragma GCC unroll 8
    for (int64_t group = 0; group < 8; group++) {
        __m512i q = (__m512i)load_bytes(weights + group * LINE), even, odd;
        if (KIND == Q8) {
            q = (__m512i)weights_q8((vbytes)q);
            even = _mm512_and_si512(q, byte), odd = _mm512_srli_epi16(q, 8);
        } else {
            even = _mm512_and_si512(half ? _mm512_srli_epi16(q, 4) : q, nibble);
            odd = half ? _mm512_srli_epi16(q, 12) : _mm512_and_si512(_mm512_srli_epi16(q, 8), nibble);
        }
        store_limbs(to + group * LINE, _mm512_add_epi16(_mm512_mullo_epi16(even, m), c),
                    _mm512_add_epi16(_mm512_mullo_epi16(odd, m), c));
    }
}

// Some steps of 16 outputs as tiles, [steps of 64 inputs][upper, lower bytes]. What lies past the last input meets zeros.
template <int64_t KIND>
void widen_steps(const Product& p, int64_t panel, int half, int64_t step, int64_t steps, uint8_t* to) {
    const __m512 inverse = inverse_of(p.units(panel) + half * HALF);
    const int64_t first = 2 * step, last = std::min(2 * (step + steps), p.w.blocks());
    const uint8_t* block = p.weights(panel) + first * Block<KIND>::bytes;
    for (int64_t b = first; b < last; b++, block += Block<KIND>::bytes)
        widen<KIND>(block, half, inverse, to + (b - first) / 2 * 2 * TILE + b % 2 * 8 * LINE);
}

// Tiles 0..3 are sums, 4 and 5 rows of x, 6 and 7 weights.
TileConfig config_of(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 6; i++) config.rows[i] = (uint8_t)rows;
    return config;
}

typedef int32_t Sums[4][16][16];  // upper by upper bytes, upper by lower, lower by upper, lower by lower

inline void step(const int8_t* x, const uint8_t* weights, int64_t i) {
    x += i * Limbs::STEP_BYTES, weights += i * 2 * TILE;
    _tile_stream_loadd(4, x, LINE);
    _tile_loadd(6, weights, LINE);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weights + TILE, LINE);
    _tile_dpbsud(1, 4, 7);
    _tile_stream_loadd(5, x + Limbs::LOW, LINE);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
}

// The first of some steps of 16 rows by 16 outputs, while the last products for those before are still under way: their
// sums are kept in `before` unless that is null. Sums go on from `sums`, or begin with zeros where that is null.
inline void first_step(const int8_t* x, const uint8_t* weights, Sums* before, const Sums* sums) {
// The instructions name their tiles.
#define TURN(AT)                                       \
    if (before) _tile_stored(AT, (*before)[AT], LINE); \
    if (sums) _tile_loadd(AT, (*sums)[AT], LINE);      \
    if (!sums) _tile_zero(AT);
    _tile_stream_loadd(4, x, LINE);
    _tile_loadd(6, weights, LINE);
    TURN(0)
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weights + TILE, LINE);
    TURN(1)
    _tile_dpbsud(1, 4, 7);
    _tile_stream_loadd(5, x + Limbs::LOW, LINE);
    TURN(2)
    _tile_dpbssd(2, 5, 6);
    TURN(3)
    _tile_dpbsud(3, 5, 7);
#undef TURN
}

inline void keep(Sums& sums) {
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
}

// Sums of up to 16 rows -> [rows][32], 16 outputs of each.
inline void leave(const Sums& sums, int64_t rows, const float* scale, __m512 unit, float* to) {
    const __m512i numbers = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    const __m512i lower_bytes = _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(64)), 8));
    for (int64_t r = 0; r < rows; r++) {
        const __m512i lowest = _mm512_load_si512(sums[3][r]);
        __m512i middle = _mm512_add_epi32(_mm512_load_si512(sums[1][r]), _mm512_load_si512(sums[2][r]));
        middle = _mm512_add_epi32(middle, _mm512_srai_epi32(lowest, 8));
        const __m512i high = _mm512_add_epi32(_mm512_load_si512(sums[0][r]), _mm512_srai_epi32(middle, 8));
        const __m512i low = _mm512_maskz_permutex2var_epi8(0x3333333333333333, lowest, lower_bytes, middle);
        _mm512_store_ps(to + r * PANEL, finish(high, low, unit, scale[r]));
    }
}

struct Room {
    alignas(64) uint8_t weights[DEEP * 2 * TILE];
    alignas(64) Sums sums[MOST_ROWS / 16];
    alignas(64) float results[MOST_ROWS * PANEL];
};

// Rows by 16 outputs: a part of the weights stays in the first cache while all rows go by, then the next. The second half
// hands its sums on with those of the first.
void half_on_tiles(const Product& p, int64_t panel, int half, int64_t first, int64_t rows, int slot, Following& following,
                   Room& room) {
    auto widen_part = p.w.kind == Q8 ? widen_steps<Q8> : p.w.kind == Q4_0 ? widen_steps<Q4_0> : widen_steps<Q4_1>;
    const int64_t steps = Limbs::steps(p.w.k), parts = (steps + DEEP - 1) / DEEP, depth = (steps + parts - 1) / parts;
    const int64_t count = (rows + 15) / 16;
    const __m512 unit = _mm512_loadu_ps(p.units(panel) + half * HALF);
    auto rows_at = [&](int64_t i) { return std::min<int64_t>(16, rows - i * 16); };
    auto sums_at = [&](int64_t i) -> Sums& { return room.sums[parts == 1 ? i % 2 : i]; };
    auto leave_at = [&](int64_t i) {
        float* results = room.results + i * 16 * PANEL;
        leave(sums_at(i), rows_at(i), p.x.scale + first + i * 16, unit, results + half * HALF);
        if (half) p.give(slot, results, first + i * 16, rows_at(i), panel);
    };
    int64_t configured = 0;
    Sums* before = nullptr;
    for (int64_t s = 0; s < steps; s += depth) {
        const int64_t some = std::min(depth, steps - s);
        widen_part(p, panel, half, s, some, room.weights);
        for (int64_t i = 0; i < count; i++) {
            if (rows_at(i) != configured) {
                if (before) keep(*before);
                before = nullptr;
                load_config(config_of(configured = rows_at(i)));
            }
            const int8_t* x = p.x.q + Limbs::row(first + i * 16, p.w.k) + s * Limbs::STEP_BYTES;
            following.step();
            first_step(x, room.weights, before, s ? &sums_at(i) : nullptr);
            before = &sums_at(i);
            for (int64_t j = 1; j < some; j++) following.step(), step(x, room.weights, j);
            if (s + some == steps && i) leave_at(i - 1);  // while the tiles of the next rows are at work
        }
    }
    keep(*before);
    leave_at(count - 1);
}

void on_tiles(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    static thread_local const std::unique_ptr<Room> room(new Room);
    Following following(p, panel, 2 * ((rows + 15) / 16) * Limbs::steps(p.w.k));
    for (int half = 0; half < 2; half++) half_on_tiles(p, panel, half, first, rows, slot, following, *room);
    _tile_release();
}

}  // namespace

void panel_limbs(const Product& p, int64_t panel, int64_t first, int64_t rows, int slot) {
    have_tiles();  // asks for them; a machine that refuses is given another library
    on_tiles(p, panel, first, rows, slot);
}

bool few_limbs(const Product& p, int threads) {
    if (p.w.takes() != Takes::LIMBS || p.rows > FEW) return false;
    auto run = p.w.kind == Q8 ? by_vectors<Q8> : p.w.kind == Q4_0 ? by_vectors<Q4_0> : by_vectors<Q4_1>;
    const int32_t* totals = totals_of(p);
    // Panels side by side as often as every thread has them, and what is left one by one.
    const int64_t sets = p.count() / (STREAMS * threads) * threads, rest = p.count() - sets * STREAMS;
    ShardedClaims whole(sets, 1, threads), single(rest, 1, threads);
    run_slots(threads, [&](int slot) {
        int64_t panels[STREAMS];
        for (int64_t i, end; whole.next(slot, i, end);) {
            for (int64_t s = 0; s < STREAMS; s++) panels[s] = i + s * sets;
            run(p, totals, panels, STREAMS, slot);
        }
        for (int64_t i, end; single.next(slot, i, end);) {
            panels[0] = STREAMS * sets + i;
            run(p, totals, panels, 1, slot);
        }
    });
    return true;
}

void panel_dots(const Product&, int64_t, int64_t, int64_t, int) {}

#else

bool few_limbs(const Product&, int) { return false; }
void panel_limbs(const Product&, int64_t, int64_t, int64_t, int) {}

#endif

}  // namespace specserve
