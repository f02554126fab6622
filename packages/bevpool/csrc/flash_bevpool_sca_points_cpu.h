// SPDX-License-Identifier: Apache-2.0
// Cameras that hit queries, and points on levels, found on the cpu. For one translation unit.
#pragma once
#include <algorithm>
#include <vector>

#include "flash_bevpool_sca.h"
#include "flash_bevpool_sca_math.h"
#include "muspace/cpu.h"
#include "rows_cpu.h"

namespace muspace::bevpool {
namespace {

constexpr int64_t kTileSide = 8;     // queries of one task: neighbours both ways, which read the same rows
constexpr int kWindow = 32;          // points located before their channels are read
constexpr int64_t kAhead = 4;        // windows between a prefetch of offsets and weights and its use

template <class T>
struct Problem {
  ScaInputs inputs;
  ScaGeometry<T> geometry;
  T uniform_weight;   // of every point, without attention weights
  const void* zeros;  // one row of zeros, read in place of a corner outside the level

  int64_t queries() const { return inputs.x_cells * inputs.y_cells; }
  int64_t head_channels() const { return inputs.channels / inputs.heads; }
};

// The queries of a square of the grid, numbered row by row.
struct Tile {
  int64_t batch, x, y, width, height;

  int64_t size() const { return width * height; }
};

inline int64_t tiles_across(const ScaInputs& in) { return (in.x_cells + kTileSide - 1) / kTileSide; }
inline int64_t tile_count(const ScaInputs& in) { return tiles_across(in) * ((in.y_cells + kTileSide - 1) / kTileSide); }

inline Tile tile_at(const ScaInputs& in, int64_t batch, int64_t index) {
  const int64_t x = index % tiles_across(in) * kTileSide, y = index / tiles_across(in) * kTileSide;
  return Tile{batch, x, y, std::min(kTileSide, in.x_cells - x), std::min(kTileSide, in.y_cells - y)};
}

MSP_CPU_INLINE int64_t query_of(const ScaInputs& in, const Tile& tile, int64_t index) {
  return (tile.y + index / tile.width) * in.x_cells + tile.x + index % tile.width;
}

// A camera that hits a query; `references` of all anchors.
template <class T>
struct Hit {
  int64_t index;  // of the query in its tile
  int64_t query, camera;
  const Reference<T>* references;
};

// The hits of one query in one camera: writes the references of all anchors and returns whether any is seen.
template <class T>
MSP_CPU_INLINE bool find_hit(const Problem<T>& problem, int64_t batch, int64_t camera, int64_t query,
                             Reference<T>* references) {
  const ScaInputs& in = problem.inputs;
  const T* const matrix = static_cast<const T*>(in.projections) + (batch * in.cameras + camera) * 12;
  const Column<T> column = project_pillar(problem.geometry, matrix, query % in.x_cells, query / in.x_cells);
  bool seen = false;
  for (int64_t anchor = 0; anchor < in.anchors; ++anchor) {
    references[anchor] = anchor_reference(problem.geometry, column, static_cast<const T*>(in.z_anchors)[anchor]);
    seen |= references[anchor].seen;
  }
  return seen;
}

// The hits of a tile, by query and camera.
template <class T>
struct TileHits {
  std::vector<Reference<T>> references;
  std::vector<Hit<T>> hits;
  int64_t counts[kTileSide * kTileSide];

  MSP_CPU_INLINE TileHits(const Problem<T>& problem, const Tile& tile) {
    const ScaInputs& in = problem.inputs;
    references.resize(static_cast<size_t>(tile.size() * in.cameras * in.anchors));
    Reference<T>* next = references.data();
    for (int64_t index = 0; index < tile.size(); ++index) {
      const int64_t query = query_of(in, tile, index);
      counts[index] = 0;
      for (int64_t camera = 0; camera < in.cameras; ++camera) {
        if (!find_hit(problem, tile.batch, camera, query, next)) continue;
        hits.push_back(Hit<T>{index, query, camera, next});
        next += in.anchors;
        ++counts[index];
      }
    }
  }
};

// Points [begin, begin + count) of one (query, head), counted over levels, in one camera: geometry without channels.
struct Window {
  int64_t row;  // (batch, query, head)
  int begin, count;
};

// `count` numbers of a tensor as T: in place, or converted into `buffer`.
template <class T>
MSP_CPU_INLINE const T* read_numbers(const void* data, Storage type, int64_t offset, int count, T* buffer) {
  if (size_of(type) == static_cast<int64_t>(sizeof(T))) return static_cast<const T*>(data) + offset;
  widen(data, type, offset, count, buffer);
  return buffer;
}

// Offsets and weights of the points of a window.
template <class T>
struct WindowNumbers {
  const T *offsets, *weights;

