// SPDX-License-Identifier: Apache-2.0
// Forward launcher: which rows, which access to offsets and weights.
#pragma once

#include "flash_bevpool_sca_forward.inl"

namespace muspace::bevpool {
namespace {

template <class Plan, class T, class Array>
const char* run_sca_forward(const ScaInputs& in, void* output, stream_t stream) {
  ScaArguments<T, Array> a = sca_arguments<T, Array>(in);
  a.output = static_cast<T*>(output);
  a.channel_blocks = (a.channels + Plan::Rows::kChannels - 1) / Plan::Rows::kChannels;
  const dim3 grid(static_cast<unsigned>((a.queries() + Plan::kQueries - 1) / Plan::kQueries),
                  static_cast<unsigned>(a.heads / Plan::kHeads * a.channel_blocks), static_cast<unsigned>(in.batch));
  const auto kernel = sca_forward<Plan, T, Array>;
  MSP_LAUNCH(kernel, grid, dim3(Plan::kThreads), 0, stream, a);
  return launch_error();
}

/// Whether a lane that sets up one sample of every `round` keeps its anchor.
bool fixed_anchor(const ScaInputs& in, int64_t round) { return round % in.anchors == 0 && in.points % in.anchors == 0; }

/// 32 channels a head, fp32 offsets and weights, 4 or 8 points: the common case. Short rows: two heads side by side
/// fill a cache line.
template <class T, int kPoints>
const char* sca_forward_32(const ScaInputs& in, void* output, stream_t stream) {
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kVector = kWide ? 4 : 8, kHeads = kWide ? 1 : 2;
  using Rows = RowPlan<32 / kVector, kVector, 1, true>;
  return run_sca_forward<ScaPlan<Rows, kHeads, kPoints, 128, kWide ? 10 : 8>, T, Float32Array>(in, output, stream);
}

template <class T>
const char* choose_sca_forward(const ScaInputs& in, void* output, stream_t stream) {
  using Any = AnyArray;
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kVector = kWide ? 4 : 8;
  const int64_t channels = in.channels / in.heads;
  const bool pairs = in.heads % 2 == 0;
  const bool vectors = channels % kVector == 0 && is_aligned(in.image_feats, 16) && is_aligned(output, 16);
  if (!vectors) return run_sca_forward<ScaPlan<RowPlan<32, 1, 4>, 1, 0, 128, 8>, T, Any>(in, output, stream);
  if (channels == 32 && (kWide || pairs) && float32_samples(in) && fixed_anchor(in, 32 / kVector)) {
    if (in.points == 8) return sca_forward_32<T, 8>(in, output, stream);
    if (in.points == 4) return sca_forward_32<T, 4>(in, output, stream);
  }
  if (channels <= 4 * kVector && pairs) {
    return run_sca_forward<ScaPlan<RowPlan<4, kVector, 1>, 2, 0, 128, 8>, T, Any>(in, output, stream);
  }
  if (channels <= 8 * kVector)
    return run_sca_forward<ScaPlan<RowPlan<8, kVector, 1>, 1, 0, 128, 8>, T, Any>(in, output, stream);
  if (channels <= 16 * kVector)
    return run_sca_forward<ScaPlan<RowPlan<16, kVector, 1>, 1, 0, 128, 8>, T, Any>(in, output, stream);
  return run_sca_forward<ScaPlan<RowPlan<32, kVector, 1>, 1, 0, 128, 8>, T, Any>(in, output, stream);
}

const char* route_sca_forward(const ScaInputs& in, void* output, stream_t stream) {
  switch (in.feature_type) {
    case Storage::f32:
      return choose_sca_forward<float>(in, output, stream);
    case Storage::f16:
      return choose_sca_forward<half_t>(in, output, stream);
    case Storage::bf16:
      return choose_sca_forward<bfloat16_t>(in, output, stream);
    default:
      return "float64 is for cpu only";
  }
}

}  // namespace

Status launch_flash_bevpool_sca(const ScaInputs& inputs, void* output, const Place& place) {
  if (!sca_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool_sca takes fewer than 2^28 pixels and 2^27 queries per image");
  }
  const DeviceGuard guard(place.device);
  const char* error = route_sca_forward(inputs, output, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "flash_bevpool_sca forward: %s", error) : success();
}

}  // namespace muspace::bevpool
