// Attention of the tokens of a prompt, by AMX: 16 queries of one head at a time over spans of their lane's positions.
//
// Scores are computed as keys times queries, so that keys are read where they lie and everything of a query stands in one column of
// vectors: no sum or maximum goes across. Values are transposed once per span for all queries of a task. Within a span the largest score is known
// before anything is raised; between spans the sums are scaled. The order does not depend on what else is computed.
#pragma once
#include "panels.h"
#include "parts.h"

#if defined(HAS_HALF_TILES)
static const int SPAN_KEYS = 512, PART_ROWS = 64, GROUP_MAX = 16;

// Consecutive tokens of one lane, at most PART_ROWS.
struct Part {
  int32_t first, count, lane, unused;
};

// What one thread needs for a task.
struct ChunkRoom {
  float scores[SPAN_KEYS * 16];
  bf16 shares[SPAN_KEYS * 16];
  bf16 values[SPAN_KEYS * 256];                          // [keys / 32, size / 16, 16, 32]
  bf16 queries[PART_ROWS / 16 * GROUP_MAX * 16 * 256];  // [tile, size / 32, 16, 16, 2]
  float mixed[PART_ROWS / 16 * GROUP_MAX * 16 * 256];   // [tile, size, 16]
  v16f best[PART_ROWS / 16 * GROUP_MAX], total[PART_ROWS / 16 * GROUP_MAX];
};

static inline void transpose(__m512i* rows) {
  __m512i other[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    other[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    other[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + 2 + j]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      other[8 * j + i] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0x88);
      other[8 * j + i + 4] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0xdd);
    }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
  }
}

// 2^x to about twice the precision of bf16; 0 far below, and NaN stays NaN
static inline v16f power_of_two(v16f x) {
  const __m512 capped = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // of a NaN it takes the second
  const __m512 whole = _mm512_roundscale_ps(capped, 0);
  const v16f rest = (v16f)_mm512_sub_ps(capped, whole);
  const v16f p = (((9.6181291e-3f * rest + 5.5504109e-2f) * rest + 2.4022651e-1f) * rest + 6.9314718e-1f) * rest + 1.0f;
  return (v16f)_mm512_scalef_ps((__m512)p, whole);
}

struct Chunks {
  const float* qkv;
  bf16* out;  // tiled rows of [query heads, size]
  const bf16 *keys, *values;
  const int64_t* positions;
  const Heads& heads;

  int group() const { return heads.query / heads.key; }
  int64_t qkv_width() const { return int64_t(heads.query + 2 * heads.key) * heads.size; }

  int64_t place(const int32_t* blocks, int64_t at, int key_head) const {
    const int tokens = heads.block_tokens;
    return (int64_t(blocks[at / tokens]) * tokens + at % tokens) * heads.key * heads.size + key_head * heads.size;
  }

