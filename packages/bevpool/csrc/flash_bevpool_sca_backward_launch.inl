// SPDX-License-Identifier: Apache-2.0
// Backward launcher: which route, which rows.
#pragma once

#include "flash_bevpool_sca_backward.inl"
#include "flash_bevpool_sca_general.inl"
#include "flash_bevpool_sca_ordered.inl"

namespace muspace::bevpool {
namespace {

#if defined(MSP_BACKEND_EMU)
using ScaSort = SortPlan<256, 128, 64>;
using ScaLargeSort = SortPlan<512, 256, 256>;
constexpr int kSmallTile = 32, kLargeTile = 64;
constexpr int64_t kManySamples = 4000;
#else
using ScaSort = SortPlan<1024, 128, 4096>;
using ScaLargeSort = SortPlan<2048, 256, 16384>;
constexpr int kSmallTile = 96, kLargeTile = 192;
constexpr int64_t kManySamples = int64_t{1} << 21;  // from which on larger tiles fill the device
#endif

/// Whether a query's samples fit a block's list and the cells fit a record's tag.
bool sca_sorted_reaches(const ScaInputs& in) {
  if (in.feature_type == Storage::f64 || !sca_reaches(in) || in.channels / in.heads > 128) return false;
  if (in.heads * in.levels > kMaxGridYZ) return false;
  if (in.cameras > kMaxSortedCameras || in.cameras > ScaSort::kSamples / 4 ||
      in.points > ScaSort::kSamples / in.cameras) {
    return false;
  }
  // a level's cells, (height + 1) * (width + 1) with the width rounded up to a power of two, are fewer than 4 * rows +
  // 4
  return in.rows < kMaxWalkCells / 4 / in.cameras;
}

bool sca_ordered_reaches(const ScaInputs& in) {
  const int64_t samples = in.levels * in.points, queries = in.x_cells * in.y_cells;
  return in.feature_type != Storage::f64 && sca_reaches(in) && queries <= kInt32Max / 8 / samples;
}

/// Segments of a chunk.
int64_t sca_chunk_segments(const ScaInputs& in) {
  const int64_t count = in.x_cells * in.y_cells * in.levels * in.points, all = in.batch * in.cameras * in.heads;
  const int64_t wanted = kOrderedChunk / count;
  return wanted < 1 ? 1 : wanted < all ? (wanted < 65535 ? wanted : 65535) : (all < 65535 ? all : 65535);
}

struct ScaWorkspace {
  uint32_t* hits;  // [images, queries, words]: the cameras that hit, a bit each
  OrderedBuffers buffers;
  int words;
  int64_t bytes;
  ScaWorkspace(const ScaInputs& in, void* base, bool ordered) {
    Parts parts(base);
    words = static_cast<int>((in.cameras + 31) / 32);
    hits = parts.take<uint32_t>(in.batch * in.x_cells * in.y_cells * words);
    bytes = parts.bytes();
    if (!ordered) return;
    buffers =
        take_ordered(parts, sca_chunk_segments(in), in.x_cells * in.y_cells * in.levels * in.points, in.rows, false);
    bytes = parts.bytes();
  }
};

template <class T, class Array>
ScaArguments<T, Array> backward_arguments(const ScaInputs& in, const ScaGradients& gradients) {
  ScaArguments<T, Array> a = sca_arguments<T, Array>(in);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_feats = static_cast<float*>(gradients.image_feats);
  a.grad_offsets = {gradients.sampling_offsets, in.offset_type};
  a.grad_weights = {gradients.attention_weights, in.weight_type};
  return a;
}

template <class T>
const char* find_all_hits(const ScaInputs& in, const ScaWorkspace& w, stream_t stream) {
  const ScaArguments<T, AnyArray> a = sca_arguments<T, AnyArray>(in);
  const int64_t masks = in.batch * a.queries() * w.words;
  const auto kernel = sca_hits<T, AnyArray>;
  MSP_LAUNCH(kernel, dim3(striding_blocks(masks, kScaKeyThreads)), dim3(kScaKeyThreads), 0, stream, a, w.hits, w.words,
             masks);
  return launch_error();
}

template <class Plan, class T, class Array>
const char* run_sca_sorted(const ScaInputs& in, const ScaGradients& gradients, const uint32_t* hits, stream_t stream) {
  const ScaArguments<T, Array> a = backward_arguments<T, Array>(in, gradients);
  const int64_t most = Plan::kTile * in.points, samples = Plan::Sort::kSamples;
  const ScaDivisors by{Divisor::of(in.points, most > samples ? most : samples), Divisor::of(in.anchors, in.points)};
  const dim3 grid(static_cast<unsigned>((a.queries() + Plan::kTile - 1) / Plan::kTile),
                  static_cast<unsigned>(a.heads * a.level_count), static_cast<unsigned>(in.batch));
  const auto kernel = sca_backward_sorted<Plan, T, Array>;
  MSP_LAUNCH(kernel, grid, dim3(Plan::Sort::kThreads), 0, stream, a, hits, by);
  return launch_error();
}

template <class T>
bool vector_rows(const ScaInputs& in, const ScaGradients& gradients) {
  return in.channels / in.heads % 4 == 0 && is_aligned(in.image_feats, 4 * sizeof(T)) &&
         is_aligned(gradients.output, 4 * sizeof(T)) && is_aligned(gradients.image_feats, 16);  // so is null
}

/// With a null `gradients.image_feats` only the gradients of offsets and weights are computed.
template <class T>
const char* choose_sca_sorted(const ScaInputs& in, const ScaGradients& gradients, const uint32_t* hits,
                              stream_t stream) {
  using Any = AnyArray;
  const int64_t channels = in.channels / in.heads;
  if (!vector_rows<T>(in, gradients)) {
    return run_sca_sorted<ScaSortPlan<RowPlan<32, 1, 4>, ScaSort, kSmallTile, 6>, T, Any>(in, gradients, hits, stream);
  }
  const int64_t samples = in.x_cells * in.y_cells * in.points * in.batch * in.heads * in.levels;
  if (channels == 32 && float32_samples(in) && samples >= kManySamples) {
    using Plan = ScaSortPlan<RowPlan<8, 4, 1, true>, ScaLargeSort, kLargeTile, 4>;
    return run_sca_sorted<Plan, T, Float32Array>(in, gradients, hits, stream);
  }
  if (channels <= 32)
    return run_sca_sorted<ScaSortPlan<RowPlan<8, 4, 1>, ScaSort, kSmallTile, 6>, T, Any>(in, gradients, hits, stream);
  if (channels <= 64)
    return run_sca_sorted<ScaSortPlan<RowPlan<16, 4, 1>, ScaSort, kSmallTile, 6>, T, Any>(in, gradients, hits, stream);
  return run_sca_sorted<ScaSortPlan<RowPlan<32, 4, 1>, ScaSort, kSmallTile, 6>, T, Any>(in, gradients, hits, stream);
}

template <class T>
const char* run_sca_general(const ScaInputs& in, const ScaGradients& gradients, stream_t stream) {
  using Array = AnyArray;
  const ScaArguments<T, Array> a = backward_arguments<T, Array>(in, gradients);
  const int64_t total = in.batch * a.queries() * a.heads;
  const auto kernel = sca_backward_general<T, Array>;
  MSP_LAUNCH(kernel, dim3(striding_blocks(total, kScaGeneralWarps)), dim3(kScaGeneralThreads), 0, stream, a, total);
  return launch_error();
}

/// Writes the gradient of the features completely.
template <class Rows, class T>
const char* run_sca_ordered(const ScaInputs& in, const ScaGradients& gradients, const ScaWorkspace& w,
                            stream_t stream) {
  using Array = AnyArray;
  ScaProblem<T, Array> problem{backward_arguments<T, Array>(in, gradients), w.hits, w.words, 0};
  const int64_t all = in.batch * in.cameras * in.heads, chunk = sca_chunk_segments(in);
  const auto write_keys = sca_keys<T, Array>;
  for (int64_t first = 0; first < all; first += chunk) {
    const int64_t segments = first + chunk < all ? chunk : all - first;
    problem.first_segment = first;
    const dim3 grid(static_cast<unsigned>((problem.count() + kScaKeyThreads - 1) / kScaKeyThreads),
                    static_cast<unsigned>(segments));
    MSP_LAUNCH(write_keys, grid, dim3(kScaKeyThreads), 0, stream, problem, w.buffers.sort.keys[0]);
    const char* error = run_ordered<Rows>(problem, w.buffers, segments, stream);
    if (error) return error;
  }
  return launch_error();
}

/// Gradients of offsets and weights alone, those of the features being there already.
template <class T>
const char* sample_gradients(const ScaInputs& in, const ScaGradients& gradients, const uint32_t* hits,
                             stream_t stream) {
  if (gradients.sampling_offsets == nullptr && gradients.attention_weights == nullptr) return nullptr;
  ScaGradients wanted = gradients;
  wanted.image_feats = nullptr;
  if (sca_sorted_reaches(in)) return choose_sca_sorted<T>(in, wanted, hits, stream);
  return run_sca_general<T>(in, wanted, stream);
}

template <class T>
const char* sca_backward_with(const ScaInputs& in, const ScaGradients& gradients, void* workspace,
                              ScaBackwardRoute route, stream_t stream) {
  const ScaWorkspace w(in, workspace, route == ScaBackwardRoute::ordered);
  const char* error = nullptr;
  if (route != ScaBackwardRoute::general) error = find_all_hits<T>(in, w, stream);
  if (error) return error;
  if (route == ScaBackwardRoute::ordered) {
    error = vector_rows<T>(in, gradients) ? run_sca_ordered<RowPlan<8, 4, 1>, T>(in, gradients, w, stream)
                                          : run_sca_ordered<RowPlan<32, 1, 4>, T>(in, gradients, w, stream);
    return error ? error : sample_gradients<T>(in, gradients, w.hits, stream);
  }
  const size_t bytes = static_cast<size_t>(in.batch * in.cameras * in.rows * in.channels) * 4;
  error = zero_fill(gradients.image_feats, bytes, stream);
  if (error) return error;
  if (route == ScaBackwardRoute::block_sorted) return choose_sca_sorted<T>(in, gradients, w.hits, stream);
  return run_sca_general<T>(in, gradients, stream);
}

const char* route_sca_backward(const ScaInputs& in, const ScaGradients& gradients, void* workspace,
                               ScaBackwardRoute route, stream_t stream) {
  switch (in.feature_type) {
    case Storage::f32:
      return sca_backward_with<float>(in, gradients, workspace, route, stream);
    case Storage::f16:
      return sca_backward_with<half_t>(in, gradients, workspace, route, stream);
    case Storage::bf16:
      return sca_backward_with<bfloat16_t>(in, gradients, workspace, route, stream);
    default:
      return "float64 is for cpu only";
  }
}

}  // namespace

ScaBackwardRoute flash_bevpool_sca_reached_route(const ScaInputs& inputs, ScaBackwardRoute wanted) {
  const bool unsorted = wanted == ScaBackwardRoute::block_sorted && !sca_sorted_reaches(inputs);
  return unsorted ? ScaBackwardRoute::general : wanted;
}

int64_t flash_bevpool_sca_workspace_bytes(const ScaInputs& inputs, ScaBackwardRoute route) {
  const bool ordered = route == ScaBackwardRoute::ordered, sorted = route == ScaBackwardRoute::block_sorted;
  const bool reaches = ordered ? sca_ordered_reaches(inputs) : sorted && sca_sorted_reaches(inputs);
  return reaches ? ScaWorkspace(inputs, nullptr, ordered).bytes : 0;
}

Status launch_flash_bevpool_sca_backward(const ScaInputs& inputs, const ScaGradients& gradients, void* workspace,
                                         int64_t, ScaBackwardRoute route, const Place& place) {
  if (!sca_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool_sca takes fewer than 2^28 pixels and 2^27 queries per image");
  }
  if (route == ScaBackwardRoute::ordered && !sca_ordered_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool_sca backward: the ordered route takes fewer than 2^28 samples per head");
  }
  const ScaBackwardRoute reached = flash_bevpool_sca_reached_route(inputs, route);
  const DeviceGuard guard(place.device);
  const char* error = route_sca_backward(inputs, gradients, workspace, reached, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "flash_bevpool_sca backward: %s", error) : success();
}

}  // namespace muspace::bevpool
