// The threads of a parallel region that does many things one after another, and how they wait for each other.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace bi {

struct Range {
  int64_t first, last;
};

// OpenMP's own barriers put a thread to sleep that waits for long, and waking it costs a virtual machine some 100 us: with
// some 300 barriers a step, one late thread makes all of them late. Here a thread that waits gives way to others instead.
class Team {
  static constexpr int SPINS = 20000;  // about a millisecond
  struct alignas(64) Counter {
    std::atomic<int64_t> claimed{0};
  };

 public:
  static constexpr int MAX_QUEUES = 16;

 private:
  std::atomic<int> arrived{0};
  std::atomic<unsigned> round{0};
  Counter queues[MAX_QUEUES];
  int size = 1;

  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  void meet() {
    const unsigned mine = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
      for (Counter& queue : queues) queue.claimed.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; spins++) {
      if (spins >= SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
      else __builtin_ia32_pause();
#endif
    }
  }

 public:
  // Work that so many threads do together.
  template <class Work>
  static void run(int threads, Work work) {
    Team team;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team.size = omp_get_num_threads();
      current() = &team;
      work();
      current() = nullptr;
    }
  }

  // The calling thread's part of n rows, as the threads of a region share them.
  static Range share(int64_t n) {
    const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
    return {n * mine / threads, n * (mine + 1) / threads};
  }

  // The next of the things that threads take one after another, in one of several queues; begins with 0 after each wait().
  static int64_t claim(int queue = 0) {
    return current()->queues[queue].claimed.fetch_add(1, std::memory_order_relaxed);
  }

  // Returns when all threads of the team have called it.
  static void wait() { current()->meet(); }
};

}  // namespace bi
