// What a step of a decoder does between its matrix products, on a CPU: norms, rotary positions, paged attention, gates.
// And products with weights of bfloat16: of float, and where the CPU has tiles (AMX) of bfloat16.
//
// Types are float and bfloat16 (as its 16 bits); everything is computed in float. Shapes: ../forward/decoder_ops.py,
// which has the same functions in plain torch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "parts.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

using bireme::Layer;
using bireme::Tokens;

namespace {

constexpr int64_t kTile = 64;              // keys whose scores are kept at once; whole vectors of them
constexpr int64_t kFewElements = 1 << 15;  // less is done sooner than another thread is woken

// Lanes of a vector; the rows of a product, and the queries with kAtOnce keys, whose sums the registers hold.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kMostRows = 12, kMostQueries = 6;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kMostRows = 6, kMostQueries = 3;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kMostRows = 12, kMostQueries = 6;
#else
constexpr int64_t kLanes = 4, kMostRows = 4, kMostQueries = 3;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float Fours __attribute__((vector_size(16)));
typedef int32_t Picks __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

inline float load(const float *at) { return *at; }

inline float load(const uint16_t *at) {
  const uint32_t bits = static_cast<uint32_t>(*at) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline Floats load_lanes(const float *at) {
  Floats values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

inline Floats load_lanes(const uint16_t *at) {
  Shorts upper;
  std::memcpy(&upper, at, sizeof upper);
#if defined(__AVX512F__)  // gcc makes four instructions of what one does
  const Bits bits = (Bits)_mm512_cvtepu16_epi32((__m256i)upper);
#elif defined(__AVX2__)
  const Bits bits = (Bits)_mm256_cvtepu16_epi32((__m128i)upper);
#else
  const Bits bits = __builtin_convertvector(upper, Bits);
#endif
  return (Floats)(bits << 16);
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Picks{__VA_ARGS__})
#endif

inline Fours halved(Floats values) {
  Fours parts[kLanes / 4];
  std::memcpy(parts, &values, sizeof parts);
  for (int64_t n = 1; n < kLanes / 4; n++) parts[0] += parts[n];
  return parts[0];
}

// The sum of each one's lanes.
inline Fours sums_of(Floats a, Floats b, Floats c, Floats d) {
  const Fours A = halved(a), B = halved(b), C = halved(c), D = halved(d);
  const Fours left = PICK(A, B, 0, 4, 1, 5) + PICK(A, B, 2, 6, 3, 7);
  const Fours right = PICK(C, D, 0, 4, 1, 5) + PICK(C, D, 2, 6, 3, 7);
  return PICK(left, right, 0, 1, 4, 5) + PICK(left, right, 2, 3, 6, 7);
}

inline void store(float *at, float value) { *at = value; }

inline void store(uint16_t *at, float value) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *at = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

inline void store_lanes(float *at, Floats values) { std::memcpy(at, &values, sizeof values); }

inline void store_lanes(uint16_t *at, Floats values) {
  Bits bits = (Bits)values;
  bits = values == values ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : Bits{} + 0x7fc0u;
  const Shorts upper = __builtin_convertvector(bits, Shorts);
  std::memcpy(at, &upper, sizeof upper);
}

// Relative error below 2e-7 in [-87, 87], which arguments are moved into; NaN stays NaN. Coefficients: Taylor's.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  x = x > 87.0f ? Floats{} + 87.0f : x;
  const Floats turned = x * 1.44269504f;
  const Ints number = __builtin_convertvector(turned < 0.0f ? turned - 0.5f : turned + 0.5f, Ints);
  const Floats whole = __builtin_convertvector(number, Floats);
  const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats power = Floats{} + 1.0f / 5040;
  power = power * rest + 1.0f / 720;
  power = power * rest + 1.0f / 120;
  power = power * rest + 1.0f / 24;
  power = power * rest + 1.0f / 6;
  power = power * rest + 0.5f;
  power = power * rest + 1.0f;
  power = power * rest + 1.0f;
  return power * (Floats)((number + 127) << 23);
}

// The first `count` lanes; the others are 0.
template <class T>
inline Floats load_some(const T *at, int64_t count) {
  T found[kLanes] = {};
  std::copy(at, at + count, found);
  return load_lanes(found);
}

// Norm one head and turn it by its position.
template <class T>
inline void turn(const T *from, const float *norm, const float *cos_sin, int64_t size, float eps, float *to) {
  float scale = 1.0f;
  if (norm != nullptr) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += load(from + i) * load(from + i);
    scale = 1.0f / std::sqrt(sum / size + eps);
  }
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float left = load(from + i) * scale, right = load(from + half + i) * scale;
    if (norm != nullptr) left *= norm[i], right *= norm[half + i];
    const float cosine = cos_sin[i], sine = cos_sin[half + i];
    to[i] = left * cosine - right * sine;
    to[half + i] = right * cosine + left * sine;
  }
}

