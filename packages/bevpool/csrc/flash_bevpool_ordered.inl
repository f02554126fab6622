// SPDX-License-Identifier: Apache-2.0
// Backward, route "ordered" of flash_bevpool and flash_bevpool_sca: gradients of features without atomics,
// bit-reproducible. The samples of each segment (an image, or a camera and head) are sorted stably by the pixel they
// hang on, their upper left corner or the nearest pixel to it; then a group of lanes per pixel sums the samples of the
// four cells around it in that order.
//
// A Problem describes the samples; see FlashProblem and ScaProblem for what it has to offer.
#pragma once

#include "flash_bevpool_tables.inl"
#include "muspace/sort.h"

namespace muspace::bevpool {

constexpr int kOrderedThreads = 256;
#if defined(MSP_BACKEND_EMU)
constexpr int kLongRun = 24;  // samples of a pixel from which a whole block sums them
constexpr int64_t kOrderedChunk = 700;
constexpr unsigned kLongPixelBlocks = 3;
constexpr unsigned kSampleBlocks = 4;
#else
constexpr int kLongRun = 512;
constexpr int64_t kOrderedChunk = int64_t{1} << 23;  // samples sorted at a time, rounded to whole segments
constexpr unsigned kLongPixelBlocks = 528;
constexpr unsigned kSampleBlocks = 1056;
#endif

/// Sorted samples: the row of the output gradient, weights of the corners 2 * (lower row) + (right column), 0 where
/// there is none, and with kDepth the derivatives for (mean, scale) per unit of corner weight.
struct OrderedSamples {
  uint32_t* rows;
  CornerWeights<float>* weights;
  float* slopes;
};

struct LongPixel {
  int segment, pixel;
};
struct LongPixels {
  uint32_t* count;
  LongPixel* items;
};

struct OrderedBuffers {
  SortBuffers sort;
  uint32_t* starts;  // [segments, pixels + 1]
  OrderedSamples samples;
  LongPixels long_pixels;
};

/// Neighbours of a pixel. Pixels that belong to no level are not covered.
struct PixelPlace {
  int width;
  bool covered, left, above;
};

/// starts[segment, pixel] = place of the first sample that hangs on this pixel or a later one. Keys are pixel + 1, 0
/// for samples that do not count. Grid: pixels 0 .. pixels, segments.
template <class Unused>
MSP_KERNEL(kOrderedThreads, 1)
ordered_starts(const uint32_t* keys, uint32_t* starts, int64_t count, int pixels, uint32_t* long_pixels) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *long_pixels = 0;
  const int pixel = static_cast<int>(blockIdx.x) * kOrderedThreads + static_cast<int>(threadIdx.x);
  if (pixel > pixels) return;
  const uint32_t* sorted = keys + static_cast<int64_t>(blockIdx.y) * count;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle] <= static_cast<uint32_t>(pixel)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[static_cast<int64_t>(blockIdx.y) * (pixels + 1) + pixel] = static_cast<uint32_t>(low);
}

/// Computes the sorted samples. A group of Problem::kSampleGroup lanes each. Grid: any number of blocks, segments.
template <class Problem>
MSP_KERNEL(kOrderedThreads, 1)
ordered_samples(const Problem problem, const uint32_t* ids, const uint32_t* starts, const OrderedSamples sorted) {
  constexpr int kGroup = Problem::kSampleGroup, kGroups = kOrderedThreads / kGroup;
  const int segment = static_cast<int>(blockIdx.y), lane = lane_id() % kGroup;
  const int64_t base = segment * problem.count();
  const int64_t begin = starts[static_cast<int64_t>(segment) * (problem.pixels() + 1)];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  // all groups of a block take the same number of steps: they meet in shuffles
  for (int64_t block = begin + static_cast<int64_t>(blockIdx.x) * kGroups; block < problem.count(); block += step) {
    const int64_t place = block + static_cast<int>(threadIdx.x) / kGroup;
    const bool active = place < problem.count();
    CornerWeights<float> weights{};
    DepthSlope<float> slope{};
    uint32_t row = 0;
    problem.sample(segment, active ? ids[base + place] : 0u, active, weights, row, slope);
    if (!active || lane != 0) continue;
    sorted.rows[base + place] = row;
    sorted.weights[base + place] = weights;
    if constexpr (Problem::kDepth) {
      sorted.slopes[2 * (base + place)] = slope.mean, sorted.slopes[2 * (base + place) + 1] = slope.scale;
    }
  }
}

