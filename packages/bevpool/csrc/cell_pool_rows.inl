// SPDX-License-Identifier: Apache-2.0
// What the sums and their gradients share on device backends: vectors of rows, any storage type, change of layout.
#pragma once

#include "cell_plan_layout.h"
#include "muspace/numeric.h"
#include "muspace/target.h"
#include "muspace/vec.h"
#include "muspace/warp.h"

namespace muspace::bevpool {

/// Element `index` of an array whose type is known at run time, equal for the whole grid.
MSP_DEVICE float load_any(const void* data, Storage type, int64_t index) {
  if (type == Storage::f32) return static_cast<const float*>(data)[index];
  if (type == Storage::f16) return to_float(static_cast<const half_t*>(data)[index]);
  return to_float(static_cast<const bfloat16_t*>(data)[index]);
}

MSP_DEVICE void store_any(void* data, Storage type, int64_t index, float value) {
  if (type == Storage::f32) {
    static_cast<float*>(data)[index] = value;
  } else if (type == Storage::f16) {
    static_cast<half_t*>(data)[index] = from_float<half_t>(value);
  } else {
    static_cast<bfloat16_t*>(data)[index] = from_float<bfloat16_t>(value);
  }
}

/// kCount neighbouring elements as they lie in memory.
template <class T, int kCount>
using RawVector = Words<kCount * static_cast<int>(sizeof(T))>;

template <class T, int kCount>
MSP_DEVICE RawVector<T, kCount> zero_vector() {
  RawVector<T, kCount> raw;
  MSP_UNROLL
  for (auto& word : raw.word) word = 0;
  return raw;
}

template <class T, int kCount>
MSP_DEVICE float element(const RawVector<T, kCount>& raw, int i) {
  if constexpr (sizeof(T) == 4) {
    return bit_cast<float>(raw.word[i]);
  } else {
    T value;
    value.bits = static_cast<std::uint16_t>(raw.word[i / 2] >> (i % 2 * 16));
    return to_float(value);
  }
}

/// sums[i] += weight * element i.
template <class T, int kCount>
MSP_DEVICE void add_weighted(float* sums, const RawVector<T, kCount>& raw, float weight) {
  MSP_UNROLL
  for (int i = 0; i < kCount; ++i) sums[i] = muspace::fma(weight, element<T, kCount>(raw, i), sums[i]);
}

/// kCount sums rounded to the storage type TO; `target` is aligned to the vector, or to 16 bytes.
template <class TO, int kCount>
MSP_DEVICE void store_sums(TO* target, const float* sums) {
  constexpr int kEach = kCount * static_cast<int>(sizeof(TO)) > 16 ? 16 / static_cast<int>(sizeof(TO)) : kCount;
  MSP_UNROLL
  for (int i = 0; i < kCount; i += kEach) {
    float piece[kEach];
    MSP_UNROLL
    for (int k = 0; k < kEach; ++k) piece[k] = sums[i + k];
    store_vector(target + i, piece);
  }
}

/// run(a value of the storage type) for one of the three.
template <class Run>
auto with_storage(Storage type, const Run& run) {
  if (type == Storage::f32) return run(float{});
  if (type == Storage::f16) return run(half_t{});
  return run(bfloat16_t{});
}

/// So that a row's bytes and a block's channels are numbers of 31 bits.
constexpr int64_t kMostChannels = int64_t{1} << 20;

inline Status too_many_channels(int64_t channels) {
  return failure(kValueError, "channels: expected at most %lld, got %lld", static_cast<long long>(kMostChannels),
                 static_cast<long long>(channels));
}

inline unsigned blocks_of(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

inline bool aligned_to(const void* data, int64_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

inline int64_t padded_bytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// -------------------------------------------------------------------------------------------------- change of layout

constexpr int kTurnThreads = 256, kTurnColumns = 32, kTurnRows = 128;

/// [images, rows, columns] -> [images, columns, rows].
struct Turn {
  const void* source;
  void* target;
  int64_t rows, columns;
  uint32_t row_blocks, column_blocks;  // of kTurnRows, or one of all rows; of kTurnColumns
  uint32_t* zeros;  // another array, 16-byte aligned, that the same launch sets to zero; or null
  int64_t zero_words;
};

MSP_DEVICE void clear_words(uint32_t* words, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTurnThreads + static_cast<int>(threadIdx.x);
  for (int64_t i = first; i < count / 4; i += static_cast<int64_t>(gridDim.x) * kTurnThreads) {
    reinterpret_cast<Words<16>*>(words)[i] = Words<16>{};
  }
  if (first < count % 4) words[count / 4 * 4 + first] = 0;
}

/// kRows: all rows, or 0 when they are many or known only at run time. The numbers of blocks are below 2^31.
template <class Word, int kRows>
MSP_KERNEL(kTurnThreads, 6)
turn(const Turn a) {
  constexpr int kTile = kRows > 0 ? kRows : kTurnRows, kPitch = kTile + 1, kWarps = kTurnThreads / kLanes;
  constexpr int kBatch = kRows == 80 ? 10 : 8, kEach = 16 / static_cast<int>(sizeof(Word));
  static_assert(kTile % (kBatch * kWarps) == 0, "whole batches");
  MSP_SHARED Word tile[kTurnColumns * kPitch];
  const int t = static_cast<int>(threadIdx.x), lane = t % kLanes, warp = t / kLanes;
  const uint32_t tile_number = blockIdx.x / a.row_blocks, image = tile_number / a.column_blocks;
  const int64_t first_column = static_cast<int64_t>(tile_number - image * a.column_blocks) * kTurnColumns;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x - tile_number * a.row_blocks) * kTile;
  const int rows = kRows > 0 ? kRows : static_cast<int>(a.rows - first_row < kTile ? a.rows - first_row : kTile);
  const int columns = static_cast<int>(a.columns - first_column < kTurnColumns ? a.columns - first_column
                                                                               : kTurnColumns);
  // addresses are clamped, so that no load waits for a condition
  const Word* source = static_cast<const Word*>(a.source) + (image * a.rows + first_row) * a.columns + first_column +
                       (lane < columns ? lane : columns - 1);
  if (a.zeros) clear_words(a.zeros, a.zero_words);
  for (int first = warp; first - warp < rows; first += kBatch * kWarps) {
    Word loaded[kBatch];
    MSP_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const int row = first + k * kWarps;
      loaded[k] = source[(kRows > 0 || row < rows ? row : rows - 1) * a.columns];
    }
    MSP_UNROLL
    for (int k = 0; k < kBatch; ++k) tile[lane * kPitch + first + k * kWarps] = loaded[k];
  }
  MSP_SYNC_BLOCK();
  Word* target = static_cast<Word*>(a.target) + (image * a.columns + first_column) * a.rows + first_row;
  if (kRows > 0 || (a.rows % kEach == 0 && rows % kEach == 0)) {
    const int vectors = rows / kEach;
    for (int i = t; i < columns * vectors; i += kTurnThreads) {
      const int column = i / vectors, row = (i - column * vectors) * kEach;
      Words<16> words;
      MSP_UNROLL
      for (int k = 0; k < 4; ++k) {
        const Word* piece = tile + column * kPitch + row + k * kEach / 4;
        words.word[k] = sizeof(Word) == 4 ? piece[0] : piece[0] | static_cast<uint32_t>(piece[kEach / 8]) << 16;
      }
      *reinterpret_cast<Words<16>*>(target + column * a.rows + row) = words;
    }
  } else {
    for (int i = t; i < columns * rows; i += kTurnThreads) {
      target[i / rows * a.rows + i % rows] = tile[i / rows * kPitch + i % rows];
    }
  }
}

template <class Word>
const char* run_turn(Turn a, int64_t images, stream_t stream) {
  const bool whole = a.rows == 64 || a.rows == 80 || a.rows == 256;
  const int64_t row_blocks = whole ? 1 : (a.rows + kTurnRows - 1) / kTurnRows;
  const int64_t column_blocks = (a.columns + kTurnColumns - 1) / kTurnColumns;
  const int64_t blocks = images * column_blocks * row_blocks;
  if (blocks > 0x7fffffff) return "too many elements for a change of layout";
  a.row_blocks = static_cast<uint32_t>(row_blocks), a.column_blocks = static_cast<uint32_t>(column_blocks);
  constexpr auto by_64 = turn<Word, 64>, by_80 = turn<Word, 80>, by_256 = turn<Word, 256>, any = turn<Word, 0>;
  const auto kernel = a.rows == 64 ? by_64 : a.rows == 80 ? by_80 : a.rows == 256 ? by_256 : any;
  MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kTurnThreads), 0, stream, a);
  return launch_error();
}

/// [images, rows, columns] -> [images, columns, rows]; `target` is 16-byte aligned.
inline const char* change_layout(const void* source, void* target, Storage type, int64_t images, int64_t rows,
                                 int64_t columns, stream_t stream, uint32_t* zeros = nullptr, int64_t zero_words = 0) {
  const Turn a{source, target, rows, columns, 1, 1, zeros, zero_words};
  return size_of(type) == 4 ? run_turn<uint32_t>(a, images, stream) : run_turn<uint16_t>(a, images, stream);
}

}  // namespace muspace::bevpool