constexpr int64_t kAtOnce = 4;  // keys or values: so many sums are under way that none waits for its own addition
constexpr int64_t kAhead = 8;   // tokens whose rows are under way to the cache

// The keys or values of tokens that lie together, and of those that are computed after them.
template <class T>
struct Tile {
  const T *own, *next;  // the first token's
  int64_t row, count;

  const T *at(int64_t token) const { return token < count ? own + token * row : next + (token - count) * row; }

  // Where kAtOnce tokens from `token` on have what begins at `offset`; those beyond the last are the last again.
  void begins(int64_t token, int64_t offset, const T **found) const {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kAtOnce; n++) found[n] = own + std::min(token + n, count - 1) * row + offset;
  }

  // Have the cache fetch a head's share of kAtOnce tokens. Rows are asked for as they lie, head after head: then the
  // cache's own prefetcher follows, which has several times as many lines under way as a core has. Inline: gcc takes a
  // function that does no more for one that does nothing.
  __attribute__((always_inline)) void fetch(int64_t token, int64_t head, int64_t heads, int64_t size) const {
    for (int64_t n = head * kAtOnce; n < (head + 1) * kAtOnce; n++) {
      const T *from = at(token + kAhead + n / heads) + n % heads * size;
      for (int64_t i = 0; i < size; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(from + i);
    }
  }
};

// Queries (G, size) and kAtOnce keys -> scores (G, kTile).
template <class T, int G>
void score(int64_t size, const T *const *keys, const float *queries, float *scores) {
  const int64_t whole = size / kLanes * kLanes;
  Floats sums[G][kAtOnce] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kAtOnce; n++) {
      const Floats key = load_lanes(keys[n] + i);
#pragma GCC unroll 6
      for (int64_t g = 0; g < G; g++) sums[g][n] += load_lanes(queries + g * size + i) * key;
    }
  }
#pragma GCC unroll 6
  for (int64_t g = 0; g < G; g++) {
    Fours found = sums_of(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
    for (int64_t i = whole; i < size; i++)
      for (int64_t n = 0; n < kAtOnce; n++) found[n] += queries[g * size + i] * load(keys[n] + i);
    std::memcpy(scores + g * kTile, &found, sizeof found);
  }
}

// sums (G, size) += weights (G, kTile) * kAtOnce values.
template <class T, int G>
void add_values(int64_t size, const T *const *values, const float *weights, float *sums) {
  const int64_t whole = size / kLanes * kLanes;
  Floats factors[G][kAtOnce];
#pragma GCC unroll 6
  for (int64_t g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int64_t n = 0; n < kAtOnce; n++) factors[g][n] = Floats{} + weights[g * kTile + n];
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats added[G];
#pragma GCC unroll 6
    for (int64_t g = 0; g < G; g++) added[g] = load_lanes(sums + g * size + i);
#pragma GCC unroll 4
    for (int64_t n = 0; n < kAtOnce; n++) {
      const Floats value = load_lanes(values[n] + i);
#pragma GCC unroll 6
      for (int64_t g = 0; g < G; g++) added[g] += factors[g][n] * value;
    }
#pragma GCC unroll 6
    for (int64_t g = 0; g < G; g++) std::memcpy(sums + g * size + i, &added[g], sizeof added[g]);
  }
  for (int64_t i = whole; i < size; i++)
    for (int64_t g = 0; g < G; g++)
      for (int64_t n = 0; n < kAtOnce; n++) sums[g * size + i] += weights[g * kTile + n] * load(values[n] + i);
}

