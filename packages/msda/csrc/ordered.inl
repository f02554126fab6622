// SPDX-License-Identifier: Apache-2.0
// Backward, route "ordered": the gradient of the sampled rows without atomics, bit-reproducible. Samples are sorted
// stably by the pixel they hang on; then a group of lanes per pixel sums the samples of the four cells around it in
// that order. Gradients of locations and weights come from the kernels of the other routes, which sum them in a fixed
// order already.
//
// A sample hangs on its upper left corner, or on the nearest pixel of the level when that corner lies outside. Pixels
// are rows of `value`, so levels need no space of their own and the host need not know their shapes.
//
// The terms are those of multi_scale_deformable_attn. A Source says where its samples lie:
//   kShared                        one set of samples serves all heads of an image, else each head has its own
//   level(extent, sample)          level of the sample-th sample of a query and head
//   load(extent, number, xy, a)    location and attention weight of sample `number` of all; NaN if it does not count
//   factor(extent, number, head)   with kShared: what the attention weight leaves out because heads differ in it
#pragma once

#include "multi_scale_deformable_attn_tables.inl"
#include "muspace/sort.h"

namespace muspace::msda {

constexpr int kOrderedThreads = 256;
#if defined(MSP_BACKEND_EMU)
constexpr int kLongRun = 64;  // samples of a pixel from which a whole block sums them
#else
constexpr int kLongRun = 512;
#endif

/// Every level, in global memory: there may be any number of them.
struct OrderedLevels {
  const TableLevel* table;
  const int* overlap;  // not 0: some row of `value` belongs to several levels
};

template <class T_, class Source_>
struct OrderedArguments {
  using T = T_;
  using A = arithmetic_t<T>;
  using Source = Source_;
  Source source;
  OrderedLevels levels;
  Extent32 extent;
  int first_image, images;  // of this chunk
  const T* grad_output;
  A* grad_value;

  MSP_HD int samples() const { return extent.levels * extent.points; }  // of a query and head
  MSP_HD int segments() const { return Source::kShared ? 1 : extent.heads; }  // of an image, each sorted on its own
  MSP_HD int64_t segment_samples() const { return static_cast<int64_t>(extent.queries) * samples(); }
  MSP_HD int64_t image_samples() const { return segment_samples() * segments(); }
};

/// One block.
template <class Unused>
MSP_KERNEL(kOrderedThreads, 1)
ordered_levels(const LevelSource source, TableLevel* table, int* overlap, int levels) {
  MSP_SHARED int found;
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) found = 0;
  for (int l = t; l < levels; l += kOrderedThreads) table[l] = table_level(source, l);
  MSP_SYNC_BLOCK();
  for (int l = t; l < levels; l += kOrderedThreads) {
    const TableLevel level = table[l];
    const int end = level.start + level.width * level.height;
    for (int other = 0; other < l; ++other) {
      const TableLevel against = table[other];
      if (level.start < against.start + against.width * against.height && against.start < end) atomic_max(&found, 1);
    }
  }
  MSP_SYNC_BLOCK();
  if (t == 0) *overlap = found;
}

/// What a sample gives to the pixel it hangs on, to the one right of it, and to those below both.
template <class A>
struct alignas(16) SampleWeights {
  A corner[4];
};

/// False if the sample lies outside its level.
template <class Arguments, class A>
MSP_DEVICE bool locate_ordered(const Arguments& a, int64_t number, int level_index, SampleWeights<A>& weights,
                               uint32_t& pixel) {
  const TableLevel level = a.levels.table[level_index];
  A xy[2], attention;
  a.source.load(a.extent, number, xy, attention);
  const Sample<A> sample = locate(xy[0], xy[1], level.height, level.width);
  if (!sample.inside) return false;
  const bool left = sample.x0 >= 0, upper = sample.y0 >= 0;
  const A at_left = left ? A(1) - sample.fx : sample.fx, at_right = sample.fx;
  const A at_upper = attention * (upper ? A(1) - sample.fy : sample.fy), at_lower = attention * sample.fy;
  weights.corner[0] = at_upper * at_left;
  weights.corner[1] = left ? at_upper * at_right : A(0);
  weights.corner[2] = upper ? at_lower * at_left : A(0);
  weights.corner[3] = left && upper ? at_lower * at_right : A(0);
  pixel = static_cast<uint32_t>(level.start + (upper ? sample.y0 : 0) * level.width + (left ? sample.x0 : 0));
  return true;
}

