// Jagged attention on the CPU for programs without Python: the operator that exported models call,
// on torch's stable ABI. reference.py is its definition, cpu/attention.py its twin for Python.
//
// An item of work is a block of query rows of one segment. It visits the keys in tiles, with
// softmax's sum and maximum carried along. A row's result depends on its own segment alone, not on
// other rows, the batch or the threads. What the mask hides is not read into a result.

#include "activations.h"
#include "arguments.h"
#include "operators.h"

#include <string>
#include <tuple>

namespace jagged_modules {
namespace {

constexpr int COLUMNS = 32;  // of values that stay in registers
constexpr Int ROWS = 32;     // query rows of an item, times the heads that share keys

// T: of the operands and the result. A: of the arithmetic.
template <class T, class A>
struct Attention {
  Operand<T> q, k, v;
  std::vector<Int> q_offsets, kv_offsets, num_targets;
  std::vector<A> segment_scale;
  std::optional<Mask> mask;
  Bias<A> bias;
  A scale, output_scale;
  bool q_shared;
  const Activation<A>* activation;  // nullptr: softmax
  T* out;
  A* lse;

  struct Item {
    Int segment, first, rows, head, heads;  // heads of keys
  };

  // An item's memory, which the next item of the same thread takes again.
  struct Scratch {
    std::vector<A> queries, keys, values, sums, top, total;
    std::vector<Int> buckets;
    std::vector<Visible> visible;
  };

  Int group() const { return q.heads / k.heads; }
  Int width() const { return (v.dim + COLUMNS - 1) / COLUMNS * COLUMNS; }
  Int num_keys(Int b) const {
    const Int segment = b % (kv_offsets.size() - 1);
    return kv_offsets[segment + 1] - kv_offsets[segment];
  }

  void run() const {
    std::vector<Item> items;
    Int cost = 0;
    // time buckets are found once for all heads
    const Int heads = bias.time.empty() ? 1 : k.heads, most = std::max<Int>(ROWS / group(), 1);
    for (Int b = 0; b + 1 < Int(q_offsets.size()); ++b) {
      const Int rows = q_offsets[b + 1] - q_offsets[b];
      if (!num_keys(b)) continue;
      cost += rows * num_keys(b) * q.heads * (q.dim + v.dim);
      for (Int first = 0; first < rows; first += most)
        for (Int head = 0; head < k.heads; head += heads)
          items.push_back({b, first, std::min(most, rows - first), head, heads});
    }
    for_each_item<Scratch>(items.size(), cost, [&](Int i, Scratch& x) { compute(items[i], x); });
  }

  void compute(const Item& item, Scratch& x) const {
    const Int keys = num_keys(item.segment), of_head = item.rows * group();
    find_visible(item, x);
    load_queries(item, x);
    x.sums.assign(item.heads * of_head * width(), 0);
    x.top.assign(item.heads * of_head, -std::numeric_limits<A>::infinity());
    x.total.assign(item.heads * of_head, 0);
    for (Int first = 0; first < keys; first += KEYS) {
      const Int end = std::min(first + KEYS, keys);
      const auto sees = [&](const Visible& row) { return row.sees_any(first, end); };
      if (std::none_of(x.visible.begin(), x.visible.end(), sees)) continue;
      if (bias.buckets && is_biased(item)) find_buckets(item, first, end, x);
      for (Int head = 0; head < item.heads; ++head) {
        load_keys(item, item.head + head, first, end, x);
        for (Int row = 0; row < item.rows; ++row)
          for (Int i = 0; i < group() && sees(x.visible[row]); ++i)
            add_tile(item, head, row, i, first, end, x);
      }
    }
    store(item, x);
  }

  void find_visible(const Item& item, Scratch& x) const {
    const Int segments = kv_offsets.size() - 1, keys = num_keys(item.segment);
    const Int targets = num_targets.empty() ? 0 : num_targets[item.segment % segments];
    x.visible.clear();
    for (Int i = item.first; i < item.first + item.rows; ++i)
      // with several query groups, the mask is that of the first
      x.visible.push_back(mask.has_value() && item.segment < segments
                              ? mask->columns(i + aligned(item.segment), keys, targets)
                              : Visible{0, keys, 0, 0, 0});
  }

  // Position of the first query row of a segment.
  Int aligned(Int b) const { return num_keys(b) - (q_offsets[b + 1] - q_offsets[b]); }