// The same of `count` queries, at most G.
template <class T, int G = kMostQueries>
void score_some(int64_t count, int64_t size, const T *const *keys, const float *queries, float *scores) {
  if constexpr (G > 0) {
    if (count < G) return score_some<T, G - 1>(count, size, keys, queries, scores);
    score<T, G>(size, keys, queries, scores);
  }
}

template <class T, int G = kMostQueries>
void add_some(int64_t count, int64_t size, const T *const *values, const float *weights, float *sums) {
  if constexpr (G > 0) {
    if (count < G) return add_some<T, G - 1>(count, size, values, weights, sums);
    add_values<T, G>(size, values, weights, sums);
  }
}

// Scores of a tile (queries, kTile) -> weights of its values; sums (queries, size), most and total (queries,), of the
// tiles before, are made to fit.
inline void weigh(int64_t queries, int64_t count, const Layer &layer, float *scores, float *sums, float *most,
                  float *total) {
  for (int64_t g = 0; g < queries; g++) {
    float *own = scores + g * kTile, highest = most[g], sum = 0;
    if (layer.softcap != 0.0f)
      for (int64_t j = 0; j < count; j++) own[j] = layer.softcap * std::tanh(own[j] / layer.softcap);
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < count; j++) highest = std::max(highest, own[j]);
    std::fill(own + count, own + kTile, -INFINITY);
    for (int64_t j = 0; j < count; j += kLanes) store_lanes(own + j, exponential(load_lanes(own + j) - highest));
    std::fill(own + count, own + kTile, 0.0f);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) sum += own[j];
    const float fade = exponential(Floats{} + (most[g] - highest))[0];
    most[g] = highest;
    total[g] = total[g] * fade + sum;
#pragma omp simd
    for (int64_t i = 0; i < layer.size; i++) sums[g * layer.size + i] *= fade;
  }
}

// Queries (heads, group, size), scaled already, over the tokens of one sequence and `heads` key/value heads from `head` on
// -> out (heads, group, size). Tile by tile for all heads: a token's heads lie together, blocks lie anywhere.
template <class T>
void attend_to(const float *queries, int64_t group, int64_t head, int64_t heads, const Layer &layer,
               const int64_t *blocks, int64_t length, T *out) {
  const int64_t size = layer.size, row = layer.kv_heads * size, all = heads * group;
  const int64_t parts = (group + kMostQueries - 1) / kMostQueries;
  float scores[all * kTile], sums[all * size], most[all], total[all];
  std::fill(sums, sums + all * size, 0.0f);
  std::fill(most, most + all, -INFINITY);
  std::fill(total, total + all, 0.0f);
  if (layer.sinks != nullptr) {
    std::copy(layer.sinks + head * group, layer.sinks + head * group + all, most);
    std::fill(total, total + all, 1.0f);
  }
  const auto place = [&](int64_t token) {
    return (blocks[token / layer.block_size] * layer.block_size + token % layer.block_size) * row + head * size;
  };
  const auto each_part = [&](int64_t h, auto compute) {
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = part * group / parts, end = (part + 1) * group / parts;
      compute(h * group + begin, end - begin);
    }
  };
  int64_t at = layer.window && length > layer.window ? length - layer.window : 0;
  while (at < length) {
    const int64_t count = std::min({layer.block_size - at % layer.block_size, length - at, kTile});
    const int64_t own = place(at), next = at + count < length ? place(at + count) : own;
    const T *pool = static_cast<const T *>(layer.keys), *of[kAtOnce];
    const Tile<T> keys{pool + own, pool + next, row, count};
    pool = static_cast<const T *>(layer.values);
    const Tile<T> values{pool + own, pool + next, row, count};
    for (int64_t j = 0; j < count; j += kAtOnce)
      for (int64_t h = 0; h < heads; h++) {
        keys.fetch(j, h, heads, size);
        keys.begins(j, h * size, of);
        each_part(h, [&](int64_t g, int64_t some) {
          score_some<T>(some, size, of, queries + g * size, scores + g * kTile + j);
        });
      }
    weigh(all, count, layer, scores, sums, most, total);
    for (int64_t j = 0; j < count; j += kAtOnce)
      for (int64_t h = 0; h < heads; h++) {
        values.fetch(j, h, heads, size);
        values.begins(j, h * size, of);
        each_part(h, [&](int64_t g, int64_t some) {
          add_some<T>(some, size, of, scores + g * kTile + j, sums + g * size);
        });
      }
    at += count;
  }
  for (int64_t g = 0; g < all; g++)
    for (int64_t i = 0; i < size; i++) store(out + g * size + i, sums[g * size + i] / total[g]);
}

}  // namespace

