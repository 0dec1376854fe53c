// The two calls that are products alone: for Python, and for tests, which compile this file for other CPUs than the one at hand.
#pragma once
#include "tiles.h"

extern "C" {
void superfluid_quantize(const float* x, const Rows* rows, int count, int width) {
  for (int row = 0; row < count; row++) quantize_row(x + int64_t(row) * width, *rows, row, width);
}

void superfluid_product(const Matrix* matrix, const Rows* rows, float* out, int count) {
  const Blocks blocks(matrix->kind, count);
  for (int tile = 0; tile * TILE < matrix->outputs; tile++)
    each_block(blocks, count, [&](int first, int some) {
      v16f found[BLOCK];
      blocks.multiply(*matrix, tile, *rows, first, some, found);
      for (int r = 0; r < some; r++)
        for (int i = 0; i < TILE && tile * TILE + i < matrix->outputs; i++)
          out[int64_t(first + r) * matrix->outputs + tile * TILE + i] = found[r][i];
    });
}
}
