// SPDX-License-Identifier: Apache-2.0
// The thread pool of a CPU library, and parallel_for on it. No OpenMP: its pool hangs in a forked child.
//
// - A forked child forgets the parent's pool, whose threads did not survive, and makes its own when it needs one.
// - A caller that finds the pool busy (a nested or concurrent call) runs its tasks itself.
// - Threads are started on demand, sleep on a condition variable, and live as long as the process.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace muspace {

class ThreadPool {
 public:
  using Task = void (*)(const void* body, int64_t index);

  static constexpr int kMaxWorkers = 255;

  // Runs tasks 0 .. count - 1 on at most `threads` threads, the caller included. False: busy, nothing was run.
  bool run(Task task, const void* body, int64_t count, int64_t threads) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    const Release release{busy_};
    const int64_t helpers = (threads < count ? threads : count) - 1;
    {
      std::lock_guard<std::mutex> lock(state_);
      task_ = task;
      body_ = body;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      error_ = nullptr;
      free_slots_ = helpers < kMaxWorkers ? static_cast<int>(helpers) : kMaxWorkers;
      start_workers(free_slots_);
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(state_);
    free_slots_ = 0;  // a worker that wakes up now finds nothing to join
    done_.wait(lock, [this] { return working_ == 0; });
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  };

  void start_workers(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { sleep_and_work(); }).detach();
      } catch (const std::system_error&) {
        return;  // the process may not start more threads: those that exist, and the caller, do the work
      }
      ++workers_;
    }
  }

  void sleep_and_work() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return free_slots_ > 0; });
      --free_slots_;
      ++working_;
      lock.unlock();
      work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  void work() {
    try {
      for (;;) {
        const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) return;
        task_(body_, index);
      }
    } catch (...) {
      next_.store(count_, std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(state_);
      if (!error_) error_ = std::current_exception();
    }
  }

  std::atomic<bool> busy_{false};  // one caller at a time; not a mutex, since a nested caller may be the same thread
  std::mutex state_;               // guards what follows; task_, body_ and count_ are constant while anyone works
  std::condition_variable wake_, done_;
  Task task_ = nullptr;
  const void* body_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::exception_ptr error_;
  int workers_ = 0, working_ = 0, free_slots_ = 0;
};

namespace detail {

inline std::atomic<ThreadPool*>& current_pool() {
  static std::atomic<ThreadPool*> pool{nullptr};
  return pool;
}

// The pool is never destroyed: its threads may still sleep when static objects go.
inline ThreadPool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool().store(nullptr); });
  (void)registered;
  ThreadPool* pool = current_pool().load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  ThreadPool* fresh = new ThreadPool;
  if (current_pool().compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // another thread was first; this one has no worker yet
  return *pool;
}

}  // namespace detail

// body(index) for index in [0, count), in any order, on at most `threads` threads. Each index runs exactly once unless
// a body throws; the first exception is rethrown after every thread has stopped.
template <class Body>
void parallel_for(int64_t count, int64_t threads, const Body& body) {
  if (count > 1 && threads > 1) {
    const auto task = [](const void* data, int64_t index) { (*static_cast<const Body*>(data))(index); };
    if (detail::pool().run(task, &body, count, threads)) return;
  }
  for (int64_t index = 0; index < count; ++index) body(index);
}

}  // namespace muspace
