// Products with weights that stay as their file has them: 4 or 8 bits each, in groups of inputs that share a scale.
//
// Formats: ggml's Q4_0, Q4_1 and Q8_0 (ggml/src/ggml-common.h), whose groups are 32 inputs; and integers of 4 bits with a
// scale and a zero point for each `span` groups of 32, as AWQ (arXiv 2306.00978) and GPTQ (2210.17323) store. Rows of x are rounded to 8 bits in groups of 32, as ggml
// rounds them (Q8_0), with a scale in float. A group's product is a sum of integers; groups are added up in their order,
// whatever else is computed: a row's result does not depend on the rows beside it.
//
// Weights lie in panels of 16 outputs. `codes` (panels, groups, pieces, 16, 4): 4 inputs of each output are 32 bits of a
// vector; at 4 bits a piece has 8 inputs, of which the upper halves of bytes are the last four. Codes of 8 bits are 128
// larger than what they mean. `scales` (panels, groups / span, 1 or 2, 16), of two bytes: of Q4_1 the least value follows,
// of integers the zero point.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parts.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_AVX2
#endif
#if defined(HAS_AVX2) && defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_VNNI
#endif

namespace {

constexpr int64_t kSide = 16, kGroup = 32;  // outputs of a panel, inputs of a group
constexpr int64_t kChunk = 192;             // rows that a panel is multiplied with while they stay in a cache
constexpr int64_t kFewElements = 1 << 15;   // less is done sooner than another thread is woken

// Rows whose sums the registers hold.
#if defined(HAS_VNNI)
constexpr int64_t kMostRows = 12;
#else
constexpr int64_t kMostRows = 4;
#endif

enum Form { kQ4_0, kQ4_1, kQ8_0, kInt4 };
constexpr int64_t pieces_of(int form) { return form == kQ8_0 ? 8 : 4; }
constexpr bool has_least(int form) { return form == kQ4_1 || form == kInt4; }  // value = code * scale + least
constexpr int64_t scales_of(int form) { return has_least(form) ? 2 : 1; }
constexpr int32_t zero_of(int form) { return form == kQ4_0 ? 8 : form == kQ8_0 ? 128 : 0; }

inline float load(const float *at) { return *at; }

inline float load(const uint16_t *at) {
  const uint32_t bits = static_cast<uint32_t>(*at) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void store(float *at, float value) { *at = value; }

inline void store(uint16_t *at, float value) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *at = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

inline float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = (half >> 10) & 31, rest = half & 0x3ff;
  uint32_t bits = sign | (exponent + 112) << 23 | rest << 13;
  float value;
  if (exponent == 31) bits |= 0x7f800000u;
  if (exponent == 0) {  // rest * 2^-24
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rows of x in 8 bits: codes (rows, in); of each group its scale, the scaled sum of its codes, and their sum.
struct Rounded {
  std::vector<int8_t> codes;
  std::vector<float> scales, scaled_sums;
  std::vector<int32_t> sums;

  void make_room(int64_t rows, int64_t in) {
    const size_t count = rows * in, groups = count / kGroup;
    if (codes.size() < count) codes.resize(count);
    if (scales.size() < groups) scales.resize(groups), scaled_sums.resize(groups), sums.resize(groups);
  }

  template <class T>
  void round(const T *x, int64_t group) {  // the group's first
    uint32_t most = 0, bits[kGroup];
    float own[kGroup], scale;
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroup; i++) own[i] = load(x + i);
    std::memcpy(bits, own, sizeof bits);
    for (int64_t i = 0; i < kGroup; i++) most = std::max(most, bits[i] & 0x7fffffffu);  // of NaN they are the largest
    std::memcpy(&scale, &most, 4);
    scale /= 127.0f;
    const float factor = scale > 0.0f ? 1.0f / scale : 0.0f;
    int8_t *to = codes.data() + group * kGroup;
    for (int64_t i = 0; i < kGroup; i++) own[i] = own[i] * factor + 12582912.0f;  // 1.5 * 2^23: what is added is rounded
    std::memcpy(bits, own, sizeof bits);
    for (int64_t i = 0; i < kGroup; i++) to[i] = static_cast<int8_t>(bits[i]);
    for (int64_t i = 0; i < kGroup; i++) sum += to[i];
    scales[group] = scale;
    scaled_sums[group] = scale * sum;
    sums[group] = sum;
  }
};

struct Panels {
  const Rounded &x;
  const uint8_t *codes;
  const uint16_t *scales;
  int64_t groups;  // of a row
  int64_t span;    // groups that share a scale; 1 but of kInt4
};

// Where a panel's scales lie, group after group.
template <int F>
struct Scales {
  const uint16_t *at;
  int64_t span, left;
  Scales(const Panels &of, int64_t panel)
      : at(of.scales + panel * (of.groups / of.span) * scales_of(F) * kSide), span(of.span), left(of.span) {}

  void next() {
    if constexpr (F == kInt4) {
      if (--left) return;
      left = span;
    }
    at += scales_of(F) * kSide;
  }
};

#if defined(HAS_VNNI)
template <int F, int R>
void multiply_panel(const Panels &of, int64_t row, int64_t panel, float *found) {
  const uint8_t *codes = of.codes + panel * of.groups * pieces_of(F) * 64;
  Scales<F> scales(of, panel);
  const int64_t first = row * of.groups;
  const int8_t *x = of.x.codes.data() + first * kGroup;
  const float *x_scales = of.x.scales.data() + first, *x_scaled = of.x.scaled_sums.data() + first;
  const int32_t *x_sums = of.x.sums.data() + first;
  const __m512i lower = _mm512_set1_epi8(15);
  __m512 sums[R];
  for (int64_t r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < of.groups; g++) {
    __m512i weights[8];
    if constexpr (F == kQ8_0) {
#pragma GCC unroll 8
      for (int64_t p = 0; p < 8; p++) weights[p] = _mm512_loadu_si512(codes + p * 64);
    } else {
#pragma GCC unroll 4
      for (int64_t p = 0; p < 4; p++) {
        const __m512i both = _mm512_loadu_si512(codes + p * 64);
        weights[2 * p] = _mm512_and_si512(both, lower);
        weights[2 * p + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales.at));
    __m512 least;
    if constexpr (has_least(F)) least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales.at + kSide)));
    if constexpr (F == kInt4) least = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(least, scale));
#pragma GCC unroll 12
    for (int64_t r = 0; r < R; r++) {
      const int8_t *own = x + (r * of.groups + g) * kGroup;
      __m512i even = _mm512_set1_epi32(-zero_of(F) * x_sums[r * of.groups + g]), odd = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int64_t p = 0; p < 8; p += 2) {
        int32_t left, right;
        std::memcpy(&left, own + 4 * p, 4);
        std::memcpy(&right, own + 4 * p + 4, 4);
        even = _mm512_dpbusd_epi32(even, weights[p], _mm512_set1_epi32(left));
        odd = _mm512_dpbusd_epi32(odd, weights[p + 1], _mm512_set1_epi32(right));
      }
      const __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * of.groups + g]));
      sums[r] = _mm512_fmadd_ps(product, both, sums[r]);
      if constexpr (has_least(F))
        sums[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(x_scaled[r * of.groups + g]), sums[r]);
    }
    codes += pieces_of(F) * 64;
    scales.next();
  }
  for (int64_t r = 0; r < R; r++) _mm512_storeu_ps(found + r * kSide, sums[r]);
}
#elif defined(HAS_AVX2)
// Half a panel at once. Products of pairs of bytes are added in 16 bits: eight of 4-bit codes fit, of 8-bit codes one.
template <int F, int R>
void multiply_half(const Panels &of, int64_t row, const uint8_t *codes, Scales<F> scales, float *found) {
  const int64_t first = row * of.groups;
  const int8_t *x = of.x.codes.data() + first * kGroup;
  const __m256i lower = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
  __m256 sums[R];
  for (int64_t r = 0; r < R; r++) sums[r] = _mm256_setzero_ps();
  const auto spread = [&](int64_t r, int64_t g, int64_t four) {
    int32_t bytes;
    std::memcpy(&bytes, x + (r * of.groups + g) * kGroup + 4 * four, 4);
    return _mm256_set1_epi32(bytes);
  };
  for (int64_t g = 0; g < of.groups; g++) {
    __m256i products[R];
    for (int64_t r = 0; r < R; r++) products[r] = _mm256_setzero_si256();
    for (int64_t p = 0; p < pieces_of(F); p++) {
      const __m256i both = _mm256_loadu_si256((const __m256i *)(codes + p * 64));
      if constexpr (F == kQ8_0) {
        const __m256i weights = _mm256_xor_si256(both, flip), size = _mm256_abs_epi8(weights);
#pragma GCC unroll 4
        for (int64_t r = 0; r < R; r++) {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(spread(r, g, p), weights));
          products[r] = _mm256_add_epi32(products[r], _mm256_madd_epi16(pairs, ones));
        }
      } else {
        const __m256i left = _mm256_and_si256(both, lower), right = _mm256_and_si256(_mm256_srli_epi16(both, 4), lower);
#pragma GCC unroll 4
        for (int64_t r = 0; r < R; r++) {
          const __m256i low = _mm256_maddubs_epi16(left, spread(r, g, 2 * p));
          const __m256i high = _mm256_maddubs_epi16(right, spread(r, g, 2 * p + 1));
          products[r] = _mm256_add_epi16(products[r], _mm256_add_epi16(low, high));
        }
      }
    }
    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales.at));
    __m256 least;
    if constexpr (has_least(F)) least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales.at + kSide)));
    if constexpr (F == kInt4) least = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(least, scale));
    for (int64_t r = 0; r < R; r++) {
      const int64_t at = first + r * of.groups + g;
      __m256i product = products[r];
      if constexpr (F != kQ8_0) product = _mm256_madd_epi16(product, ones);
      if constexpr (F == kQ4_0) product = _mm256_sub_epi32(product, _mm256_set1_epi32(zero_of(F) * of.x.sums[at]));
      const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(of.x.scales[at]));
      sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), both, sums[r]);
      if constexpr (has_least(F)) sums[r] = _mm256_fmadd_ps(least, _mm256_set1_ps(of.x.scaled_sums[at]), sums[r]);
    }
    codes += pieces_of(F) * 64;
    scales.next();
  }
  for (int64_t r = 0; r < R; r++) _mm256_storeu_ps(found + r * kSide, sums[r]);
}

