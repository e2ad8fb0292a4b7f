// What single operations and a whole step of few rows (step.cpp) are made of.
//
// Types T are float and bfloat16 (as its 16 bits). None of these starts threads.

#pragma once

#include <cstdint>

namespace bireme {

// Of attention.
struct Layer {
  const float *q_norm, *k_norm;  // (K,), or null
  const float *cos_sin;          // (positions, K): cosines of the K / 2 angles, then their sines
  const float *sinks;            // (heads,): scores that take a share and bring no value, or null
  void *keys, *values;           // (pool rows, N K)
  int64_t heads, kv_heads, size, block_size, window;
  float eps, scaling, softcap;  // window and softcap: 0, none
};

// Tokens of a step, as one window of layers sees them.
struct Tokens {
  const int64_t *positions, *rows;  // (tokens,): where each is, and its table
  const int64_t *tables;            // (sequences, columns): blocks
  int64_t columns, count, decodes;  // those after the first `decodes` are normed, turned and written, no more
  int64_t drafts;  // not 0: rows of one sequence see each other, so that all keys are kept before any row attends
};

// Rows of weights of one form.
struct Part {
  int64_t form;
  const uint8_t *codes;
  const uint16_t *scales;
  const void *bias;      // (width,), or null
  int64_t width, begin;  // of the outputs
  int64_t span;          // groups of 32 inputs that share a scale
};

// Decoder.cpp.

template <class T>
void norm_row(const T *x, const float *weight, const T *add_to, T *out, int64_t width, float eps);

template <class T>
void gate_row(const T *gate_up, T *out, int64_t width, bool is_gelu);

// How many key/value heads of a token one thread takes, so that all threads have some.
int64_t heads_together(int64_t tokens, int64_t kv_heads, int threads);

// Norm and turn a token's key, and put it and its value into the pools.
template <class T>
void keep_head(T *qkv, const Tokens &of, int64_t token, int64_t head, const Layer &layer);

// Of `together` key/value heads from `head` on, and their queries.
template <class T>
void attend_heads(T *qkv, const Tokens &of, int64_t token, int64_t head, int64_t together, T *out, const Layer &layer);

// Quantized.cpp. By each thread of a parallel part, with the same arguments: each does its share, and does not wait for
// the others'. x (rows, in), few of them -> the parts' outputs of out (rows, stride), plus as many of add_to, or null.
template <class T>
void multiply_share(const Part *parts, int64_t count, const T *x, int64_t rows, int64_t in, const T *add_to, T *out,
                    int64_t stride, int threads);

}  // namespace bireme
