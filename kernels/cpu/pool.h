// The threads that share an op's work. They claim pieces one after the other instead of being dealt fixed shares, so a
// thread that the machine has no core for costs nothing: the others do its work. Which thread computes a piece never
// enters its result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace specserve {

constexpr int MAX_THREADS = 256;

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

// The same where it matters for speed who takes what: slot t of `threads` first takes the pieces of its own contiguous
// range [t * total / threads, (t + 1) * total / threads) in order, so that it streams through memory, and meets the
// same part of the weights in its cache from call to call; then what is left of the others' ranges.
class ShardedClaims {
  public:
    ShardedClaims(int64_t total, int64_t piece, int threads)
        : piece_(piece < 1 ? 1 : piece), shards_(std::clamp(threads, 1, MAX_THREADS)) {
        for (int i = 0; i < shards_; i++) {
            shard_[i].next.store(i * total / shards_, std::memory_order_relaxed);
            shard_[i].end = (i + 1) * total / shards_;
        }
    }

    bool next(int slot, int64_t& begin, int64_t& end) {
        for (int i = 0; i < shards_; i++) {
            Shard& shard = shard_[(slot + i) % shards_];
            if (shard.next.load(std::memory_order_relaxed) >= shard.end) continue;
            begin = shard.next.fetch_add(piece_, std::memory_order_relaxed);
            end = std::min(begin + piece_, shard.end);
            if (begin < shard.end) return true;
        }
        return false;
    }

  private:
    struct alignas(64) Shard {
        std::atomic<int64_t> next;
        int64_t end;
        Shard() {}  // those past the last are never touched
    };

    const int64_t piece_;
    const int shards_;
    Shard shard_[MAX_THREADS];
};

// Calls call(context, slot): see run_slots.
void run_threads(int threads, void (*call)(void*, int), void* context);

// Runs body(slot) in the calling thread, as slot 0, and in up to `threads` - 1 others, each with a slot of its own in
// 1..threads - 1; each call takes pieces until there are none. Any of the others may not come at all. Returns when all
// that came have returned. A call that comes while another one is running, or from inside one, is run by its caller
// alone. `body` must not throw.
template <typename Body>
void run_slots(int threads, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    if (threads <= 1) return body(0);
    run_threads(
        threads, [](void* context, int slot) { (*static_cast<Plain*>(context))(slot); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// The same for a body that does not ask who it is.
template <typename Body>
void run_shared(int threads, Body&& body) {
    run_slots(threads, [&](int) { body(); });
}

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
