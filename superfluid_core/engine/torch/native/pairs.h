// Products with quantized weights on CPUs whose vectors are 256 bits wide: AVX2, and AVX-VNNI where there is that.
//
// Weights become 16-bit words, and one instruction multiplies pairs of them with pairs of activations and adds the two products in 32 bits.
// Nothing there can be rounded or cut off: an activation is at most 127 * 256 = 32512, a weight 15 (kind 4) or between -128 and 127 (kind 8),
// so a pair is at most 2 * 128 * 32512 < 2^23 and the 16 pairs of a group less than 2^27. (Bytes times bytes in 16 bits would need two such
// products for the two bytes of an activation, as many instructions, and kind 8 would not fit.)
// Weights of a group are unfolded once for up to 32 rows; one or two rows take them from registers. What follows the whole numbers is what
// with_group does, in its order, so a row's numbers are bit by bit those of any other code here.
//   activations  [inputs / 32, room, 16 pairs]: of four inputs first 0 and 2, then 1 and 3, as the words of four bytes fall apart
#pragma once
#include "products.h"

#if defined(BY_PAIRS)
static const int PAIRS = GROUP / 2, SOME_ROWS = 4;  // so many rows' sums stay in registers; of six the compiler spills some

// The values 0, 2, 1, 3 of every four, as 16-bit words.
static inline void store_words(int8_t* to, v16f whole_numbers) {
  __m256 half[2];
  memcpy(half, &whole_numbers, 64);
  const __m256i words = _mm256_packs_epi32(_mm256_cvttps_epi32(half[0]), _mm256_cvttps_epi32(half[1]));
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, order), 0xd8));
}

static inline __m256i add_pairs(__m256i sum, __m256i weights, __m256i two) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, weights, two);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, two));
#endif
}

// Scale and minimum of 16 outputs, as two halves.
struct HalfScales {
  __m256 scale[2], minimum[2];
};

template <int KIND>
static inline HalfScales half_scales_of(const uint8_t* group) {
  const __m128i* at = (const __m128i*)(group + (KIND == 4 ? 256 : 512));
  HalfScales of;
  for (int half = 0; half < 2; half++) {
    of.scale[half] = _mm256_cvtph_ps(_mm_loadu_si128(at + half));
    if (KIND == 4) of.minimum[half] = _mm256_cvtph_ps(_mm_loadu_si128(at + 2 + half));
  }
  return of;
}

// total[half] += what `dot` stands for; with_group, written out because the order of its roundings is part of a row's numbers.
template <int KIND>
static inline void add_group(float* total, const __m256i* dot, const HalfScales& of, const Rows& rows, int64_t at) {
  const __m256 scale = _mm256_broadcast_ss(rows.scales + at);
  for (int half = 0; half < 2; half++) {
    __m256 wanted = _mm256_cvtepi32_ps(dot[half]);
    if (KIND == 4)
      wanted = _mm256_fmadd_ps(wanted, of.scale[half], _mm256_mul_ps(of.minimum[half], _mm256_broadcast_ss(rows.sums + at)));
    else
      wanted = _mm256_mul_ps(wanted, of.scale[half]);
    _mm256_storeu_ps(total + 8 * half, _mm256_fmadd_ps(wanted, scale, _mm256_loadu_ps(total + 8 * half)));
  }
}

