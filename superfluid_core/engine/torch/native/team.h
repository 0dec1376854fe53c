// Phases of small chunks that threads share without a barrier.
//
// A phase is over when all its chunks are done, not when all threads have come: a thread that the system has put aside
// between two chunks holds nobody up, and one that wakes late finds the phases finished and catches up.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__) || defined(__APPLE__)
#include <sched.h>
#endif
#if defined(__SSE__)
#include <immintrin.h>
#endif

struct alignas(128) Phase {
  std::atomic<int32_t> next, done;
};

static inline void begin_again(Phase* phases, int count) {
  for (int i = 0; i < count; i++) {
    phases[i].next.store(0, std::memory_order_relaxed);
    phases[i].done.store(0, std::memory_order_relaxed);
  }
}

// What one thread holds of the phases; every thread runs the same sequence of `run`.
struct Member {
  Phase* phase;

  template <class Work>
  void run(int chunks, Work work) {
    Phase& mine = *phase++;
    while (mine.done.load(std::memory_order_acquire) < chunks) {
      int chunk = mine.next.load(std::memory_order_relaxed) < chunks ? mine.next.fetch_add(1) : chunks;
      if (chunk >= chunks) break;
      work(chunk);
      mine.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; mine.done.load(std::memory_order_acquire) < chunks; spins++) {
      if (spins < 4000) {
#if defined(__SSE__)
        _mm_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }
};
