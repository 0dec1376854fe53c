// How the rows of a step are cut into blocks that meet a tile of weights at once, and what multiplies them: vectors, or AMX.
//
// AMX multiplies 8 rows, high and low parts, by 16 outputs in one instruction, but leaves its sums in memory, and what was just written is not
// read at once. So nothing is used where it is made: weights are unfolded some groups ahead, sums are stored while the next
// product runs, and scaled and added after that.
// Whole numbers are exact and everything after them is with_group, so a row's numbers are bit by bit those of the vector code.
#pragma once
#include "pairs.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_HALF_TILES 1  // large.h
#endif

// A process asks once for the tiles' registers.
static const bool has_tiles = syscall(SYS_arch_prctl, 0x1023L, 18L) == 0;

static const int BLOCK = 16, VECTOR_ROWS = 8, AHEAD = 3;  // groups that are unfolded before they are multiplied

// Compilers take a tile's memory for unread: these say what they read and in which order.
#define TILE_LOAD(T, FROM, STRIDE) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #T ::"r"(FROM), "r"(int64_t(STRIDE)) : "memory")
#define TILE_STORE(T, TO, STRIDE) \
  asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"(TO), "r"(int64_t(STRIDE)) : "memory")
#define TILE_ZERO(T) asm volatile("tilezero %%tmm" #T ::: "memory")
// SUMS += signed A times unsigned B
#define TILE_DOT(SUMS, A, B) asm volatile("tdpbsud %%tmm" #B ", %%tmm" #A ", %%tmm" #SUMS ::: "memory")

// What the eight registers hold, as the processor reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count, int bytes) { rows[tile] = count, row_bytes[tile] = bytes; }
  void use() const { asm volatile("ldtilecfg (%0)" ::"r"(this) : "memory"); }
};

// Registers 0 to 2 are sums, 4 and 5 activations, 6 weights; 1 and 5 belong to rows from the ninth on.
static void shape_tiles(int rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 6; tile++) {
    const int mine = tile & 1 ? rows - 8 : rows < 8 ? rows : 8;
    shapes.set(tile, mine > 0 ? 2 * mine : 1, tile < 4 ? 64 : GROUP);
  }
  shapes.set(6, GROUP / 4, 64);
  shapes.use();
}

static void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// 256 bytes of nibbles -> 512 of q
static inline void unfold(const uint8_t* group, uint8_t* to) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v64b packed;
    memcpy(&packed, group + 64 * i, 64);
    const v64b first = packed & 15, second = (v64b)((v16u)packed >> 4) & 15;
    memcpy(to + 64 * i, &first, 64);
    memcpy(to + 256 + 64 * i, &second, 64);
  }
}

// SUMS [row, 2, output] = rows of one group, register A, times the weights in register 6
#define TILE_ROWS(SUMS, A, FROM) \
  TILE_ZERO(SUMS);               \
  TILE_LOAD(A, FROM, GROUP);     \
  TILE_DOT(SUMS, A, 6)

// out[r] = 16 outputs of rows first .. first + COUNT - 1; there is room for so many, though some may mean nothing.
template <int KIND, int COUNT>
static void multiply_block(const uint8_t* tile, const Rows& rows, int64_t first, int inputs, v16f* out) {
  constexpr int64_t bytes = KIND == 4 ? 320 : 544;
  constexpr int part = COUNT < 8 ? COUNT : 8;
  const int groups = inputs / GROUP;
  alignas(64) uint8_t unfolded[AHEAD + 1][512];
  alignas(64) int32_t found[3][16 * TILE];
  v16f totals[COUNT];
#pragma GCC unroll 16
  for (int r = 0; r < COUNT; r++) totals[r] = v16f{};  // not unrolled, they would stay in memory
  const auto unfold_group = [&](int g) {
    if (KIND == 4 && g < groups) unfold(tile + bytes * g, unfolded[g % (AHEAD + 1)]);
  };
  for (int g = 0; g < AHEAD; g++) unfold_group(g);
  const auto add = [&](int g, const int32_t* sums, int from, int count) __attribute__((always_inline)) {
    const Scales of = scales_of<KIND>(tile + bytes * g);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
      v16i high, low;
      memcpy(&high, sums + 2 * r * TILE, 64);
      memcpy(&low, sums + (2 * r + 1) * TILE, 64);
      totals[from + r] = with_group<KIND>(totals[from + r], high * STEPS + low, of, rows, g * rows.room + first + from + r);
    }
  };
  for (int g = 0; g <= groups + (COUNT <= 8); g++) {
    const int8_t* x = rows.values + (g * rows.room + first) * 2 * GROUP;
    if (g < groups) TILE_LOAD(6, KIND == 4 ? unfolded[g % (AHEAD + 1)] : tile + bytes * g, 64);
    if (COUNT > 8) {
      if (g < groups) { TILE_ROWS(0, 4, x); }
      if (g > 0) TILE_STORE(1, found[2], 64);
      if (g < groups) { TILE_ROWS(1, 5, x + 16 * GROUP); }
      if (g > 0) add(g - 1, found[(g - 1) & 1], 0, 8);
      if (g < groups) TILE_STORE(0, found[g & 1], 64);
      if (g > 0) add(g - 1, found[2], 8, COUNT - 8);
    } else if (g & 1) {
      if (g < groups) { TILE_ROWS(2, 4, x); }
      if (g <= groups) TILE_STORE(0, found[0], 64);
      if (g > 1) add(g - 2, found[1], 0, part);
    } else {
      if (g < groups) { TILE_ROWS(0, 4, x); }
      if (g > 0 && g <= groups) TILE_STORE(2, found[1], 64);
      if (g > 1) add(g - 2, found[0], 0, part);
    }
    unfold_group(g + AHEAD);
    if (g < groups) fetch_ahead<KIND>(tile + bytes * g);
  }
