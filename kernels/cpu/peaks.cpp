// What the machine can do at most, by code that does nothing else: the ceilings that benches hold the kernels against.
// Operands are random, as a product's are: with zeros the units draw less power, and some machines clock them 15 to 20%
// higher, which no product ever sees.
#include <chrono>
#include <random>

#include "dot.h"
#include "half.h"
#include "pool.h"
#include "tiles.h"

namespace specserve {

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Keeps the compiler from dropping what a value was made by. A copy: what the assembler sees lives in memory.
template <typename T>
inline void use(T value) {
    asm volatile("" : : "m"(value));
}

// One pass over memory, in STREAMS streams side by side; each line is asked for `ahead` bytes before it is read.
template <int STREAMS>
void read_piece(const uint8_t* p, int64_t bytes, int64_t ahead) {
    constexpr int64_t LINES = 4;
    const int64_t stream = bytes / STREAMS;
    vuint sums[STREAMS][LINES] = {};
    for (int64_t i = 0; i < stream; i += LINES * 64)
        for (int s = 0; s < STREAMS; s++)
            for (int64_t line = 0; line < LINES; line++) {
                const uint8_t* at = p + s * stream + i + line * 64;
                if (ahead) __builtin_prefetch(at + ahead);
                vuint v;
                std::memcpy(&v, at, sizeof v);
                sums[s][line] ^= v;
            }
    for (int s = 0; s < STREAMS; s++)
        for (int64_t line = 0; line < LINES; line++) use(sums[s][line]);
}

// Steps of operands that stay in the first cache, in which a core's units find always other ones.
constexpr int64_t STEPS = 64;

struct alignas(64) Operands {
    float weights[STEPS][2][W], x[STEPS * 8];
    bf16 tile_x[8][2][512], tile_weights[8][2][512];
    uint8_t bytes[STEPS][2][64];
    uint16_t halves[STEPS][32];

    Operands() {
        std::minstd_rand random;
        auto number = [&] { return (float)random() / (float)random.max() * 2.0f - 1.0f; };
        fill(&weights[0][0][0], STEPS * 2 * W, number), fill(x, STEPS * 8, number);
        fill(&tile_x[0][0][0], 8 * 2 * 512, number), fill(&tile_weights[0][0][0], 8 * 2 * 512, number);
        for (int64_t i = 0; i < STEPS * 2 * 64; i++) (&bytes[0][0][0])[i] = (uint8_t)(random() >> 8);
        for (int64_t i = 0; i < STEPS * 32; i++) (&halves[0][0])[i] = half_of(number());
    }