template <int F, int R>
void multiply_panel(const Panels &of, int64_t row, int64_t panel, float *found) {
  const uint8_t *codes = of.codes + panel * of.groups * pieces_of(F) * 64;
  for (int64_t half = 0; half < 2; half++) {
    Scales<F> scales(of, panel);
    scales.at += 8 * half;
    multiply_half<F, R>(of, row, codes + 32 * half, scales, found + 8 * half);
  }
}
#else
template <int F, int R>
void multiply_panel(const Panels &of, int64_t row, int64_t panel, float *found) {
  const uint8_t *codes = of.codes + panel * of.groups * pieces_of(F) * 64;
  Scales<F> scales(of, panel);
  std::fill(found, found + R * kSide, 0.0f);
  for (int64_t g = 0; g < of.groups; g++) {
    for (int64_t r = 0; r < R; r++) {
      const int64_t at = (row + r) * of.groups + g;
      const int8_t *x = of.x.codes.data() + at * kGroup;
      int32_t products[kSide];
      std::fill(products, products + kSide, -zero_of(F) * of.x.sums[at]);
      for (int64_t p = 0; p < pieces_of(F); p++)
        for (int64_t n = 0; n < kSide; n++)
          for (int64_t j = 0; j < 4; j++) {
            const int32_t code = codes[(p * kSide + n) * 4 + j];
            products[n] += F == kQ8_0 ? code * x[4 * p + j] : (code & 15) * x[8 * p + j] + (code >> 4) * x[8 * p + 4 + j];
          }
      for (int64_t n = 0; n < kSide; n++) {
        const float scale = from_half(scales.at[n]);
        found[r * kSide + n] += products[n] * (scale * of.x.scales[at]);
        if (has_least(F)) {
          const float more = from_half(scales.at[kSide + n]);
          found[r * kSide + n] += (F == kInt4 ? -more * scale : more) * of.x.scaled_sums[at];
        }
      }
    }
    codes += pieces_of(F) * 64;
    scales.next();
  }
}
#endif

