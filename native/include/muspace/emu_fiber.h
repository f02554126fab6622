// SPDX-License-Identifier: Apache-2.0
// Stacks and context switches of the SIMT emulation: a few instructions on x86-64 and aarch64, ucontext elsewhere
// (whose switch is a system call, about twenty times slower). Sanitizers are told about every switch.
#pragma once
#include <pthread.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) || defined(__aarch64__)
#define MSP_EMU_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

#if defined(MSP_EMU_ASSEMBLY)
// Saves the callee-saved registers on the stack, stores the stack pointer to *from and continues at `to`.
extern "C" void muspace_emu_switch(void** from, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.pushsection .text
.weak muspace_emu_switch
.hidden muspace_emu_switch
.type muspace_emu_switch,@function
muspace_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size muspace_emu_switch,.-muspace_emu_switch
.popsection
)");
#else
asm(R"(
.pushsection .text
.weak muspace_emu_switch
.hidden muspace_emu_switch
.type muspace_emu_switch,%function
muspace_emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size muspace_emu_switch,.-muspace_emu_switch
.popsection
)");
#endif
#endif

namespace muspace::emu {

/// Where a fiber, or the caller of the machine, continues.
struct Context {
#if defined(MSP_EMU_ASSEMBLY)
  void* stack_pointer = nullptr;
#else
  ucontext_t state;
#endif
  const void* stack_bottom = nullptr;  // for the sanitizer
  std::size_t stack_size = 0;

  /// A sanitizer has to know the stack that a switch to this context returns to.
  void learn_own_stack() {
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    void* bottom = nullptr;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
    pthread_attr_getstack(&attributes, &bottom, &stack_size);
    pthread_attr_destroy(&attributes);
    stack_bottom = bottom;
#endif
  }
};

class Fiber {
 public:
  using Entry = void (*)(Fiber*);
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kStack = 512 * 1024;
#else
  static constexpr std::size_t kStack = 128 * 1024;
#endif
  static constexpr std::size_t kGuard = 64 * 1024;  // not accessible: an overflowing stack faults at once

  explicit Fiber(Entry entry) : entry_(entry) {
    memory_ =
        mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(memory_, kGuard, PROT_NONE) != 0) throw std::bad_alloc();
    context_.stack_bottom = static_cast<char*>(memory_) + kGuard;
    context_.stack_size = kStack;
    reset();
  }
  ~Fiber() { munmap(memory_, kGuard + kStack); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  Context& context() { return context_; }

  static Fiber*& current() {
    static Fiber* fiber = nullptr;
    return fiber;
  }

  /// Forgets whatever ran on the stack; the next resume begins at the entry.
  void reset();
  /// Continues this fiber; returns when something switches back to `from`.
  void resume_from(Context& from);

 private:
  static void begin();

  Entry entry_;
  void* memory_;
  Context context_;
};

inline void switch_context(Context& from, Context& to) {
  Fiber* const self = Fiber::current();
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, to.stack_bottom, to.stack_size);
#endif
#if defined(MSP_EMU_ASSEMBLY)
  muspace_emu_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.state, &to.state);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  Fiber::current() = self;
}

inline void Fiber::begin() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Fiber* const self = current();
  self->entry_(self);
  __builtin_trap();  // an entry never returns
}

inline void Fiber::reset() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(context_.stack_bottom, context_.stack_size);
#endif
  char* const top = static_cast<char*>(memory_) + kGuard + kStack;
#if defined(__x86_64__)
  void** frame = reinterpret_cast<void**>(top - 64);  // six registers, the return address, padding
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(&Fiber::begin);
  context_.stack_pointer = frame;
#elif defined(__aarch64__)
  void** frame = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(&Fiber::begin);  // x30
  context_.stack_pointer = frame;
#else
  getcontext(&context_.state);
  context_.state.uc_stack.ss_sp = top - kStack;
  context_.state.uc_stack.ss_size = kStack;
  context_.state.uc_link = nullptr;
  makecontext(&context_.state, &Fiber::begin, 0);
#endif
}

inline void Fiber::resume_from(Context& from) {
  Fiber* const self = current();
  current() = this;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, context_.stack_bottom, context_.stack_size);
#endif
#if defined(MSP_EMU_ASSEMBLY)
  muspace_emu_switch(&from.stack_pointer, context_.stack_pointer);
#else
  swapcontext(&from.state, &context_.state);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  current() = self;
}

}  // namespace muspace::emu
