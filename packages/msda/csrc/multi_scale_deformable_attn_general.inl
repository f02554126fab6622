// SPDX-License-Identifier: Apache-2.0
// Forward and backward, route "general": any number of channels, levels and points, fp64, extents beyond 32 bits.
#pragma once

#include "multi_scale_deformable_attn_tables.inl"

namespace muspace::msda {

constexpr int kGeneralThreads = 256;
constexpr int kGeneralGroups = kGeneralThreads / kLanes;

template <class T>
using GeneralAccess = AnyAccess<std::is_same_v<T, double>>;

template <class T>
struct GeneralArguments {
  using A = arithmetic_t<T>;
  const T* value;
  Coordinates<GeneralAccess<T>> coordinates;
  LevelSource levels;
  Extent extent;
  T* output;             // forward
  const T* grad_output;  // backward
  A* grad_value;         // null: only the gradients of locations and weights are wanted
  CoordinateGradients<GeneralAccess<T>> grad_coordinates;
};

/// Levels in turn, without a table.
struct LevelCursor {
  LevelSource source;
  int64_t next_start = 0;
  MSP_DEVICE Level at(int64_t index) {
    const int64_t* shapes = source.spatial_shapes + 2 * index;
    const int64_t start = source.level_start_index ? source.level_start_index[index] : next_start;
    next_start += stated_rows(source.spatial_shapes, index);
    return fitted_level(shapes[0], shapes[1], start, source.rows);
  }
};

/// Element offsets of the four corners of a sample in one image's `value`, head and channel not yet added.
MSP_DEVICE void corner_offsets(int64_t start, int x0, int y0, int width, int64_t row_size, int64_t (&offsets)[4]) {
  offsets[0] = (start + static_cast<int64_t>(y0) * width + x0) * row_size;
  offsets[1] = offsets[0] + row_size;
  offsets[2] = offsets[0] + width * row_size;
  offsets[3] = offsets[2] + row_size;
}

template <class A>
MSP_DEVICE void masked_weights(const Sample<A>& sample, const Level& level, bool (&mask)[4], A (&weights)[4]) {
  const CornerMask corner = corner_mask(sample, level.height, level.width);
  const Corners<A> w = corner_weights(sample.fx, sample.fy);
  mask[0] = corner.k00, mask[1] = corner.k01, mask[2] = corner.k10, mask[3] = corner.k11;
  weights[0] = w.v00, weights[1] = w.v01, weights[2] = w.v10, weights[3] = w.v11;
}

/// One thread per output element.
template <class T>
MSP_KERNEL(kGeneralThreads, 1)
forward_general(const GeneralArguments<T> a) {
  using A = arithmetic_t<T>;
  const Extent& e = a.extent;
  const int64_t row_size = e.heads * e.channels, total = e.batch * e.queries * row_size;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += threads) {
    const int64_t query_head = i / e.channels, image = query_head / (e.queries * e.heads);
    const T* value = a.value + image * e.rows * row_size + i % row_size;
    int64_t number = query_head * e.levels * e.points;
    LevelCursor cursor{a.levels};
    A sum = 0;
    for (int64_t l = 0; l < e.levels; ++l) {
      const Level level = cursor.at(l);
      for (int64_t p = 0; p < e.points; ++p, ++number) {
        A xy[2], attention;
        a.coordinates.load(number, xy, attention);
        const Sample<A> sample = locate(xy[0], xy[1], level.height, level.width);
        if (!sample.inside) continue;
        bool mask[4];
        A weights[4];
        int64_t offsets[4];
        masked_weights(sample, level, mask, weights);
        corner_offsets(level.start, sample.x0, sample.y0, level.width, row_size, offsets);
        for (int k = 0; k < 4; ++k) {
          if (mask[k]) sum = muspace::fma(attention * weights[k], to_float(value[offsets[k]]), sum);
        }
      }
    }
    a.output[i] = from_float<T>(sum);
  }
}

