// SPDX-License-Identifier: Apache-2.0
// The ordered gradient of `value`: every head has samples of its own.
#pragma once

#include "ordered_launch.inl"

namespace muspace::msda {

template <class Access>
struct HeadSamples {
  static constexpr bool kShared = false;
  Coordinates<Access> coordinates;

  MSP_DEVICE int level(const Extent32& e, int sample) const { return sample / e.points; }
  template <class A>
  MSP_DEVICE void load(const Extent32&, int64_t number, A (&xy)[2], A& attention) const {
    coordinates.load(number, xy, attention);
  }
};

namespace {

template <class T>
using ValueSamples = HeadSamples<AnyAccess<std::is_same_v<T, double>>>;

/// Writes the gradient of `value` completely.
template <class T>
const char* run_ordered_value(const Inputs& inputs, const Gradients& gradients, void* workspace, stream_t stream) {
  OrderedArguments<T, ValueSamples<T>> a{};
  a.source.coordinates = coordinates_of<AnyAccess<std::is_same_v<T, double>>>(inputs);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_value = static_cast<arithmetic_t<T>*>(gradients.value);
  return run_ordered_rows(a, inputs.extent, levels_of(inputs), workspace, stream);
}

}  // namespace
}  // namespace muspace::msda
