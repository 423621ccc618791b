// DIN's attention on the CPU for programs without Python, as cpu/din.py defines it.
//
// An item of work is a candidate. It visits its user's events in tiles: a hidden unit is a row of
// KEYS pairs, and softmax's sum and maximum are carried along. A candidate's result depends on its
// own operands alone, not on the batch or the threads.

#include "activations.h"
#include "arguments.h"
#include "operators.h"

#include <string>
#include <tuple>

namespace jagged_modules {
namespace {

template <class A>
struct DIN {
  struct Layer {
    std::vector<A> weight, bias, table;  // the first layer's bias is that of its pair
    Int in, out;
  };
  struct Scratch {
    std::vector<A> weight, units, next, sums;
  };
  // The events of a row, and which of them it sees.
  struct Events {
    Int start, end;
    Visible visible;
  };

  Int width, values;  // of q and of v
  std::vector<A> q, k, a, b, v;
  std::vector<Layer> layers;  // the last one makes the score
  const Activation<A>* pointwise;  // nullptr: by the tables
  bool is_prelu, softmax;

  // Returns the log-sum-exp. x.sums gets the result. The row sees an event.
  A compute(Int row, const Events& events, Scratch& x) const {
    const Layer& first = layers.front();
    A top = -std::numeric_limits<A>::infinity(), total = 0;
    x.sums.assign(values, 0);
    x.weight = first.weight;
    for (Int i = 0; i < first.out * width; ++i) x.weight[i] *= q[row * width + i % width];
    for (Int start = events.start; start < events.end; start += KEYS) {
      const Int n = std::min<Int>(KEYS, events.end - start), first = start - events.start;
      if (!events.visible.sees_any(first, first + n)) continue;
      scores(row, start, n, x);
      A* p = x.units.data();
      bool hidden[KEYS];
      for (Int j = 0; j < KEYS; ++j) hidden[j] = j >= n || !events.visible.sees(first + j);
      const A keep = softmax ? exponentials(p, hidden, top, total) : A(1);
      for (Int d = 0; d < values; ++d) x.sums[d] *= keep;
      for (Int j = 0; j < n; ++j)
        for (Int d = 0; d < values && !hidden[j]; ++d) x.sums[d] += p[j] * v[(start + j) * values + d];
    }
    if (!softmax) return 0;
    for (A& sum : x.sums) sum /= total;
    return top + std::log(total);
  }

  // Of a tile, in the first row of x.units.
  void scores(Int row, Int start, Int n, Scratch& x) const {
    transpose(k, width, start, n, x.units);
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer& layer = layers[l];
      if (l == 0) transpose(b, layer.out, start, n, x.next);
      x.next.resize(layer.out * KEYS);
      for (Int h = 0; h < layer.out; ++h) {
        const A* weight = (l ? layer.weight : x.weight).data() + h * layer.in;
        A sums[KEYS] = {}, *z = x.next.data() + h * KEYS;  // sums are in registers
        for (Int d = 0; d < layer.in; ++d)
          for (int j = 0; j < KEYS; ++j) sums[j] += weight[d] * x.units[d * KEYS + j];
        const A bias = l ? layer.bias[h] : a[row * layer.out + h];
        for (int j = 0; j < KEYS; ++j) z[j] = sums[j] + bias + (l ? A(0) : z[j]);
        if (l + 1 < layers.size()) activate(layer, h, z);
      }
      std::swap(x.units, x.next);
    }
  }

  // Rows of events `[n, columns]` to `[columns, KEYS]`. Behind n it has what was there.
  static void transpose(const std::vector<A>& from, Int columns, Int start, Int n,
                        std::vector<A>& to) {
    to.resize(columns * KEYS);
    for (Int j = 0; j < n; ++j)
      for (Int d = 0; d < columns; ++d) to[d * KEYS + j] = from[(start + j) * columns + d];
  }

  void activate(const Layer& layer, Int h, A* z) const {
    if (pointwise) return pointwise->apply(z);
    const Int n = layer.out;
    const A* unit = layer.table.data() + h;
    const A slope = unit[0], mean = unit[n], rstd = unit[2 * n], weight = unit[3 * n];
    const A bias = unit[4 * n];
    for (int j = 0; j < KEYS && is_prelu; ++j) z[j] = z[j] > 0 ? z[j] : slope * z[j];
    for (int j = 0; j < KEYS && !is_prelu; ++j) {
      const A p = sigmoid((z[j] - mean) * rstd * weight + bias);
      z[j] *= p + slope * (1 - p);
    }
  }
};

template <class A>
std::vector<A> matrix(const char* name, const Tensor& x, Int rows, Int columns) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == columns, name,
                  " must be of shape [", rows, ", ", columns, "], got [", x.size(0), ", ",
                  x.dim() > 1 ? x.size(1) : 1, "]");
  return elements<A>(name, x);
}