/// keys[segment, query * L * P + l * P + p] = pixel, or S if the sample lies outside. One thread per sample.
/// Grid: samples of an image, images of the chunk.
template <class Arguments>
MSP_KERNEL(kOrderedThreads, 1)
ordered_keys(const Arguments a, uint32_t* keys, uint32_t* long_pixels) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *long_pixels = 0;
  const uint32_t within = blockIdx.x * static_cast<uint32_t>(kOrderedThreads) + threadIdx.x;
  const int64_t image_samples = a.image_samples();
  if (within >= image_samples) return;
  const uint32_t samples = static_cast<uint32_t>(a.samples()), heads = static_cast<uint32_t>(a.segments());
  const uint32_t query_head = within / samples, sample = within - query_head * samples;
  const uint32_t query = query_head / heads, head = query_head - query * heads;
  const int64_t image = a.first_image + static_cast<int>(blockIdx.y),
                segment = static_cast<int64_t>(blockIdx.y) * heads + head;
  SampleWeights<typename Arguments::A> weights;
  uint32_t pixel = static_cast<uint32_t>(a.extent.rows);
  locate_ordered(a, image * image_samples + within, a.source.level(a.extent, static_cast<int>(sample)), weights, pixel);
  keys[segment * a.segment_samples() + query * samples + sample] = pixel;
}

/// Number among all samples of sample `id` of a segment.
template <class Arguments>
MSP_DEVICE int64_t sample_number(const Arguments& a, int segment, uint32_t id) {
  const unsigned samples = static_cast<unsigned>(a.samples()), query = id / samples, sample = id - query * samples;
  const int image = segment / a.segments(), head = segment - image * a.segments();
  const int64_t query_head =
      (static_cast<int64_t>(a.first_image + image) * a.extent.queries + query) * a.segments() + head;
  return query_head * samples + sample;
}

/// The weights of sample `id` of a segment; returns its row of the output gradient, see SortedSamples.
template <class Arguments>
MSP_DEVICE uint32_t sample_weights(const Arguments& a, int segment, uint32_t id,
                                   SampleWeights<typename Arguments::A>& weights) {
  const unsigned samples = static_cast<unsigned>(a.samples()), query = id / samples, sample = id - query * samples;
  uint32_t pixel;
  locate_ordered(a, sample_number(a, segment, id), a.source.level(a.extent, static_cast<int>(sample)), weights, pixel);
  return 4 * query * static_cast<uint32_t>(a.extent.heads * a.extent.channels);
}

/// The sorted samples as the last kernel reads them.
struct SortedSamples {
  uint32_t* rows;  // 4 * element offset of the output gradient's row within the image and head
  SampleWeights<float>* weights;
};

/// Grid: places of a segment, segments.
template <class Arguments>
MSP_KERNEL(kOrderedThreads, 1)
ordered_samples(const Arguments a, const uint32_t* keys, const uint32_t* ids, const SortedSamples sorted) {
  const int64_t count = a.segment_samples(), within = static_cast<int64_t>(blockIdx.x) * kOrderedThreads + threadIdx.x;
  const int64_t i = static_cast<int64_t>(blockIdx.y) * count + within;
  if (within >= count || keys[i] >= static_cast<uint32_t>(a.extent.rows)) return;
  SampleWeights<float> weights{};
  sorted.rows[i] = sample_weights(a, static_cast<int>(blockIdx.y), ids[i], weights);
  sorted.weights[i] = weights;
}

/// starts[segment, pixel] = place, within the segment, of the first sample that hangs on it or on a later pixel.
/// Grid: pixels 0 .. S, segments.
template <class Unused>
MSP_KERNEL(kOrderedThreads, 1)
ordered_starts(const uint32_t* keys, uint32_t* starts, int64_t count, int rows) {
  const int pixel = static_cast<int>(blockIdx.x) * kOrderedThreads + static_cast<int>(threadIdx.x);
  if (pixel > rows) return;
  const uint32_t* sorted = keys + static_cast<int64_t>(blockIdx.y) * count;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle] < static_cast<uint32_t>(pixel)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[static_cast<int64_t>(blockIdx.y) * (rows + 1) + pixel] = static_cast<uint32_t>(low);
}

/// Pixels around which too many samples lie for one group; `plane` is an image and head.
struct LongPixel {
  int plane, pixel;
};
struct LongPixels {
  uint32_t* count;
  LongPixel* items;
};

