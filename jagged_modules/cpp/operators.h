// What operators on the CPU share: registration, and the threads that compute their items of work.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace jagged_modules {

constexpr int64_t COST = 1 << 16;  // multiplications that are worth another thread

struct Operator {
  const char *name, *schema;
  void (*call)(StableIValue*, uint64_t, uint64_t);
};

// Defines the operator. False if the namespace has it: Python's.
inline bool register_in(const char* space, const Operator& x) {
  TorchLibraryHandle schemas, kernels;
  aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &schemas);
  aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &kernels);
  return !aoti_torch_library_def(schemas, x.schema) &&
         !torch_library_impl(kernels, x.name, x.call, TORCH_ABI_VERSION);
}

// Beside Python's operators, these get a namespace of their own, so that both can be compared.
inline bool register_operator(const Operator& x) {
  return register_in("jagged_modules", x) || register_in("jagged_modules_cpp", x);
}

// compute(item, memory of its thread). cost: multiplications of all items.
template <class Scratch, class F>
void for_each_item(int64_t items, int64_t cost, F compute) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), cost / COST + 1);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Scratch scratch;
    for (int64_t i; (i = next++) < items;) compute(i, scratch);
  });
}

}  // namespace jagged_modules
