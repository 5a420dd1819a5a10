#include "pool.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace specserve {

namespace {

// A thread spins so long for what comes next, then sleeps. Longer than the gaps between the ops of a step; short, as a
// spinning thread takes its core from whoever else could use it.
constexpr std::chrono::microseconds SPIN{100};
constexpr int CLOSED = 1 << 30;

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
    void run(int threads, const std::function<void()>& body) {
        if (threads <= 1 || !owner_.try_lock()) return body();
        std::lock_guard<std::mutex> own(owner_, std::adopt_lock);
        grow(threads - 1);
        body_ = &body;
        seats_ = threads - 1;
        inside_.store(0);  // opens the door: helpers enter from here on
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        body();
        close();
    }

  private:
    // Lets nobody in any more and waits for those inside.
    void close() {
        if (inside_.fetch_or(CLOSED) == 0) return;
        auto empty = [&] { return inside_.load() == CLOSED; };
        if (spin(empty)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true);
        done_.wait(lock, empty);
        waiting_.store(false);
    }

    bool enter() {
        int inside = inside_.load();
        while (!(inside & CLOSED) && inside < seats_)
            if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
        return false;
    }

    void leave() {
        if (inside_.fetch_sub(1) - 1 != CLOSED) return;
        if (waiting_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_all();
        }
    }

    void help(uint64_t seen) {
        for (;;) {
            auto news = [&] { return epoch_.load() != seen; };
            if (!spin(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, news);
                sleepers_.fetch_sub(1);
            }
            seen = epoch_.load();
            if (enter()) {
                (*body_)();
                leave();
            }
        }
    }

    void grow(int helpers) {
        for (; helpers_ < helpers; helpers_++) std::thread([this, seen = epoch_.load()] { help(seen); }).detach();
    }

    std::mutex owner_;  // one caller at a time
    int helpers_ = 0;
    const std::function<void()>* body_ = nullptr;
    std::atomic<int> seats_{0};
    std::atomic<int> inside_{CLOSED};  // helpers at work, and whether the door is closed
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> waiting_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
};

// Never destroyed: its threads sleep in it until the process ends.
Pool& pool() {
    static Pool* one = new Pool;
    return *one;
}

}  // namespace

void run_shared(int threads, const std::function<void()>& body) { pool().run(threads, body); }

}  // namespace specserve