  void load_queries(const Item& item, Scratch& x) const {
    x.queries.resize(item.heads * group() * item.rows * q.dim);
    A* to = x.queries.data();
    for (Int head = 0; head < item.heads; ++head)
      for (Int row = 0; row < item.rows; ++row)
        for (Int i = 0; i < group(); ++i)
          for (Int d = 0; d < q.dim; ++d)
            *to++ = A(q.at(item.first + row + (q_shared ? 0 : q_offsets[item.segment]),
                           (item.head + head) * group() + i)[d * q.stride]);
  }

  // A tile of keys `[dim, KEYS]` and of values `[KEYS, width]`. Behind `end` it has what was there.
  void load_keys(const Item& item, Int head, Int first, Int end, Scratch& x) const {
    const Int start = kv_offsets[item.segment % (kv_offsets.size() - 1)] + first, n = end - first;
    x.keys.resize(k.dim * KEYS);
    x.values.resize(KEYS * width());
    for (Int j = 0; j < n; ++j) {
      const T *key = k.at(start + j, head), *value = v.at(start + j, head);
      for (Int d = 0; d < k.dim; ++d) x.keys[d * KEYS + j] = A(key[d * k.stride]);
      for (Int d = 0; d < v.dim; ++d) x.values[j * width() + d] = A(value[d * v.stride]);
    }
  }

  // The bias is that of the first query group, as the mask.
  bool is_biased(const Item& item) const {
    return (bias.positions || bias.buckets) && item.segment + 1 < Int(kv_offsets.size());
  }

  void find_buckets(const Item& item, Int first, Int end, Scratch& x) const {
    const Int segment = item.segment, keys = num_keys(segment);
    const Int* t = bias.timestamps.data() + kv_offsets[segment];
    const auto& edges = bias.boundaries;
    x.buckets.resize(item.rows * KEYS);
    for (Int row = 0; row < item.rows; ++row) {
      const Int i = position(item, row);
      const Int u = bias.query_timestamps.empty()
                        ? t[std::clamp<Int>(i + 1, 0, keys - 1)]
                        : bias.query_timestamps[q_offsets[item.segment] + item.first + row];
      for (Int j = first; j < end; ++j)
        x.buckets[row * KEYS + j - first] =
            std::upper_bound(edges.begin(), edges.end(), std::abs(u - t[j])) - edges.begin();
    }
  }

  // Position of a row of an item, as the bias counts it.
  Int position(const Item& item, Int row) const {
    return aligned(item.segment) + item.first + row +
           (bias.query_shift.empty() ? 0 : bias.query_shift[item.segment]);
  }

  // Adds a tile's weighted values to the sums of a row of an item and of the i-th of the heads that
  // share keys.
  void add_tile(const Item& item, Int head, Int row, Int i, Int first, Int end, Scratch& x) const {
    const Int place = (head * item.rows + row) * group() + i, n = end - first;
    const Visible& visible = x.visible[row];
    const bool all = n == KEYS && visible.sees_all(first, end);
    A s[KEYS];
    bool hidden[KEYS] = {};
    dot_products(x.queries.data() + place * q.dim, x.keys.data(), s);
    if (is_biased(item))
      add_bias(item, row, (item.head + head) * group() + i, first, n, s, x);
    if (!all)
      for (int j = 0; j < KEYS; ++j) hidden[j] = !visible.sees(first + j);
    A *sums = x.sums.data() + place * width(), keep = 1;
    if (activation)
      activation->apply(s);
    else
      keep = exponentials(s, hidden, x.top[place], x.total[place]);
    for (Int d = 0; d < width(); d += COLUMNS) {
      A sum[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) sum[c] = sums[d + c] * keep;
      for (Int j = 0; j < n; ++j) {
        if (hidden[j]) continue;
        const A* value = x.values.data() + j * width() + d;
        for (int c = 0; c < COLUMNS; ++c) sum[c] += s[j] * value[c];
      }
      for (int c = 0; c < COLUMNS; ++c) sums[d + c] = sum[c];
    }
  }

  void dot_products(const A* query, const A* keys, A* s) const {
    A sums[KEYS] = {};  // in registers, as no pointer to it is kept
    for (Int d = 0; d < q.dim; ++d)
      for (int j = 0; j < KEYS; ++j) sums[j] += query[d] * keys[d * KEYS + j];
    for (int j = 0; j < KEYS; ++j) s[j] = sums[j] * scale;
  }

