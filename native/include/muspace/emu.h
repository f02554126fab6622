// SPDX-License-Identifier: Apache-2.0
// SIMT emulation: device kernels compiled as host code and run thread by thread. Only target.h includes this.
//
// The calling thread runs one block at a time. Every GPU thread is a fiber; a barrier or warp operation parks it until
// the others have arrived. Threads start one after the other on the same fiber while none of them parks, so that a
// kernel without synchronisation is a plain loop. Shared memory is static; dynamic shared memory starts as NaN.
//
// Environment, read at every launch
//   MUSPACE_EMU_WARP    32, 64 or 128: how many threads meet at a warp operation (values travel in groups of 32)   (32)
//   MUSPACE_EMU_SEED    a number: threads and blocks run in an order drawn from it                  (natural order)
//   MUSPACE_EMU_BUDGET  thread starts and arrivals at synchronisations one launch may take           (0, unlimited)
// Wrong launch shapes, deadlocks and divergent warp operations end the launch; launch_error() then says why.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "muspace/emu_fiber.h"

#define MSP_HD inline
#define MSP_DEVICE inline
#define MSP_KERNEL(threads, blocks) inline void
#define MSP_SHARED static
#define MSP_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::muspace::emu::machine().dynamic_shared())
#define MSP_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                      \
   ::muspace::emu::machine().launch(grid, block, shared_bytes, [&] { (kernel)(__VA_ARGS__); }))
