// SPDX-License-Identifier: Apache-2.0
// What the sums per cell and their gradients share on the cpu: cutting into blocks, and channels-first tensors as rows.
#pragma once
#include <algorithm>

#include "cell_pool.h"
#include "rows_cpu.h"

namespace muspace::bevpool {

// Fewer sums than 2^15 a thread do not pay for waking it.
inline int64_t useful_threads(int64_t numbers, int64_t threads) {
  return std::max<int64_t>(1, std::min(threads, numbers >> 15));
}

inline Storage arithmetic_storage(Storage type) { return type == Storage::f64 ? Storage::f64 : Storage::f32; }

// Cells or pixels of one block: whole cache lines of a channels-first tensor, and what stays in the first cache level.
inline int64_t block_rows(int64_t channels) {
  return std::clamp<int64_t>(4096 / std::max<int64_t>(channels, 1), 16, 64) & ~int64_t{15};
}

// `rows` cut into blocks that do not cross a multiple of `pixels`, if pixels > 0.
struct Blocks {
  int64_t rows, pixels, size, per_image;

  Blocks(int64_t row_count, int64_t pixel_count, int64_t block) : rows(row_count), size(block) {
    pixels = pixel_count > 0 ? pixel_count : std::max<int64_t>(rows, 1);
    per_image = (pixels + size - 1) / size;
  }
  int64_t count() const { return rows / pixels * per_image + (rows % pixels + size - 1) / size; }
  int64_t first(int64_t block) const { return block / per_image * pixels + block % per_image * size; }
  int64_t last(int64_t block) const {
    return std::min({rows, first(block) + size, (block / per_image + 1) * pixels});
  }
};

// The pixels [first, last) of one image, counted over all images.
inline PixelRun pixel_run(int64_t first, int64_t last, int64_t channels, int64_t pixels) {
  return PixelRun{first / pixels * channels * pixels + first % pixels, pixels, last - first};
}

// `data` of type `from`, [rows, channels] or (pixels > 0) [images, channels, pixels], copied to `rows` of type `to`,
// [rows, channels].
struct Staging {
  const void* data;
  Storage from, to;
  int64_t channels, pixels;
  void* rows;
};

// Whether rows that `points` points read are copied first, as rows of the arithmetic type: channels-first ones, and
// 16-bit ones that would otherwise be widened many times.
inline bool staged(Storage type, int64_t rows, int64_t pixels, int64_t points) {
  return pixels > 0 || (size_of(type) == 2 && points >= 4 * rows);
}

void stage(const Staging& staging, int64_t rows, int64_t threads);

}  // namespace muspace::bevpool
