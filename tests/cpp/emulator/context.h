// A stack that runs when another one lets it. On x86-64 a switch takes a few instructions. That of
// the C library asks the kernel for the signal mask, and the address sanitizer clears the shadow of
// a whole stack for it.
#ifndef CGX_TESTS_EMULATOR_CONTEXT_H_
#define CGX_TESTS_EMULATOR_CONTEXT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
// Functions on the way from one stack to another: the thread sanitizer takes it for another thread.
#if defined(__SANITIZE_THREAD__)
#define CGX_UNSEEN __attribute__((no_sanitize("thread")))
#else
#define CGX_UNSEEN
#endif

#if defined(__x86_64__)

// Saves the registers that a call keeps on this stack, writes where it ends to *from, and returns
// on the stack that ends at `to`.
extern "C" void cgx_switch_stack(void** from, void* to);
asm(R"(
  .text
  .globl cgx_switch_stack
  .type cgx_switch_stack, @function
cgx_switch_stack:
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
  .size cgx_switch_stack, .-cgx_switch_stack
)");

namespace emulator {

class Context {
 public:
  // Lets the next switch to this context call `function`, which must not return.
  CGX_UNSEEN void start(char* stack, size_t size, void (*function)()) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(stack, size);  // of the functions that never returned
#endif
    auto* top = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(stack + size) & ~15);
    *--top = 0;  // where the function would return to
    *--top = reinterpret_cast<uintptr_t>(function);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    stack_ = top;
  }
  CGX_UNSEEN static void change(Context& from, Context& to) {
    cgx_switch_stack(&from.stack_, to.stack_);
  }

 private:
  void* stack_;
};

}  // namespace emulator

#else

#include <ucontext.h>

namespace emulator {

class Context {
 public:
  CGX_UNSEEN void start(char* stack, size_t size, void (*function)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = size;
    context_.uc_link = nullptr;
    makecontext(&context_, function, 0);
  }
  CGX_UNSEEN static void change(Context& from, Context& to) {
    swapcontext(&from.context_, &to.context_);
  }

 private:
  ucontext_t context_;
};

}  // namespace emulator

#endif

#endif  // CGX_TESTS_EMULATOR_CONTEXT_H_
