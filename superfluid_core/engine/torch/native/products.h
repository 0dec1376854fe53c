// Products with quantized weights: rows of int8 activations times tiles of 16 outputs, in groups of 32 inputs.
//
// A tile holds 16 outputs; per group of 32 inputs it has
//   kind 4   256 bytes of nibbles, 16 half scales, 16 half minima     weight = q * scale + minimum, q in 0..15
//   kind 8   512 bytes, 16 half scales                                weight = (q - 128) * scale,   q in 0..255
// Byte 4 r + j of 64 belongs to output r and input 4 g + j; a kind 4 byte holds run g low and run g + 4 high (g in 0..3).
// Activations are cut into the same groups, each value a whole number of about sixteen bits times one scale: x = scale * (256 high + low),
// high and low int8, so that the weights are all that was ever rounded much. Minima are multiplied by the sum of these whole numbers, not
// by the exact one: a rounding error then meets the small weight itself and not its larger, always positive q.
// One output of one row is always summed in the same order, whatever rows come along and whatever multiplies (tiles.h).
#pragma once
#include "vectors.h"

// Unrolled, a dot is one instruction; where it is many, that only takes the compiler minutes.
#if defined(__AVX512VNNI__)
#define UNROLL_8 _Pragma("GCC unroll 8")
#else
#define UNROLL_8
#endif

// pairs.h multiplies instead of what is here. (PLAIN_VECTORS is for tests, which hold one against the other.)
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512VNNI__) && !defined(PLAIN_VECTORS)
#define BY_PAIRS 1
static inline void store_words(int8_t* to, v16f whole_numbers);
#endif

static const int TILE = 16, GROUP = 32, STEPS = 256;  // of low are one of high
static const float LARGEST = 127 * STEPS;

struct Matrix {
  const uint8_t* tiles;
  const float* bias;  // may be null
  int32_t kind, outputs, inputs, unused;
};

// Rows of activations; those of a group lie side by side, `room` of them.
struct Rows {
  int8_t* values;   // [inputs / 32, room, 2, 32]: high, then low; or as pairs.h has them
  float* scales;    // [inputs / 32, room]
  float* sums;      // [inputs / 32, room]: of the whole numbers
  int32_t* counts;  // the same 128 times, for weights that are kept 128 higher
  int64_t room;
};

static inline int64_t group_bytes(int kind) { return kind == 4 ? 320 : 544; }

// The nearest whole number, for sizes below 2^22.
static inline v16f whole(v16f x) {
  v16f shifted = x + 12582912.0f;
  return shifted - 12582912.0f;
}

static inline void quantize_row(const float* x, const Rows& rows, int64_t row, int width) {
  typedef int8_t v16c __attribute__((vector_size(16)));
  for (int64_t g = 0; g < width / GROUP; g++) {
    const v16f first = load(x + g * GROUP), second = load(x + g * GROUP + 16);
    const float top = largest(maximum(absolute(first), absolute(second))), total = sum(first + second);
    float scale = top / LARGEST, inverse = top > 0 ? LARGEST / top : 0.0f;
    // a row that is not finite is to give no finite product
    if (!std::isfinite(total) || !std::isfinite(top)) scale = NAN, inverse = 0;
    const int64_t at = g * rows.room + row;
    int8_t* out = rows.values + at * 2 * GROUP;
    v16f both{};
    for (int half = 0; half < 2; half++) {
      v16f wanted = whole((half ? second : first) * inverse);
      if (inverse == 0) wanted = v16f{};
      both += wanted;
#if defined(BY_PAIRS)
      store_words(out + half * GROUP, wanted);
#else
      const v16i q = __builtin_convertvector(wanted, v16i), high = (q + STEPS / 2) >> 8;
      const v16c bytes[2] = {__builtin_convertvector(high, v16c), __builtin_convertvector(q - high * STEPS, v16c)};
      memcpy(out + half * 16, &bytes[0], 16);
      memcpy(out + GROUP + half * 16, &bytes[1], 16);
#endif
    }
    rows.scales[at] = scale;
    rows.sums[at] = sum(both);
    rows.counts[at] = 128 * int32_t(rows.sums[at]);
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

struct Scales {
  v16f scale, minimum;
};

template <int KIND>
static inline Scales scales_of(const uint8_t* group) {
  if (KIND == 4) return {load_half((const uint16_t*)(group + 256)), load_half((const uint16_t*)(group + 288))};
  return {load_half((const uint16_t*)(group + 512)), v16f{}};
}

// What a row's whole product with a group adds to its sum.
template <int KIND>
static inline v16f with_group(v16f total, v16i dot, const Scales& of, const Rows& rows, int64_t at) {
  if (KIND == 8) dot -= rows.counts[at];
  v16f wanted = __builtin_convertvector(dot, v16f) * of.scale;
  if (KIND == 4) wanted += of.minimum * rows.sums[at];
  return total + wanted * rows.scales[at];
}

// What lies this far behind a group is read soon.
template <int KIND>
static inline void fetch_ahead(const uint8_t* group) {
  for (int i = 0; i < (KIND == 4 ? 5 : 9); i++) __builtin_prefetch(group + 4096 + 64 * i);
}

// out[r] = 16 outputs of rows first .. first + COUNT - 1
template <int KIND, int COUNT>
static inline void multiply_tile(const uint8_t* tile, const Rows& rows, int64_t first, int inputs, v16f* out) {
  const int groups = inputs / GROUP;
  v16f sums[COUNT];
  for (int r = 0; r < COUNT; r++) sums[r] = v16f{};
  for (int g = 0; g < groups; g++, tile += group_bytes(KIND)) {
    v64b weights[8];
    if (KIND == 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        v64b packed;
        memcpy(&packed, tile + 64 * i, 64);
        weights[i] = packed & 15;
        weights[i + 4] = (v64b)((v16u)packed >> 4) & 15;
      }
    } else {
      memcpy(weights, tile, 512);
    }
    const Scales of = scales_of<KIND>(tile);
    fetch_ahead<KIND>(tile);
UNROLL_8
    for (int r = 0; r < COUNT; r++) {
      const int64_t at = g * rows.room + first + r;
      const int8_t* x = rows.values + at * 2 * GROUP;
      v16i high{}, low{};
UNROLL_8
      for (int i = 0; i < 8; i++) {
        high = dot_four(high, weights[i], four_at(x + 4 * i));
        low = dot_four(low, weights[i], four_at(x + GROUP + 4 * i));
      }
      sums[r] = with_group<KIND>(sums[r], high * STEPS + low, of, rows, at);
    }
  }
  for (int r = 0; r < COUNT; r++) out[r] = sums[r];
}

// Up to eight rows.
template <int KIND>
static inline void multiply_some(const uint8_t* tile, const Rows& rows, int64_t first, int count, int inputs, v16f* out) {
  switch (count) {
#define ROWS(N)                                             \
  case N:                                                   \
    multiply_tile<KIND, N>(tile, rows, first, inputs, out); \
    break;
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
  }
}
