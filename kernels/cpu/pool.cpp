#include "pool.h"

#include "pins.h"

#include <condition_variable>
#include <mutex>

namespace specserve {

namespace {

// A thread spins so long for what comes next, then sleeps. Longer than the gaps between the ops of a step; short, as a
// spinning thread takes its core from whoever else could use it.
constexpr std::chrono::microseconds SPIN{100};
// Who waits longer than this for a helper inside has lost it to another process that holds its CPU.
constexpr std::chrono::microseconds LOST{500};

// The pool's state in one word: the number of the run, whether its door is closed, and how many helpers are inside.
constexpr uint64_t RUN = uint64_t{1} << 32, CLOSED = RUN >> 1, INSIDE = CLOSED - 1;

inline uint64_t run_of(uint64_t state) { return state / RUN; }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <typename Done>
bool spin(const Done& done) {
    auto limit = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < limit);
    return done();
}

class Pool {
  public:
    void run(int threads, void (*call)(void*, int), void* context) {
        threads = std::min(threads, limit_.load(std::memory_order_relaxed));
        if (threads <= 1 || busy_.exchange(true, std::memory_order_acquire)) return call(context, 0);
        grow(threads - 1);
        call_ = call;
        context_ = context;
        seats_.store(threads - 1, std::memory_order_relaxed);
        state_.store((run_of(state_.load()) + 1) * RUN);  // opens the door: helpers enter from here on
        if (sleepers_.load() > 0) {
            pins_.make_way();
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        call(context, 0);
        close();
        busy_.store(false, std::memory_order_release);
    }

    void limit(int threads) { limit_.store(threads < 1 ? pins_.cpus() : std::min(threads, MAX_THREADS)); }

  private:
    // Lets nobody in any more and waits for those inside.
    void close() {
        if ((state_.fetch_or(CLOSED) & INSIDE) == 0) return;
        auto empty = [&] { return (state_.load() & INSIDE) == 0; };
        if (spin(empty)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true);
        if (!done_.wait_for(lock, LOST, empty)) {
            pins_.release();
            done_.wait(lock, empty);
        }
        waiting_.store(false);
    }

    // Into this very run, as long as its door is open.
    bool enter(uint64_t run) {
        uint64_t state = state_.load();
        while (run_of(state) == run && !(state & CLOSED))
            if (state_.compare_exchange_weak(state, state + 1)) return true;
        return false;
    }

    void leave() {
        if ((state_.fetch_sub(1) & (CLOSED | INSIDE)) != (CLOSED | 1)) return;
        if (waiting_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_all();
        }
    }

    void help(int number, uint64_t seen) {
        for (;;) {
            auto news = [&] { return run_of(state_.load()) != seen; };
            if (!spin(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, news);
                sleepers_.fetch_sub(1);
            }
            seen = run_of(state_.load());
            if (number < seats_.load(std::memory_order_relaxed) && enter(seen)) {
                call_(context_, number + 1);
                leave();
            }
        }
    }

    void grow(int helpers) {
        for (; helpers_ < helpers; helpers_++) {
            std::thread helper([this, number = helpers_, seen = run_of(state_.load())] { help(number, seen); });
            pins_.add(helper);
            helper.detach();
        }
    }

    alignas(64) std::atomic<uint64_t> state_{CLOSED};
    alignas(64) std::atomic<int> seats_{0};  // helpers numbered below take part
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> waiting_{false};
    std::atomic<bool> busy_{false};  // one caller at a time
    int helpers_ = 0;
    Pins pins_;
    std::atomic<int> limit_{pins_.cpus()};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
};

// Never destroyed: its threads sleep in it until the process ends.
Pool& pool() {
    static Pool* one = new Pool;
    return *one;
}

}  // namespace

void run_threads(int threads, void (*call)(void*, int), void* context) {
    pool().run(threads, call, context);
}

}  // namespace specserve

// For tests: the most threads that a call gets; 0 is the number of this process's CPUs, as at the start.
extern "C" void ss_limit_threads(int threads) { specserve::pool().limit(threads); }

// For tests: adds 1 to counts[i] for each i of 0..total that is claimed, pieces of `piece` at a time, and to calls[slot]
// for each participant's call. `counts` and `calls` ([threads]) are only written by whom they belong to.
extern "C" void ss_count_claims(int64_t* counts, int64_t* calls, int64_t total, int64_t piece, int threads) {
    specserve::ShardedClaims claims(total, piece, threads);
    specserve::run_slots(threads, [&](int slot) {
        calls[slot]++;
        for (int64_t begin, end; claims.next(slot, begin, end);)
            for (int64_t i = begin; i < end; i++) counts[i]++;
    });
}