  void fold_queries(const Part& part, int tile, int head, bf16* to) const {
    const v16f scale = splat(1.44269504f / std::sqrt(float(heads.size)));
    for (int i = 0; i < heads.size; i += 32) {
      __m512i rows[16];
      for (int n = 0; n < 16; n++) {
        const int row = tile * 16 + n;
        rows[n] = _mm512_setzero_si512();
        if (row >= part.count) continue;
        const float* at = qkv + (part.first + row) * qkv_width() + head * heads.size + i;
        rows[n] = (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(at + 16) * scale), (__m512)(load(at) * scale));
      }
      transpose(rows);
      memcpy(to + 16 * i, rows, sizeof rows);
    }
  }

  // Values of positions [first, end), turned; those outside [low, high) are 0: what lies there may be anything.
  void fold_values(const int32_t* blocks, int key_head, int64_t first, int64_t end, int64_t low, int64_t high, bf16* to) const {
    const int64_t row = int64_t(heads.key) * heads.size;
    for (int64_t at = first; at < end; at += 32) {
      const bf16* from[2];
      for (int half = 0; half < 2; half++)
        from[half] = at + 16 * half < high ? values + place(blocks, at + 16 * half, key_head) : values;
      for (int i = 0; i < heads.size; i += 16, to += TILE_VALUES) {
        __m512i pairs[16];
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++) {
          const bf16* mine = from[n / 8] + 2 * n % 16 * row + i;
          const int64_t key = at + 2 * n;
          __m512i one = _mm512_setzero_si512(), two = one;
          if (key >= low && key < high) one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)mine));
          if (key + 1 >= low && key + 1 < high) two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(mine + row)));
          pairs[n] = _mm512_or_si512(one, _mm512_slli_epi32(two, 16));
        }
        transpose(pairs);
        memcpy(to, pairs, sizeof pairs);
      }
    }
  }

  // scores [end - first, 16 queries]; the two are multiples of 16
  void score(const int32_t* blocks, int key_head, int64_t first, int64_t end, const bf16* queries, float* scores) const {
    const int64_t stride = int64_t(heads.key) * heads.size * 2;
    for (int64_t at = first; at < end; at += 16) {
      const bf16* key = keys + place(blocks, at, key_head);
      TILE_ZERO(0);
      for (int i = 0; i < heads.size; i += 32) {
        TILE_LOAD(4, key + i, stride);
        TILE_LOAD(6, queries + 16 * i, 64);
        TILE_DOT_HALF(0, 4, 6);
      }
      TILE_STORE(0, scores + (at - first) * 16, 64);
    }
  }

  // Scores become shares in pairs of keys; what is summed so far is scaled to the new best. Returns the shares' sum.
  v16f share(int64_t first, int64_t end, int64_t wide_end, v16i seen_from, v16i at, ChunkRoom& room, v16f& best, v16f& shrink) const {
    v16f top = best;
    const int64_t free_from = heads.sliding_window ? end : first, free_to = at[0] + 1;  // these all queries see
    for (int64_t key = first; key < end; key++) {
      float* mine = room.scores + (key - first) * 16;
      v16f score = load(mine);
      if (key < free_from || key >= free_to) {
        const v16i hidden = (v16i{} + int32_t(key) > at) | (v16i{} + int32_t(key) < seen_from);
        score = hidden ? splat(-INFINITY) : score;
        store(mine, score);
      }
      top = (v16f)_mm512_max_ps((__m512)top, (__m512)score);
    }
    const v16f used = top == -INFINITY ? splat(0.0f) : top;  // nothing was seen yet
    shrink = power_of_two(best - used);
    best = top;
    v16f total{};
    for (int64_t key = first; key < wide_end; key += 2) {
      const float* mine = room.scores + (key - first) * 16;
      v16f one{}, two{};
      if (key < end) one = power_of_two(load(mine) - used), two = power_of_two(load(mine + 16) - used);
      total += one + two;
      store_pairs(room.shares + (key - first) * 16, one, two);
    }
    return total;
  }

  // mixed [size, 16 queries] = mixed * shrink + values times shares
  void mix(int64_t keys_count, const ChunkRoom& room, v16f shrink, bool is_new, float* mixed) const {
    const int64_t parts = heads.size / 16;
    for (int64_t i = 0; i < parts; i += 2) {
      float* mine = mixed + i * 256;
      for (int n = 0; n < 32; n++) store(mine + 16 * n, is_new ? v16f{} : load(mine + 16 * n) * shrink);
      TILE_LOAD(0, mine, 64);
      TILE_LOAD(1, mine + 256, 64);
      for (int64_t step = 0; step < keys_count / 32; step++) {
        const bf16* value = room.values + (step * parts + i) * TILE_VALUES;
        TILE_LOAD(6, room.shares + step * TILE_VALUES, 64);
        TILE_LOAD(4, value, 64);
        TILE_DOT_HALF(0, 4, 6);
        TILE_LOAD(5, value + TILE_VALUES, 64);
        TILE_DOT_HALF(1, 5, 6);
      }
      TILE_STORE(0, mine, 64);
      TILE_STORE(1, mine + 256, 64);
    }
  }

  void write(const Part& part, int tile, int head, const float* mixed, v16f total) const {
    for (int i = 0; i < heads.size; i += 16) {
      __m512i rows[16];
      for (int n = 0; n < 16; n++) rows[n] = (__m512i)(load(mixed + (i + n) * 16) / total);
      transpose(rows);
      for (int n = 0; n < 16 && tile * 16 + n < part.count; n++)
        store(out + tiled(part.first + tile * 16 + n, head * heads.size + i, int64_t(heads.query) * heads.size), (v16f)rows[n]);
    }
  }

  // All query heads of a key head, for the tokens of a part.
  void attend(const Part& part, const int32_t* blocks, int key_head, ChunkRoom& room) const {
    const int size = heads.size, tiles = (part.count + 15) / 16, count = tiles * group();
    const int64_t from = positions[part.first], last = positions[part.first + part.count - 1];
    for (int n = 0; n < count; n++) {
      fold_queries(part, n / group(), key_head * group() + n % group(), room.queries + n * 16 * size);
      room.best[n] = splat(-INFINITY), room.total[n] = v16f{};
    }
    const int64_t low = first_seen(from, heads), begin = low / 32 * 32;
    for (int64_t first = begin; first <= last; first += SPAN_KEYS) {
      const int64_t end = first + SPAN_KEYS <= last ? first + SPAN_KEYS : (last + 32) / 32 * 32;
      fold_values(blocks, key_head, first, end, low, last + 1, room.values);
      for (int n = 0; n < count; n++) {
        const int64_t mine = from + n / group() * 16, top = mine + 15 < last ? mine + 15 : last;
        if (first > top) continue;
        v16i at, seen_from;
        for (int i = 0; i < 16; i++) at[i] = int32_t(mine + i < last ? mine + i : last), seen_from[i] = first_seen(at[i], heads);
        const int64_t close = end < top + 1 ? end : (top + 16) / 16 * 16, wide = (close + 31) / 32 * 32;
        v16f shrink;
        score(blocks, key_head, first, close, room.queries + n * 16 * size, room.scores);
        const v16f total = share(first, close, wide, seen_from, at, room, room.best[n], shrink);
        room.total[n] = room.total[n] * shrink + total;
        mix(wide - first, room, shrink, first == begin, room.mixed + n * 16 * size);
      }
    }
    for (int n = 0; n < count; n++)
      write(part, n / group(), key_head * group() + n % group(), room.mixed + n * 16 * size, room.total[n]);
  }
};
#endif
