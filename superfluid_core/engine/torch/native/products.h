// Products with quantized weights: rows of int8 activations times tiles of 16 outputs, in groups of 32 inputs.
//
// A tile holds 16 outputs; per group of 32 inputs it has
//   kind 4   256 bytes of nibbles, 16 half scales, 16 half minima     weight = q * scale + minimum, q in 0..15
//   kind 8   512 bytes, 16 half scales                                weight = (q - 128) * scale,   q in 0..255
// Byte 4 r + j of 64 belongs to output r and input 4 g + j; a kind 4 byte holds run g low and run g + 4 high (g in 0..3).
// Activations are cut into the same groups, each value as two int8 under one scale: x = scale * (high + low / FINE), about sixteen
// bits, so that the weights are all that was ever rounded much. Minima are multiplied by the sum of these rounded values, not by the
// exact one: a rounding error then meets the small weight itself and not its larger, always positive q.
// One output of one row is always summed in the same order, whatever rows come along.
#pragma once
#include "vectors.h"

// Unrolled, a dot is one instruction; where it is many, that only takes the compiler minutes.
#if defined(__AVX512VNNI__)
#define UNROLL_8 _Pragma("GCC unroll 8")
#else
#define UNROLL_8
#endif

static const int TILE = 16, GROUP = 32;
static const float FINE = 254;

struct Matrix {
  const uint8_t* tiles;
  const float* bias;  // may be null
  int32_t kind, outputs, inputs, unused;
};

struct Rows {
  int8_t* values;   // [rows, inputs / 32, 2, 32]: high, then low
  float* scales;    // [rows, inputs / 32]
  float* sums;      // [rows, inputs / 32]: of high + low / FINE
  int32_t* counts;  // [rows, inputs / 32, 2]: sums of high and of low
};

static inline int64_t group_bytes(int kind) { return kind == 4 ? 320 : 544; }

// The nearest whole number, for sizes below 2^22.
static inline v16f whole(v16f x) {
  v16f shifted = x + 12582912.0f;
  return shifted - 12582912.0f;
}

static inline void quantize_row(const float* x, const Rows& rows, int64_t row, int width) {
  for (int64_t g = 0; g < width / GROUP; g++) {
    v16f low = load(x + g * GROUP), high = load(x + g * GROUP + 16);
    v16f size = maximum(absolute(low), absolute(high));
    float top = 0;
    for (int i = 0; i < 16; i++) top = size[i] > top ? size[i] : top;
    float total = sum(low + high);
    float scale = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
    // a row that is not finite is to give no finite product
    if (!std::isfinite(total) || !std::isfinite(top)) scale = NAN, inverse = 0;
    const int64_t at = row * (width / GROUP) + g;
    int8_t* out = rows.values + at * 2 * GROUP;
    int32_t high_count = 0, low_count = 0;
    for (int half = 0; half < 2; half++) {
      v16f wanted = (half ? high : low) * inverse;
      if (inverse == 0) wanted = v16f{};
      const v16f coarse = whole(wanted);
      const v16i coarse_q = __builtin_convertvector(coarse, v16i);
      const v16i fine_q = __builtin_convertvector(whole((wanted - coarse) * FINE), v16i);
      for (int i = 0; i < 16; i++) {
        out[half * 16 + i] = int8_t(coarse_q[i]);
        out[GROUP + half * 16 + i] = int8_t(fine_q[i]);
        high_count += coarse_q[i];
        low_count += fine_q[i];
      }
    }
    rows.scales[at] = scale;
    rows.sums[at] = float(high_count) + float(low_count) / FINE;
    rows.counts[2 * at] = high_count;
    rows.counts[2 * at + 1] = low_count;
  }
}

// sum += for each of 16 outputs: four unsigned bytes of `weights` times four signed bytes of `four`.
static inline v16i dot_four(v16i sum, v64b weights, int32_t four) {
#if defined(__AVX512VNNI__)
  return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#else
  v16i wide = (v16i)weights;
  sum += (wide & 255) * int32_t(int8_t(four));
  sum += ((wide >> 8) & 255) * int32_t(int8_t(four >> 8));
  sum += ((wide >> 16) & 255) * int32_t(int8_t(four >> 16));
  sum += (v16i)((v16u)wide >> 24) * (four >> 24);
  return sum;
#endif
}

static inline int32_t four_at(const int8_t* at) {
  int32_t out;
  memcpy(&out, at, 4);
  return out;
}

// out[r] = 16 outputs of rows first .. first + COUNT - 1
template <int KIND, int COUNT>
static inline void multiply_tile(const uint8_t* tile, const Rows& rows, int64_t first, int inputs, v16f* out) {
  const int groups = inputs / GROUP;
  v16f sums[COUNT];
  for (int r = 0; r < COUNT; r++) sums[r] = v16f{};
  for (int g = 0; g < groups; g++, tile += KIND == 4 ? 320 : 544) {
    v64b weights[8];
    v16f scale, minimum;
    if (KIND == 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        v64b packed;
        memcpy(&packed, tile + 64 * i, 64);
        weights[i] = packed & 15;
        weights[i + 4] = (v64b)((v16u)packed >> 4) & 15;
      }
      scale = load_half((const uint16_t*)(tile + 256));
      minimum = load_half((const uint16_t*)(tile + 288));
    } else {
      memcpy(weights, tile, 512);
      scale = load_half((const uint16_t*)(tile + 512));
      minimum = v16f{};
    }
#if defined(__SSE__)
    for (int i = 0; i < (KIND == 4 ? 5 : 9); i++) _mm_prefetch((const char*)tile + 4096 + 64 * i, _MM_HINT_T0);
#endif
UNROLL_8
    for (int r = 0; r < COUNT; r++) {
      const int64_t at = (first + r) * groups + g;
      const int8_t* x = rows.values + at * 2 * GROUP;
      v16i coarse{}, fine{};
      if (KIND == 8) coarse -= 128 * rows.counts[2 * at], fine -= 128 * rows.counts[2 * at + 1];
UNROLL_8
      for (int i = 0; i < 8; i++) {
        coarse = dot_four(coarse, weights[i], four_at(x + 4 * i));
        fine = dot_four(fine, weights[i], four_at(x + GROUP + 4 * i));
      }
      v16f dot = __builtin_convertvector(coarse, v16f) + __builtin_convertvector(fine, v16f) * (1 / FINE);
      v16f wanted = dot * scale;
      if (KIND == 4) wanted += minimum * rows.sums[at];
      sums[r] += wanted * rows.scales[at];
    }
  }
  for (int r = 0; r < COUNT; r++) out[r] = sums[r];
}

template <int KIND>
static inline void multiply_some(const uint8_t* tile, const Rows& rows, int64_t first, int count, int inputs, v16f* out) {
  switch (count) {
#define ROWS(N)                                                     \
  case N:                                                           \
    multiply_tile<KIND, N>(tile, rows, first, inputs, out); \
    break;
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
  }
}

// One tile for up to eight rows, with bias.
__attribute__((noinline)) static void multiply(const Matrix& matrix, int tile, const Rows& rows, int64_t first, int count, v16f* out) {
  const uint8_t* at = matrix.tiles + int64_t(tile) * (matrix.inputs / GROUP) * group_bytes(matrix.kind);
  if (matrix.kind == 4)
    multiply_some<4>(at, rows, first, count, matrix.inputs, out);
  else
    multiply_some<8>(at, rows, first, count, matrix.inputs, out);
  if (matrix.bias)
    for (int r = 0; r < count; r++) out[r] += load(matrix.bias + tile * TILE);
}