// `rows` of them, at most R.
template <int F, int R = kMostRows>
void multiply_rows(const Panels &of, int64_t rows, int64_t row, int64_t panel, float *found) {
  if constexpr (R > 0) {
    if (rows < R) return multiply_rows<F, R - 1>(of, rows, row, panel, found);
    multiply_panel<F, R>(of, row, panel, found);
  }
}

template <class T>
struct Product {
  const T *x;  // (rows, in)
  const uint8_t *codes;
  const uint16_t *scales;
  const T *bias, *add_to;
  T *out;  // (rows, stride), as is add_to
  int64_t rows, in, width, stride, span;
};

// One panel's outputs of `count` rows from `first` on, which are those of `x`.
template <int F, class T>
void multiply_panel_of(const Product<T> &of, const Panels &shared, int64_t first, int64_t count, int64_t panel) {
  const int64_t tiles = (count + kMostRows - 1) / kMostRows;
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t row = tile * count / tiles, end = (tile + 1) * count / tiles;
    float found[kMostRows * kSide];
    multiply_rows<F>(shared, end - row, row, panel, found);
    const int64_t at = panel * kSide, wide = std::min(kSide, of.width - at);
    for (int64_t r = 0; r < end - row; r++) {
      const int64_t to = (first + row + r) * of.stride + at;
      float *own = found + r * kSide;
      if (of.bias)
        for (int64_t n = 0; n < wide; n++) own[n] += load(of.bias + at + n);
      if (of.add_to)
        for (int64_t n = 0; n < wide; n++) own[n] += load(of.add_to + to + n);
      for (int64_t n = 0; n < wide; n++) store(of.out + to + n, own[n]);
    }
  }
}

