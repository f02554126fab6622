// SPDX-License-Identifier: Apache-2.0
// Sums of many cells with few entries each, channels last: a group of lanes walks some neighbouring cells and writes
// their rows from registers, zeros included. Long cells are left to blocks of their own, which cut them into shares.
#pragma once

#include "cell_pool_forward.inl"

namespace muspace::bevpool {

#if defined(MSP_BACKEND_EMU)
constexpr unsigned kCrowdedBlocks = 2;
#else
constexpr unsigned kCrowdedBlocks = 1056;
#endif

/// A group of lanes walks kRun neighbouring cells.
template <class Base, int kRun_>
struct SparseShape : Base {
  static constexpr int kRun = kRun_;
};

template <class Shape>
struct SparseShared {
  alignas(16) float parts[Shape::kShares * Shape::kWidth];
  int32_t starts[Shape::kShares * Shape::kRun + 1];
};

/// The lane's sums as the row of a cell.
template <class Shape, class TO>
MSP_DEVICE void store_row(const PoolArguments& a, int64_t cell, int channel, const float* own) {
  TO* row = static_cast<TO*>(a.output) + cell * a.channels + channel;
  MSP_UNROLL
  for (int j = 0; j < Shape::kSteps; ++j) {
    const int at = j * Shape::kGroup * Shape::kVector;
    if (channel + at < a.channels) store_sums<TO, Shape::kVector>(row + at, own + j * Shape::kVector);
  }
}

template <class Shape>
MSP_DEVICE void finish_row(const PoolArguments& a, int64_t cell, int channel, float* own) {
  if (a.output_type == Storage::f32) {
    store_row<Shape, float>(a, cell, channel, own);
  } else if (a.output_type == Storage::f16) {
    store_row<Shape, half_t>(a, cell, channel, own);
  } else {
    store_row<Shape, bfloat16_t>(a, cell, channel, own);
  }
  MSP_UNROLL
  for (int e = 0; e < Shape::kOwn; ++e) own[e] = 0.f;
}

/// Adds the entries [first, last) and calls before(k) ahead of entry k.
template <class Shape, class T, class Before>
MSP_DEVICE void add_entries(const PoolArguments& a, const LaneColumns<Shape, T>& columns, int32_t first, int32_t last,
                            float* own, const Before& before) {
  const FrustumWords frustum = frustum_of(a);
  MSP_NO_UNROLL
  for (int32_t k = first; k < last; k += Shape::kFlight) {
    PoolRecord record[Shape::kFlight];
    RawVector<T, Shape::kVector> raw[Shape::kFlight][Shape::kSteps];
    MSP_UNROLL
    for (int u = 0; u < Shape::kFlight; ++u) record[u] = pool_record(a, frustum, k + u < last ? k + u : k);
    MSP_UNROLL
    for (int u = 0; u < Shape::kFlight; ++u) columns.load(record[u].row, k + u < last && record[u].row >= 0, raw[u]);
    MSP_UNROLL
    for (int u = 0; u < Shape::kFlight; ++u) {
      if (k + u >= last) continue;
      before(k + u);
      MSP_UNROLL
      for (int j = 0; j < Shape::kSteps; ++j) {
        add_weighted<T, Shape::kVector>(own + j * Shape::kVector, raw[u][j], record[u].weight);
      }
    }
  }
}

/// Cells first .. first + count of a group, `starts` theirs.
template <class Shape, class T>
MSP_DEVICE void pool_run(const PoolArguments& a, const LaneColumns<Shape, T>& columns, int64_t first, int count,
                         const int32_t* starts, int channel) {
  float own[Shape::kOwn];
  MSP_UNROLL
  for (int e = 0; e < Shape::kOwn; ++e) own[e] = 0.f;
  int cell = 0;
  while (cell < count) {
    // a long cell is skipped; the cells up to the next long one are walked as one run of entries
    if (starts[cell + 1] - starts[cell] > a.long_limit) {
      ++cell;
      continue;
    }
    int end = cell + 1;
    while (end < count && starts[end + 1] - starts[end] <= a.long_limit) ++end;
    add_entries(a, columns, starts[cell], starts[end], own, [&](int32_t k) {
      while (k >= starts[cell + 1]) finish_row<Shape>(a, first + cell++, channel, own);
    });
    while (cell < end) finish_row<Shape>(a, first + cell++, channel, own);
  }
}

template <class Shape, class T>
MSP_DEVICE void pool_crowded(SparseShared<Shape>& shared, const PoolArguments& a, const LaneColumns<Shape, T>& columns,
                             int first_channel) {
  const int t = static_cast<int>(threadIdx.x), lane = lane_id() % Shape::kGroup, group = lane_id() / Shape::kGroup;
  const int crowded = a.counters[2];
  for (int i = static_cast<int>(blockIdx.x); i < crowded; i += static_cast<int>(kCrowdedBlocks)) {
    const int32_t cell = a.long_cells[i];
    if (static_cast<uint32_t>(cell) >= static_cast<uint32_t>(a.cells)) continue;  // the whole block
    const int32_t first = a.starts[cell], last = a.starts[cell + 1];
    const int64_t each = (static_cast<int64_t>(last) - first + Shape::kShares - 1) / Shape::kShares;
    if (group < Shape::kGroups) {
      const int share = warp_id() * Shape::kGroups + group;
      const int64_t from = first + share * each, to = from + each < last ? from + each : last;
      float own[Shape::kOwn];
      MSP_UNROLL
      for (int e = 0; e < Shape::kOwn; ++e) own[e] = 0.f;
      if (from < to) {
        add_entries(a, columns, static_cast<int32_t>(from), static_cast<int32_t>(to), own, [](int32_t) {});
      }
      MSP_UNROLL
      for (int e = 0; e < Shape::kOwn; ++e) {
        const int at = (e / Shape::kVector * Shape::kGroup + lane) * Shape::kVector + e % Shape::kVector;
        shared.parts[share * Shape::kWidth + at] = own[e];
      }
    }
    MSP_SYNC_BLOCK();
    for (int c = t; c < Shape::kWidth && first_channel + c < a.channels; c += Shape::kThreads) {
      float sum = 0.f;
      MSP_UNROLL
      for (int share = 0; share < Shape::kShares; ++share) sum += shared.parts[share * Shape::kWidth + c];
      store_any(a.output, a.output_type, static_cast<int64_t>(cell) * a.channels + first_channel + c, sum);
    }
    MSP_SYNC_BLOCK();
  }
}

/// Grid: kCrowdedBlocks blocks for long cells and then kShares * kRun cells a block; blocks of channels.
template <class Shape, class T>
MSP_KERNEL(Shape::kThreads, Shape::kBlocks)
pool_sparse(const PoolArguments a) {
  MSP_SHARED SparseShared<Shape> shared;
  const int t = static_cast<int>(threadIdx.x), lane = lane_id() % Shape::kGroup, group = lane_id() / Shape::kGroup;
  const int first_channel = static_cast<int>(blockIdx.y) * Shape::kWidth;
  const LaneColumns<Shape, T> columns(a, first_channel, lane);
  if (blockIdx.x < kCrowdedBlocks) {
    pool_crowded<Shape, T>(shared, a, columns, first_channel);
    return;
  }
  constexpr int kCells = Shape::kShares * Shape::kRun;
  const int64_t block_cell = static_cast<int64_t>(blockIdx.x - kCrowdedBlocks) * kCells;
  const int cells = a.cells - block_cell < kCells ? static_cast<int>(a.cells - block_cell) : kCells;
  for (int i = t; i <= cells; i += Shape::kThreads) shared.starts[i] = a.starts[block_cell + i];
  MSP_SYNC_BLOCK();
  const int within = (warp_id() * Shape::kGroups + group) * Shape::kRun;
  if (group >= Shape::kGroups || within >= cells) return;
  const int count = cells - within < Shape::kRun ? cells - within : Shape::kRun;
  pool_run<Shape, T>(a, columns, block_cell + within, count, shared.starts + within,
                     first_channel + lane * Shape::kVector);
}

template <class Shape, class T>
const char* run_sparse_shape(const PoolArguments& a, stream_t stream) {
  const unsigned channel_blocks = blocks_of(a.channels, Shape::kWidth);
  if (channel_blocks > 65535) return "too many channels";
  const auto kernel = pool_sparse<Shape, T>;
  MSP_LAUNCH(kernel, dim3(kCrowdedBlocks + blocks_of(a.cells, Shape::kShares * Shape::kRun), channel_blocks),
             dim3(Shape::kThreads), 0, stream, a);
  return launch_error();
}

template <class T>
const char* run_sparse(const PoolArguments& a, stream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int vectors = a.channels / kVector;
  if (vectors <= 8) return run_sparse_shape<SparseShape<PoolShape<kVector, 8, 1, 4, 256, 4>, 4>, T>(a, stream);
  if (vectors <= 16) return run_sparse_shape<SparseShape<PoolShape<kVector, 8, 2, 2, 256, 4>, 4>, T>(a, stream);
  if (vectors <= 32) return run_sparse_shape<SparseShape<PoolShape<kVector, 16, 2, 2, 256, 4>, 4>, T>(a, stream);
  return run_sparse_shape<SparseShape<PoolShape<kVector, 32, 2, 2, 256, 4>, 4>, T>(a, stream);
}

}  // namespace muspace::bevpool
