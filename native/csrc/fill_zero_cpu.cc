// SPDX-License-Identifier: Apache-2.0
// In every cpu library: the answer to calls without work.
#include "muspace/cpu_call.h"

namespace muspace {

Status launch_fill_zero(void* data, int64_t bytes, const Place& place) {
  return cpu::guarded("fill with zero", [&] { cpu::fill_zero(data, bytes, place.ctx); });
}

}  // namespace muspace