  void add_bias(const Item& item, Int row, Int head, Int first, Int n, A* s,
                const Scratch& x) const {
    if (bias.positions) {
      const A* table = bias.position.data() + (bias.position_per_head ? head * bias.positions : 0);
      const Int from = first - position(item, row) + (bias.positions - 1) / 2;
      for (Int j = 0; j < n; ++j) s[j] += table[std::clamp<Int>(from + j, 0, bias.positions - 1)];
    }
    if (bias.buckets) {
      const A* table = bias.time.data() + (bias.time_per_head ? head * bias.buckets : 0);
      for (Int j = 0; j < n; ++j) s[j] += table[x.buckets[row * KEYS + j]];
    }
  }

  void store(const Item& item, const Scratch& x) const {
    const Int keys = num_keys(item.segment), start = q_offsets[item.segment] + item.first;
    const A factor = output_scale * (segment_scale.empty() ? A(1) : segment_scale[item.segment]);
    for (Int head = 0; head < item.heads; ++head)
      for (Int row = 0; row < item.rows; ++row) {
        if (!x.visible[row].sees_any(0, keys)) continue;  // stays 0
        for (Int i = 0; i < group(); ++i) {
          const Int place = (head * item.rows + row) * group() + i;
          const Int to = (start + row) * q.heads + (item.head + head) * group() + i;
          const A* sums = x.sums.data() + place * width();
          for (Int d = 0; d < v.dim; ++d)
            out[to * v.dim + d] = T((activation ? sums[d] : sums[d] / x.total[place]) * factor);
          if (!activation) lse[to] = x.top[place] + std::log(x.total[place]);
        }
      }
  }
};

// -- the operator --------------------------------------------------------------------------------

// The arguments are those of `pack` in attention/params.py.
std::tuple<Tensor, Tensor> attention_cpu(Tensor q, Tensor k, Tensor v, MaybeTensors segments,
                                         MaybeTensors bias, std::optional<std::vector<Int>> mask,
                                         std::vector<Int> options, std::vector<double> factors,
                                         std::string activation, std::string) {
  STD_TORCH_CHECK(!segments[4].has_value(), "attention_cpu: pages are not supported");
  STD_TORCH_CHECK(segments.size() < 10 || !segments[9].has_value(),
                  "attention_cpu: dropout is not supported");
  const bool q_shared = options[0], is_softmax = activation == "softmax";
  const Int rows = q_shared ? q.size(0) * (segments[0]->size(0) - 1) : q.size(0);
  const bool is_double = q.scalar_type() == ScalarType::Double;
  Tensor out = torch::stable::new_zeros(q, {rows, q.size(1), v.size(2)});
  Tensor lse = torch::stable::new_zeros(q, {is_softmax ? rows : 0, q.size(1), 1},
                                        is_double ? ScalarType::Double : ScalarType::Float);
  const auto rule = Mask::of(mask);
  const auto q_offsets = offsets_of("q_offsets", segments[0], rows);
  const auto kv_offsets = offsets_of("kv_offsets", segments[1], std::min(k.size(0), v.size(0)));
  const Int of_queries = q_offsets.size() - 1, of_keys = kv_offsets.size() - 1;
  STD_TORCH_CHECK(of_keys ? of_queries % of_keys == 0 : !of_queries, "q_offsets must be of ",
                  of_keys, " segments, as kv_offsets, or a multiple, got ", of_queries);
  const auto num_targets = elements<Int>("num_targets", segments[2], of_keys);
  typed("q", q, [&](auto* data) {
    using T = std::decay_t<decltype(*data)>;
    using A = std::conditional_t<sizeof(T) == 8, double, float>;
    if constexpr (!std::is_integral_v<T>) {
      const Activation<A>* found = nullptr;
      for (const auto& entry : ACTIVATIONS<A>)
        if (entry.name == activation) found = &entry;
      STD_TORCH_CHECK(found || is_softmax, "attention_cpu: no activation ", activation);
      Attention<T, A>{q, k, v, q_offsets, kv_offsets, num_targets,
                      elements<A>("segment_scale", segments[3], of_queries), rule,
                      Bias<A>(bias, rows, k.size(0), of_keys), A(factors[0]), A(factors[1]),
                      q_shared, found, static_cast<T*>(out.mutable_data_ptr()),
                      static_cast<A*>(lse.mutable_data_ptr())}
          .run();
    }
  });
  return {out, lse};
}

const bool registered = register_operator(
    {"attention_cpu",
     "attention_cpu(Tensor q, Tensor k, Tensor v, Tensor?[] segments, Tensor?[] bias,"
     " SymInt[]? mask, SymInt[] options, float[] factors, str activation, str implementation)"
     " -> (Tensor, Tensor)",
     TORCH_BOX(&attention_cpu)});

}  // namespace
}  // namespace jagged_modules