// visit(pair, half, words) for all weights of a group
template <int KIND, class Visit>
static inline void each_words(const uint8_t* group, Visit visit) {
  const __m256i nibble = _mm256_set1_epi16(15), byte = _mm256_set1_epi16(255), middle = _mm256_set1_epi16(128);
#pragma GCC unroll 16
  for (int i = 0; i < (KIND == 4 ? 8 : 16); i++) {
    const __m256i packed = _mm256_loadu_si256((const __m256i*)(group + 32 * i));
    const int run = i / 2, half = i % 2;
    if (KIND == 4) {
      visit(2 * run, half, _mm256_and_si256(packed, nibble));
      visit(2 * run + 1, half, _mm256_and_si256(_mm256_srli_epi16(packed, 8), nibble));
      visit(2 * run + 8, half, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
      visit(2 * run + 9, half, _mm256_srli_epi16(packed, 12));
    } else {
      visit(2 * run, half, _mm256_sub_epi16(_mm256_and_si256(packed, byte), middle));
      visit(2 * run + 1, half, _mm256_sub_epi16(_mm256_srli_epi16(packed, 8), middle));
    }
  }
}

// The next COUNT rows times a group that is unfolded.
template <int KIND, int COUNT>
static inline void add_rows(const __m256i* words, const HalfScales& of, const Rows& rows, int64_t at, float* totals) {
  const int8_t* x = rows.values + at * 2 * GROUP;
  __m256i dots[COUNT][2];
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++) dots[r][0] = dots[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int p = 0; p < PAIRS; p++) {
    const __m256i first = words[2 * p], second = words[2 * p + 1];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) {
      const __m256i two = _mm256_set1_epi32(four_at(x + r * 2 * GROUP + 4 * p));
      dots[r][0] = add_pairs(dots[r][0], first, two);
      dots[r][1] = add_pairs(dots[r][1], second, two);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++) add_group<KIND>(totals + r * TILE, dots[r], of, rows, at + r);
}

template <int KIND>
static inline void add_some_rows(const __m256i* words, const HalfScales& of, const Rows& rows, int64_t at, int count, float* totals) {
  switch (count) {
    case 1: return add_rows<KIND, 1>(words, of, rows, at, totals);
    case 2: return add_rows<KIND, 2>(words, of, rows, at, totals);
    case 3: return add_rows<KIND, 3>(words, of, rows, at, totals);
    case 4: return add_rows<KIND, 4>(words, of, rows, at, totals);
  }
}

// One or two rows, whose weights are worth no room.
template <int KIND, int COUNT>
static inline void add_few_rows(const uint8_t* group, const HalfScales& of, const Rows& rows, int64_t at, float* totals) {
  const int8_t* x = rows.values + at * 2 * GROUP;
  __m256i dots[COUNT][2];
  for (int r = 0; r < COUNT; r++) dots[r][0] = dots[r][1] = _mm256_setzero_si256();
  each_words<KIND>(group, [&](int pair, int half, __m256i words) __attribute__((always_inline)) {
    for (int r = 0; r < COUNT; r++)
      dots[r][half] = add_pairs(dots[r][half], words, _mm256_set1_epi32(four_at(x + r * 2 * GROUP + 4 * pair)));
  });
  for (int r = 0; r < COUNT; r++) add_group<KIND>(totals + r * TILE, dots[r], of, rows, at + r);
}

// out[r] = 16 outputs of `count` rows, at most BLOCK, from `first` on
template <int KIND>
static void multiply_pairs(const uint8_t* tile, const Rows& rows, int64_t first, int count, int inputs, v16f* out) {
  float* totals = (float*)out;
  memset(totals, 0, sizeof(v16f) * count);
  const int blocks = (count + SOME_ROWS - 1) / SOME_ROWS, each = count / blocks, more = count % blocks;
  __m256i words[2 * PAIRS];
  for (int g = 0; g < inputs / GROUP; g++, tile += group_bytes(KIND)) {
    const HalfScales of = half_scales_of<KIND>(tile);
    const int64_t at = g * rows.room + first;
    fetch_ahead<KIND>(tile);
    if (count == 1) {
      add_few_rows<KIND, 1>(tile, of, rows, at, totals);
    } else if (count == 2) {
      add_few_rows<KIND, 2>(tile, of, rows, at, totals);
    } else {
      each_words<KIND>(tile, [&](int pair, int half, __m256i found) __attribute__((always_inline)) { words[2 * pair + half] = found; });
      for (int block = 0, row = 0; block < blocks; row += each + (block < more), block++)
        add_some_rows<KIND>(words, of, rows, at + row, each + (block < more), totals + row * TILE);
    }
  }
}
#endif