  MSP_CPU_INLINE WindowNumbers(const Problem<T>& problem, const Window& window)
      : offsets(offset_buffer_), weights(weight_buffer_) {
    const ScaInputs& in = problem.inputs;
    const int64_t first = window.row * in.levels * in.points + window.begin;
    if (in.sampling_offsets != nullptr) {
      offsets = read_numbers(in.sampling_offsets, in.offset_type, 2 * first, 2 * window.count, offset_buffer_);
    } else {
      std::fill(offset_buffer_, offset_buffer_ + 2 * window.count, T(0));
    }
    if (in.attention_weights != nullptr) {
      weights = read_numbers(in.attention_weights, in.weight_type, first, window.count, weight_buffer_);
    } else {
      std::fill(weight_buffer_, weight_buffer_ + window.count, problem.uniform_weight);
    }
  }
  WindowNumbers(const WindowNumbers&) = delete;
  WindowNumbers& operator=(const WindowNumbers&) = delete;

 private:
  T offset_buffer_[2 * kWindow], weight_buffer_[kWindow];
};

// Offsets and weights of `count` points, counted over the whole call.
MSP_CPU_INLINE void prefetch_numbers(const ScaInputs& in, int64_t first, int64_t count) {
  const int64_t offset_size = 2 * size_of(in.offset_type), weight_size = size_of(in.weight_type);
  if (in.sampling_offsets != nullptr) {
    prefetch(static_cast<const char*>(in.sampling_offsets) + first * offset_size, count * offset_size);
  }
  if (in.attention_weights != nullptr) {
    prefetch(static_cast<const char*>(in.attention_weights) + first * weight_size, count * weight_size);
  }
}

// Walks the windows of all hits of a tile at one head. locate(hit, window, slot) runs one window ahead of add(hit,
// slot), so that rows are on their way; finish(hit) follows the last window of a query.
template <class T, class Locate, class Add, class Finish>
MSP_CPU_INLINE void walk_windows(const Problem<T>& problem, const Tile& tile, const TileHits<T>& found, int64_t head,
                                 const Locate& locate, const Add& add, const Finish& finish) {
  const ScaInputs& in = problem.inputs;
  const int points = static_cast<int>(in.levels * in.points), windows = (points + kWindow - 1) / kWindow;
  const int64_t steps = static_cast<int64_t>(found.hits.size()) * windows, base = tile.batch * problem.queries();
  const auto hit_of = [&](int64_t step) -> const Hit<T>& { return found.hits[static_cast<size_t>(step / windows)]; };
  const auto window_of = [&](int64_t step) {
    const int begin = static_cast<int>(step % windows) * kWindow;
    return Window{(base + hit_of(step).query) * in.heads + head, begin, std::min(kWindow, points - begin)};
  };
  for (int64_t step = 0; step <= steps; ++step) {
    if (step + kAhead < steps) {
      const Window window = window_of(step + kAhead);
      prefetch_numbers(in, window.row * points + window.begin, window.count);
    }
    if (step < steps) locate(hit_of(step), window_of(step), static_cast<int>(step % 2));
    if (step == 0) continue;
    const Hit<T>& last = hit_of(step - 1);
    add(last, static_cast<int>((step - 1) % 2));
    if (step == steps || hit_of(step).index != last.index) finish(last);
  }
}

// The first row of a camera, at one head.
template <class V>
MSP_CPU_INLINE const V* plane_of(const ScaInputs& in, int64_t batch, int64_t camera, int64_t head) {
  return static_cast<const V*>(in.image_feats) + (batch * in.cameras + camera) * in.rows * in.channels +
         head * (in.channels / in.heads);
}

// Calls visit(point of the window, level, sample) for the points of a window that lie inside their level.
template <class T, class Visit>
MSP_CPU_INLINE void visit_points(const Problem<T>& problem, const Window& window, const T* offsets,
                                 const Reference<T>* references, const Visit& visit) {
  const ScaInputs& in = problem.inputs;
  int64_t level = window.begin / in.points, point = window.begin % in.points, anchor = point % in.anchors;
  for (int k = 0; k < window.count; ++k) {
    const LevelSample<T> sample =
        locate_point(references[anchor], offsets[2 * k], offsets[2 * k + 1],
                     static_cast<int32_t>(in.level_height[level]), static_cast<int32_t>(in.level_width[level]));
    if (sample.inside) visit(k, level, sample);
    if (++anchor == in.anchors) anchor = 0;
    if (++point == in.points) point = anchor = 0, ++level;
  }
}

// Index of the row of corner 0 in its level.
template <class T>
MSP_CPU_INLINE int64_t first_corner(const LevelSample<T>& sample, int64_t width) {
  return static_cast<int64_t>(sample.y0) * width + sample.x0;
}

// Rows of the corners of a sample, from `base`, the first row of the level; `outside` in place of corners outside.
template <class P, class T>
MSP_CPU_INLINE void corner_rows(const LevelSample<T>& sample, int32_t height, int32_t width, P base, int64_t pitch,
                                P outside, P* rows) {
  const int64_t first = first_corner(sample, width);
  for (int k = 0; k < 4; ++k) {
    const int64_t row = first + (k & 1) + (k & 2 ? width : 0);
    rows[k] = has_corner(sample, k, height, width) ? base + row * pitch : outside;
  }
}

}  // namespace
}  // namespace muspace::bevpool
