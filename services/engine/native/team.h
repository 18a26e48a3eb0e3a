// Threads that run one function together and meet at barriers.
//
// A waiting thread spins for some microseconds, which is what a stage of a step takes, and then sleeps: where others use
// the cores, it gives its own away instead of burning it.
#pragma once

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace pdray {

constexpr int SPINS = 4000;

// Returns once `value` is no longer `old`.
inline void await_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < SPINS; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// The calling thread stays on the CPU that comes `number`-th among those that it may use.
inline void pin(const cpu_set_t& usable, int number) {
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &usable) && number-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(pthread_self(), sizeof one, &one);
      return;
    }
}

class Team {
 public:
  // With `pinned` each thread stays on a CPU of its own, the caller too; else two that wake at once may share one.
  explicit Team(int size, bool pinned = false) : size_(size < 1 ? 1 : size) {
    cpu_set_t usable;
    pinned = pinned && size_ > 1 && !pthread_getaffinity_np(pthread_self(), sizeof usable, &usable);
    for (int i = 1; i < size_; ++i)
      threads_.emplace_back([this, i, pinned, usable] {
        if (pinned) pin(usable, i);
        serve(i);
      });
    if (pinned) pin(usable, 0);
  }
  ~Team() {
    job_ = nullptr;
    start();
    for (std::thread& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Each thread, the caller as number 0 among them, runs job(number); returns when all have.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    start();
    job(0);
    barrier();
  }

  // All threads of a job must call it equally often.
  void barrier() {
    if (size_ == 1) return;
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
    } else {
      await_change(round_, round);
    }
  }

 private:
  void start() {
    if (size_ == 1) return;
    started_.fetch_add(1, std::memory_order_acq_rel);
    started_.notify_all();
  }
  void serve(int number) {
    for (uint32_t seen = 0;; ++seen) {
      await_change(started_, seen);
      if (!job_) return;
      (*job_)(number);
      barrier();
    }
  }

  int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace pdray
