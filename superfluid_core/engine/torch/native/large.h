// A whole step of many rows over quantized weights: what step.h does for few, with bf16 products by AMX and float32 between them.
//
// The residual rows stay float32; what a product reads is bf16 in tiles. The eight phases of a layer are shared by the team's
// threads, and what follows a product is done where its results fall.
#pragma once
#include "chunks.h"
#include "step.h"

#if defined(HAS_HALF_TILES)
#include <omp.h>

static const int ROWS_A_CHUNK = 16, PART_ROWS_MIN = 4;

struct Large {
  const int64_t *ids, *positions, *slots, *sampled;
  const int32_t* blocks;  // [lanes, blocks_width]
  const Part* parts;
  int32_t tokens, samples, blocks_width, threads, parts_count, unused;
  int64_t panel_values;  // room of one thread
  // room: float rows; tiled rows, as many as whole pairs of tiles hold; one for every thread
  float *x, *qkv;
  bf16 *normed, *mixed, *wide, *panels;
  ChunkRoom* chunks;
  Phase* phases;
  float* logits;
};

struct LargePass {
  const Model& m;
  const Large& s;
  Member team;
  bf16* panel;
  ChunkRoom& room;

  int64_t q_width() const { return int64_t(m.heads.query) * m.heads.size; }
  int64_t qkv_width() const { return int64_t(m.heads.query + 2 * m.heads.key) * m.heads.size; }

  template <class Visit>
  void each_row(int count, Visit visit) {
    team.run((count + ROWS_A_CHUNK - 1) / ROWS_A_CHUNK, [&](int chunk) {
      const int end = (chunk + 1) * ROWS_A_CHUNK < count ? (chunk + 1) * ROWS_A_CHUNK : count;
      for (int row = chunk * ROWS_A_CHUNK; row < end; row++) visit(row);
    });
  }

  // visit(row, panel, halves, values) for all that rows times a matrix is
  template <class Visit>
  void product(const Matrix& matrix, const bf16* rows, int64_t count, Visit visit) {
    const int64_t piece = piece_rows(count, matrix, s.threads), panels = (matrix.outputs + PANEL - 1) / PANEL;
    team.run(int((count + piece - 1) / piece * panels), [&](int chunk) {
      const int64_t first = chunk / panels * piece, end = first + piece < count ? first + piece : count;
      const int at = int(chunk % panels);
      each_found(matrix, at, rows, panel, first, end,
                 [&](int64_t row, int halves, const v16f* values) { visit(row, at, halves, values); });
    });
  }

  // out[row] = (or +=) the product
  void product_to(const Matrix& matrix, const bf16* rows, int64_t count, float* out, bool adds) {
    const int64_t width = matrix.outputs;
    product(matrix, rows, count, [&](int64_t row, int panel, int halves, const v16f* values) {
      for (int half = 0; half < halves; half++) {
        const int64_t column = panel * PANEL + half * TILE;
        float* at = out + row * width + column;
        if (column + TILE <= width)
          store(at, adds ? load(at) + values[half] : values[half]);
        else
          for (int i = 0; column + i < width; i++) at[i] = adds ? at[i] + values[half][i] : values[half][i];
      }
    });
  }

  void gated_product(const Matrix& matrix) {
    product(matrix, s.normed, s.tokens, [&](int64_t row, int panel, int, const v16f* values) {
      const v16f gate = values[0];
      store(s.wide + tiled(row, panel * TILE, m.intermediate), gate / (1.0f + exponential(-gate)) * values[1]);
    });
  }

  void norm(float* x, const float* weight, int64_t to) {
    add_norm(x, (const float*)nullptr, weight, panel, m.hidden, m.heads.norm_eps);  // the panel's room is free between products
    copy_to_tiles(panel, s.normed, to, m.hidden);
  }

  void attend(const Layer& layer) {
    const Chunks chunks{s.qkv, s.mixed, (const bf16*)layer.keys, (const bf16*)layer.values, s.positions, m.heads};
    team.run(s.parts_count * m.heads.key, [&](int task) {
      const Part& part = s.parts[s.parts_count - 1 - task / m.heads.key];  // long contexts first
      const int32_t* blocks = s.blocks + int64_t(part.lane) * s.blocks_width;
      const int key_head = task % m.heads.key;
      if (part.count >= PART_ROWS_MIN) return chunks.attend(part, blocks, key_head, room);
      for (int row = part.first; row < part.first + part.count; row++) attend_row(layer, row, blocks, key_head);
    });
  }

  void attend_row(const Layer& layer, int row, const int32_t* blocks, int key_head) {
    const int group = m.heads.query / m.heads.key, size = m.heads.size;
    const int64_t at = s.positions[row];
    alignas(64) float weighted[16 * 256], best[16], total[16];
    attend_any(s.qkv + row * qkv_width() + key_head * group * size, (const bf16*)layer.keys, (const bf16*)layer.values, blocks,
               key_head, first_seen(at, m.heads), int(at) + 1, m.heads, weighted, best, total);
    for (int g = 0; g < group; g++)
      for (int i = 0; i < size; i += 16)
        store(s.mixed + tiled(row, (key_head * group + g) * size + i, q_width()), load(weighted + g * size + i) / total[g]);
  }

  void layer(const Layer& layer, bool is_first) {
    each_row(s.tokens, [&](int row) {
      float* x = s.x + int64_t(row) * m.hidden;
      if (is_first) embed(m, s.ids[row], x);
      norm(x, layer.attention_norm, row);
    });
    product_to(layer.qkv, s.normed, s.tokens, s.qkv, false);
    each_row(s.tokens, [&](int row) {
      const int64_t at = s.positions[row] * m.heads.size;
      turn_and_keep(s.qkv + row * qkv_width(), layer.head_norm, m.cos + at, m.sin + at, (bf16*)layer.keys, (bf16*)layer.values,
                    s.slots[row], m.heads);
    });
    attend(layer);
    product_to(layer.out, s.mixed, s.tokens, s.x, true);
    each_row(s.tokens, [&](int row) { norm(s.x + int64_t(row) * m.hidden, layer.mlp_norm, row); });
    gated_product(layer.gate_up);
    product_to(layer.down, s.wide, s.tokens, s.x, true);
  }

  void all() {
    shape_whole_tiles();
    for (int n = 0; n < m.layers; n++) layer(m.layer[n], n == 0);
    if (s.samples) {
      each_row(s.samples, [&](int row) { norm(s.x + s.sampled[row] * m.hidden, m.final_norm, row); });
      product_to(m.head, s.normed, s.samples, s.logits, false);
    }
    release_tiles();
  }
};
#endif
