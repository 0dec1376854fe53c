// A whole step of few rows over quantized weights: token ids in, float32 logits of the sampled rows out.
//
// Activations are float32, KV is kept in the pool's type. Python hands one structure over; nothing is allocated here. The ten
// phases of a layer are shared by the team's threads; a row's numbers do not depend on how.
#pragma once
#include "parts.h"
#include "team.h"
#include "tiles.h"

struct Layer {
  const float *attention_norm, *mlp_norm, *head_norm;  // head_norm [query + key, size], may be null
  Matrix qkv, out, gate_up, down;                      // gate_up: a tile of gate, then its tile of up
  void *keys, *values;                                 // the layer's pools
};

struct Model {
  Heads heads;
  int32_t hidden, intermediate, vocabulary, layers, kv_is_float, embedding_is_float;
  const void* embedding;
  const float *final_norm, *cos, *sin;
  Matrix head;
  const Layer* layer;
};

struct Step {
  const int64_t *ids, *positions, *slots, *sampled;
  const int32_t *blocks, *lane_of;  // blocks [lanes, blocks_width]
  int32_t tokens, samples, blocks_width, threads, spans, unused;
  // room: x, qkv, mixed, wide; partial results of attention
  float *x, *qkv, *mixed, *wide, *weighted, *best, *total;
  Rows rows;
  Phase* phases;
  float* logits;
};

static inline void embed(const Model& m, int64_t id, float* x) {
  if (m.embedding_is_float)
    copy_row((const float*)m.embedding + id * m.hidden, x, m.hidden);
  else
    copy_row((const bf16*)m.embedding + id * m.hidden, x, m.hidden);
}

static const int SPAN = 512;  // positions that one task of attention reads at most

template <class K>
struct Pass {
  const Model& m;
  const Step& s;
  Member team;

  int q_width() const { return m.heads.query * m.heads.size; }
  int qkv_width() const { return (m.heads.query + 2 * m.heads.key) * m.heads.size; }

  int tiles_a_chunk(int tiles) const {
    int each = tiles / (s.threads * 6);
    return each > 1 ? each : 1;
  }

  // visit(tile) for all tiles, shared out
  template <class Visit>
  void each_tile(int tiles, Visit visit) {
    const int size = tiles_a_chunk(tiles);
    team.run((tiles + size - 1) / size, [&](int chunk) {
      for (int tile = chunk * size; tile < tiles && tile < (chunk + 1) * size; tile++) visit(tile);
    });
  }

  // out[row, tile] = (or +=) the product
  void product(const Matrix& matrix, int count, float* out, bool adds) {
    const int width = matrix.outputs;
    const Blocks blocks(matrix.kind, count);
    each_tile((width + TILE - 1) / TILE, [&](int tile) {
      const int cut = width - tile * TILE < TILE ? width - tile * TILE : TILE;
      each_block(blocks, count, [&](int first, int some) {
        v16f found[BLOCK];
        blocks.multiply(matrix, tile, s.rows, first, some, found);
        for (int r = 0; r < some; r++) {
          float* at = out + int64_t(first + r) * width + tile * TILE;
          if (cut == TILE)
            store(at, adds ? load(at) + found[r] : found[r]);
          else
            for (int i = 0; i < cut; i++) at[i] = adds ? at[i] + found[r][i] : found[r][i];
        }
      });
    });
  }

  void gated_product(const Matrix& matrix) {
    const Blocks blocks(matrix.kind, s.tokens);
    each_tile(m.intermediate / TILE, [&](int tile) {
      each_block(blocks, s.tokens, [&](int first, int some) {
        v16f gate[BLOCK], up[BLOCK];
        blocks.multiply(matrix, 2 * tile, s.rows, first, some, gate);
        blocks.multiply(matrix, 2 * tile + 1, s.rows, first, some, up);
        for (int r = 0; r < some; r++)
          store(s.wide + int64_t(first + r) * m.intermediate + tile * TILE, gate[r] / (1.0f + exponential(-gate[r])) * up[r]);
      });
    });
  }