namespace bireme {

template <class T>
void norm_row(const T *x, const float *weight, const T *add_to, T *out, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; i++) sum += load(x + i) * load(x + i);
  const float scale = 1.0f / std::sqrt(sum / width + eps);
  if (add_to == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) store(out + i, load(x + i) * scale * weight[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) store(out + i, load(add_to + i) + load(x + i) * scale * weight[i]);
  }
}

template <class T>
void gate_row(const T *gate_up, T *out, int64_t width, bool is_gelu) {
  const T *ups = gate_up + width;
  T rest[kLanes];
  // GELU by tanh's approximation: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
  const auto compute = [&](Floats x, Floats up) {
    return x / (1.0f + exponential(is_gelu ? -1.59576912f * (x + 0.044715f * x * x * x) : -x)) * up;
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    store_lanes(out + i, compute(load_lanes(gate_up + i), load_lanes(ups + i)));
  store_lanes(rest, compute(load_some(gate_up + i, width - i), load_some(ups + i, width - i)));
  std::copy(rest, rest + width - i, out + i);
}

int64_t heads_together(int64_t tokens, int64_t kv_heads, int threads) {
  int64_t together = kv_heads;
  while (together > 1 && tokens * (kv_heads / together) < 2 * threads)
    do together--;
    while (kv_heads % together);
  return together;
}

template <class T>
void keep_head(T *qkv, const Tokens &of, int64_t token, int64_t head, const Layer &layer) {
  const int64_t size = layer.size, heads = layer.heads, kv_heads = layer.kv_heads;
  const int64_t position = of.positions[token], *blocks = of.tables + of.rows[token] * of.columns;
  const int64_t slot = blocks[position / layer.block_size] * layer.block_size + position % layer.block_size;
  const int64_t to = (slot * kv_heads + head) * size;
  T *key = qkv + (token * (heads + 2 * kv_heads) + heads + head) * size, *value = key + kv_heads * size;
  float turned[size];
  turn(key, layer.k_norm, layer.cos_sin + position * size, size, layer.eps, turned);
  for (int64_t i = 0; i < size; i++) store(static_cast<T *>(layer.keys) + to + i, turned[i]);
  std::copy(value, value + size, static_cast<T *>(layer.values) + to);
  if (token >= of.decodes)
    for (int64_t i = 0; i < size; i++) store(key + i, turned[i]);
}

template <class T>
void attend_heads(T *qkv, const Tokens &of, int64_t token, int64_t head, int64_t together, T *out, const Layer &layer) {
  const int64_t size = layer.size, heads = layer.heads, kv_heads = layer.kv_heads, group = heads / kv_heads;
  const int64_t position = of.positions[token], *blocks = of.tables + of.rows[token] * of.columns;
  const float *cos_sin = layer.cos_sin + position * size;
  float queries[together * group * size];
  for (int64_t h = 0; h < together; h++) {
    if (!of.drafts) keep_head(qkv, of, token, head + h, layer);
    T *query = qkv + (token * (heads + 2 * kv_heads) + (head + h) * group) * size;
    float *turned_queries = queries + h * group * size;
    for (int64_t g = 0; g < group; g++)
      turn(query + g * size, layer.q_norm, cos_sin, size, layer.eps, turned_queries + g * size);
    if (token >= of.decodes)
      for (int64_t i = 0; i < group * size; i++) store(query + i, turned_queries[i]);
  }
  if (token < of.decodes) {
    for (int64_t i = 0; i < together * group * size; i++) queries[i] *= layer.scaling;
    attend_to(queries, group, head, together, layer, blocks, position + 1, out + (token * heads + head * group) * size);
  }
}

#define INSTANTIATE(T) \
  template void norm_row(const T *, const float *, const T *, T *, int64_t, float); \
  template void gate_row(const T *, T *, int64_t, bool); \
  template void keep_head(T *, const Tokens &, int64_t, int64_t, const Layer &); \
  template void attend_heads(T *, const Tokens &, int64_t, int64_t, int64_t, T *, const Layer &);

INSTANTIATE(float)
INSTANTIATE(uint16_t)

}  // namespace bireme

