// SPDX-License-Identifier: Apache-2.0
// Sums of rows per cell, on the cpu.
//
// A task owns the cells that it writes, and every sum runs by ascending point: results depend neither on the number of
// threads nor on the instruction set. A channels-first output is written in blocks of cells that are transposed in the
// cache; channels-first rows, which are read in the order of the cells, are copied once.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cell_plan_cpu.h"
#include "cell_pool.h"
#include "cell_pool_cpu.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"
#include "rows_cpu.h"

namespace muspace::bevpool {
namespace {

constexpr int kWindow = 64;               // points whose rows and weights are found before their channels are read
constexpr int64_t kCacheBytes = 1 << 19;  // rows beyond this are prefetched

// ---- copies as rows of one type

template <class T>
MSP_CPU_INLINE void stage_block(const Staging& staging, int64_t first, int64_t last) {
  const int64_t offset = first * staging.channels, numbers = staging.channels * (last - first);
  if (staging.pixels == 0) {
    widen(staging.data, staging.from, offset, numbers, static_cast<T*>(staging.rows) + offset);
    return;
  }
  std::vector<T> tile(static_cast<size_t>(2 * numbers));
  const PixelRun run = pixel_run(first, last, staging.channels, staging.pixels);
  if (size_of(staging.to) == static_cast<int64_t>(sizeof(T))) {
    read_pixels(staging.data, staging.from, run, staging.channels, tile.data(), static_cast<T*>(staging.rows) + offset);
  } else {
    read_pixels(staging.data, staging.from, run, staging.channels, tile.data(), tile.data() + numbers);
    narrow(tile.data() + numbers, numbers, staging.rows, staging.to, offset);
  }
}
MSP_CPU_CLONES void stage_block_f32(const Staging& staging, int64_t first, int64_t last) {
  stage_block<float>(staging, first, last);
}
MSP_CPU_CLONES void stage_block_f64(const Staging& staging, int64_t first, int64_t last) {
  stage_block<double>(staging, first, last);
}

// ---- sums per cell

struct Pooling {
  Rows rows;  // [rows, channels]
  Weights weights;
  Cells output;
  PlanView plan;
  int64_t points;
  bool prefetched;
};

template <class V>
struct Term {
  const V* row;
  arithmetic_t<V> weight;
};

// Rows and weights of the entries [begin, end), without those that point outside the arrays.
template <class V>
MSP_CPU_INLINE int find_terms(const Pooling& pooling, int64_t begin, int64_t end, Term<V>* terms) {
  using T = arithmetic_t<V>;
  const V* const rows = static_cast<const V*>(pooling.rows.data);
  const int64_t channels = pooling.rows.channels;
  const uint64_t row_count = static_cast<uint64_t>(pooling.rows.rows),
                 weight_count = static_cast<uint64_t>(pooling.weights.count);
  int count = 0;
  if (pooling.plan.entries == nullptr) {
    for (int64_t k = begin; k < end; ++k) {
      const uint64_t row = static_cast<uint64_t>(int64_t{pooling.plan.rows[k]});
      if (row < row_count) terms[count++] = Term<V>{rows + static_cast<int64_t>(row) * channels, T(1)};
    }
    return count;
  }
  for (int64_t k = begin; k < end; ++k) {
    const PlanEntry entry = pooling.plan.entries[k];
    const uint64_t row = static_cast<uint64_t>(int64_t{entry.row}),
                   weight = static_cast<uint64_t>(int64_t{entry.weight});
    if (row >= row_count || weight >= weight_count) continue;
    terms[count++] = Term<V>{rows + static_cast<int64_t>(row) * channels,
                             read_number<T>(pooling.weights.data, pooling.weights.type, static_cast<int64_t>(weight))};
  }
  return count;
}

// sums[c] += the weighted rows, for N vectors of channels from `first`, kept in registers over the terms.
template <int N, bool kWeighted, class V, class T>
MSP_CPU_INLINE void add_vectors(const Term<V>* terms, int count, int64_t first, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sum[N];
  for (int n = 0; n < N; ++n) sum[n] = cpu::load_lanes(sums + first + n * kWidth);
  for (int k = 0; k < count; ++k) {
    const V* const row = terms[k].row + first;
    const T weight = terms[k].weight;
    for (int n = 0; n < N; ++n) {
      if constexpr (kWeighted) {
        sum[n] += weight * cpu::load_lanes(row + n * kWidth);
      } else {
        sum[n] += cpu::load_lanes(row + n * kWidth);
      }
    }
  }
  for (int n = 0; n < N; ++n) cpu::store_lanes(sums + first + n * kWidth, sum[n]);
}

template <bool kWeighted, class V, class T>
MSP_CPU_INLINE void add_terms(const Term<V>* terms, int count, int64_t channels, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  int64_t c = 0;
  for (; c + 10 * kWidth <= channels; c += 10 * kWidth) add_vectors<10, kWeighted>(terms, count, c, sums);
  for (; c + 8 * kWidth <= channels; c += 8 * kWidth) add_vectors<8, kWeighted>(terms, count, c, sums);
  for (; c + 4 * kWidth <= channels; c += 4 * kWidth) add_vectors<4, kWeighted>(terms, count, c, sums);
  for (; c + kWidth <= channels; c += kWidth) add_vectors<1, kWeighted>(terms, count, c, sums);
  if (c == channels) return;
  for (int k = 0; k < count; ++k) {
    for (int64_t rest = c; rest < channels; ++rest) {
      const T number = cpu::load(terms[k].row + rest);
      sums[rest] += kWeighted ? terms[k].weight * number : number;
    }
  }
}

template <class V>
MSP_CPU_INLINE void prefetch_entries(const Pooling& pooling, const EntryRange& range) {
  if (!pooling.prefetched) return;
  const int64_t bytes = pooling.rows.channels * static_cast<int64_t>(sizeof(V));
  const int64_t end = std::min(range.end, range.begin + kWindow);
  for (int64_t k = range.begin; k < end; ++k) {
    const int64_t row = pooling.plan.entries != nullptr ? pooling.plan.entries[k].row : pooling.plan.rows[k];
    if (row < 0 || row >= pooling.rows.rows) continue;
    prefetch(static_cast<const V*>(pooling.rows.data) + row * pooling.rows.channels, bytes);
  }
}

// sums = the sum of a cell that has entries.
template <class V, class T>
MSP_CPU_INLINE void sum_cell(const Pooling& pooling, const EntryRange& range, T* sums) {
  Term<V> terms[kWindow];
  std::memset(sums, 0, static_cast<size_t>(pooling.rows.channels) * sizeof(T));
  for (int64_t k = range.begin; k < range.end; k += kWindow) {
    const int count = find_terms(pooling, k, std::min(range.end, k + kWindow), terms);
    if (pooling.plan.entries != nullptr) {
      add_terms<true>(terms, count, pooling.rows.channels, sums);
    } else {
      add_terms<false>(terms, count, pooling.rows.channels, sums);
    }
  }
}

template <class V>
MSP_CPU_INLINE void pool_last(const Pooling& pooling, int64_t first, int64_t last) {
  using T = arithmetic_t<V>;
  const int64_t channels = pooling.rows.channels, size = size_of(pooling.output.type);
  const bool in_place = size == static_cast<int64_t>(sizeof(T));
  std::vector<T> sums(static_cast<size_t>(channels));
  for (int64_t cell = first; cell < last; ++cell) {
    const EntryRange range = entries_of(pooling.plan, pooling.points, cell);
    if (cell + 1 < last) prefetch_entries<V>(pooling, entries_of(pooling.plan, pooling.points, cell + 1));
    char* const row = static_cast<char*>(pooling.output.data) + cell * channels * size;
    if (range.begin == range.end) {
      std::memset(row, 0, static_cast<size_t>(channels * size));
    } else if (in_place) {
      sum_cell<V>(pooling, range, reinterpret_cast<T*>(row));
    } else {
      sum_cell<V>(pooling, range, sums.data());
      narrow(sums.data(), channels, pooling.output.data, pooling.output.type, cell * channels);
    }
  }
}

template <class V>
MSP_CPU_INLINE void pool_first(const Pooling& pooling, int64_t first, int64_t last) {
  using T = arithmetic_t<V>;
  const int64_t channels = pooling.rows.channels, size = size_of(pooling.output.type);
  const PixelRun run = pixel_run(first, last, channels, pooling.output.pixels);
  if (entries_of(pooling.plan, pooling.points, first).begin == entries_of(pooling.plan, pooling.points, last - 1).end) {
    for (int64_t c = 0; c < channels; ++c) {
      std::memset(static_cast<char*>(pooling.output.data) + (run.offset + c * run.pitch) * size, 0,
                  static_cast<size_t>(run.count * size));
    }
    return;
  }
  std::vector<T> buffer(static_cast<size_t>(2 * channels * run.count));
  for (int64_t cell = first; cell < last; ++cell) {
    const EntryRange range = entries_of(pooling.plan, pooling.points, cell);
    if (cell + 1 < last) prefetch_entries<V>(pooling, entries_of(pooling.plan, pooling.points, cell + 1));
    if (range.begin < range.end) sum_cell<V>(pooling, range, &buffer[static_cast<size_t>((cell - first) * channels)]);
  }
  write_pixels(buffer.data(), channels, buffer.data() + channels * run.count, pooling.output.data, pooling.output.type,
               run);
}

template <class V>
MSP_CPU_INLINE void pool_block(const Pooling& pooling, int64_t first, int64_t last) {
  if (pooling.output.pixels > 0) {
    pool_first<V>(pooling, first, last);
  } else {
    pool_last<V>(pooling, first, last);
  }
}

#define MSP_CELL_POOL_CPU_INSTANCE(suffix, V)                                                 \
  MSP_CPU_CLONES void pool_##suffix(const Pooling& pooling, int64_t first, int64_t last) {    \
    pool_block<V>(pooling, first, last);                                                      \
  }
MSP_CELL_POOL_CPU_INSTANCE(f32, float)
MSP_CELL_POOL_CPU_INSTANCE(f16, half_t)
MSP_CELL_POOL_CPU_INSTANCE(bf16, bfloat16_t)
MSP_CELL_POOL_CPU_INSTANCE(f64, double)
#undef MSP_CELL_POOL_CPU_INSTANCE

constexpr auto kPool = {pool_f32, pool_f16, pool_bf16, pool_f64};

void run_pool(const Rows& rows, const Weights& weights, const int32_t* plan, int64_t points, const Cells& output,
              void* workspace, int64_t threads) {
  const bool weighted = weights.data != nullptr;
  Pooling pooling{rows, weights, output, plan_view(plan, points, output.cells, weighted), points, false};
  threads = useful_threads((points + output.cells) * rows.channels, threads);
  if (staged(rows.type, rows.rows, rows.pixels, points)) {
    const Storage arithmetic = arithmetic_storage(rows.type);
    stage(Staging{rows.data, rows.type, arithmetic, rows.channels, rows.pixels, workspace}, rows.rows, threads);
    pooling.rows = Rows{workspace, arithmetic, rows.rows, rows.channels, 0};
  }
  pooling.prefetched = rows.rows * rows.channels * size_of(pooling.rows.type) > kCacheBytes;
  cpu::prefer_huge_pages(output.data, output.cells * output.channels * size_of(output.type));
  const Blocks blocks(output.cells, output.pixels, block_rows(output.channels));
  const auto task = kPool.begin()[static_cast<int>(pooling.rows.type)];
  parallel_for(blocks.count(), threads, [&](int64_t b) { task(pooling, blocks.first(b), blocks.last(b)); });
}

}  // namespace

void stage(const Staging& staging, int64_t rows, int64_t threads) {
  const Blocks blocks(rows, staging.pixels, block_rows(staging.channels));
  const auto task = staging.from == Storage::f64 ? stage_block_f64 : stage_block_f32;
  cpu::prefer_huge_pages(staging.rows, rows * staging.channels * size_of(staging.to));
  parallel_for(blocks.count(), threads, [&](int64_t b) { task(staging, blocks.first(b), blocks.last(b)); });
}

int64_t pool_workspace_bytes(const Rows& rows, const Weights&, const Cells&, int64_t points) {
  if (!staged(rows.type, rows.rows, rows.pixels, points)) return 0;
  return rows.rows * rows.channels * size_of(arithmetic_storage(rows.type));
}

Status launch_pool(const Rows& rows, const Weights& weights, const int32_t* plan, int64_t points, const Cells& output,
                   PoolLaunch, void* workspace, const Place& place) {
  return cpu::guarded("cell_pool", [&] { run_pool(rows, weights, plan, points, output, workspace, place.ctx); });
}

}  // namespace muspace::bevpool