  void norm_and_quantize(float* x, const float* weight, int64_t row) {
    float* normed = s.wide + row * (m.hidden > m.intermediate ? m.hidden : m.intermediate);  // free between products
    add_norm(x, (const float*)nullptr, weight, normed, m.hidden, m.heads.norm_eps);
    quantize_row(normed, s.rows, row, m.hidden);
  }

  int spans_of(int token) const {
    const int64_t at = s.positions[token];
    return int(at - first_seen(at, m.heads)) / SPAN + 1;
  }

  void attend(const Layer& layer) {
    const int group = m.heads.query / m.heads.key, size = m.heads.size;
    team.run(s.tokens * m.heads.key * s.spans, [&](int task) {
      const int span = task % s.spans, key_head = task / s.spans % m.heads.key, token = task / s.spans / m.heads.key;
      const int64_t at = s.positions[token];
      const int first = first_seen(at, m.heads) + span * SPAN;
      if (first > at) return;
      const int end = first + SPAN <= at ? first + SPAN : int(at) + 1;
      const int64_t place = (int64_t(token) * s.spans + span) * m.heads.query + key_head * group;
      attend_any(s.qkv + int64_t(token) * qkv_width() + key_head * group * size, (const K*)layer.keys,
                 (const K*)layer.values, s.blocks + int64_t(s.lane_of[token]) * s.blocks_width, key_head, first, end,
                 m.heads, s.weighted + place * size, s.best + place, s.total + place);
    });
  }

  // The spans of a token become one row, which is quantized.
  void merge(int64_t token) {
    const int size = m.heads.size, spans = spans_of(int(token));
    float* out = s.mixed + token * q_width();
    for (int h = 0; h < m.heads.query; h++) {
      const int64_t place = token * s.spans * m.heads.query + h;
      float top = -INFINITY, total = 0;
      for (int n = 0; n < spans; n++) {
        const float best = s.best[place + n * m.heads.query];
        if (!(best <= top)) top = best;
      }
      for (int i = 0; i < size; i += 16) store(out + h * size + i, v16f{});
      for (int n = 0; n < spans; n++) {
        const int64_t at = place + int64_t(n) * m.heads.query;
        const float share = exponential(splat(s.best[at] - top))[0];
        total += s.total[at] * share;
        for (int i = 0; i < size; i += 16)
          store(out + h * size + i, load(out + h * size + i) + load(s.weighted + at * size + i) * share);
      }
      for (int i = 0; i < size; i += 16) store(out + h * size + i, load(out + h * size + i) / total);
    }
    quantize_row(out, s.rows, token, q_width());
  }

  void layer(const Layer& layer, bool is_first) {
    team.run(s.tokens, [&](int token) {
      float* x = s.x + int64_t(token) * m.hidden;
      if (is_first) embed(m, s.ids[token], x);
      norm_and_quantize(x, layer.attention_norm, token);
    });
    product(layer.qkv, s.tokens, s.qkv, false);
    team.run(s.tokens, [&](int token) {
      const int64_t at = s.positions[token] * m.heads.size;
      turn_and_keep(s.qkv + int64_t(token) * qkv_width(), layer.head_norm, m.cos + at, m.sin + at, (K*)layer.keys,
                    (K*)layer.values, s.slots[token], m.heads);
    });
    attend(layer);
    team.run(s.tokens, [&](int token) { merge(token); });
    product(layer.out, s.tokens, s.x, true);
    team.run(s.tokens, [&](int token) { norm_and_quantize(s.x + int64_t(token) * m.hidden, layer.mlp_norm, token); });
    gated_product(layer.gate_up);
    team.run(s.tokens, [&](int token) { quantize_row(s.wide + int64_t(token) * m.intermediate, s.rows, token, m.intermediate); });
    product(layer.down, s.tokens, s.x, true);
  }

  void all() {
    for (int n = 0; n < m.layers; n++) layer(m.layer[n], n == 0);
    if (!s.samples) return;
    team.run(s.samples, [&](int row) { norm_and_quantize(s.x + s.sampled[row] * m.hidden, m.final_norm, row); });
    product(m.head, s.samples, s.logits, false);
  }
};
