// What a step of a decoder does between its matrix products, on a CPU: norms, rotary positions, paged attention, gates.
// And products of few rows with weights that are kept in bfloat16 while all else is float.
//
// Types are float and bfloat16 (as its 16 bits); everything is computed in float. Shapes: ../decoder_ops.py, which has the
// same functions in plain torch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kTile = 64;              // keys whose scores are kept at once
constexpr int64_t kFewElements = 1 << 15;  // less is done sooner than another thread is woken

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

// Relative error below 2e-7 in [-87, 87], which arguments are moved into. The compiler makes vectors of it, which it
// can't of the library's. Coefficients: Taylor's.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 87.0f);
  const float whole = std::floor(x * 1.44269504f + 0.5f);
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float power = 1.0f / 5040;
  power = power * rest + 1.0f / 720;
  power = power * rest + 1.0f / 120;
  power = power * rest + 1.0f / 24;
  power = power * rest + 1.0f / 6;
  power = power * rest + 0.5f;
  power = power * rest + 1.0f;
  power = power * rest + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return power * scale;
}

template <class T>
void rms_norm(const T *x, const float *weight, const T *add_to, T *out, int64_t rows, int64_t width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kFewElements)
  for (int64_t row = 0; row < rows; row++) {
    const T *own = x + row * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += load(own + i) * load(own + i);
    const float scale = 1.0f / std::sqrt(sum / width + eps);
    T *to = out + row * width;
    if (add_to == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, load(own + i) * scale * weight[i]);
    } else {
      const T *other = add_to + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; i++) store(to + i, load(other + i) + load(own + i) * scale * weight[i]);
    }
  }
}

template <class T>
void gate(const T *gate_up, T *out, int64_t rows, int64_t width, bool is_gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kFewElements)
  for (int64_t row = 0; row < rows; row++) {
    const T *gates = gate_up + 2 * row * width, *ups = gates + width;
    T *to = out + row * width;
    if (is_gelu) {  // tanh's approximation: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        const float x = load(gates + i), z = 1.59576912f * (x + 0.044715f * x * x * x);
        store(to + i, x / (1.0f + exponential(-z)) * load(ups + i));
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; i++) {
        const float x = load(gates + i);
        store(to + i, x / (1.0f + exponential(-x)) * load(ups + i));
      }
    }
  }
}

struct Layer {
  const float *q_norm, *k_norm;  // (K,), or null
  const float *cos_sin;          // (positions, K): cosines of the K / 2 angles, then their sines
  void *keys, *values;           // (pool rows, N K)
  int64_t heads, kv_heads, size, block_size, window;
  float eps, scaling, softcap;  // window and softcap: 0, none
};

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

// `group` queries (group, K), scaled already, over the tokens of one sequence and one key/value head -> out (group, K).
template <class T, int K>
void attend_to(const float *queries, int64_t group, int64_t head, const Layer &layer, const int32_t *blocks,
               int64_t length, T *out) {
  const int64_t size = K ? K : layer.size, row = layer.kv_heads * size;
  float scores[group * kTile], sums[group * size], most[group], total[group], wide[size];
  std::fill(sums, sums + group * size, 0.0f);
  std::fill(most, most + group, -INFINITY);
  std::fill(total, total + group, 0.0f);
  int64_t at = layer.window && length > layer.window ? length - layer.window : 0;
  while (at < length) {
    const int64_t inside = at % layer.block_size;
    const int64_t count = std::min({layer.block_size - inside, length - at, kTile});
    const int64_t first = (blocks[at / layer.block_size] * layer.block_size + inside) * row + head * size;
    const T *keys = static_cast<const T *>(layer.keys) + first;
    const T *values = static_cast<const T *>(layer.values) + first;
    for (int64_t j = 0; j < count; j++) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) wide[i] = load(keys + j * row + i);
      for (int64_t g = 0; g < group; g++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += queries[g * size + i] * wide[i];
        scores[g * kTile + j] = sum;
      }
    }
    for (int64_t g = 0; g < group; g++) {
      float *own = scores + g * kTile, highest = most[g], sum = 0;
      if (layer.softcap != 0.0f)
        for (int64_t j = 0; j < count; j++) own[j] = layer.softcap * std::tanh(own[j] / layer.softcap);
      for (int64_t j = 0; j < count; j++) highest = std::max(highest, own[j]);
      const float fade = exponential(most[g] - highest);
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < count; j++) {
        own[j] = exponential(own[j] - highest);
        sum += own[j];
      }
      most[g] = highest;
      total[g] = total[g] * fade + sum;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sums[g * size + i] *= fade;
    }
    for (int64_t j = 0; j < count; j++) {
#pragma omp simd
      for (int64_t i = 0; i < size; i++) wide[i] = load(values + j * row + i);
      for (int64_t g = 0; g < group; g++) {
        const float weight = scores[g * kTile + j];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sums[g * size + i] += weight * wide[i];
      }
    }
    at += count;
  }
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < size; i++) store(out + g * size + i, sums[g * size + i] / total[g]);
}