/// The samples around one pixel: those hanging on the pixel to the left, on the pixel itself, and likewise on the row
/// above. They are numbered through all four; each of the two rows is one run of the sorted samples.
struct PixelRuns {
  uint32_t first_begin, second_begin;  // where the runs begin; the second less the first one's length
  uint32_t end[4];                     // number at which each of the four ends
  MSP_DEVICE PixelRuns() : first_begin(0), second_begin(0), end{0, 0, 0, 0} {}
  MSP_DEVICE PixelRuns(const uint32_t* starts, const PixelPlace& place, int pixel) {
    const int left = place.left ? 1 : 0, above = place.above ? pixel - place.width : pixel;
    const uint32_t a0 = starts[pixel - left], a1 = starts[pixel], a2 = starts[pixel + 1];
    const uint32_t b0 = starts[above - left], b1 = starts[above], b2 = starts[above + 1];
    first_begin = a0;
    end[0] = a1 - a0;
    end[1] = a2 - a0;
    end[2] = end[1] + (place.above ? b1 - b0 : 0);
    end[3] = end[1] + (place.above ? b2 - b0 : 0);
    second_begin = b0 - end[1];
  }
  MSP_DEVICE uint32_t count() const { return end[3]; }
  MSP_DEVICE bool is_long() const { return count() > static_cast<uint32_t>(kLongRun); }
  MSP_DEVICE uint32_t place(uint32_t number) const { return number + (number < end[1] ? first_begin : second_begin); }
  /// Which of its corners a sample gives to this pixel.
  MSP_DEVICE uint32_t corner(uint32_t number) const {
    return number < end[1] ? (number < end[0] ? 1u : 0u) : (number < end[2] ? 3u : 2u);
  }
};

/// One block's view of a segment.
template <class Rows, class Problem>
struct OrderedBlock {
  using T = typename Problem::Feature;
  const Problem& problem;
  const uint32_t *rows, *starts;
  const float *weights, *slopes;
  const T* grad_output;  // of the lane
  float* grad_feats;     // likewise
  float* grad_depth;     // of the segment
  int channels_left;

  MSP_DEVICE OrderedBlock(const Problem& p, const OrderedSamples& sorted, const uint32_t* all_starts, int segment)
      : problem(p) {
    const int lane = lane_id() % Rows::kGroup,
              first_channel = static_cast<int>(blockIdx.z) * Rows::kChannels + lane * Rows::kVector;
    const int64_t base = segment * p.count();
    rows = sorted.rows + base;
    weights = reinterpret_cast<const float*>(sorted.weights + base);
    slopes = sorted.slopes + 2 * base;
    starts = all_starts + static_cast<int64_t>(segment) * (p.pixels() + 1);
    grad_output = p.grad_output(segment) + first_channel;
    grad_feats = p.grad_feats(segment) + first_channel;
    grad_depth = p.grad_depth(segment);
    channels_left = p.channels() - first_channel;
  }
};

/// Sums of one pixel: a lane's channels, and its own part of the depth gradient.
template <class Rows>
struct PixelSums {
  float feats[Rows::kPerLane] = {};
  float depth[2] = {0.f, 0.f};
};

/// Adds samples `first` .. `last` of the runs. Every lane of the group fetches one sample, then all of them go through
/// the group. The whole block has to call it, with an empty range if there is nothing to add.
template <class Rows, class Problem>
MSP_DEVICE void add_ordered(const OrderedBlock<Rows, Problem>& block, const PixelRuns& runs, uint32_t first,
                            uint32_t last, PixelSums<Rows>& sums) {
  constexpr uint32_t kNone = ~0u;
  constexpr int kFlight = Rows::kPerLane > 4 ? 2 : 4;
  const int group_lane = lane_id() % Rows::kGroup, first_lane = lane_id() - group_lane;
  const int longest = converged_max(static_cast<int>(last - first));
  MSP_NO_UNROLL
  for (int done = 0; done < longest; done += Rows::kGroup) {
    const uint32_t number = first + static_cast<uint32_t>(done + group_lane);
    uint32_t own_row = kNone;
    float own_weight = 0.f;
    if (number < last) {
      const int64_t place = runs.place(number);
      own_weight = block.weights[4 * place + runs.corner(number)];
      if (own_weight != 0.f) {  // 0 is also what a sample at the border gives to its missing corners
        own_row = block.rows[place];
        if constexpr (Problem::kDepth) {
          sums.depth[0] = muspace::fma(own_weight, block.slopes[2 * place], sums.depth[0]);
          sums.depth[1] = muspace::fma(own_weight, block.slopes[2 * place + 1], sums.depth[1]);
        }
      }
    }
    MSP_NO_UNROLL
    for (int lane = 0; lane < Rows::kGroup && done + lane < longest; lane += kFlight) {
      float weight[kFlight], gradient[kFlight][Rows::kPerLane];
      MSP_UNROLL
      for (int u = 0; u < kFlight; ++u) {
        const uint32_t row = shuffle(own_row, first_lane + lane + u);
        weight[u] = shuffle(own_weight, first_lane + lane + u);
        MSP_UNROLL
        for (int c = 0; c < Rows::kPerLane; ++c) gradient[u][c] = 0.f;
        if (row != kNone)
          load_row<Rows>(block.grad_output + row * block.problem.grad_row_size(), block.channels_left, gradient[u]);
      }
      MSP_UNROLL
      for (int u = 0; u < kFlight; ++u) {
        MSP_UNROLL
        for (int c = 0; c < Rows::kPerLane; ++c) sums.feats[c] = muspace::fma(weight[u], gradient[u][c], sums.feats[c]);
      }
    }
  }
}