/// What the last kernels read of one segment, for one head.
template <class Arguments>
struct SortedSegment {
  const Arguments& a;
  const uint32_t* rows;  // not for fp64, which computes rows and weights anew from the ids
  const float* weights;
  const uint32_t* ids;
  const uint32_t* starts;
  const typename Arguments::T* grad_output;  // of the image, head and lane
  int segment, head;
  bool overlap;
};

/// kVector neighbouring channels a lane, or with kStrided channels lane, lane + kGroup, ...; kFlight samples at a time.
template <int kVector_, int kGroup_, bool kStrided_, int kFlight_>
struct OrderedPlan {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kGroups = kOrderedThreads / kGroup;
  static constexpr bool kStrided = kStrided_;
  static constexpr int kFlight = kFlight_;
};

template <class Plan, class T>
MSP_DEVICE void load_gradient(const T* row, int channels_left, arithmetic_t<T> (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      values[c] = c * Plan::kGroup < channels_left ? to_float(row[c * Plan::kGroup]) : arithmetic_t<T>(0);
    }
  } else {
    load_vector(row, values);
  }
}

/// The samples around one pixel of one level: those hanging on the pixel to the left, on the pixel itself, and likewise
/// on the row above. They are numbered through all four; each of the two rows is one run of the sorted samples.
struct PixelRuns {
  uint32_t first_begin, second_begin;  // where the runs begin; the second less the first one's length
  uint32_t end[4];                     // number at which each of the four ends
  MSP_DEVICE PixelRuns() : first_begin(0), second_begin(0), end{0, 0, 0, 0} {}
  MSP_DEVICE PixelRuns(const uint32_t* starts, const TableLevel& level, int pixel) {
    const int within = pixel - level.start, y = within / level.width, x = within - y * level.width;
    const int left = x > 0 ? 1 : 0, above = y > 0 ? pixel - level.width : pixel;
    const uint32_t a0 = starts[pixel - left], a1 = starts[pixel], a2 = starts[pixel + 1];
    const uint32_t b0 = starts[above - left], b1 = starts[above], b2 = starts[above + 1];
    first_begin = a0;
    end[0] = a1 - a0;
    end[1] = a2 - a0;
    end[2] = end[1] + (y > 0 ? b1 - b0 : 0);
    end[3] = end[1] + (y > 0 ? b2 - b0 : 0);
    second_begin = b0 - end[1];
  }
  MSP_DEVICE uint32_t count() const { return end[3]; }
  MSP_DEVICE uint32_t place(uint32_t number) const { return number + (number < end[1] ? first_begin : second_begin); }
  /// Which of its corners a sample gives to this pixel.
  MSP_DEVICE uint32_t corner(uint32_t number) const {
    return number < end[1] ? (number < end[0] ? 1u : 0u) : (number < end[2] ? 3u : 2u);
  }
};

/// Weight and gradient row of sample `number` of the runs.
template <class Arguments>
MSP_DEVICE uint32_t load_sample(const SortedSegment<Arguments>& s, const PixelRuns& runs, uint32_t number,
                                typename Arguments::A& weight) {
  const uint32_t place = runs.place(number), corner = runs.corner(number);
  if constexpr (std::is_same_v<typename Arguments::T, double>) {
    SampleWeights<double> weights{};
    const uint32_t row = sample_weights(s.a, s.segment, s.ids[place], weights);
    weight = corner == 0   ? weights.corner[0]
             : corner == 1 ? weights.corner[1]
             : corner == 2 ? weights.corner[2]
                           : weights.corner[3];
    return row;
  } else {
    weight = *at_offset(s.weights, 16 * place + 4 * corner);
    if constexpr (Arguments::Source::kShared) {
      weight *= s.a.source.factor(s.a.extent, sample_number(s.a, s.segment, s.ids[place]), s.head);
    }
    return *at_offset(s.rows, 4 * place);
  }
}

template <class Arguments>
MSP_DEVICE bool belongs_to(const SortedSegment<Arguments>& s, const PixelRuns& runs, uint32_t number, int level) {
  const uint32_t sample = s.ids[runs.place(number)] % static_cast<uint32_t>(s.a.samples());
  return s.a.source.level(s.a.extent, static_cast<int>(sample)) == level;
}

