// The layers of a decode step of few rows in one parallel part, with weights that stay as their file has them.
//
// Between two single operations threads end and begin again, and Python looks for the next one: of a small model that
// takes as long as the products. Here threads wait for each other five times a layer. What is quick (norms, gates) each
// thread computes for itself. Sums have the order of the single operations: results are the same to the last bit.

#include <algorithm>
#include <vector>

#include "parts.h"

namespace {

using namespace bireme;

// x (rows, in) -> (rows, out).
struct Linear {
  const Part *parts;
  int64_t count, in, out;
};

struct DecoderLayer {
  const float *attention_norm, *mlp_norm;  // (hidden,)
  const float *attention_post_norm, *mlp_post_norm;  // the same, or null
  Linear qkv, output, gate_up, down;
  const Layer *attention;
  int64_t group;  // of Tokens
};

struct Step {
  const DecoderLayer *layers;
  int64_t count, rows, hidden;
  const Tokens *groups;
  float eps;
  bool is_gelu;
  int threads;
};

template <class T>
T *room(std::vector<T> &values, int64_t count) {
  if (values.size() < static_cast<size_t>(count)) values.resize(count);
  return values.data();
}

// x (rows, hidden) -> x.
template <class T>
void decode(const Step &of, T *x) {
  const int64_t rows = of.rows, hidden = of.hidden;
  int64_t widest = 0, attended_width = 0, gated_width = 0;
  for (const DecoderLayer *layer = of.layers; layer < of.layers + of.count; layer++) {
    widest = std::max({widest, layer->qkv.out, layer->gate_up.out});
    attended_width = std::max(attended_width, layer->output.in);
    gated_width = std::max(gated_width, layer->down.in);
  }
  std::vector<T> between(rows * widest), attended(rows * attended_width), others(rows * hidden), products(rows * hidden);
#pragma omp parallel num_threads(of.threads)
  {
    static thread_local std::vector<T> kept_normed, kept_gated;
    T *normed = room(kept_normed, rows * hidden), *gated = room(kept_gated, rows * gated_width);
    T *from = x, *to = others.data();
    const auto norm = [&](const float *weight) {
      for (int64_t row = 0; row < rows; row++)
        norm_row<T>(from + row * hidden, weight, nullptr, normed + row * hidden, hidden, of.eps);
    };
    const auto multiply = [&](const Linear &by, const T *inner, const T *add_to, T *out) {
      multiply_share<T>(by.parts, by.count, inner, rows, by.in, add_to, out, by.out, of.threads);
#pragma omp barrier
    };
    const auto add = [&](const Linear &by, const T *inner, const float *post_norm) {
      if (post_norm == nullptr) {
        multiply(by, inner, from, to);
      } else {
        multiply(by, inner, nullptr, products.data());
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
          const int64_t at = row * hidden;
          norm_row<T>(products.data() + at, post_norm, from + at, to + at, hidden, of.eps);
        }
      }
      std::swap(from, to);
    };
    for (const DecoderLayer *layer = of.layers; layer < of.layers + of.count; layer++) {
      norm(layer->attention_norm);
      multiply(layer->qkv, normed, nullptr, between.data());
      const Layer &attention = *layer->attention;
      const int64_t together = heads_together(rows, attention.kv_heads, of.threads);
      const Tokens &tokens = of.groups[layer->group];
      if (tokens.drafts) {
#pragma omp for collapse(2)
        for (int64_t token = 0; token < rows; token++)
          for (int64_t head = 0; head < attention.kv_heads; head++)
            keep_head<T>(between.data(), tokens, token, head, attention);
      }
#pragma omp for collapse(2) schedule(dynamic, 1)
      for (int64_t token = 0; token < rows; token++)
        for (int64_t head = 0; head < attention.kv_heads; head += together)
          attend_heads<T>(between.data(), tokens, token, head, together, attended.data(), attention);
      add(layer->output, attended.data(), layer->attention_post_norm);
      norm(layer->mlp_norm);
      multiply(layer->gate_up, normed, nullptr, between.data());
      for (int64_t row = 0; row < rows; row++)
        gate_row<T>(between.data() + row * layer->gate_up.out, gated + row * layer->down.in, layer->down.in, of.is_gelu);
      add(layer->down, gated, layer->mlp_post_norm);
    }
  }
}

}  // namespace

#define EXPORT(T, NAME) \
  extern "C" void decode_##NAME(const DecoderLayer *layers, int64_t count, T *x, int64_t rows, int64_t hidden, \
                                const Tokens *groups, float eps, int is_gelu, int threads) { \
    decode<T>({layers, count, rows, hidden, groups, eps, is_gelu != 0, threads}, x); \
  }

EXPORT(float, float32)
EXPORT(uint16_t, bfloat16)
