// Products of many bf16 rows with quantized weights, by AMX: weights become bf16 on their way, 32 outputs at a time.
//
// Unfolding a panel of 32 outputs costs about what 60 rows of products do, so it is done once for as many rows as the second cache holds.
// A row's numbers are sums in one order whatever rows come along. Rows lie in tiles, as the multiplier loads them:
//   rows    [rows / 16, inputs / 32, 16, 32]
//   panel   [inputs / 32, 2, 16, 16, 2]: pairs of inputs, output by output, of two tiles of outputs
#pragma once
#include "tiles.h"

#if defined(HAS_HALF_TILES)
static const int PANEL = 2 * TILE, PAIR_ROWS = 32;
static const int64_t TILE_VALUES = 512, PIECE_BYTES = 3 << 19;

// SUMS += bf16 A times bf16 B
#define TILE_DOT_HALF(SUMS, A, B) asm volatile("tdpbf16ps %%tmm" #B ", %%tmm" #A ", %%tmm" #SUMS ::: "memory")

// All registers are whole: 16 rows of 64 bytes.
static void shape_whole_tiles() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16, 64);
  shapes.use();
}

// Where value `column` of `row` lies among tiled rows.
static inline int64_t tiled(int64_t row, int64_t column, int64_t inputs) {
  return (row / 16 * (inputs / 32) + column / 32) * TILE_VALUES + row % 16 * 32 + column % 32;
}

static inline void copy_to_tiles(const bf16* from, bf16* to, int64_t row, int width) {
  for (int i = 0; i < width; i += 32) memcpy(to + tiled(row, i, width), from + i, 64);
}

// 16 values of one input and 16 of the next, as one row of a tile
static inline void store_pairs(bf16* to, v16f first, v16f second) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)both));
}

// One group of 32 inputs of 16 outputs, as bf16
template <int KIND>
static inline void unfold_half(const uint8_t* group, bf16* to) {
  Scales of = scales_of<KIND>(group);
  if (KIND == 8) of.minimum = of.scale * -128.0f;
#pragma GCC unroll 8
  for (int run = 0; run < 8; run++) {
    v16u bytes;
    memcpy(&bytes, group + 64 * (KIND == 4 ? run % 4 : run), 64);
    v16f values[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const int shift = 8 * i + (KIND == 4 && run > 3 ? 4 : 0);
      const v16i q = (v16i)((bytes >> shift) & (KIND == 4 ? 15u : 255u));
      values[i] = __builtin_convertvector(q, v16f) * of.scale + of.minimum;
    }
    store_pairs(to + 64 * run, values[0], values[1]);
    store_pairs(to + 64 * run + 32, values[2], values[3]);
  }
}

template <int KIND>
static void unfold_panel(const Matrix& matrix, int panel, bf16* to) {
  const int64_t groups = matrix.inputs / GROUP, bytes = group_bytes(KIND);
  for (int half = 0; half < 2; half++) {
    if ((2 * panel + half) * TILE >= matrix.outputs) return;  // nobody reads what is behind the last
    const uint8_t* at = matrix.tiles + (2 * panel + half) * groups * bytes;
    for (int64_t g = 0; g < groups; g++, at += bytes) {
      fetch_ahead<KIND>(at);
      unfold_half<KIND>(at, to + (2 * g + half) * TILE_VALUES);
    }
  }
}

typedef float Found[4][16 * TILE];

// found[2 half of rows + half of outputs] [16, 16] = 32 (or the first 16) rows times a panel
static inline void multiply_panel(const bf16* rows, const bf16* panel, int64_t steps, bool both, Found found) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  const bf16* lower = rows + steps * TILE_VALUES;
  for (int64_t i = 0; i < steps; i++) {
    TILE_LOAD(6, panel + 2 * i * TILE_VALUES, 64);
    TILE_LOAD(4, rows + i * TILE_VALUES, 64);
    TILE_DOT_HALF(0, 4, 6);
    TILE_LOAD(7, panel + (2 * i + 1) * TILE_VALUES, 64);
    TILE_DOT_HALF(1, 4, 7);
    if (!both) continue;
    TILE_LOAD(5, lower + i * TILE_VALUES, 64);
    TILE_DOT_HALF(2, 5, 6);
    TILE_DOT_HALF(3, 5, 7);
  }
  TILE_STORE(0, found[0], 64);
  TILE_STORE(1, found[1], 64);
  if (!both) return;
  TILE_STORE(2, found[2], 64);
  TILE_STORE(3, found[3], 64);
}

// Pieces of rows that meet a panel: no larger than the second cache, no fewer than threads need. Whole pairs of tiles.
static inline int64_t piece_rows(int64_t rows, const Matrix& matrix, int threads) {
  const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL, wanted = (4 * threads + panels - 1) / panels;
  int64_t most = PIECE_BYTES / (2 * matrix.inputs);
  if (most > rows / wanted) most = rows / wanted;
  const int64_t pieces = most > PAIR_ROWS ? (rows + most - 1) / most : (rows + PAIR_ROWS - 1) / PAIR_ROWS;
  return ((rows + pieces - 1) / pieces + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS;
}

// visit(row, half, values of outputs 32 panel + 16 half ...) for rows [first, end) of a panel, with bias; first is a multiple of 32.
template <class Visit>
static inline void each_found(const Matrix& matrix, int panel, const bf16* rows, bf16* room, int64_t first, int64_t end,
                              Visit visit) {
  matrix.kind == 4 ? unfold_panel<4>(matrix, panel, room) : unfold_panel<8>(matrix, panel, room);
  const int64_t steps = matrix.inputs / 32;
  const int halves = (2 * panel + 1) * TILE < matrix.outputs ? 2 : 1;
  alignas(64) Found found;
  for (int64_t at = first; at < end; at += PAIR_ROWS) {
    multiply_panel(rows + at / 16 * steps * TILE_VALUES, room, steps, end - at > 16, found);
    const int64_t count = end - at < PAIR_ROWS ? end - at : PAIR_ROWS;
    for (int64_t r = 0; r < count; r++) {
      v16f values[2];
      for (int half = 0; half < halves; half++) {
        values[half] = load(found[r / 16 * 2 + half] + r % 16 * TILE);
        if (matrix.bias) values[half] += load(matrix.bias + panel * PANEL + half * TILE);
      }
      visit(at + r, halves, values);
    }
  }
}
#endif