/// Adds samples `first` .. `last` of the runs. Every lane of the group fetches one sample, then all of them go through
/// the group. The whole block has to call it, with an empty range if there is nothing to add.
template <class Plan, class Arguments>
MSP_DEVICE void add_samples(const SortedSegment<Arguments>& s, const PixelRuns& runs, uint32_t first, uint32_t last,
                            int level, int channels_left, typename Arguments::A (&sum)[Plan::kVector]) {
  using A = typename Arguments::A;
  constexpr uint32_t kNone = ~0u;
  const int group_lane = lane_id() % Plan::kGroup, first_lane = lane_id() - group_lane;
  const int longest = converged_max(static_cast<int>(last - first));
  MSP_NO_UNROLL
  for (int done = 0; done < longest; done += Plan::kGroup) {
    const uint32_t number = first + static_cast<uint32_t>(done + group_lane);
    uint32_t own_row = kNone;
    A own_weight = A(0);
    if (number < last && (!s.overlap || belongs_to(s, runs, number, level)))
      own_row = load_sample(s, runs, number, own_weight);
    if (own_weight == A(0)) own_row = kNone;  // also what a sample at the border does not give to its missing corners
    MSP_NO_UNROLL
    for (int lane = 0; lane < Plan::kGroup && done + lane < longest; lane += Plan::kFlight) {
      A weight[Plan::kFlight], gradient[Plan::kFlight][Plan::kVector];
      MSP_UNROLL
      for (int u = 0; u < Plan::kFlight; ++u) {
        const uint32_t row = shuffle(own_row, first_lane + lane + u);
        weight[u] = shuffle(own_weight, first_lane + lane + u);
        MSP_UNROLL
        for (int c = 0; c < Plan::kVector; ++c) gradient[u][c] = A(0);
        if (row != kNone) load_gradient<Plan>(at_offset(s.grad_output, row), channels_left, gradient[u]);
      }
      MSP_UNROLL
      for (int u = 0; u < Plan::kFlight; ++u) {
        MSP_UNROLL
        for (int c = 0; c < Plan::kVector; ++c) sum[c] = muspace::fma(weight[u], gradient[u][c], sum[c]);
      }
    }
  }
}

/// False for pixels past the end, which no level covers.
MSP_DEVICE bool level_covers(const TableLevel& level, int pixel) {
  return pixel >= level.start && pixel - level.start < level.width * level.height;
}

MSP_DEVICE bool is_long(const PixelRuns& runs) { return runs.count() > static_cast<uint32_t>(kLongRun); }

/// Adds the samples around the pixel; true if some level has too many for one group, which are then left out.
template <class Plan, class Arguments>
MSP_DEVICE bool add_pixel(const SortedSegment<Arguments>& s, int pixel, int channels_left,
                          typename Arguments::A (&sum)[Plan::kVector]) {
  bool left_out = false;
  MSP_NO_UNROLL
  for (int l = 0; l < s.a.extent.levels; ++l) {
    const TableLevel level = s.a.levels.table[l];
    PixelRuns runs;
    if (level_covers(level, pixel)) runs = PixelRuns(s.starts, level, pixel);
    left_out = left_out || is_long(runs);
    add_samples<Plan>(s, runs, 0, is_long(runs) ? 0 : runs.count(), l, channels_left, sum);
  }
  return left_out;
}

template <class Plan, class A>
MSP_DEVICE void store_gradient(A* row, int channels_left, const A (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      if (c * Plan::kGroup < channels_left) row[c * Plan::kGroup] = values[c];
    }
  } else {
    store_vector(row, values);
  }
}

/// Addresses of one block of the last kernels; `plane` counts (image, head) from the chunk's first image.
template <class Plan, class Arguments>
struct OrderedBlock {
  SortedSegment<Arguments> segment;
  typename Arguments::A* grad_value;  // of the image, head and lane
  int64_t row_size;
  int channels_left;

  MSP_DEVICE OrderedBlock(const Arguments& a, const SortedSamples& sorted, const uint32_t* ids, const uint32_t* starts,
                          int plane)
      : segment{a, nullptr, nullptr, nullptr, nullptr, nullptr, plane, 0, *a.levels.overlap != 0} {
    const int group_lane = lane_id() % Plan::kGroup, image = plane / a.extent.heads,
              head = plane - image * a.extent.heads;
    if (Arguments::Source::kShared) segment.segment = image, segment.head = head;
    const int first_channel = static_cast<int>(blockIdx.z) * Plan::kGroup * Plan::kVector +
                              (Plan::kStrided ? group_lane : group_lane * Plan::kVector);
    const int64_t first_sample = segment.segment * a.segment_samples(), image_index = a.first_image + image;
    channels_left = a.extent.channels - first_channel;
    row_size = static_cast<int64_t>(a.extent.heads) * a.extent.channels;
    const int64_t head_channel = static_cast<int64_t>(head) * a.extent.channels + first_channel;
    segment.rows = sorted.rows + first_sample;
    segment.weights = reinterpret_cast<const float*>(sorted.weights + first_sample);
    segment.ids = ids + first_sample;
    segment.starts = starts + static_cast<int64_t>(segment.segment) * (a.extent.rows + 1);
    segment.grad_output = a.grad_output + image_index * a.extent.queries * row_size + head_channel;
    grad_value = a.grad_value + image_index * a.extent.rows * row_size + head_channel;
  }
};