/// gradient[pixel] += sums, which earlier chunks may have begun.
template <class Rows, class Problem>
MSP_DEVICE void store_ordered(const OrderedBlock<Rows, Problem>& block, int pixel, PixelSums<Rows>& sums, bool again) {
  float* row = block.grad_feats + pixel * block.problem.feats_row_size();
  if (again) {
    float old[Rows::kPerLane];
    load_row<Rows>(static_cast<const float*>(row), block.channels_left, old);
    MSP_UNROLL
    for (int c = 0; c < Rows::kPerLane; ++c) sums.feats[c] += old[c];
  }
  store_row<Rows>(row, block.channels_left, sums.feats);
}

/// The group's sums of the depth gradient, by its first lane. The whole block calls it.
template <class Rows, class Problem>
MSP_DEVICE void store_depth(const OrderedBlock<Rows, Problem>& block, int pixel, const PixelSums<Rows>& sums,
                            bool exists) {
  const float mean = group_sum<Rows::kGroup>(sums.depth[0]), scale = group_sum<Rows::kGroup>(sums.depth[1]);
  if (!exists || blockIdx.z != 0 || lane_id() % Rows::kGroup != 0) return;
  block.grad_depth[2 * static_cast<int64_t>(pixel)] += mean;
  block.grad_depth[2 * static_cast<int64_t>(pixel) + 1] += scale;
}

/// A group per pixel. Grid: blocks of pixels, segments, blocks of channels. Later rows first: small levels have long
/// runs.
template <class Rows, class Problem>
MSP_KERNEL(kOrderedThreads, 4)
ordered_pixels(const Problem problem, const OrderedSamples sorted, const uint32_t* starts,
               const LongPixels long_pixels) {
  const OrderedBlock<Rows, Problem> block(problem, sorted, starts, static_cast<int>(blockIdx.y));
  const int pixel = static_cast<int>(gridDim.x - 1 - blockIdx.x) * (kOrderedThreads / Rows::kGroup) +
                    static_cast<int>(threadIdx.x) / Rows::kGroup;
  PixelRuns runs;
  if (pixel < problem.pixels()) {
    const PixelPlace place = problem.place(pixel);
    if (place.covered) runs = PixelRuns(block.starts, place, pixel);
  }
  PixelSums<Rows> sums;
  add_ordered(block, runs, 0, runs.is_long() ? 0 : runs.count(), sums);
  if constexpr (Problem::kDepth) store_depth(block, pixel, sums, pixel < problem.pixels());
  if (pixel >= problem.pixels()) return;
  store_ordered(block, pixel, sums, problem.again());
  if (runs.is_long() && lane_id() % Rows::kGroup == 0 && blockIdx.z == 0) {
    long_pixels.items[atomic_add(long_pixels.count, 1u)] = {static_cast<int>(blockIdx.y), pixel};
  }
}

/// Adds the long runs, a block per pixel: every group sums an equal share, the shares are added in order. Grid: any
/// number of blocks, 1, blocks of channels. The order of the list does not matter.
template <class Rows, class Problem>
MSP_KERNEL(kOrderedThreads, 4)
ordered_long_pixels(const Problem problem, const OrderedSamples sorted, const uint32_t* starts,
                    const LongPixels long_pixels) {
  constexpr int kGroups = kOrderedThreads / Rows::kGroup;
  MSP_SHARED float partial[kGroups][Rows::kGroup][Rows::kPerLane + 2];
  const int group = static_cast<int>(threadIdx.x) / Rows::kGroup, lane = lane_id() % Rows::kGroup;
  const uint32_t count = *long_pixels.count;
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const LongPixel item = long_pixels.items[i];
    const OrderedBlock<Rows, Problem> block(problem, sorted, starts, item.segment);
    const PixelRuns runs(block.starts, problem.place(item.pixel), item.pixel);
    const uint32_t share = (runs.count() + kGroups - 1) / kGroups, begin = share * static_cast<uint32_t>(group);
    const uint32_t first = begin < runs.count() ? begin : runs.count();
    PixelSums<Rows> sums;
    add_ordered(block, runs, first, first + share < runs.count() ? first + share : runs.count(), sums);
    for (int c = 0; c < Rows::kPerLane; ++c) partial[group][lane][c] = sums.feats[c];
    partial[group][lane][Rows::kPerLane] = group_sum<Rows::kGroup>(sums.depth[0]);
    partial[group][lane][Rows::kPerLane + 1] = group_sum<Rows::kGroup>(sums.depth[1]);
    MSP_SYNC_BLOCK();
    if (group == 0) {
      PixelSums<Rows> total;
      for (int other = 0; other < kGroups; ++other) {
        for (int c = 0; c < Rows::kPerLane; ++c) total.feats[c] += partial[other][lane][c];
        for (int p = 0; p < 2; ++p) total.depth[p] += partial[other][lane][Rows::kPerLane + p];
      }
      store_ordered(block, item.pixel, total, true);  // ordered_pixels has begun the row
      if (Problem::kDepth && blockIdx.z == 0 && lane == 0) {
        block.grad_depth[2 * static_cast<int64_t>(item.pixel)] += total.depth[0];
        block.grad_depth[2 * static_cast<int64_t>(item.pixel) + 1] += total.depth[1];
      }
    }
    MSP_SYNC_BLOCK();
  }
}

