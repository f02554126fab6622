// SPDX-License-Identifier: Apache-2.0
// The plan of a set of keys, on the cpu: a stable radix sort by cell in two passes.
//
// Pass one moves the points into buckets of 2^shift neighbouring cells, pass two orders a bucket by cell. A bucket is
// small enough for the caches, and owned by one task. Both passes keep points in order, and the cuts depend on the
// sizes alone: a plan is the same for any number of threads.
#include "cell_plan_cpu.h"

#include <algorithm>
#include <vector>

#include "cell_pool.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"

namespace muspace::bevpool {
namespace {

constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinChunkPoints = 8192;
constexpr int64_t kMaxBuckets = 1024;
constexpr int64_t kBucketPoints = 1024;  // aimed at

struct KeyedPoint {
  int32_t key, point;
};

// How a sort of these sizes is cut.
struct SortShape {
  int64_t points, cells, chunk_points, chunks, buckets;
  int shift;

  SortShape(int64_t point_count, int64_t cell_count) : points(point_count), cells(cell_count), shift(0) {
    chunk_points = std::max(kMinChunkPoints, (points + kMaxChunks - 1) / kMaxChunks);
    chunks = (points + chunk_points - 1) / chunk_points;
    const int64_t most = std::clamp<int64_t>(points / kBucketPoints, 1, kMaxBuckets);
    while ((cells >> shift) >= most) ++shift;
    buckets = (cells >> shift) + 1;
  }
};

// A plan under construction.
struct Sort {
  SortShape shape;
  const int32_t* keys;
  PointMap map;
  bool weighted;
  int32_t* plan;
  KeyedPoint* moved;      // the points, by bucket
  int32_t* chunk_starts;  // [chunks, buckets]: counts, then where the next point of the chunk goes in the bucket
};

bool has_cell(int32_t key, int64_t cells) { return key >= 0 && key < cells; }

void count_chunk(const Sort& sort, int64_t chunk) {
  const SortShape& s = sort.shape;
  int32_t* const counts = sort.chunk_starts + chunk * s.buckets;
  std::fill(counts, counts + s.buckets, 0);
  const int64_t last = std::min(s.points, (chunk + 1) * s.chunk_points);
  for (int64_t i = chunk * s.chunk_points; i < last; ++i) {
    if (has_cell(sort.keys[i], s.cells)) ++counts[sort.keys[i] >> s.shift];
  }
}

// Counts to starts, bucket by bucket and chunk by chunk. Returns where each bucket starts.
std::vector<int32_t> scan_counts(const Sort& sort) {
  const SortShape& s = sort.shape;
  std::vector<int32_t> bucket_starts(static_cast<size_t>(s.buckets + 1));
  int32_t total = 0;
  for (int64_t b = 0; b < s.buckets; ++b) {
    bucket_starts[static_cast<size_t>(b)] = total;
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
      int32_t& slot = sort.chunk_starts[chunk * s.buckets + b];
      const int32_t count = slot;
      slot = total;
      total += count;
    }
  }
  bucket_starts.back() = total;
  return bucket_starts;
}

void move_chunk(const Sort& sort, int64_t chunk) {
  const SortShape& s = sort.shape;
  int32_t* const starts = sort.chunk_starts + chunk * s.buckets;
  const int64_t last = std::min(s.points, (chunk + 1) * s.chunk_points);
  for (int64_t i = chunk * s.chunk_points; i < last; ++i) {
    const int32_t key = sort.keys[i];
    if (has_cell(key, s.cells)) sort.moved[starts[key >> s.shift]++] = KeyedPoint{key, static_cast<int32_t>(i)};
  }
}

PlanEntry entry_of(const PointMap& map, int32_t point) {
  if (map.rows != nullptr) return PlanEntry{map.rows[point], map.weights == nullptr ? point : map.weights[point]};
  const uint32_t p = static_cast<uint32_t>(point), pixels = static_cast<uint32_t>(map.pixels),
                 image = p / (static_cast<uint32_t>(map.depth_bins) * pixels);
  return PlanEntry{static_cast<int32_t>(image * pixels + p % pixels), point};
}

void order_bucket(const Sort& sort, int64_t bucket, int32_t begin, int32_t end) {
  const SortShape& s = sort.shape;
  const int64_t first = bucket << s.shift, last = std::min(s.cells, (bucket + 1) << s.shift);
  std::vector<int32_t> next(static_cast<size_t>(last - first));
  for (int32_t k = begin; k < end; ++k) ++next[static_cast<size_t>(sort.moved[k].key - first)];
  int32_t total = begin;
  for (int64_t cell = first; cell < last; ++cell) {
    int32_t& slot = next[static_cast<size_t>(cell - first)];
    const int32_t count = slot;
    sort.plan[cell] = slot = total;
    total += count;
  }
  int32_t* const rows = sort.plan + s.cells + 1;
  PlanEntry* const entries = reinterpret_cast<PlanEntry*>(rows);
  int32_t* const order = rows + 2 * s.points;
  for (int32_t k = begin; k < end; ++k) {
    const int32_t point = sort.moved[k].point, slot = next[static_cast<size_t>(sort.moved[k].key - first)]++;
    if (sort.weighted) {
      entries[slot] = entry_of(sort.map, point);
      order[slot] = point;
    } else {
      rows[slot] = point;
    }
  }
}

void build_plan(const Sort& sort, int64_t threads) {
  const SortShape& s = sort.shape;
  parallel_for(s.chunks, threads, [&](int64_t chunk) { count_chunk(sort, chunk); });
  const std::vector<int32_t> bucket_starts = scan_counts(sort);
  parallel_for(s.chunks, threads, [&](int64_t chunk) { move_chunk(sort, chunk); });
  parallel_for(s.buckets, threads, [&](int64_t bucket) {
    const size_t b = static_cast<size_t>(bucket);
    order_bucket(sort, bucket, bucket_starts[b], bucket_starts[b + 1]);
  });
  sort.plan[s.cells] = bucket_starts.back();
}

}  // namespace

int64_t plan_words(int64_t points, int64_t cells, bool weighted) { return cells + 1 + points * (weighted ? 3 : 1); }

int64_t plan_workspace_bytes(int64_t points, int64_t cells, bool) {
  const SortShape shape(points, cells);
  return points * static_cast<int64_t>(sizeof(KeyedPoint)) +
         shape.chunks * shape.buckets * static_cast<int64_t>(sizeof(int32_t));
}

Status launch_plan(const int32_t* keys, int64_t points, int64_t cells, const PointMap& map, int32_t* plan,
                   void* workspace, const Place& place) {
  return cpu::guarded("cell_plan", [&] {
    KeyedPoint* const moved = static_cast<KeyedPoint*>(workspace);
    cpu::prefer_huge_pages(workspace, plan_workspace_bytes(points, cells, map.weighted()));
    cpu::prefer_huge_pages(plan, plan_words(points, cells, map.weighted()) * static_cast<int64_t>(sizeof(int32_t)));
    const Sort sort{SortShape(points, cells), keys, map, map.weighted(), plan, moved,
                    reinterpret_cast<int32_t*>(moved + points)};
    build_plan(sort, place.ctx);
  });
}

}  // namespace muspace::bevpool
