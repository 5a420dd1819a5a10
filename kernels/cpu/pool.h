// The threads that share an op's work. They claim pieces one after the other instead of being dealt fixed shares, so a
// thread that the machine has no core for costs nothing: the others do its work. Which thread computes a piece never
// enters its result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace specserve {

// Pieces [begin, end) of 0..total, each claimed by one thread.
class Claims {
  public:
    Claims(int64_t total, int64_t piece) : total_(total), piece_(piece < 1 ? 1 : piece) {}

    bool next(int64_t& begin, int64_t& end) {
        begin = next_.fetch_add(piece_, std::memory_order_relaxed);
        end = std::min(begin + piece_, total_);
        return begin < total_;
    }

  private:
    const int64_t total_, piece_;
    std::atomic<int64_t> next_{0};
};

// Runs `body` in the calling thread and in up to `threads` - 1 others; each call takes pieces until there are none.
// Returns when all have returned. A call that comes while another thread's is running is run by its caller alone.
void run_shared(int threads, const std::function<void()>& body);

// body(i) for each i in 0..total; in the calling thread alone where there are no more than `least` of them, and never
// more than that at a time.
template <typename Body>
void parallel_for(int64_t total, int64_t least, int threads, const Body& body) {
    if (threads <= 1 || total <= least) {
        for (int64_t i = 0; i < total; i++) body(i);
        return;
    }
    Claims claims(total, std::min(least, total / (threads * 4)));
    run_shared(threads, [&] {
        for (int64_t begin, end; claims.next(begin, end);)
            for (int64_t i = begin; i < end; i++) body(i);
    });
}

}  // namespace specserve
