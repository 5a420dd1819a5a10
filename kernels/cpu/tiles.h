// AMX tile registers: permission and configuration.
#pragma once
#include <cstdint>
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace specserve {

// The kernel hands tile registers only to processes that asked (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline bool have_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// Eight tiles of 16 rows of 64 bytes, unless said otherwise.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the instruction reads 64 bytes");

// The compiler's own _tile_loadconfig may say that it reads one pointer's width only (gcc 12 does), and stores to the
// rest of the configuration are then dropped as dead.
inline void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

}  // namespace specserve
#endif