#define MSP_SYNC_BLOCK() ::muspace::emu::machine().sync_block()
#define MSP_SYNC_WARP() ::muspace::emu::machine().sync_warp()
#define MSP_SHUFFLE(value, lane) ::muspace::emu::machine().shuffle(value, [&](int) { return (lane) & 31; })
#define MSP_SHUFFLE_UP(value, delta) ::muspace::emu::machine().shuffle(value, [&](int own) { return own - (delta); })
#define MSP_SHUFFLE_XOR(value, mask) ::muspace::emu::machine().shuffle(value, [&](int own) { return own ^ (mask); })
#define MSP_LOAD_CACHED(pointer) (*(pointer))
#define MSP_UNIFORM(value) (value)
#define MSP_STORE_STREAMING(pointer, value) (*(pointer) = (value))

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace muspace {

struct Stream;  // the emulation has one queue and no stream
using stream_t = Stream*;

namespace emu {

constexpr unsigned kMaxBlock = 1024, kMaxGridYZ = 65535;
constexpr std::size_t kMaxShared = 48 * 1024;
constexpr int kGroup = 32;  // lanes among which shuffles move values

enum class Wait : int { none, block, sync_warp, shuffle };

inline const char* wait_name(Wait wait) {
  switch (wait) {
    case Wait::block:
      return "a block barrier";
    case Wait::sync_warp:
      return "a warp barrier";
    case Wait::shuffle:
      return "a shuffle";
    default:
      return "nothing";
  }
}

/// One GPU thread of the running block.
struct Thread {
  dim3 index;
  unsigned linear = 0;
  Fiber* fiber = nullptr;
  Wait wait = Wait::none;
  bool finished = false;
  // What it gives to a shuffle, and to which meeting; two, so that it may enter the next before the others have read.
  unsigned char slots[2][8] = {};
  unsigned meetings[2] = {~0u, ~0u};
};

/// Threads that meet at warp operations.
struct Warp {
  unsigned live = 0, arrived = 0, meetings = 0;
  Wait wait = Wait::none;
};

class Machine {
 public:
  dim3 grid, block, block_index;
  int warp_size = 32;

  const dim3& thread_index() const { return running_->index; }
  void* dynamic_shared() { return shared_.get(); }

  template <class Body>
  void launch(dim3 grid_, dim3 block_, std::size_t shared_bytes, const Body& body) {
    if (!last_error().empty()) return;  // as on a device: the first failure stands until it is asked for
    const std::lock_guard<std::mutex> turn(turn_);
    run(grid_, block_, shared_bytes, [](const void* data) { (*static_cast<const Body*>(data))(); }, &body);
    last_error() = error_;
  }

  void sync_block() {
    ++steps_;
    if (++block_arrived_ < block_live_) return park(Wait::block);
    release_block();
    if (seeded_) yield();
  }

  void sync_warp() { meet(Wait::sync_warp); }

  /// The value of the lane `source(own lane)` of the group of 32; the own value when there is no such live lane.
  template <class T, class Source>
  T shuffle(T value, const Source& source) {
    static_assert(sizeof(T) <= sizeof(Thread::slots[0]), "a shuffle moves at most 8 bytes");
    Thread& own = *running_;
    const int lane = static_cast<int>(own.linear) % kGroup, from = source(lane);
    const unsigned meeting = warps_[own.linear / static_cast<unsigned>(warp_size)].meetings, slot = meeting % 2;
    std::memcpy(own.slots[slot], &value, sizeof(T));
    own.meetings[slot] = meeting;
    meet(Wait::shuffle);
    if (from < 0 || from >= kGroup) return value;
    const std::size_t other = own.linear - static_cast<unsigned>(lane) + static_cast<unsigned>(from);
    if (other >= threads_.size() || threads_[other].meetings[slot] != meeting) return value;
    std::memcpy(&value, threads_[other].slots[slot], sizeof(T));
    return value;
  }

  /// Why a launch of the calling thread ended early; empty when none did since launch_error() was asked.
  static std::string& last_error() {
    static thread_local std::string text;
    return text;
  }

 private:
  using Kernel = void (*)(const void*);

  void run(dim3 grid_, dim3 block_, std::size_t shared_bytes, Kernel kernel, const void* data);
  bool accept(dim3 grid_, dim3 block_, std::size_t shared_bytes);
  void run_block();
  void meet(Wait wait);
  void park(Wait wait);
  void yield();
  void finish();
  void release_block();
  void release_warp(Warp& warp, unsigned first);
  void wake(Thread& thread);
  void next();
  std::string stuck() const;
  void start_threads(Fiber* fiber);
  Fiber* idle_fiber();
  Thread* pop_thread();

  std::uint64_t draw() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }
  template <class Item>
  void shuffle_order(std::vector<Item>& items) {
    for (std::size_t i = items.size(); seeded_ && i > 1; --i) std::swap(items[i - 1], items[draw() % i]);
  }

  Kernel kernel_ = nullptr;
  const void* data_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> order_;  // in which the threads start
  std::vector<Thread*> ready_;   // parked threads that may go on; a queue from ready_head_
  std::size_t started_ = 0, ready_head_ = 0;
  unsigned block_live_ = 0, block_arrived_ = 0;
  Thread* running_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Context caller_;
  std::unique_ptr<unsigned char[]> shared_;
  bool seeded_ = false;
  std::uint64_t random_ = 1, steps_ = 0, budget_ = 0;
  std::string error_;
  std::mutex turn_;
};

/// The one machine of the process; launches from several threads take turns. Not thread_local: threadIdx and shared
/// memory are then plain addresses, and a sanitizer watches the ends of shared arrays.
inline Machine& machine() {
  static Machine* const instance = new Machine;
  return *instance;
}

/// A number from the environment, or `fallback` when the variable is absent or empty.
inline std::uint64_t environment_number(const char* name, std::uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 10);
}