namespace {

template <class T>
void rms_norm(const T *x, const float *weight, const T *add_to, T *out, int64_t rows, int64_t width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kFewElements)
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * width;
    bireme::norm_row(x + at, weight, add_to ? add_to + at : nullptr, out + at, width, eps);
  }
}

template <class T>
void gate(const T *gate_up, T *out, int64_t rows, int64_t width, bool is_gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kFewElements)
  for (int64_t row = 0; row < rows; row++)
    bireme::gate_row(gate_up + 2 * row * width, out + row * width, width, is_gelu);
}

template <class T>
void attend(T *qkv, const Tokens &of, T *out, const Layer &layer, int threads) {
  if (of.drafts) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t token = 0; token < of.count; token++)
      for (int64_t head = 0; head < layer.kv_heads; head++) bireme::keep_head(qkv, of, token, head, layer);
  }
  const int64_t together = bireme::heads_together(of.count, layer.kv_heads, threads);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(dynamic, 1) if (of.count * layer.kv_heads > 1)
  for (int64_t token = 0; token < of.count; token++)
    for (int64_t head = 0; head < layer.kv_heads; head += together)
      bireme::attend_heads(qkv, of, token, head, together, out, layer);
}

// Weights of two bytes lie in panels of 2 kLanes outputs: (panels, in, kLanes, 2), so that a vector of 32 bits a lane holds
// one output in its lower halves and one in its upper. A tile is R rows of x and P panels; its sums stay in registers, as
// many as hide an addition's latency, and each is added up in the same order whatever R and P are: a row's result does
// not depend on the rows beside it.
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kMostPanels = 4;
constexpr int64_t kDepth = 1024, kChunk = 192;  // of x: what panels are multiplied with while it stays in a cache

template <class T>
struct Product {
  const T *x;              // (rows, in)
  const uint16_t *weight;  // panels
  const T *bias, *add_to;
  T *out;  // (rows, width)
  int64_t in, width;
};

