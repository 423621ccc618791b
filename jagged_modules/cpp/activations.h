// Activations of a tile's scores: the functions of activations.py, vectorised by the compiler.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

namespace jagged_modules {

constexpr int KEYS = 64;   // of a tile
constexpr int LANES = 16;  // of sums and maxima

// 1 / i!
template <class A, int N>
constexpr std::array<A, N + 1> taylor_coefficients() {
  std::array<A, N + 1> found{};
  long double factor = 1;
  for (int i = 0; i <= N; factor /= ++i) found[i] = A(factor);
  return found;
}

// e^x for x <= 0 or NaN, within 2 units in the last place; vectorised by the compiler, as std::exp
// is not. x = 2 n ln 2 + r with |r| <= ln 2, so that 2^n is not subnormal where e^x is.
template <class A>
inline A exponential(A x) {
  constexpr bool is_float = sizeof(A) == 4;
  using Bits = std::conditional_t<is_float, uint32_t, uint64_t>;
  constexpr int mantissa = is_float ? 23 : 52, bias = is_float ? 127 : 1023;
  constexpr int terms = is_float ? 10 : 18;
  constexpr auto coefficients = taylor_coefficients<A, terms>();
  constexpr long double twice_ln2 = 1.386294361119890618834464242916353136L;
  constexpr int64_t cut = int64_t(1) << (is_float ? 12 : 40);  // n times `high` is exact
  constexpr A high = A(int64_t(twice_ln2 * cut)) / cut, low = A(twice_ln2 - high);
  constexpr A rounding = A(int64_t(3) << (mantissa - 1)), lowest = is_float ? -104 : -746;
  x = x < lowest ? lowest : x;
  const A shifted = x * A(1 / twice_ln2) + rounding, n = shifted - rounding;
  const A r = (x - n * high) - n * low;
  A p = coefficients[terms];
#pragma GCC unroll 32
  for (int i = terms - 1; i >= 0; --i) p = p * r + coefficients[i];
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof(A));
  bits = (bits + bias) << mantissa;
  A power;
  std::memcpy(&power, &bits, sizeof(A));
  return p * power * power;
}

// Scores to e^(score - top), with the top and the total of a row brought up to date. Returns the
// factor of what was summed before. A row of -inf scores has a total of 0, so NaN.
template <class A>
inline A exponentials(A* s, const bool* hidden, A& top, A& total) {
  constexpr A infinity = std::numeric_limits<A>::infinity();
  A tops[LANES], totals[LANES] = {};
  for (int j = 0; j < KEYS; ++j) s[j] = hidden[j] ? -infinity : s[j];
  for (int i = 0; i < LANES; ++i) tops[i] = top;
  for (int j = 0; j < KEYS; j += LANES)
    for (int i = 0; i < LANES; ++i) tops[i] = s[j + i] > tops[i] ? s[j + i] : tops[i];
  const A highest = *std::max_element(tops, tops + LANES);
  const A base = highest == -infinity ? A(0) : highest;
  for (int j = 0; j < KEYS; ++j) s[j] = exponential(s[j] - base);
  for (int j = 0; j < KEYS; j += LANES)
    for (int i = 0; i < LANES; ++i) totals[i] += s[j + i];
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) totals[i] += totals[i + half];
  const A keep = top == highest ? A(1) : exponential(top - base);
  top = highest;
  total = total * keep + totals[0];
  return keep;
}

template <class A>
inline A sigmoid(A x) {
  const A e = exponential(-std::abs(x));
  return (x >= 0 ? A(1) : e) / (1 + e);
}

template <class A>
inline A gelu_taylor(A x) {  // see activations.py
  constexpr A coefficients[] = {A(-0.00015379236612135828), A(0.0044996411707417154),
                                A(-0.05253872479237837), A(0.387094523507696)};
  const A range = A(3.06), size = std::abs(x), a = size > range ? range : size, t = a * a;
  A polynomial = 0;
  for (A coefficient : coefficients) polynomial = (polynomial + coefficient) * t;
  return (A(0.5) * x + A(0.5) * size) - A(0.5) * a + polynomial;
}

template <class A, class F>
inline void each(A* s, F f) {
  for (int j = 0; j < KEYS; ++j) s[j] = f(s[j]);
}

template <class A>
struct Activation {
  std::string_view name;
  void (*apply)(A* s);  // to a tile's scores of a row
};

// Of a NaN, each is NaN.
template <class A>
constexpr Activation<A> ACTIVATIONS[] = {
    {"identity", [](A*) {}},
    {"relu", [](A* s) { each(s, [](A x) { return x < 0 ? A(0) : x; }); }},
    {"relu_squared", [](A* s) { each(s, [](A x) { return x < 0 ? A(0) : x * x; }); }},
    {"leaky_relu", [](A* s) { each(s, [](A x) { return x < 0 ? A(0.01) * x : x; }); }},
    {"silu", [](A* s) { each(s, [](A x) { return x * sigmoid(x); }); }},
    {"gelu",
     [](A* s) {
       each(s, [](A x) { return A(0.5) * x * std::erfc(x * A(-0.70710678118654752)); });
     }},
    {"gelu_tanh",
     [](A* s) {
       each(s, [](A x) {
         return x * sigmoid(A(1.5957691216057308) * (x + A(0.044715) * x * x * x));
       });
     }},
    {"gelu_taylor", [](A* s) { each(s, gelu_taylor<A>); }},
    {"hardswish",
     [](A* s) {
       each(s, [](A x) {
         const A y = x + 3;
         return x * (y < 0 ? A(0) : y > 6 ? A(6) : y) / 6;
       });
     }},
    {"sigmoid", [](A* s) { each(s, sigmoid<A>); }},
};

}  // namespace jagged_modules
