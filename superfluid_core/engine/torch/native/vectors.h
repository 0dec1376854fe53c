// Sixteen floats at once, for any CPU: the compiler's own vector types, cut to what the machine has.
// Also the two element types that activations and KV come in, and an exponential that keeps NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16s __attribute__((vector_size(32)));
typedef uint8_t v64b __attribute__((vector_size(64)));

struct bf16 {
  uint16_t bits;
};

static inline v16f splat(float x) { return v16f{} + x; }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

static inline v16f load(const float* at) {
  v16f out;
  memcpy(&out, at, 64);
  return out;
}
static inline v16f load(const bf16* at) {
  v16s half;
  memcpy(&half, at, 32);
  return (v16f)(__builtin_convertvector(half, v16u) << 16);
}

static inline void store(float* at, v16f x) { memcpy(at, &x, 64); }
static inline void store(bf16* at, v16f x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);  // the same, but for numbers below 1e-38, which become 0
  memcpy(at, &half, 32);
#else
  v16u bits = (v16u)x;
  v16u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  v16i is_nan = x != x;
  rounded = is_nan ? (v16u{} + 0x7fc0u) : rounded;
  v16s half = __builtin_convertvector(rounded, v16s);
  memcpy(at, &half, 32);
#endif
}

// What a value becomes when it is kept in this type.
static inline v16f rounded(const float*, v16f x) { return x; }
static inline v16f rounded(const bf16*, v16f x) {
  bf16 kept[16];
  store(kept, x);
  return load(kept);
}

static inline v16f load_half(const uint16_t* at) {
#if defined(__AVX512F__)
  return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
  v16f out;
  __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
  __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 8)));
  memcpy(&out, &low, 32);
  memcpy((char*)&out + 32, &high, 32);
  return out;
#else
  v16f out;
  for (int i = 0; i < 16; i++) {  // exact for normal, subnormal and zero; scales are finite
    uint32_t sign = uint32_t(at[i] & 0x8000) << 16, exponent = (at[i] >> 10) & 31, low = at[i] & 1023;
    float magnitude = exponent ? std::ldexp(float(1024 + low), int(exponent) - 25) : std::ldexp(float(low), -24);
    out[i] = sign ? -magnitude : magnitude;
  }
  return out;
#endif
}

static inline float sum(v16f x) {
  typedef float v8f __attribute__((vector_size(32)));
  typedef float v4f __attribute__((vector_size(16)));
  v8f half[2];
  memcpy(half, &x, 64);
  v8f eight = half[0] + half[1];
  v4f quarter[2];
  memcpy(quarter, &eight, 32);
  v4f four = quarter[0] + quarter[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The largest of sixteen numbers; one that is not a number is passed over or taken, nobody knows.
static inline float largest(v16f x) {
  typedef float v8f __attribute__((vector_size(32)));
  typedef float v4f __attribute__((vector_size(16)));
  v8f half[2];
  memcpy(half, &x, 64);
  v8f eight = half[0] > half[1] ? half[0] : half[1];
  v4f quarter[2];
  memcpy(quarter, &eight, 32);
  v4f four = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
  const float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
  return a > b ? a : b;
}

// The sums of 16 vectors, side by side: halves are folded onto each other, pair by pair.
template <int LENGTH>
static inline v16f fold(v16f a, v16f b) {
  v16i low, high;
  for (int i = 0; i < 16; i++) {
    // lane i of the result lies in segment `at` of what a, then b hold
    const int at = i / (LENGTH / 2), inside = i % (LENGTH / 2);
    low[i] = at * LENGTH + inside;
    high[i] = low[i] + LENGTH / 2;
  }
#if defined(__clang__)
  v16f first, second;
  for (int i = 0; i < 16; i++) {
    first[i] = low[i] < 16 ? a[low[i]] : b[low[i] - 16];
    second[i] = high[i] < 16 ? a[high[i]] : b[high[i] - 16];
  }
  return first + second;
#else
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}

static inline v16f sums_of(v16f* parts) {
  for (int i = 0; i < 8; i++) parts[i] = fold<16>(parts[2 * i], parts[2 * i + 1]);
  for (int i = 0; i < 4; i++) parts[i] = fold<8>(parts[2 * i], parts[2 * i + 1]);
  for (int i = 0; i < 2; i++) parts[i] = fold<4>(parts[2 * i], parts[2 * i + 1]);
  return fold<2>(parts[0], parts[1]);
}

static inline v16f maximum(v16f a, v16f b) { return a > b ? a : b; }

static inline v16f absolute(v16f x) { return (v16f)((v16u)x & 0x7fffffffu); }

// e^x to about one unit in the last place; below -87 it is 0, above 88 infinity, NaN stays NaN.
static inline v16f exponential(v16f x) {
  v16f capped = x < -87.0f ? splat(-87.0f) : x;
  capped = capped > 88.0f ? splat(88.0f) : capped;
  v16f turns = capped * 1.44269504088896341f;
  v16f shifted = turns + 12582912.0f;  // rounds to a whole number in the low bits
  v16f whole = shifted - 12582912.0f;
  v16f rest = capped - whole * 0.693359375f + whole * 2.12194440e-4f;
  v16f p = splat(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  v16i power = ((v16i)shifted - 0x4b400000 + 127) << 23;
  v16f out = p * (v16f)power;
  out = x < -87.0f ? splat(0.0f) : out;
  out = x > 88.0f ? splat(INFINITY) : out;
  return x != x ? x : out;
}