template <class A>
std::vector<typename DIN<A>::Layer> layers_of(const std::vector<Tensor>& weights,
                                              const std::vector<Tensor>& biases,
                                              const MaybeTensors& tables, Int width) {
  std::vector<typename DIN<A>::Layer> found;
  STD_TORCH_CHECK(biases.size() + 1 == weights.size(), "biases must be of ", weights.size() - 1,
                  " layers, got ", biases.size());
  STD_TORCH_CHECK(tables.size() + 1 == weights.size(), "tables must be of ", weights.size() - 1,
                  " layers, got ", tables.size());
  for (size_t l = 0; l < weights.size(); ++l) {
    const Int out = weights[l].size(0);
    auto& layer = found.emplace_back();
    layer.in = l ? found[l - 1].out : width, layer.out = out;
    layer.weight = matrix<A>("weights", weights[l], out, layer.in);
    if (l) layer.bias = elements<A>("biases", biases[l - 1], out);
    if (l + 1 < weights.size() && tables[l].has_value())
      layer.table = matrix<A>("tables", *tables[l], 7, out);
  }
  return found;
}

// The arguments are those of `din_attention_cpu` in cpu/din.py.
std::tuple<Tensor, Tensor> din_attention_cpu(std::vector<Tensor> operands,
                                             std::vector<Tensor> weights,
                                             std::vector<Tensor> biases, MaybeTensors tables,
                                             MaybeTensors segments, std::string activation,
                                             bool softmax, std::optional<std::vector<Int>> mask) {
  const Tensor &q = operands.at(0), &k = operands.at(1), &v = operands.at(operands.size() - 1);
  const bool is_shared = operands.size() == 4;  // v is k
  const Int rows = q.size(0), events = k.size(0), width = q.size(1);
  const Int values = is_shared ? width : v.size(1), units = weights.at(0).size(0);
  const auto of_rows = offsets_of("q_offsets", segments.at(0), rows);
  const auto of_events = offsets_of("kv_offsets", segments.at(1), events);
  STD_TORCH_CHECK(of_rows.size() == of_events.size(), "q_offsets must be of ", of_events.size() - 1,
                  " segments, as kv_offsets, got ", of_rows.size() - 1);
  const auto rule = Mask::of(mask);
  const auto targets = elements<Int>("num_targets", segments.at(2), of_rows.size() - 1);
  std::vector<Int> users(rows, -1);  // of rows
  Int pairs = 0, cost = 0;
  for (size_t b = 0; b + 1 < of_rows.size(); ++b) {
    const Int keys = of_events[b + 1] - of_events[b];
    std::fill(users.begin() + of_rows[b], users.begin() + of_rows[b + 1], keys ? b : -1);
    pairs += (of_rows[b + 1] - of_rows[b]) * keys;
  }
  for (const Tensor& x : weights) cost += pairs * x.size(0) * x.size(1);
  const bool is_double = q.scalar_type() == ScalarType::Double;
  Tensor out = torch::stable::new_zeros(q, {rows, values});
  Tensor lse = torch::stable::new_zeros(q, {rows},
                                        is_double ? ScalarType::Double : ScalarType::Float);
  typed("q", q, [&](auto* data) {
    using T = std::decay_t<decltype(*data)>;
    using A = std::conditional_t<sizeof(T) == 8, double, float>;
    if constexpr (!std::is_integral_v<T>) {
      DIN<A> din{width, values, matrix<A>("q", q, rows, width), matrix<A>("k", k, events, width),
                 matrix<A>("a", operands.at(2), rows, units),
                 matrix<A>("b", operands.at(3), events, units), {},
                 layers_of<A>(weights, biases, tables, width), nullptr, activation == "prelu",
                 softmax};
      din.v = is_shared ? din.k : matrix<A>("v", v, events, values);
      for (const auto& entry : ACTIVATIONS<A>)
        if (entry.name == activation) din.pointwise = &entry;
      const bool has_tables = std::none_of(
          din.layers.begin(), din.layers.end() - 1, [](const auto& x) { return x.table.empty(); });
      STD_TORCH_CHECK(din.pointwise || ((din.is_prelu || activation == "dice") && has_tables),
                      "din_attention_cpu: no activation ", activation);
      auto* results = static_cast<T*>(out.mutable_data_ptr());
      auto* sums = static_cast<A*>(lse.mutable_data_ptr());
      for_each_item<typename DIN<A>::Scratch>(rows, cost, [&](Int row, auto& x) {
        const Int b = users[row];
        if (b < 0) return;  // stays 0
        const Int keys = of_events[b + 1] - of_events[b], i = row + keys - of_rows[b + 1];
        const Visible visible = rule.has_value() ? rule->columns(i, keys, targets.empty() ? 0 : targets[b])
                                                 : Visible{0, keys, 0, 0, 0};
        if (!visible.sees_any(0, keys)) return;
        sums[row] = din.compute(row, {of_events[b], of_events[b + 1], visible}, x);
        for (Int d = 0; d < values; ++d) results[row * values + d] = T(x.sums[d]);
      });
    }
  });
  return {out, lse};
}

const bool registered = register_operator(
    {"din_attention_cpu",
     "din_attention_cpu(Tensor[] operands, Tensor[] weights, Tensor[] biases, Tensor?[] tables,"
     " Tensor?[] segments, str activation, bool softmax, SymInt[]? mask=None) -> (Tensor, Tensor)",
     TORCH_BOX(&din_attention_cpu)});

}  // namespace
}  // namespace jagged_modules