inline std::string dim_text(dim3 d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

/// Checks the launch as a device would and reads the environment.
inline bool Machine::accept(dim3 grid_, dim3 block_, std::size_t shared_bytes) {
  error_.clear();
  const std::uint64_t threads = std::uint64_t{block_.x} * block_.y * block_.z;
  const std::uint64_t blocks = std::uint64_t{grid_.x} * grid_.y * grid_.z;
  if (threads == 0 || threads > kMaxBlock || blocks == 0 || grid_.x > 0x7fffffffu || grid_.y > kMaxGridYZ ||
      grid_.z > kMaxGridYZ) {
    error_ = "emulation: invalid launch of grid " + dim_text(grid_) + " and block " + dim_text(block_);
  } else if (shared_bytes > kMaxShared) {
    error_ = "emulation: " + std::to_string(shared_bytes) + " bytes of dynamic shared memory, more than 48 KiB";
  }
  const std::uint64_t warp = environment_number("MUSPACE_EMU_WARP", 32);
  if (warp != 32 && warp != 64 && warp != 128) error_ = "emulation: MUSPACE_EMU_WARP has to be 32, 64 or 128";
  warp_size = static_cast<int>(warp);
  budget_ = environment_number("MUSPACE_EMU_BUDGET", 0);
  if (error_.empty() && budget_ != 0 && threads * blocks > budget_) {
    error_ = "emulation: " + std::to_string(threads * blocks) +
             " threads are above MUSPACE_EMU_BUDGET=" + std::to_string(budget_);
  }
  seeded_ = std::getenv("MUSPACE_EMU_SEED") != nullptr;
  random_ = environment_number("MUSPACE_EMU_SEED", 0) * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  if (random_ == 0) random_ = 1;
  return error_.empty();
}

inline void Machine::run(dim3 grid_, dim3 block_, std::size_t shared_bytes, Kernel kernel, const void* data) {
  if (!accept(grid_, block_, shared_bytes)) return;
  caller_.learn_own_stack();
  grid = grid_, block = block_, kernel_ = kernel, data_ = data, steps_ = 0;
  threads_.assign(std::size_t{block.x} * block.y * block.z, Thread{});
  std::vector<std::uint64_t> blocks(std::uint64_t{grid.x} * grid.y * grid.z);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  shuffle_order(blocks);
  for (const std::uint64_t i : blocks) {
    block_index = dim3(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                       static_cast<unsigned>(i / grid.x / grid.y));
    if (shared_bytes > 0) {  // an allocation of its own, so that a sanitizer sees where it ends
      shared_.reset(new unsigned char[shared_bytes]);
      std::memset(shared_.get(), 0xff, shared_bytes);
    }
    run_block();
    if (!error_.empty()) return;
  }
}

inline void Machine::run_block() {
  const unsigned count = static_cast<unsigned>(threads_.size()), width = static_cast<unsigned>(warp_size);
  warps_.assign((count + width - 1) / width, Warp{});
  order_.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads_[i];
    thread.index = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    thread.linear = order_[i] = i;
    thread.wait = Wait::none;
    thread.finished = false;
    thread.meetings[0] = thread.meetings[1] = ~0u;
    ++warps_[i / width].live;
  }
  shuffle_order(order_);
  ready_.clear();
  started_ = ready_head_ = 0;
  block_live_ = count, block_arrived_ = 0;
  idle_fiber()->resume_from(caller_);
  if (error_.empty()) return;
  idle_.clear();  // fibers that were parked in the kernel are given up and start anew
  for (auto& fiber : fibers_) {
    fiber->reset();
    idle_.push_back(fiber.get());
  }
}

/// What a fiber does: starts threads while there are any, then hands over to a parked one.
inline void Machine::start_threads(Fiber* fiber) {
  for (;;) {
    while (started_ < order_.size()) {
      Thread& thread = threads_[order_[started_++]];
      thread.fiber = fiber;
      running_ = &thread;
      ++steps_;
      kernel_(data_);
      finish();
    }
    idle_.push_back(fiber);
    next();  // comes back when another block needs the fiber
  }
}

inline Fiber* Machine::idle_fiber() {
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>([](Fiber* fiber) { machine().start_threads(fiber); }));
    return fibers_.back().get();
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

inline Thread* Machine::pop_thread() {
  if (ready_head_ == ready_.size()) return nullptr;
  if (seeded_) std::swap(ready_[ready_head_], ready_[ready_head_ + draw() % (ready_.size() - ready_head_)]);
  Thread* thread = ready_[ready_head_++];
  if (ready_head_ == ready_.size()) ready_.clear(), ready_head_ = 0;
  return thread;
}

/// Leaves the running fiber for whatever can go on: a thread that has not started, a released one, or the caller.
inline void Machine::next() {
  Context& here = Fiber::current()->context();
  if (budget_ != 0 && steps_ > budget_ && error_.empty()) {
    error_ = "emulation: the launch took more steps than MUSPACE_EMU_BUDGET=" + std::to_string(budget_);
  }
  if (!error_.empty()) return switch_context(here, caller_);
  const bool fresh = started_ < order_.size() && (!seeded_ || ready_head_ == ready_.size() || draw() % 2 == 0);
  if (fresh) return idle_fiber()->resume_from(here);
  if (Thread* thread = pop_thread()) {
    running_ = thread;
    if (thread->fiber != Fiber::current()) thread->fiber->resume_from(here);
    return;
  }
  if (block_live_ != 0) error_ = stuck();
  switch_context(here, caller_);
}

