// SPDX-License-Identifier: Apache-2.0
// Workspace and launches of the ordered gradient of the sampled rows.
#pragma once

#include "ordered.inl"

namespace muspace::msda {
namespace {

#if defined(MSP_BACKEND_EMU)
constexpr int64_t kOrderedChunk = 256;
constexpr unsigned kLongPixelBlocks = 3;
#else
constexpr unsigned kLongPixelBlocks = 528;
constexpr int64_t kOrderedChunk = int64_t{1} << 23;  // samples sorted at a time, rounded to whole images
#endif

/// 32-bit ids and keys reach everything within an image.
template <class Source>
bool ordered_reaches(const Extent& e) {
  const int64_t samples = e.levels * e.points, segments = Source::kShared ? 1 : e.heads;
  return samples <= kInt32Max && e.heads <= kMaxGridYZ && e.rows < kInt32Max && e.queries <= kInt32Max / samples &&
         e.queries * samples <= kInt32Max / 8 / segments && e.channels <= kInt32Max / 2 / e.heads &&
         e.queries <= kInt32Max / 2 / (e.heads * e.channels);
}

template <class Source>
int64_t chunk_images(const Extent& e) {
  const int64_t segments = Source::kShared ? 1 : e.heads;
  const int64_t wanted = kOrderedChunk / (e.queries * segments * e.levels * e.points), most = kMaxGridYZ / e.heads;
  const int64_t images = wanted < 1 ? 1 : wanted > most ? most : wanted;
  return images < e.batch ? images : e.batch;
}

/// The parts of the workspace, from `base`; `bytes` is what all of them take.
template <class Source>
struct OrderedWorkspace {
  TableLevel* levels;
  int* overlap;
  SortBuffers sort;
  uint32_t* starts;
  SortedSamples sorted;
  LongPixels long_pixels;
  int64_t bytes = 0;

  OrderedWorkspace(const Extent& e, void* base) : base_(static_cast<char*>(base)) {
    const int64_t images = chunk_images<Source>(e), planes = images * e.heads;
    const int64_t segments = Source::kShared ? images : planes, count = e.queries * e.levels * e.points;
    levels = take<TableLevel>(e.levels);
    overlap = take<int>(1);
    for (int i = 0; i < 2; ++i) {
      sort.keys[i] = take<uint32_t>(segments * count);
      sort.ids[i] = take<uint32_t>(segments * count);
    }
    sort.counts = take<uint32_t>(radix_count_words<DefaultSortTiles>(segments, count));
    starts = take<uint32_t>(segments * (e.rows + 1));
    sorted.rows = take<uint32_t>(segments * count);
    sorted.weights = take<SampleWeights<float>>(segments * count);
    // a sample lies around two pixels of its own row and, for each level, two of the next
    const int64_t around = (2 + 2 * e.levels) * planes * count / kLongRun + 1, pixels = planes * e.rows;
    long_pixels.count = take<uint32_t>(1);
    long_pixels.items = take<LongPixel>(around < pixels ? around : pixels);
  }

 private:
  template <class Item>
  Item* take(int64_t count) {
    char* begin = base_ ? base_ + bytes : nullptr;
    bytes += (count * static_cast<int64_t>(sizeof(Item)) + 255) / 256 * 256;
    return reinterpret_cast<Item*>(begin);
  }
  char* base_;
};

template <class Plan, class Arguments>
const char* run_ordered_plan(const Arguments& a, const OrderedWorkspace<typename Arguments::Source>& w,
                             const uint32_t* ids, stream_t stream) {
  constexpr int kBlockChannels = Plan::kGroup * Plan::kVector;
  const unsigned pixel_blocks = static_cast<unsigned>((a.extent.rows + Plan::kGroups - 1) / Plan::kGroups);
  const unsigned channel_blocks = static_cast<unsigned>((a.extent.channels + kBlockChannels - 1) / kBlockChannels);
  const unsigned planes = static_cast<unsigned>(a.images * a.extent.heads);
  const auto sum_pixels = ordered_value<Plan, Arguments>;
  const auto sum_long_pixels = ordered_long_pixels<Plan, Arguments>;
  MSP_LAUNCH(sum_pixels, dim3(pixel_blocks, planes, channel_blocks), dim3(kOrderedThreads), 0, stream, a, w.sorted,
             ids, w.starts, w.long_pixels);
  MSP_LAUNCH(sum_long_pixels, dim3(kLongPixelBlocks, 1, channel_blocks), dim3(kOrderedThreads), 0, stream, a, w.sorted,
             ids, w.starts, w.long_pixels);
  return launch_error();
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kOrderedThreads - 1) / kOrderedThreads); }

template <class Arguments>
const char* run_ordered_chunk(const Arguments& a, const OrderedWorkspace<typename Arguments::Source>& w,
                              stream_t stream) {
  using T = typename Arguments::T;
  const int64_t segments = static_cast<int64_t>(a.images) * a.segments(), count = a.segment_samples();
  const unsigned segment_rows = static_cast<unsigned>(segments);
  const dim3 block(kOrderedThreads);
  int bits = 1, sorted = 0;
  while (static_cast<int64_t>(a.extent.rows) >> bits) ++bits;

  const auto make_keys = ordered_keys<Arguments>;
  MSP_LAUNCH(make_keys, dim3(blocks_of(a.image_samples()), static_cast<unsigned>(a.images)), block, 0, stream, a,
             w.sort.keys[0], w.long_pixels.count);
  const char* error = radix_sort<DefaultSortTiles>(w.sort, segments, count, bits, sorted, stream);
  if (error) return error;
  const uint32_t *keys = w.sort.keys[sorted], *ids = w.sort.ids[sorted];
  if constexpr (!std::is_same_v<T, double>) {
    const auto prepare = ordered_samples<Arguments>;
    MSP_LAUNCH(prepare, dim3(blocks_of(count), segment_rows), block, 0, stream, a, keys, ids, w.sorted);
  }
  const auto find_starts = ordered_starts<T>;
  MSP_LAUNCH(find_starts, dim3(blocks_of(int64_t{a.extent.rows} + 1), segment_rows), block, 0, stream, keys, w.starts,
             count, a.extent.rows);
  if constexpr (!std::is_same_v<T, double>) {
    if (a.extent.channels % 32 == 0) return run_ordered_plan<OrderedPlan<4, 8, false, 4>>(a, w, ids, stream);
  }
  return run_ordered_plan<OrderedPlan<4, 32, true, 2>>(a, w, ids, stream);
}

/// Writes the gradient of the rows completely. `a` lacks the levels and the images.
template <class Arguments>
const char* run_ordered_rows(Arguments a, const Extent& e, const LevelSource& levels, void* workspace,
                             stream_t stream) {
  using Source = typename Arguments::Source;
  const OrderedWorkspace<Source> w(e, workspace);
  a.levels = {w.levels, w.overlap};
  a.extent = Extent32::of(e);
  const auto read_levels = ordered_levels<typename Arguments::T>;
  MSP_LAUNCH(read_levels, dim3(1), dim3(kOrderedThreads), 0, stream, levels, w.levels, w.overlap, a.extent.levels);
  const int images = static_cast<int>(chunk_images<Source>(e));
  for (a.first_image = 0; a.first_image < e.batch; a.first_image += images) {
    a.images = a.first_image + images < e.batch ? images : static_cast<int>(e.batch) - a.first_image;
    const char* error = run_ordered_chunk(a, w, stream);
    if (error) return error;
  }
  return launch_error();
}

}  // namespace
}  // namespace muspace::msda
