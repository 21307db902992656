// The threads of a parallel region that does many things one after another, and how they wait for each other.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>

namespace bi {

// OpenMP's own barriers put a thread to sleep that waits for long, and waking it costs a virtual machine some 100 us: with
// some 300 barriers a step, one late thread makes all of them late. Here a thread that waits gives way to others instead.
class Team {
  static constexpr int SPINS = 20000;  // about a millisecond
  std::atomic<int> arrived{0};
  std::atomic<unsigned> round{0};
  int size = 1;

  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  void meet() {
    const unsigned mine = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
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
  // By all threads of a region; until leave() they wait for each other here.
  void enter() {
#pragma omp single
    size = omp_get_num_threads();
    current() = this;
  }
  static void leave() { current() = nullptr; }

  // Returns when all threads of the region have called it.
  static void wait() {
    if (Team* team = current()) {
      team->meet();
    } else {
#pragma omp barrier
    }
  }
};

}  // namespace bi