/// The four inner products of one sample, summed over the group, and its share of the gradient of `value`.
template <class T, class A>
MSP_DEVICE Corners<A> sample_dots(const GeneralArguments<T>& a, const Sample<A>& sample, const Level& level,
                                  int64_t image_head, const T* grad_row, A attention) {
  const int64_t row_size = a.extent.heads * a.extent.channels;
  bool mask[4];
  A weights[4], dots[4] = {};
  int64_t offsets[4];
  masked_weights(sample, level, mask, weights);
  corner_offsets(level.start, sample.x0, sample.y0, level.width, row_size, offsets);
  if (sample.inside) {
    for (int64_t c = lane_id(); c < a.extent.channels; c += kLanes) {
      const A gradient = to_float(grad_row[c]);
      for (int k = 0; k < 4; ++k) {
        if (!mask[k]) continue;
        const int64_t element = image_head + offsets[k] + c;
        dots[k] = muspace::fma(gradient, to_float(a.value[element]), dots[k]);
        if (a.grad_value) atomic_add(a.grad_value + element, attention * weights[k] * gradient);
      }
    }
  }
  for (int k = 0; k < 4; ++k) {
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) dots[k] += shuffle_xor(dots[k], lanes);
  }
  return {dots[0], dots[1], dots[2], dots[3]};
}

/// A group of 32 lanes per (image, query, head); lanes go over channels. Gradients of locations and weights are summed
/// in a fixed order, those of `value` by atomics.
template <class T>
MSP_KERNEL(kGeneralThreads, 1)
backward_general(const GeneralArguments<T> a) {
  using A = arithmetic_t<T>;
  const Extent& e = a.extent;
  const int64_t total = e.batch * e.queries * e.heads, step = static_cast<int64_t>(gridDim.x) * kGeneralGroups;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGeneralGroups; first < total; first += step) {
    const bool active = first + warp_id() < total;  // an idle group takes part in the shuffles
    const int64_t query_head = active ? first + warp_id() : 0;
    const int64_t image = query_head / (e.queries * e.heads), head = query_head % e.heads;
    const int64_t image_head = (image * e.rows * e.heads + head) * e.channels;
    const T* grad_row = a.grad_output + query_head * e.channels;
    int64_t number = query_head * e.levels * e.points;
    LevelCursor cursor{a.levels};
    for (int64_t l = 0; l < e.levels; ++l) {
      const Level level = cursor.at(l);
      for (int64_t p = 0; p < e.points; ++p, ++number) {
        A xy[2], attention;
        a.coordinates.load(number, xy, attention);
        Sample<A> sample = locate(xy[0], xy[1], level.height, level.width);
        sample.inside = sample.inside && active;
        const Corners<A> dots = sample_dots(a, sample, level, image_head, grad_row, attention);
        if (!active || lane_id() != 0) continue;
        SampleGradient<A> gradient{};
        if (sample.inside) {
          gradient = sample_gradient(dots, sample.fx, sample.fy, attention, level.height, level.width);
        }
        a.grad_coordinates.store(number, gradient);
      }
    }
  }
}

template <class T>
GeneralArguments<T> general_arguments(const Inputs& inputs) {
  GeneralArguments<T> a{};
  a.value = static_cast<const T*>(inputs.value);
  a.coordinates = coordinates_of<GeneralAccess<T>>(inputs);
  a.levels = levels_of(inputs);
  a.extent = inputs.extent;
  return a;
}

/// Enough blocks to fill any device; the kernels stride over the rest.
inline int general_blocks(int64_t items, int64_t items_per_block) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  return static_cast<int>(blocks < 65535 ? blocks : 65535);
}

template <class T>
const char* run_forward_general(const Inputs& inputs, void* output, stream_t stream) {
  GeneralArguments<T> a = general_arguments<T>(inputs);
  a.output = static_cast<T*>(output);
  const int64_t elements = a.extent.batch * a.extent.queries * a.extent.heads * a.extent.channels;
  if (elements == 0) return nullptr;
  const auto kernel = forward_general<T>;
  MSP_LAUNCH(kernel, dim3(general_blocks(elements, kGeneralThreads)), dim3(kGeneralThreads), 0, stream, a);
  return launch_error();
}

/// With a null `gradients.value` only the gradients of locations and weights are computed.
template <class T>
const char* run_backward_general(const Inputs& inputs, const Gradients& gradients, stream_t stream) {
  GeneralArguments<T> a = general_arguments<T>(inputs);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_value = static_cast<arithmetic_t<T>*>(gradients.value);
  a.grad_coordinates = coordinate_gradients_of<GeneralAccess<T>>(inputs, gradients);
  const int64_t groups = a.extent.batch * a.extent.queries * a.extent.heads;
  if (groups == 0) return nullptr;
  const auto kernel = backward_general<T>;
  MSP_LAUNCH(kernel, dim3(general_blocks(groups, kGeneralGroups)), dim3(kGeneralThreads), 0, stream, a);
  return launch_error();
}

}  // namespace muspace::msda
