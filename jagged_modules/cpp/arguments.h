// The arguments of attention, as attention/params.py packs them.

#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace jagged_modules {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Int = int64_t;
using MaybeTensors = std::vector<std::optional<Tensor>>;

// f(a pointer to the data of x)
template <class F>
auto typed(const char* name, const Tensor& x, F f) {
  const void* data = x.const_data_ptr();
  switch (x.scalar_type()) {
    case ScalarType::Float: return f(static_cast<const float*>(data));
    case ScalarType::Double: return f(static_cast<const double*>(data));
    case ScalarType::Half: return f(static_cast<const torch::headeronly::Half*>(data));
    case ScalarType::BFloat16: return f(static_cast<const torch::headeronly::BFloat16*>(data));
    case ScalarType::Int: return f(static_cast<const int32_t*>(data));
    case ScalarType::Long: return f(static_cast<const int64_t*>(data));
    default: STD_TORCH_CHECK(false, "attention_cpu: ", name, " has a dtype that it does not take");
  }
}

// The elements of a vector, `size` or more, or of a matrix's rows; none without a tensor. Packages
// check neither sizes nor values of their inputs: wrong ones must not become addresses.
template <class A>
std::vector<A> elements(const char* name, const std::optional<Tensor>& x, Int size = 0) {
  std::vector<A> found;
  if (!x.has_value()) return found;
  const bool is_matrix = x->dim() > 1;
  const Int rows = is_matrix ? x->size(0) : 1, columns = x->size(is_matrix);
  typed(name, *x, [&](auto* data) {
    for (Int i = 0; i < rows; ++i)
      for (Int j = 0; j < columns; ++j)
        found.push_back(A(data[(is_matrix ? i * x->stride(0) : 0) + j * x->stride(is_matrix)]));
  });
  STD_TORCH_CHECK(Int(found.size()) >= size, name, " must have ", size, " elements, got ",
                  found.size());
  return found;
}

inline std::vector<Int> offsets_of(const char* name, const std::optional<Tensor>& x, Int rows) {
  std::vector<Int> found = elements<Int>(name, x, 1);
  for (size_t b = 1; b < found.size(); ++b)
    STD_TORCH_CHECK(found[b - 1] <= found[b], name, " must not decrease, got ", found[b - 1],
                    " before ", found[b], " at segment ", b - 1);
  STD_TORCH_CHECK(found.front() >= 0 && found.back() <= rows, name, " must be 0 to ", rows,
                  ", the number of rows, got ", found.front(), " to ", found.back());
  return found;
}

// `[rows, heads, dim]`
template <class T>
struct Operand {
  const T* data;
  Int rows, heads, dim, row_stride, head_stride, stride;

  Operand(const Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())), rows(x.size(0)), heads(x.size(1)),
        dim(x.size(2)), row_stride(x.stride(0)), head_stride(x.stride(1)), stride(x.stride(2)) {}

  const T* at(Int row, Int head) const { return data + row * row_stride + head * head_stride; }
};

// The columns that a query row sees: [low, high), [own_low, own_high) and [0, prefix).
struct Visible {
  Int low, high, own_low, own_high, prefix;

  bool sees(Int j) const {
    return (j >= low && j < high) || (j >= own_low && j < own_high) || j < prefix;
  }
  bool sees_any(Int first, Int end) const {
    return std::max(low, first) < std::min(high, end) ||
           std::max(own_low, first) < std::min(own_high, end) || first < prefix;
  }
  bool sees_all(Int first, Int end) const { return (low <= first && end <= high) || end <= prefix; }
};

// MaskParams: the rule of AttentionMask, in the form of the kernels (attention/mask.py)
struct Mask {
  enum Field { causal, left, right, has_targets, group_size, context, max_attn_len, full_attn_len,
               global_prefix, recent_history, grouped, num_fields };
  std::array<Int, num_fields> fields{};

  static std::optional<Mask> of(const std::optional<std::vector<Int>>& params) {
    if (!params.has_value()) return std::nullopt;
    STD_TORCH_CHECK(params->size() <= num_fields,
                    "mask has fields of a newer jagged_modules: compile this library with it");
    Mask found;
    std::copy(params->begin(), params->end(), found.fields.begin());
    return found;
  }

  Int operator[](Field field) const { return fields[field]; }

  Int id(Int row, Int first_target) const {
    const Int c = fields[context];
    return c ? std::min(std::max<Int>(row - c + 1, 0), first_target - c + 1)
             : std::min(row, first_target);
  }

  Visible columns(Int row, Int keys, Int num_targets) const {
    const Mask& m = *this;
    const Int target = std::clamp<Int>(keys - num_targets, 0, keys);
    const Int own_id = id(row, target), last_id = id(target, target), reach = m[max_attn_len];
    const bool is_exempt = m[full_attn_len] && own_id >= last_id - m[full_attn_len];
    Visible found{0, m[causal] ? std::min(row, target) : target, row, row + 1, 0};
    if (reach && own_id > reach && !is_exempt) found.low = std::min(row, target) - reach;
    if (reach && !m[causal] && !is_exempt)
      found.high = std::min(found.high, own_id + reach + std::max<Int>(m[context], 1));
    if (m[context]) {
      if (row < m[context]) found.low = 0;
      if (row < m[context] && last_id > 0) found.high = target;
      if (m[causal] && last_id <= 0) found.high = 0;
    }
    if (m[has_targets] && row >= target)
      found.own_low = target + (row - target) / m[group_size] * m[group_size];
    if (m[left] >= 0) {
      found.low = std::max(found.low, row - m[left]);
      found.own_low = std::max(found.own_low, row - m[left]);
    }
    if (m[right] >= 0) found.high = std::min(found.high, row + m[right] + 1);
    if (m[recent_history]) found.low = std::max(found.low, target - m[recent_history]);
    if (m[global_prefix]) {
      found.prefix = std::min(target, m[global_prefix]);
      if (m[causal]) found.prefix = std::min(found.prefix, row + 1);
    }
    return found;
  }
};

// The tables of a RelativeBias, and what they are indexed by. A table without entries is none.
template <class A>
struct Bias {
  std::vector<A> position, time;
  Int positions, buckets;  // entries of a head
  bool position_per_head, time_per_head;
  std::vector<Int> timestamps, boundaries, query_timestamps, query_shift;

  Bias(const MaybeTensors& x, Int queries, Int keys, Int segments)
      : position(elements<A>("position_bias", x[0])), time(elements<A>("time_bias", x[1])),
        positions(x[0].has_value() ? x[0]->size(1) : 0),
        buckets(x[1].has_value() ? x[1]->size(1) : 0),
        position_per_head(positions && x[0]->size(0) > 1),
        time_per_head(buckets && x[1]->size(0) > 1),
        timestamps(elements<Int>("timestamps", x[2], keys)),
        boundaries(elements<Int>("boundaries", x[3])),
        query_timestamps(elements<Int>("query_timestamps", x[4], queries)),
        query_shift(elements<Int>("query_shift", x[5], segments)) {}
};

}  // namespace jagged_modules