  private:
    template <typename Number>
    static void fill(float* to, int64_t count, const Number& number) {
        for (int64_t i = 0; i < count; i++) to[i] = number();
    }
    template <typename Number>
    static void fill(bf16* to, int64_t count, const Number& number) {
        for (int64_t i = 0; i < count; i++) {
            float value = number();
            std::memcpy(to + i, (const char*)&value + 2, sizeof(bf16));
        }
    }
};

// One register of the machine, in which the compiler keeps sums; of vectors that are wider it makes memory.
#if defined(__AVX512F__)
typedef __m512 Floats;
typedef __m512i Numbers;
constexpr int AT_ONCE = 6;  // rows whose sums of two registers of outputs fit the registers
inline Floats add_product(Floats sum, const float* weights, float x) {
    return _mm512_fmadd_ps(_mm512_load_ps(weights), _mm512_set1_ps(x), sum);
}
inline Numbers add_dots(Numbers sum, const uint8_t* weights, int32_t four) {
    return (Numbers)dot4<Q8>((vint)sum, load_bytes(weights), four);
}
#elif defined(__AVX2__)
typedef __m256 Floats;
typedef __m256i Numbers;
constexpr int AT_ONCE = 4;
inline Floats add_product(Floats sum, const float* weights, float x) {
    return _mm256_fmadd_ps(_mm256_load_ps(weights), _mm256_set1_ps(x), sum);
}
inline Numbers add_dots(Numbers sum, const uint8_t* weights, int32_t four) {
    return _mm256_add_epi32(sum, dot4_half(_mm256_load_si256((const __m256i*)weights), _mm256_set1_epi32(four)));
}
#else
typedef vfloat Floats;
typedef vint Numbers;
constexpr int AT_ONCE = 2;
inline Floats add_product(Floats sum, const float* weights, float x) { return fma(load(weights), splat(x), sum); }
inline Numbers add_dots(Numbers sum, const uint8_t* weights, int32_t four) {
    return dot4<Q8>(sum, load_bytes(weights), four);
}
#endif
constexpr int64_t PASSES = 96;  // of a unit of work, which takes some tens of microseconds

// Sums of products of AT_ONCE rows by two registers of weights, as the kernels have them but for the memory.
template <typename Sum, typename Add>
inline void multiply_vectors(const Add& add) {
    Sum sums[AT_ONCE][2] = {};
    for (int64_t pass = 0; pass < PASSES; pass++)
        for (int64_t step = 0; step < STEPS; step++) {
#pragma GCC unroll 8
            for (int r = 0; r < AT_ONCE; r++) {
                sums[r][0] = add(sums[r][0], step, 0, r);
                sums[r][1] = add(sums[r][1], step, 1, r);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < AT_ONCE; r++) use(sums[r][0]), use(sums[r][1]);
}
// Lanes of 32 bits that it gave products to.
constexpr double LANES = (double)PASSES * STEPS * AT_ONCE * 2 * sizeof(Floats) / 4;

// Each does one unit of work in the calling thread and gives its operations, 0 where the machine has no such
// instructions. Multiplications and additions count as one each.
double float32(const Operands& o) {
    multiply_vectors<Floats>([&](Floats sum, int64_t step, int half, int r) __attribute__((always_inline)) {
        return add_product(sum, o.weights[step][half], o.x[step * 8 + r]);
    });
    return LANES * 2;
}

double bf16_pairs(const Operands& o) {
#if defined(__AVX512BF16__)
    multiply_vectors<Floats>([&](Floats sum, int64_t step, int half, int r) __attribute__((always_inline)) {
        __m512i weights = _mm512_load_si512(&o.tile_weights[step % 8][half][step / 8 * 32]);
        int32_t pair;
        std::memcpy(&pair, &o.tile_x[r % 8][half][2 * step], sizeof pair);
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
    });
    return LANES * 4;
#else
    (void)o;
    return 0;
#endif
}

double int8_dots(const Operands& o) {
    multiply_vectors<Numbers>([&](Numbers sum, int64_t step, int half, int r) __attribute__((always_inline)) {
        int32_t four;
        std::memcpy(&four, &o.bytes[step][1][4 * r], sizeof four);
        return add_dots(sum, o.bytes[step][half], four);
    });
    return LANES * 8;
}

#ifdef __AMX_BF16__

constexpr int64_t TILE_STEPS = 1024;

// Four sums of 16 x 16. IN_TILES: the operands never leave the registers; else each step loads others.
template <bool INT8, bool IN_TILES>
double tiles(const Operands& o) {
    alignas(64) float sums[4][256];
    static const TileConfig config;
    load_config(config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, INT8 ? (const void*)o.bytes[0] : o.tile_x[0][0], 64);
    _tile_loadd(5, INT8 ? (const void*)o.bytes[8] : o.tile_x[0][1], 64);
    _tile_loadd(6, INT8 ? (const void*)o.bytes[16] : o.tile_weights[0][0], 64);
    _tile_loadd(7, INT8 ? (const void*)o.bytes[24] : o.tile_weights[0][1], 64);
    for (int64_t step = 0; step < TILE_STEPS; step++) {
        if (!IN_TILES) {
            const int64_t i = step % 8;
            _tile_loadd(4, INT8 ? (const void*)o.bytes[4 * i] : o.tile_x[i][0], 64);
            _tile_loadd(5, INT8 ? (const void*)o.bytes[4 * i + 8] : o.tile_x[i][1], 64);
            _tile_loadd(6, INT8 ? (const void*)o.bytes[4 * i + 16] : o.tile_weights[i][0], 64);
            _tile_loadd(7, INT8 ? (const void*)o.bytes[4 * i + 24] : o.tile_weights[i][1], 64);
        }
        if (INT8) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    _tile_release();
    return (double)TILE_STEPS * 4 * 16 * 16 * (INT8 ? 64 : 32) * 2;
}

// Rows by 32 inputs in tiles 4 and 5, 32 inputs by 16 outputs in 6 and 7.
TileConfig config_of_blocks() {
    TileConfig config;
    config.column_bytes[4] = config.column_bytes[5] = 32;
    config.rows[6] = config.rows[7] = 8;
    return config;
}

// What int8 tiles could give where every 32 inputs have a scale of their own: 16 x 16 sums of 32 inputs leave the tile
// and are scaled in vectors, sum = fma(products, scale of the weights * scale of the row, sum). All memory is in the
// first cache. SCALED false: they only leave the tile, as if the rest were free.
template <bool SCALED>
double blocks(const Operands& o) {
    constexpr int64_t RING = 4, LAG = 2;  // sums are read some steps after they were stored: sooner, loads would wait
    alignas(64) int32_t ring[RING][256] = {};
    static const TileConfig config = config_of_blocks();
    vfloat sums[16] = {};
    load_config(config);
    for (int64_t step = 0; step < TILE_STEPS; step++) {
        _tile_zero(0);
        _tile_loadd(4, o.bytes[step % 32], 32);
        _tile_loadd(6, o.bytes[step % 32 + 16], 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, ring[step % RING], 64);
        if (!SCALED) continue;
        const int32_t* products = ring[(step - LAG) & (RING - 1)];
        const vfloat scale = load_half(o.halves[step % STEPS]);
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            vfloat exact = (vfloat)_mm512_cvtepi32_ps(_mm512_load_si512(products + r * 16));
            sums[r] = fma(exact, scale * o.x[step % 32 * 8 + r], sums[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) use(sums[r]);
    _tile_release();
    return (double)TILE_STEPS * 16 * 16 * 32 * 2;
}

#define TILED(FUNCTION) (have_tiles() ? FUNCTION : nullptr)

#else

#define TILED(FUNCTION) nullptr

#endif

typedef double (*Unit)(const Operands&);

// By the numbers that callers know them by.
Unit unit_of(int64_t what) {
    switch (what) {
        case 0: return float32;
        case 1: return bf16_pairs;
        case 2: return int8_dots;
        case 3: return TILED((tiles<false, true>));
        case 4: return TILED((tiles<false, false>));
        case 5: return TILED((tiles<true, true>));
        case 6: return TILED((tiles<true, false>));
        case 7: return TILED(blocks<true>);
        case 8: return TILED(blocks<false>);
        default: return nullptr;
    }
}

}  // namespace

}  // namespace specserve

using namespace specserve;

extern "C" {
// Seconds to read all of p, `bytes` bytes (a multiple of 64 KB): in 1, 2 or 4 streams, each line prefetched `ahead`
// bytes before its turn, or not at all for 0.
double ss_peak_read(const uint8_t* p, int64_t bytes, int64_t streams, int64_t ahead, int threads) {
    constexpr int64_t PIECE = 1 << 16;
    auto read = streams == 4 ? read_piece<4> : streams == 2 ? read_piece<2> : read_piece<1>;
    ShardedClaims claims(bytes / PIECE, 1, threads);
    const double start = now();
    run_slots(threads, [&](int slot) {
        for (int64_t begin, end; claims.next(slot, begin, end);) read(p + begin * PIECE, PIECE, ahead);
    });
    return now() - start;
}

// Operations a second of `units` units of work: 0 float32 on vectors, 1 bfloat16 pairs on vectors, 2 int8 dots of four
// on vectors, 3 and 4 bfloat16 tiles with operands in registers and in the first cache, 5 and 6 int8 tiles likewise,
// 7 and 8 int8 tiles that leave the tile every 32 inputs, scaled there and not scaled.
// 0.0 where this library has no such instructions.
double ss_peak_operations(int64_t what, int64_t units, int threads) {
    static const Operands* operands = new Operands;
    const Unit unit = unit_of(what);
    const double each = unit ? unit(*operands) : 0.0;
    if (each == 0.0) return 0.0;
    Claims claims(units, 1);
    const double start = now();
    run_shared(threads, [&] {
        for (int64_t begin, end; claims.next(begin, end);) unit(*operands);
    });
    return each * (double)units / (now() - start);
}

// Seconds of each of `runs` runs of the pool. With `together` the caller waits inside for all the others to come, 1 ms at
// most; without, there is nothing to do, and the run is over before they come.
void ss_peak_fork_join(double* seconds, int64_t runs, int64_t together, int threads) {
    for (int64_t i = 0; i < runs; i++) {
        std::atomic<int> missing{together ? threads - 1 : 0};
        const double start = now();
        run_slots(threads, [&](int slot) {
            if (slot) return void(missing.fetch_sub(1));
            while (missing.load() > 0 && now() - start < 1e-3) {}
        });
        seconds[i] = now() - start;
    }
}
}