/// A group per pixel. Grid: blocks of pixels, (image, head) of the chunk, blocks of channels. Later rows first: small
/// levels have long runs.
template <class Plan, class Arguments>
MSP_KERNEL(kOrderedThreads, 5)
ordered_value(const Arguments a, const SortedSamples sorted, const uint32_t* ids, const uint32_t* starts,
              const LongPixels long_pixels) {
  using A = typename Arguments::A;
  const OrderedBlock<Plan, Arguments> block(a, sorted, ids, starts, static_cast<int>(blockIdx.y));
  const int group = static_cast<int>(threadIdx.x) / Plan::kGroup;
  const int pixel = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Plan::kGroups + group;
  A sum[Plan::kVector] = {};
  const bool left_out = add_pixel<Plan>(block.segment, pixel, block.channels_left, sum);
  if (pixel >= a.extent.rows) return;
  store_gradient<Plan>(block.grad_value + pixel * block.row_size, block.channels_left, sum);
  if (left_out && lane_id() % Plan::kGroup == 0 && blockIdx.z == 0) {
    long_pixels.items[atomic_add(long_pixels.count, 1u)] = {static_cast<int>(blockIdx.y), pixel};
  }
}

/// Adds the levels that add_pixel left out of one pixel, by the whole block: every group sums an equal share, the
/// shares are added in order.
template <class Plan, class Arguments>
MSP_DEVICE void add_long_runs(const OrderedBlock<Plan, Arguments>& block, int pixel,
                              typename Arguments::A (*partial)[Plan::kGroup][Plan::kVector]) {
  using A = typename Arguments::A;
  const SortedSegment<Arguments>& s = block.segment;
  const int group = static_cast<int>(threadIdx.x) / Plan::kGroup, group_lane = lane_id() % Plan::kGroup;
  A sum[Plan::kVector] = {};
  for (int l = 0; l < s.a.extent.levels; ++l) {
    const TableLevel level = s.a.levels.table[l];
    if (!level_covers(level, pixel)) continue;  // the same for the whole block
    const PixelRuns runs(s.starts, level, pixel);
    if (!is_long(runs)) continue;
    const uint32_t share = (runs.count() + Plan::kGroups - 1) / Plan::kGroups;
    const uint32_t begin = share * static_cast<uint32_t>(group), first = begin < runs.count() ? begin : runs.count();
    const uint32_t last = first + share < runs.count() ? first + share : runs.count();
    add_samples<Plan>(s, runs, first, last, l, block.channels_left, sum);
  }
  for (int c = 0; c < Plan::kVector; ++c) partial[group][group_lane][c] = sum[c];
  MSP_SYNC_BLOCK();
  if (group == 0) {
    A* row = block.grad_value + pixel * block.row_size;
    for (int c = 0; c < Plan::kVector; ++c) {
      const int channel = Plan::kStrided ? c * Plan::kGroup : c;
      if (channel >= block.channels_left) continue;
      A total = row[channel];  // what ordered_value stored
      for (int other = 0; other < Plan::kGroups; ++other) total += partial[other][group_lane][c];
      row[channel] = total;
    }
  }
  MSP_SYNC_BLOCK();
}

/// Grid: any number of blocks, 1, blocks of channels. The order of the list does not matter.
template <class Plan, class Arguments>
MSP_KERNEL(kOrderedThreads, 5)
ordered_long_pixels(const Arguments a, const SortedSamples sorted, const uint32_t* ids, const uint32_t* starts,
                    const LongPixels long_pixels) {
  MSP_SHARED typename Arguments::A partial[Plan::kGroups][Plan::kGroup][Plan::kVector];
  const uint32_t count = *long_pixels.count;
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const LongPixel item = long_pixels.items[i];
    const OrderedBlock<Plan, Arguments> block(a, sorted, ids, starts, item.plane);
    add_long_runs(block, item.pixel, partial);
  }
}

}  // namespace muspace::msda