namespace {

/// Hands out parts of a workspace, 256-byte aligned.
class Parts {
 public:
  explicit Parts(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(base_ + static_cast<uintptr_t>(bytes_));
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return part;
  }
  int64_t bytes() const { return bytes_; }

 private:
  uintptr_t base_;  // null when only the size is asked for
  int64_t bytes_ = 0;
};

/// Buffers for `segments` times `count` samples over `pixels` pixels each.
OrderedBuffers take_ordered(Parts& parts, int64_t segments, int64_t count, int64_t pixels, bool depth) {
  OrderedBuffers b{};
  const int64_t all = segments * count;
  for (int i = 0; i < 2; ++i) {
    b.sort.keys[i] = parts.take<uint32_t>(all);
    b.sort.ids[i] = parts.take<uint32_t>(all);
  }
  b.sort.counts = parts.take<uint32_t>(radix_count_words<DefaultSortTiles>(segments, count));
  b.starts = parts.take<uint32_t>(segments * (pixels + 1));
  b.samples.rows = parts.take<uint32_t>(all);
  b.samples.weights = parts.take<CornerWeights<float>>(all);
  b.samples.slopes = parts.take<float>(depth ? 2 * all : 0);
  b.long_pixels.count = parts.take<uint32_t>(1);
  // a sample lies around four pixels
  const int64_t most = 4 * all / kLongRun + 1;
  b.long_pixels.items = parts.take<LongPixel>(most < segments * pixels ? most : segments * pixels);
  return b;
}

/// Sorts the keys that lie in buffers.sort.keys[0] and adds everything up. The problem's segments are one chunk.
template <class Rows, class Problem>
const char* run_ordered(const Problem& problem, const OrderedBuffers& b, int64_t segments, stream_t stream) {
  int bits = 0, result = 0;
  while (static_cast<uint64_t>(problem.pixels()) >> bits) ++bits;
  const char* error = radix_sort<DefaultSortTiles>(b.sort, segments, problem.count(), bits, result, stream);
  if (error) return error;
  const unsigned rows = static_cast<unsigned>(segments);
  const auto blocks = [](int64_t items, int64_t per_block) {
    return static_cast<unsigned>((items + per_block - 1) / per_block);
  };
  const dim3 block(kOrderedThreads);
  const auto find_starts = ordered_starts<Problem>;
  MSP_LAUNCH(find_starts, dim3(blocks(int64_t{problem.pixels()} + 1, kOrderedThreads), rows), block, 0, stream,
             b.sort.keys[result], b.starts, problem.count(), problem.pixels(), b.long_pixels.count);
  const unsigned sample_blocks = blocks(problem.count(), kOrderedThreads / Problem::kSampleGroup);
  const auto compute = ordered_samples<Problem>;
  MSP_LAUNCH(compute, dim3(sample_blocks < kSampleBlocks ? sample_blocks : kSampleBlocks, rows), block, 0, stream,
             problem, b.sort.ids[result], b.starts, b.samples);
  const unsigned chunks = blocks(problem.channels(), Rows::kChannels);
  const auto add = ordered_pixels<Rows, Problem>;
  const auto add_long = ordered_long_pixels<Rows, Problem>;
  MSP_LAUNCH(add, dim3(blocks(problem.pixels(), kOrderedThreads / Rows::kGroup), rows, chunks), block, 0, stream,
             problem, b.samples, b.starts, b.long_pixels);
  MSP_LAUNCH(add_long, dim3(kLongPixelBlocks, 1, chunks), block, 0, stream, problem, b.samples, b.starts,
             b.long_pixels);
  return launch_error();
}

}  // namespace
}  // namespace muspace::bevpool
