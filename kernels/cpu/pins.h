// Which CPUs the pool's helpers run on. Each is pinned to one of the CPUs that the process was given, the caller's own
// left to the caller, so that a slot meets its part of the weights in the same cache. SPECSERVE_PIN=0 switches it off.
//
// A pinned thread cannot flee from another process that takes its CPU, nor from the caller when the scheduler moves that
// one there. So the helper in the way changes places with the caller, and all are let go for a while when one was lost.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif

#include "pool.h"

namespace specserve {

#ifdef __linux__

class Pins {
  public:
    Pins() {
        CPU_ZERO(&given_);
        if (sched_getaffinity(0, sizeof given_, &given_) != 0) {  // more CPUs than the set holds
            cpus_ = std::clamp((int)std::thread::hardware_concurrency(), 1, MAX_THREADS);
            return;
        }
        cpus_ = std::min(CPU_COUNT(&given_), MAX_THREADS);
        const char* wanted = std::getenv("SPECSERVE_PIN");
        wanted_ = cpus_ > 1 && !(wanted && std::strcmp(wanted, "0") == 0);
    }

    // CPUs that the process was given.
    int cpus() const { return cpus_; }

    // A new helper, made by the caller. One more than there are CPUs runs where it likes.
    void add(std::thread& helper) {
        pthread_setname_np(helper.native_handle(), "specserve-pool");
        if (!wanted_) return;
        if (helpers_.empty()) caller_ = sched_getcpu();
        int place = -1;
        for (int cpu = 0; cpu < CPU_SETSIZE && place < 0; cpu++)
            if (CPU_ISSET(cpu, &given_) && cpu != caller_ && !taken(cpu)) place = cpu;
        helpers_.push_back({helper.native_handle(), place});
        if (pinned_) pin(helpers_.back());
    }

    // The caller is about to wake helpers: none of them may be on its CPU.
    void make_way() {
        if (helpers_.empty()) return;
        if (!pinned_) {
            if (std::chrono::steady_clock::now() - released_ < PAUSE) return;
            pinned_ = true;
            for (Helper& helper : helpers_) pin(helper);
        }
        int cpu = sched_getcpu();
        if (cpu == caller_) return;
        for (Helper& helper : helpers_)
            if (helper.cpu == cpu) {
                helper.cpu = caller_;
                pin(helper);
            }
        caller_ = cpu;
    }

    // A helper was lost: for some time all go where the scheduler finds a CPU for them.
    void release() {
        if (!pinned_ || helpers_.empty()) return;
        pinned_ = false;
        released_ = std::chrono::steady_clock::now();
        for (Helper& helper : helpers_) pthread_setaffinity_np(helper.thread, sizeof given_, &given_);
    }

  private:
    static constexpr std::chrono::seconds PAUSE{2};

    struct Helper {
        pthread_t thread;
        int cpu;  // -1: none is left for it
    };

    bool taken(int cpu) const {
        for (const Helper& helper : helpers_)
            if (helper.cpu == cpu) return true;
        return false;
    }

    // Where it is refused, the helper stays free.
    void pin(const Helper& helper) {
        if (helper.cpu < 0) return;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(helper.cpu, &one);
        pthread_setaffinity_np(helper.thread, sizeof one, &one);
    }

    cpu_set_t given_;
    int cpus_ = 1, caller_ = -1;
    bool wanted_ = false, pinned_ = true;
    std::chrono::steady_clock::time_point released_{};
    std::vector<Helper> helpers_;
};

#else  // threads cannot be pinned to a CPU, or there is nothing to learn about what was given

class Pins {
  public:
    int cpus() const { return std::clamp((int)std::thread::hardware_concurrency(), 1, MAX_THREADS); }
    void add(std::thread&) {}
    void make_way() {}
    void release() {}
};

#endif

}  // namespace specserve