template <int R, int P>
void multiply_tile(const Product<float> &of, int64_t row, int64_t panel, int64_t at) {
  const float *x = of.x + row * of.in;
  const uint16_t *weight = of.weight + panel * of.in * kPanel;
  const int64_t end = std::min(at + kDepth, of.in);
  Floats sums[P][R][2] = {};
  for (int64_t k = at; k < end; k++) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < P; p++) {
      Bits both;
      std::memcpy(&both, weight + (p * of.in + k) * kPanel, sizeof both);
      const Floats low = (Floats)(both << 16), high = (Floats)(both & 0xffff0000u);
#pragma GCC unroll 12
      for (int64_t r = 0; r < R; r++) {
        sums[p][r][0] += x[r * of.in + k] * low;
        sums[p][r][1] += x[r * of.in + k] * high;
      }
    }
  }
  for (int64_t p = 0; p < P; p++)
    for (int64_t r = 0; r < R; r++) {
      float found[kPanel];
      std::memcpy(found, sums[p][r], sizeof found);
      const int64_t first = (panel + p) * kPanel, to = (row + r) * of.width + first;
      const int64_t count = std::min(kPanel, of.width - first);
      const float *other = at ? of.out : of.add_to, *bias = at ? nullptr : of.bias;
      for (int64_t i = 0; i < count; i++)
        of.out[to + i] = found[i] + (bias ? bias[first + i] : 0.0f) + (other ? other[to + i] : 0.0f);
    }
}

// `rows` of them, at most R, and `panels`.
template <int R>
void multiply_rows(const Product<float> &of, int64_t rows, int64_t row, int64_t panels, int64_t panel, int64_t at) {
  if constexpr (R > 0) {
    if (rows < R) return multiply_rows<R - 1>(of, rows, row, panels, panel, at);
    constexpr int64_t P = R == 1 ? 4 : R <= 3 ? 2 : 1;
    for (; panels >= P; panel += P, panels -= P) multiply_tile<R, P>(of, row, panel, at);
    for (; panels > 0; panel++, panels--) multiply_tile<R, 1>(of, row, panel, at);
  }
}

#if defined(HAS_TILES)
// Products of bfloat16 with tiles. Weights lie in panels of kSide outputs: (panels, in / 2, kSide, 2), so that kStep of x's
// columns are a tile. Two panels are multiplied with 32 rows at once, over all columns: a row's result does not depend on
// the rows beside it.
constexpr int64_t kSide = 16, kStep = 32;
constexpr int64_t kKept = 1 << 19;  // elements of x that stay in a cache while panels pass

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums of up to 32 rows, two panels each; 4 and 5 their x, 6 and 7 the panels.
void shape_tiles(int64_t rows) {
  const uint8_t upper = std::min(rows, kSide), lower = rows - upper;
  const uint8_t counts[] = {upper, upper, lower, lower, upper, lower, kSide, kSide};
  TileShapes shapes;
  for (int64_t tile = 0; tile < 8; tile++)
    if (counts[tile]) shapes.rows[tile] = counts[tile], shapes.bytes[tile] = 64;
  asm volatile("" ::"r"(&shapes) : "memory");  // gcc thinks that only the first eight bytes are read
  _tile_loadconfig(&shapes);
}

inline __m512 lanes_of(const uint16_t *at, __mmask16 wanted) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

template <bool kHasLower>
void multiply_tiles(const Product<uint16_t> &of, int64_t row, int64_t rows, int64_t panel) {
  const uint16_t *x = of.x + row * of.in, *left = of.weight + panel * of.in * kSide, *right = left + of.in * kSide;
  _tile_zero(0);
  _tile_zero(1);
  if (kHasLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < of.in; k += kStep) {
    _tile_loadd(4, x + k, 2 * of.in);
    _tile_loadd(6, left + k * kSide, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + k * kSide, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kHasLower) {
      _tile_loadd(5, x + kSide * of.in + k, 2 * of.in);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[2][2][kSide][kSide];
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if (kHasLower) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t p = 0; p < 2; p++) {
      const int64_t first = (panel + p) * kSide, to = (row + r) * of.width + first;
      const __mmask16 wanted = (1u << std::clamp(of.width - first, int64_t{0}, kSide)) - 1;
      __m512 found = _mm512_load_ps(sums[r / kSide][p][r % kSide]);
      if (of.bias) found = _mm512_add_ps(found, lanes_of(of.bias + first, wanted));
      if (of.add_to) found = _mm512_add_ps(found, lanes_of(of.add_to + to, wanted));
      _mm256_mask_storeu_epi16(of.out + to, wanted, (__m256i)_mm512_cvtneps_pbh(found));
    }
}
#endif

}  // namespace

