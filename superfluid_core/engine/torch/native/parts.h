// The parts of a decoder layer between its matrix products, for one token (or one token and key head) at a time.
// Every row is computed by itself and in one order, so its numbers depend on no neighbour.
#pragma once
#include "vectors.h"

struct Heads {
  int32_t query, key, size, block_tokens, sliding_window;  // sliding_window 0: none
  float norm_eps;
};

// x += delta (rounded as x is kept), then out = x / rms(x) * weight. delta may be null.
template <class X, class D, class W, class O>
static inline void add_norm(X* x, const D* delta, const W* weight, O* out, int width, float eps) {
  v16f squares{};
  for (int i = 0; i < width; i += 16) {
    v16f value = load(x + i);
    if (delta) {
      value = rounded(x, value + load(delta + i));
      store(x + i, value);
    }
    squares += value * value;
  }
  v16f scale = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
  for (int i = 0; i < width; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
}

// Norm (if any) and turn one head in place.
template <class X, class W>
static inline void turn_head(X* head, const W* norm, const float* cos, const float* sin, const Heads& shape) {
  const int size = shape.size, half = size / 2;
  alignas(64) float wide[256], crossed[256];
  v16f squares{};
  for (int i = 0; i < size; i += 16) {
    v16f value = load(head + i);
    squares += value * value;
    store(wide + i, value);
  }
  if (norm) {
    v16f scale = splat(1.0f / std::sqrt(sum(squares) / float(size) + shape.norm_eps));
    for (int i = 0; i < size; i += 16) store(wide + i, load(wide + i) * scale * load(norm + i));
  }
  // the tables' sine carries the sign, so that both halves do the same
  memcpy(crossed, wide + half, half * sizeof(float));
  memcpy(crossed + half, wide, half * sizeof(float));
  for (int i = 0; i < size; i += 16) store(head + i, load(wide + i) * load(cos + i) + load(crossed + i) * load(sin + i));
}

template <class X, class K>
static inline void copy_row(const X* from, K* to, int width) {
  for (int i = 0; i < width; i += 16) store(to + i, load(from + i));
}

// Turn query and key heads of one token's [query + 2 key] heads in place, and keep key and value at the token's slot.
template <class X, class W, class K>
static inline void turn_and_keep(X* qkv, const W* norm, const float* cos, const float* sin, K* keys, K* values,
                                 int64_t slot, const Heads& shape) {
  const int size = shape.size, row = shape.key * size;
  for (int h = 0; h < shape.query + shape.key; h++)
    turn_head(qkv + h * size, norm ? norm + h * size : nullptr, cos, sin, shape);
  copy_row(qkv + shape.query * size, keys + slot * row, row);
  copy_row(qkv + (shape.query + shape.key) * size, values + slot * row, row);
}

template <class K>
static inline void fetch_rows(const K* from, int count, int row, int size) {
  for (int n = 0; n < count; n++)
    for (int i = 0; i < size * int(sizeof(K)); i += 64) __builtin_prefetch((const char*)(from + int64_t(n) * row) + i);
}

// Attention of a few query heads of one token that share a key head, over positions [first, end) of their lane, in one pass.
// weighted [HEADS, size] is the sum of values not yet divided by total [HEADS]; best [HEADS] is what was subtracted.
template <class X, class K, int HEADS, int UNROLLED>
static inline void attend_heads(const X* query, const K* keys, const K* values, const int32_t* blocks, int key_head,
                                int first, int end, const Heads& shape, float* weighted, float* best, float* total) {
  const int size = shape.size, row = shape.key * size, tokens = shape.block_tokens;
  const int vectors = UNROLLED ? UNROLLED : size / 16;
  constexpr int most = UNROLLED ? UNROLLED : 16;
  const float scale = 1.0f / std::sqrt(float(size));
  v16f wide[HEADS][most], mixed[HEADS][most];
  for (int g = 0; g < HEADS; g++) {
    best[g] = -INFINITY;
    total[g] = 0;
    for (int i = 0; i < vectors; i++) {
      mixed[g][i] = v16f{};
      wide[g][i] = load(query + g * size + 16 * i) * scale;
    }
  }
  for (int at = first; at < end;) {
    // at most 16 positions that lie in one block
    const int offset = at % tokens;
    int count = tokens - offset;
    if (count > 16) count = 16;
    if (count > end - at) count = end - at;
    const int64_t place = (int64_t(blocks[at / tokens]) * tokens + offset) * row + key_head * size;
    // what is read soon: this run's values, the next run's keys
    fetch_rows(values + place, count, row, size);
    if (at + count < end) {
      const int next = at + count;
      fetch_rows(keys + (int64_t(blocks[next / tokens]) * tokens + next % tokens) * row + key_head * size, 16, row, size);
    }
    v16f dots[HEADS][16];
    const K* key = keys + place;
    for (int n = 0; n < count; n++, key += row) {
      for (int g = 0; g < HEADS; g++) dots[g][n] = load(key) * wide[g][0];
      for (int i = 1; i < vectors; i++) {
        const v16f part = load(key + 16 * i);
        for (int g = 0; g < HEADS; g++) dots[g][n] += part * wide[g][i];
      }
    }
    alignas(64) float shares[HEADS][16];
    for (int g = 0; g < HEADS; g++) {
      for (int n = count; n < 16; n++) dots[g][n] = v16f{};
      v16f scores = sums_of(dots[g]);
      for (int n = count; n < 16; n++) scores[n] = -INFINITY;
      store(shares[g], scores);
      float top = best[g], check = 0;
      for (int n = 0; n < count; n++) {
        check += shares[g][n] * 0;  // NaN when one of them is not finite
        top = shares[g][n] > top ? shares[g][n] : top;
      }
      if (check != check) top = NAN;
      if (top != best[g] && total[g] != 0) {
        const float shrink = exponential(splat(best[g] - top))[0];
        total[g] *= shrink;
        for (int i = 0; i < vectors; i++) mixed[g][i] *= shrink;
      }
      best[g] = top;
      scores = exponential(scores - top);
      store(shares[g], scores);
      total[g] += sum(scores);
    }
    const K* value = values + place;
    for (int n = 0; n < count; n++, value += row)
      for (int i = 0; i < vectors; i++) {
        const v16f part = load(value + 16 * i);
        for (int g = 0; g < HEADS; g++) mixed[g][i] += part * shares[g][n];
      }
    at += count;
  }
  for (int g = 0; g < HEADS; g++)
    for (int i = 0; i < vectors; i++) store(weighted + g * size + 16 * i, mixed[g][i]);
}

// All query heads of one key head, a few at once, with the loops over a head unrolled for the usual sizes; 0 is any size.
template <class X, class K, int UNROLLED>
__attribute__((noinline)) static void attend_group(const X* query, const K* keys, const K* values, const int32_t* blocks,
                                                   int key_head, int first, int end, const Heads& shape,
                                                   float* weighted, float* best, float* total) {
  const int group = shape.query / shape.key, size = shape.size;
  for (int g = 0; g < group;) {
    const int left = group - g;
#define HEADS(N)                                                                                                 \
  attend_heads<X, K, N, UNROLLED>(query + g * size, keys, values, blocks, key_head, first, end, shape, \
                                  weighted + g * size, best + g, total + g);                           \
  g += N
    if (left == 3) {
      HEADS(3);
    } else if (left >= 2) {
      HEADS(2);
    } else {
      HEADS(1);
    }
#undef HEADS
  }
}

template <class X, class K>
static inline void attend_any(const X* query, const K* keys, const K* values, const int32_t* blocks, int key_head,
                              int first, int end, const Heads& shape, float* weighted, float* best, float* total) {
  if (shape.size == 64)
    attend_group<X, K, 4>(query, keys, values, blocks, key_head, first, end, shape, weighted, best, total);
  else if (shape.size == 128)
    attend_group<X, K, 8>(query, keys, values, blocks, key_head, first, end, shape, weighted, best, total);
  else
    attend_group<X, K, 0>(query, keys, values, blocks, key_head, first, end, shape, weighted, best, total);
}

// Positions that a token sees: [first_seen, position].
static inline int first_seen(int64_t position, const Heads& shape) {
  return shape.sliding_window && position >= shape.sliding_window ? int(position) - shape.sliding_window + 1 : 0;
}

template <class X, class O>
static inline void silu_times(const X* gate, const X* up, O* out, int width) {
  for (int i = 0; i < width; i += 16) {
    v16f g = load(gate + i);
    v16f swish = rounded(gate, g / (1.0f + exponential(-g)));
    store(out + i, swish * load(up + i));
  }
}