#pragma GCC unroll 16
  for (int r = 0; r < COUNT; r++) out[r] = totals[r];
}

template <int KIND>
static void multiply_rows(const uint8_t* tile, const Rows& rows, int64_t first, int count, int inputs, v16f* out) {
  switch (count) {
    case 4: return multiply_block<KIND, 4>(tile, rows, first, inputs, out);
    case 8: return multiply_block<KIND, 8>(tile, rows, first, inputs, out);
    case 12: return multiply_block<KIND, 12>(tile, rows, first, inputs, out);
    default: return multiply_block<KIND, 16>(tile, rows, first, inputs, out);
  }
}
#else
static const bool has_tiles = false;
#if defined(BY_PAIRS)
static const int BLOCK = 32, VECTOR_ROWS = 32;
#else
static const int BLOCK = 8, VECTOR_ROWS = 8;
#endif
static void shape_tiles(int) {}
static void release_tiles() {}
template <int KIND>
static void multiply_rows(const uint8_t*, const Rows&, int64_t, int, int, v16f*) {}
#endif

// Blocks of equal size, as few as there can be. `rows` is how many one is computed for, which may be more than there are.
struct Blocks {
  int rows;
  bool by_tiles;

  Blocks(int kind, int count) : rows(VECTOR_ROWS), by_tiles(has_tiles && count >= (kind == 4 ? 3 : 5)) {
    if (!by_tiles) return;
    const int blocks = (count + BLOCK - 1) / BLOCK;
    rows = ((count + blocks - 1) / blocks + 3) / 4 * 4;
    shape_tiles(rows);
  }
  Blocks(const Blocks&) = delete;
  ~Blocks() {
    if (by_tiles) release_tiles();
  }

  // One tile of weights for the `count` rows of the block that begins at `first`, with bias.
  __attribute__((noinline)) void multiply(const Matrix& matrix, int tile, const Rows& x, int64_t first, int count, v16f* out) const {
    const uint8_t* at = matrix.tiles + int64_t(tile) * (matrix.inputs / GROUP) * group_bytes(matrix.kind);
    if (by_tiles)
      matrix.kind == 4 ? multiply_rows<4>(at, x, first, rows, matrix.inputs, out)
                       : multiply_rows<8>(at, x, first, rows, matrix.inputs, out);
    else
#if defined(BY_PAIRS)
      matrix.kind == 4 ? multiply_pairs<4>(at, x, first, count, matrix.inputs, out)
                       : multiply_pairs<8>(at, x, first, count, matrix.inputs, out);
#else
      matrix.kind == 4 ? multiply_some<4>(at, x, first, count, matrix.inputs, out)
                       : multiply_some<8>(at, x, first, count, matrix.inputs, out);
#endif
    if (matrix.bias)
      for (int r = 0; r < count; r++) out[r] += load(matrix.bias + tile * TILE);
  }
};

// visit(first, count) for every block of `count` rows
template <class Visit>
static inline void each_block(const Blocks& blocks, int count, Visit visit) {
  for (int first = 0; first < count; first += blocks.rows)
    visit(first, count - first < blocks.rows ? count - first : blocks.rows);
}