// Whether there is multiply_tiles, and Linux lets this process have tiles, for which it must ask.
extern "C" int has_tiles() {
#if defined(HAS_TILES)
  constexpr long kAsk = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAsk, kTiles) == 0;
#else
  return 0;
#endif
}

#if defined(HAS_TILES)
// x (rows, in), `in` a multiple of kStep, weight: panels of (width, in), padded to an even number -> out (rows, width), plus
// bias (width,) and add_to (rows, width), both or either null.
extern "C" void multiply_bfloat16(const uint16_t *x, const uint16_t *weight, const uint16_t *bias,
                                  const uint16_t *add_to, uint16_t *out, int64_t rows, int64_t in, int64_t width, int threads) {
  const Product<uint16_t> of{x, weight, bias, add_to, out, in, width};
  const int64_t pairs = (width + 2 * kSide - 1) / (2 * kSide);
  const int64_t step = std::clamp(pairs / (4 * threads), int64_t{1}, int64_t{4});
  const int64_t chunks = rows * in / kKept + 1, chunk = (rows / chunks + 32) / 32 * 32;
#pragma omp parallel num_threads(threads)
  {
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t end = std::min(rows, first + chunk);
#pragma omp for schedule(dynamic, 1)
      for (int64_t begin = 0; begin < pairs; begin += step) {
        int64_t shaped = 0;
        for (int64_t pair = begin; pair < std::min(begin + step, pairs); pair++)
          for (int64_t row = first; row < end; row += 32) {
            const int64_t count = std::min(end - row, int64_t{32});
            if (count != shaped) shape_tiles(shaped = count);
            const auto multiply = count > kSide ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(of, row, count, 2 * pair);
          }
      }
    }
    _tile_release();
  }
}
#endif

extern "C" int64_t num_lanes() { return kLanes; }

// x (rows, in), weight: panels of (width, in), padded -> out (rows, width), plus bias (width,) and add_to (rows, width),
// both or either null.
extern "C" void multiply_float32(const float *x, const uint16_t *weight, const float *bias, const float *add_to, float *out,
                         int64_t rows, int64_t in, int64_t width, int threads) {
  const Product<float> of{x, weight, bias, add_to, out, in, width};
  const int64_t panels = (width + kPanel - 1) / kPanel;
  const int64_t step = std::clamp(panels / (4 * threads), int64_t{1}, kMostPanels);
  for (int64_t first = 0; first < rows; first += kChunk) {
    const int64_t count = std::min(kChunk, rows - first), blocks = (count + kMostRows - 1) / kMostRows;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t panel = 0; panel < panels; panel += step)
      for (int64_t at = 0; at < in; at += kDepth)
        for (int64_t block = 0; block < blocks; block++) {
          const int64_t row = first + block * count / blocks, end = first + (block + 1) * count / blocks;
          multiply_rows<kMostRows>(of, end - row, row, std::min(step, panels - panel), panel, at);
        }
  }
}

#define EXPORT(T, NAME) \
  extern "C" void rms_norm_##NAME(const T *x, const float *weight, const T *add_to, T *out, int64_t rows, \
                                  int64_t width, float eps, int threads) { \
    rms_norm(x, weight, add_to, out, rows, width, eps, threads); \
  } \
  extern "C" void gate_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width, int is_gelu, int threads) { \
    gate(gate_up, out, rows, width, is_gelu != 0, threads); \
  } \
  extern "C" void attend_##NAME(T *qkv, const int64_t *positions, const int64_t *rows, int64_t tokens, \
                                int64_t decodes, int drafts, const int64_t *tables, int64_t columns, T *out, \
                                const Layer *layer, int threads) { \
    attend(qkv, {positions, rows, tables, columns, tokens, decodes, drafts}, out, *layer, threads); \
  }

EXPORT(float, float32)
EXPORT(uint16_t, bfloat16)
