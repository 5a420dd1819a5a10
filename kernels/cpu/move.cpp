// Whole KV blocks from one memory to another, or within one: copy-on-write, and swaps to and from host memory.
#include <cstring>

#include "pool.h"

namespace specserve {

constexpr int64_t SHARED_BYTES = 1 << 20;  // fewer are moved sooner than other threads wake up

// How the blocks of a memory lie: each is split into one piece a plane (K or V of one layer).
struct Layout {
    int64_t plane_stride, block_stride;  // bytes
};

void move_blocks(const char* src, Layout from, char* dst, Layout to, const int64_t* pairs, int64_t count,
                 int64_t planes, int64_t bytes, int threads) {
    if (count * planes * bytes < SHARED_BYTES) threads = 1;
    // Threads share the planes, so the pairs of each are moved in order.
    parallel_for(planes, 1, threads, [&](int64_t p) {
        for (int64_t i = 0; i < count; i++) {
            const char* a = src + p * from.plane_stride + pairs[2 * i] * from.block_stride;
            char* b = dst + p * to.plane_stride + pairs[2 * i + 1] * to.block_stride;
            if (a != b) std::memcpy(b, a, bytes);
        }
    });
}

}  // namespace specserve

using namespace specserve;

extern "C" {
// pairs [count, 2]: block of src, block of dst. `bytes` of each block in each of the planes.
void ss_move_blocks(const char* src, char* dst, const int64_t* pairs, int64_t count, int64_t planes, int64_t bytes,
                    int64_t src_plane, int64_t src_block, int64_t dst_plane, int64_t dst_block, int threads) {
    move_blocks(src, Layout{src_plane, src_block}, dst, Layout{dst_plane, dst_block}, pairs, count, planes, bytes,
                threads);
}
}