template <int F, class T>
void multiply(const Product<T> &of, int threads) {
  static thread_local Rounded kept;
  Rounded &x = kept;
  const int64_t groups = of.in / kGroup, panels = (of.width + kSide - 1) / kSide;
  x.make_room(std::min(of.rows, kChunk), of.in);
  const Panels shared{x, of.codes, of.scales, groups, of.span};
  const int64_t step = std::clamp(panels / (4 * threads), int64_t{1}, int64_t{32});
  for (int64_t first = 0; first < of.rows; first += kChunk) {
    const int64_t count = std::min(kChunk, of.rows - first);
#pragma omp parallel for num_threads(threads) if (count * of.in > kFewElements)
    for (int64_t group = 0; group < count * groups; group++) x.round(of.x + first * of.in + group * kGroup, group);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (of.in * of.width > kFewElements)
    for (int64_t begin = 0; begin < panels; begin += step)
      for (int64_t panel = begin; panel < std::min(begin + step, panels); panel++)
        multiply_panel_of<F>(of, shared, first, count, panel);
  }
}

template <int F, class T>
void multiply_own(const Product<T> &of, const Rounded &x, int threads) {
  const int64_t panels = (of.width + kSide - 1) / kSide;
  const Panels shared{x, of.codes, of.scales, of.in / kGroup, of.span};
  const int64_t step = std::clamp(panels / (8 * threads), int64_t{1}, int64_t{32});
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t begin = 0; begin < panels; begin += step)
    for (int64_t panel = begin; panel < std::min(begin + step, panels); panel++)
      multiply_panel_of<F>(of, shared, 0, of.rows, panel);
}

template <class T>
void multiply_any(int form, const Product<T> &of, int threads) {
  switch (form) {
    case kQ4_0: return multiply<kQ4_0>(of, threads);
    case kQ4_1: return multiply<kQ4_1>(of, threads);
    case kInt4: return multiply<kInt4>(of, threads);
    default: return multiply<kQ8_0>(of, threads);
  }
}

