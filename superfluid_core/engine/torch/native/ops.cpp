// What Python calls, by C linkage and raw addresses: four parts of a layer for bf16 or float32 rows, a product with a quantized
// matrix, and whole steps. Sizes are checked by the caller.
#include "calls.h"
#include "large.h"
#include "many.h"

template <class Work>
static void in_parallel(int threads, int64_t count, Work work) {
  if (threads > count) threads = int(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) work(i);
}

// Rows of few tokens are not worth waking threads for.
static int threads_for(int threads, int64_t elements) { return elements < 16384 ? 1 : threads; }

template <class X>
static void add_norm_rows(X* x, const X* delta, const X* weight, X* out, int rows, int width, float eps, int threads) {
  in_parallel(threads_for(threads, int64_t(rows) * width), rows, [&](int64_t row) {
    const int64_t at = row * width;
    add_norm(x + at, delta ? delta + at : delta, weight, out + at, width, eps);
  });
}

template <class X>
static void silu_rows(const X* gate_up, X* out, int rows, int width, int threads) {
  in_parallel(threads_for(threads, int64_t(rows) * width), rows, [&](int64_t row) {
    const X* gate = gate_up + 2 * row * width;
    silu_times(gate, gate + width, out + row * width, width);
  });
}

struct Turn {
  void* qkv;
  const void* norm;
  const float *cos, *sin;  // [rows, size]
  const int64_t* slots;
  void *keys, *values;
  int32_t rows, threads;
};

template <class X>
static void turn_rows(const Turn& t, const Heads& heads) {
  const int64_t width = int64_t(heads.query + 2 * heads.key) * heads.size;
  in_parallel(threads_for(t.threads, t.rows * width), t.rows, [&](int64_t row) {
    const int64_t at = row * heads.size;
    turn_and_keep((X*)t.qkv + row * width, (const X*)t.norm, t.cos + at, t.sin + at, (X*)t.keys, (X*)t.values,
                  t.slots[row], heads);
  });
}

struct Attend {
  const void* qkv;  // rows of query, key and value heads
  void* out;
  const void *keys, *values;
  const int32_t *blocks, *lane_of;
  const int64_t* positions;
  int32_t rows, blocks_width, threads, unused;
};

template <class X>
static void attend_rows(const Attend& a, const Heads& heads) {
  const int group = heads.query / heads.key, size = heads.size;
  const int64_t width = int64_t(heads.query + 2 * heads.key) * size;
  const int tasks = a.rows * heads.key;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic) if (tasks > 1)
  for (int task = 0; task < tasks; task++) {
    const int row = task / heads.key, key_head = task % heads.key;
    const int64_t at = a.positions[row];
    alignas(64) float weighted[16 * 256], best[16], total[16];
    attend_any((const X*)a.qkv + row * width + key_head * group * size, (const X*)a.keys, (const X*)a.values,
               a.blocks + int64_t(a.lane_of[row]) * a.blocks_width, key_head, first_seen(at, heads), int(at) + 1, heads,
               weighted, best, total);
    for (int g = 0; g < group; g++) {
      X* out = (X*)a.out + (int64_t(row) * heads.query + key_head * group + g) * size;
      for (int i = 0; i < size; i += 16) store(out + i, load(weighted + g * size + i) / total[g]);
    }
  }
}

extern "C" {
int superfluid_ops_version() { return 2; }

void superfluid_add_norm(int is_float, void* x, const void* delta, const void* weight, void* out, int rows, int width,
                         float eps, int threads) {
  if (is_float)
    add_norm_rows((float*)x, (const float*)delta, (const float*)weight, (float*)out, rows, width, eps, threads);
  else
    add_norm_rows((bf16*)x, (const bf16*)delta, (const bf16*)weight, (bf16*)out, rows, width, eps, threads);
}

void superfluid_silu(int is_float, const void* gate_up, void* out, int rows, int width, int threads) {
  if (is_float)
    silu_rows((const float*)gate_up, (float*)out, rows, width, threads);
  else
    silu_rows((const bf16*)gate_up, (bf16*)out, rows, width, threads);
}

void superfluid_turn(int is_float, const Turn* turn, const Heads* heads) {
  is_float ? turn_rows<float>(*turn, *heads) : turn_rows<bf16>(*turn, *heads);
}

void superfluid_attend(int is_float, const Attend* attend, const Heads* heads) {
  is_float ? attend_rows<float>(*attend, *heads) : attend_rows<bf16>(*attend, *heads);
}

// How many rows lie together in the room of superfluid_many; 0: this CPU has better ways.
int superfluid_many_block() { return MANY_BLOCK; }

void superfluid_many(const Matrix* matrix, const Many* many) { multiply_many(*matrix, *many); }

void superfluid_step(const Model* model, const Step* step, int phases) {
  begin_again(step->phases, phases);
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
  {
    const Member member{step->phases};
    if (model->kv_is_float)
      Pass<float>{*model, *step, member}.all();
    else
      Pass<bf16>{*model, *step, member}.all();
  }
}
#if defined(HAS_HALF_TILES)
int64_t superfluid_large_room() { return has_tiles ? sizeof(ChunkRoom) : 0; }

void superfluid_large(const Model* model, const Large* step, int phases) {
  begin_again(step->phases, phases);
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
  {
    const int mine = omp_get_thread_num();
    LargePass{*model, *step, Member{step->phases}, step->panels + mine * step->panel_values, step->chunks[mine]}.all();
  }
}
#else
int64_t superfluid_large_room() { return 0; }
void superfluid_large(const Model*, const void*, int) {}
#endif
}
