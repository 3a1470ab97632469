// Threads for the CPU handlers.
#ifndef JAXOPS_CORE_PARALLEL_CPU_H_
#define JAXOPS_CORE_PARALLEL_CPU_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>

#include "core/handler.h"

namespace jaxops {

// Calls run(worker, task) once for each task in [0, tasks), worker in [0, workers).
//
// The caller works too and takes tasks from the same counter as its helpers, so it never waits for a helper that the
// pool has not started: handlers that occupy every thread of the pool at once cannot deadlock. `run` must not throw.
template <class Run>
void ParallelFor(Device& pool, int64_t workers, int64_t tasks, const Run& run) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    int64_t tasks;
  };
  auto state = std::make_shared<State>();
  state->tasks = tasks;
  // A helper that starts late finds no task left and does not touch `run`, which lives on the caller's stack.
  const auto work = [state, run = &run](int64_t worker) {
    for (int64_t task; (task = state->next.fetch_add(1)) < state->tasks;) {
      (*run)(worker, task);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  try {
    for (int64_t worker = 1; worker < std::min(workers, tasks); ++worker) {
      pool.Schedule([work, worker] { work(worker); });
    }
  } catch (const std::exception&) {
    // No memory for a helper: go on without it. Helpers that have started use `run`, so this frame must stay.
  }
  work(0);
  while (state->done.load(std::memory_order_acquire) < tasks) std::this_thread::yield();
}

}  // namespace jaxops

#endif  // JAXOPS_CORE_PARALLEL_CPU_H_