inline void Machine::park(Wait wait) {
  Thread* own = running_;
  own->wait = wait;
  next();
  running_ = own;
}

/// Lets another thread go first; the order is random.
inline void Machine::yield() {
  Thread* own = running_;
  ready_.push_back(own);
  next();
  running_ = own;
}

inline void Machine::wake(Thread& thread) {
  thread.wait = Wait::none;
  ready_.push_back(&thread);
}

inline void Machine::release_block() {
  block_arrived_ = 0;
  for (Thread& thread : threads_) {
    if (thread.wait == Wait::block) wake(thread);
  }
}

inline void Machine::release_warp(Warp& warp, unsigned first) {
  warp.arrived = 0;
  ++warp.meetings;
  for (unsigned i = first; i < first + static_cast<unsigned>(warp_size) && i < threads_.size(); ++i) {
    if (threads_[i].wait == warp.wait) wake(threads_[i]);
  }
  warp.wait = Wait::none;
}

/// Arrives at a warp operation and goes on when every live thread of the warp has.
inline void Machine::meet(Wait wait) {
  const unsigned width = static_cast<unsigned>(warp_size), number = running_->linear / width;
  Warp& warp = warps_[number];
  ++steps_;
  if (warp.arrived > 0 && warp.wait != wait) {
    error_ = "emulation: thread " + std::to_string(running_->linear) + " of block " + dim_text(block_index) +
             " is at " + wait_name(wait) + " while others of its warp are at " + wait_name(warp.wait);
    return next();  // to the caller; this fiber is not resumed
  }
  warp.wait = wait;
  if (++warp.arrived < warp.live) return park(wait);
  release_warp(warp, number * width);
  if (seeded_) yield();
}

/// The running thread has returned from the kernel; those that waited for it only may go on.
inline void Machine::finish() {
  running_->finished = true;
  const unsigned width = static_cast<unsigned>(warp_size), number = running_->linear / width;
  Warp& warp = warps_[number];
  --warp.live;
  --block_live_;
  if (warp.arrived > 0 && warp.arrived == warp.live) release_warp(warp, number * width);
  if (block_arrived_ > 0 && block_arrived_ == block_live_) release_block();
}

inline std::string Machine::stuck() const {
  unsigned counts[4] = {};
  for (const Thread& thread : threads_) {
    if (!thread.finished) ++counts[static_cast<int>(thread.wait)];
  }
  std::string text = "emulation: deadlock in block " + dim_text(block_index) + ":";
  for (const Wait wait : {Wait::block, Wait::sync_warp, Wait::shuffle}) {
    const unsigned count = counts[static_cast<int>(wait)];
    if (count > 0) text += " " + std::to_string(count) + " threads at " + wait_name(wait) + ",";
  }
  return text + " " + std::to_string(threads_.size() - block_live_) + " finished";
}

}  // namespace emu

inline stream_t stream_at(std::int64_t) { return nullptr; }

class DeviceGuard {
 public:
  explicit DeviceGuard(int) {}
  ~DeviceGuard() {}
};

/// nullptr, or why a launch ended early since the last question; asking clears it, as on a device.
inline const char* launch_error() {
  static thread_local std::string told;
  told = std::exchange(emu::Machine::last_error(), {});
  return told.empty() ? nullptr : told.c_str();
}

inline const char* zero_fill(void* pointer, std::size_t bytes, stream_t) {
  if (bytes > 0) std::memset(pointer, 0, bytes);
  return nullptr;
}

}  // namespace muspace

#define threadIdx (::muspace::emu::machine().thread_index())
#define blockIdx (::muspace::emu::machine().block_index)
#define blockDim (::muspace::emu::machine().block)
#define gridDim (::muspace::emu::machine().grid)
#define warpSize (::muspace::emu::machine().warp_size)
