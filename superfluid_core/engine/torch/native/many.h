// Products of many float32 rows with a quantized matrix, where a small step's own products are faster than float32 ones: AVX2 (pairs.h).
//
// Rows are quantized in blocks that lie together, each as a small step would; the weights of a tile then meet block after block from the
// first cache. A row's numbers are those of a small step, whatever rows come along and whatever threads there are.
#pragma once
#include "parts.h"
#include "tiles.h"

struct Many {
  const float* x;
  float* out;  // [count, outputs]; if gated [count, outputs / 2]: the silu of a tile of gate times its tile of up
  Rows rows;   // room for whole blocks, `room` of them is BLOCK
  int32_t count, gated, threads, unused;
};

#if defined(BY_PAIRS)
static const int MANY_BLOCK = BLOCK;

static inline Rows rows_of_block(const Many& many, int block, int inputs) {
  const int64_t groups = int64_t(block) * BLOCK * (inputs / GROUP);
  return {many.rows.values + groups * 2 * GROUP, many.rows.scales + groups, many.rows.sums + groups, many.rows.counts + groups, BLOCK};
}

static inline void multiply_one_block(const Many& many, const Matrix& matrix, const Blocks& blocks, int tile, int block) {
  const Rows rows = rows_of_block(many, block, matrix.inputs);
  const int first = block * BLOCK, some = many.count - first < BLOCK ? many.count - first : BLOCK;
  v16f found[BLOCK], up[BLOCK];
  if (many.gated) {
    blocks.multiply(matrix, 2 * tile, rows, 0, some, found);
    blocks.multiply(matrix, 2 * tile + 1, rows, 0, some, up);
    for (int r = 0; r < some; r++) found[r] = found[r] / (1.0f + exponential(-found[r])) * up[r];
  } else {
    blocks.multiply(matrix, tile, rows, 0, some, found);
  }
  const int width = many.gated ? matrix.outputs / 2 : matrix.outputs;
  const int cut = width - tile * TILE < TILE ? width - tile * TILE : TILE;
  for (int r = 0; r < some; r++) memcpy(many.out + int64_t(first + r) * width + tile * TILE, &found[r], cut * sizeof(float));
}

static void multiply_many(const Matrix& matrix, const Many& many) {
  const int blocks_count = (many.count + BLOCK - 1) / BLOCK, tiles = (matrix.outputs + TILE - 1) / TILE / (many.gated ? 2 : 1);
  const Blocks blocks(matrix.kind, BLOCK);
#pragma omp parallel num_threads(many.threads) if (many.threads > 1)
  {
#pragma omp for schedule(dynamic, 16)
    for (int row = 0; row < many.count; row++)
      quantize_row(many.x + int64_t(row) * matrix.inputs, rows_of_block(many, row / BLOCK, matrix.inputs), row % BLOCK, matrix.inputs);
#pragma omp for schedule(dynamic, 1)
    for (int tile = 0; tile < tiles; tile++)
      for (int block = 0; block < blocks_count; block++) multiply_one_block(many, matrix, blocks, tile, block);
  }
}
#else
static const int MANY_BLOCK = 0;
static void multiply_many(const Matrix&, const Many&) {}
#endif