template <class T, int K>
void attend(T *qkv, const int64_t *positions, const int64_t *slots, int64_t tokens, const int32_t *blocks,
            const int32_t *lengths, int64_t decodes, int64_t columns, T *out, const Layer &layer, int threads) {
  const int64_t size = K ? K : layer.size, heads = layer.heads, kv_heads = layer.kv_heads, group = heads / kv_heads;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(dynamic, 1) if (tokens * kv_heads > 1)
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t head = 0; head < kv_heads; head++) {
      T *own = qkv + token * (heads + 2 * kv_heads) * size;
      T *query = own + head * group * size, *key = own + (heads + head) * size, *value = key + kv_heads * size;
      const float *cos_sin = layer.cos_sin + positions[token] * size;
      const int64_t to = (slots[token] * kv_heads + head) * size;
      float queries[group * size], turned[size];
      turn(key, layer.k_norm, cos_sin, size, layer.eps, turned);
      for (int64_t i = 0; i < size; i++) store(static_cast<T *>(layer.keys) + to + i, turned[i]);
      std::copy(value, value + size, static_cast<T *>(layer.values) + to);
      for (int64_t g = 0; g < group; g++)
        turn(query + g * size, layer.q_norm, cos_sin, size, layer.eps, queries + g * size);
      if (token < decodes) {
        for (int64_t i = 0; i < group * size; i++) queries[i] *= layer.scaling;
        attend_to<T, K>(queries, group, head, layer, blocks + token * columns, lengths[token],
                        out + (token * heads + head * group) * size);
      } else {
        for (int64_t i = 0; i < size; i++) store(key + i, turned[i]);
        for (int64_t i = 0; i < group * size; i++) store(query + i, queries[i]);
      }
    }
}

template <class T>
void attend_any(T *qkv, const int64_t *positions, const int64_t *slots, int64_t tokens, const int32_t *blocks,
                const int32_t *lengths, int64_t decodes, int64_t columns, T *out, const Layer &layer, int threads) {
#define SIZE(K) \
  if (K == 0 || layer.size == K) \
    return attend<T, K>(qkv, positions, slots, tokens, blocks, lengths, decodes, columns, out, layer, threads);
  SIZE(64) SIZE(128) SIZE(256) SIZE(0)
#undef SIZE
}

// One row with `kAtOnce` rows of weights: so many sums are under way that none waits for its own addition.
constexpr int64_t kAtOnce = 4;

inline void multiply(const float *x, const uint16_t *weight, int64_t in, float *out) {
  const uint16_t *second = weight + in, *third = second + in, *fourth = third + in;
  float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < in; i++) {
    a += x[i] * load(weight + i);
    b += x[i] * load(second + i);
    c += x[i] * load(third + i);
    d += x[i] * load(fourth + i);
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

}  // namespace

// x (rows, in), weight (width, in), width a multiple of 4 -> out (rows, width), plus bias (width,) and add_to (rows,
// width), both or either null.
extern "C" void few_rows(const float *x, const uint16_t *weight, const float *bias, const float *add_to, float *out,
                         int64_t rows, int64_t in, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < width; first += kAtOnce)
    for (int64_t row = 0; row < rows; row++) {
      float found[kAtOnce];
      multiply(x + row * in, weight + first * in, in, found);
      const int64_t to = row * width + first;
      for (int64_t i = 0; i < kAtOnce; i++)
        out[to + i] = found[i] + (bias ? bias[first + i] : 0.0f) + (add_to ? add_to[to + i] : 0.0f);
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
  extern "C" void attend_##NAME(T *qkv, const int64_t *positions, const int64_t *slots, int64_t tokens, \
                                const int32_t *blocks, const int32_t *lengths, int64_t decodes, int64_t columns, \
                                T *out, const Layer *layer, int threads) { \
    attend_any(qkv, positions, slots, tokens, blocks, lengths, decodes, columns, out, *layer, threads); \
  }

EXPORT(float, float32)
EXPORT(uint16_t, bfloat16)