// What outputs `ids` mean -> out (count, in).
template <class T>
void take_rows(int form, const uint8_t *codes, const uint16_t *scales, const int64_t *ids, T *out, int64_t count, int64_t in) {
  const int64_t groups = in / kGroup, pieces = pieces_of(form), each = scales_of(form);
  for (int64_t row = 0; row < count; row++)
    for (int64_t g = 0; g < groups; g++) {
      const int64_t panel = ids[row] / kSide * groups + g, lane = ids[row] % kSide;
      const uint8_t *own = codes + panel * pieces * 64 + lane * 4;
      const uint16_t *scale = scales + panel * each * kSide + lane;
      const float factor = from_half(scale[0]), least = form == kQ4_1 ? from_half(scale[kSide]) : 0.0f;
      T *to = out + row * in + g * kGroup;
      for (int64_t i = 0; i < kGroup; i++) {
        const int32_t byte = form == kQ8_0 ? own[i / 4 * 64 + i % 4] : own[i / 8 * 64 + i % 4];
        const int32_t code = form == kQ8_0 ? byte : i / 4 % 2 ? byte >> 4 : byte & 15;
        store(to + i, (code - zero_of(form)) * factor + least);
      }
    }
}

}  // namespace

namespace bireme {

template <class T>
void multiply_share(const Part *parts, int64_t count, const T *x, int64_t rows, int64_t in, const T *add_to, T *out,
                    int64_t stride, int threads) {
  static thread_local Rounded rounded;  // each thread has its own: that takes less than to wait for another's
  rounded.make_room(rows, in);
  for (int64_t group = 0; group < rows * in / kGroup; group++) rounded.round(x + group * kGroup, group);
  for (const Part *part = parts; part < parts + count; part++) {
    const T *more = add_to ? add_to + part->begin : nullptr, *bias = static_cast<const T *>(part->bias);
    const Product<T> of{x,    part->codes, part->scales, bias,   more,      out + part->begin,
                        rows, in,          part->width,  stride, part->span};
    switch (part->form) {
      case kQ4_0: multiply_own<kQ4_0>(of, rounded, threads); break;
      case kQ4_1: multiply_own<kQ4_1>(of, rounded, threads); break;
      case kInt4: multiply_own<kInt4>(of, rounded, threads); break;
      default: multiply_own<kQ8_0>(of, rounded, threads);
    }
  }
}

template void multiply_share(const Part *, int64_t, const float *, int64_t, int64_t, const float *, float *, int64_t, int);
template void multiply_share(const Part *, int64_t, const uint16_t *, int64_t, int64_t, const uint16_t *, uint16_t *,
                             int64_t, int);

}  // namespace bireme

extern "C" const char *quantized_instructions() {
#if defined(HAS_VNNI)
  return "avx512_vnni";
#elif defined(HAS_AVX2)
  return "avx2";
#else
  return "none";
#endif
}

// x (rows, in), `in` a multiple of 32 * span; codes and scales of (width, in), in panels -> the first `width` of each `stride` of
// out, plus bias (width,) and as many of add_to (rows, stride), both or either null.
#define EXPORT(T, NAME) \
  extern "C" void multiply_quantized_##NAME(int form, const T *x, const uint8_t *codes, const uint16_t *scales, \
                                            const T *bias, const T *add_to, T *out, int64_t rows, int64_t in, \
                                            int64_t width, int64_t stride, int64_t span, int threads) { \
    multiply_any<T>(form, {x, codes, scales, bias, add_to, out, rows, in, width, stride, span}, threads); \
  } \
  extern "C" void take_quantized_rows_##NAME(int form, const uint8_t *codes, const uint16_t *scales, const int64_t *ids, \
                                             T *out, int64_t count, int64_t in) { \
    take_rows(form, codes, scales, ids, out, count, in); \
  }

EXPORT(float, float32)
EXPORT(uint16_t, bfloat16)
