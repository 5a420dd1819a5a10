// GCC 12 tells its optimiser that ldtilecfg reads 8 bytes and that tileloadd reads none, so the stores before them may be
// left out and llama.cpp's AMX kernels crash. Included before everything else where llama.cpp is compiled by GCC.
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#undef _tile_loadd_internal
#define _tile_loadd_internal(dst, base, stride)                                  \
    __asm__ volatile("{tileloadd\t(%0,%1,1), %%tmm" #dst "|tileloadd\t%%tmm" #dst ", [%0+%1*1]}" \
                     :                                                            \
                     : "r"((const void*)(base)), "r"((long)(stride))              \
                     : "memory")
#endif
