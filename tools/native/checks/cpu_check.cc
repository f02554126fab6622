// SPDX-License-Identifier: Apache-2.0
// The vectorisable 16-bit conversions of cpu.h give the bits of numeric.h: every half, a dense sample of all floats.
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "muspace/cpu.h"

using namespace muspace;

namespace {

long differences = 0;

void compare(std::uint32_t got, std::uint32_t wanted) {
  if (got != wanted) ++differences;
}

std::uint32_t bits_of(float value) { return bit_cast<std::uint32_t>(value); }

void check_loads(std::uint32_t first) {
  half_t halves[8];
  bfloat16_t brains[8];
  float from_halves[8], from_brains[8];
  for (std::uint32_t i = 0; i < 8; ++i) halves[i].bits = brains[i].bits = static_cast<std::uint16_t>(first + i);
  cpu::store_lanes(from_halves, cpu::load_lanes(halves));
  cpu::store_lanes(from_brains, cpu::load_lanes(brains));
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t wanted = bits_of(portable::half_value(halves[i].bits));
    compare(bits_of(from_halves[i]), wanted);
    compare(bits_of(cpu::load(&halves[i])), wanted);
    compare(bits_of(from_brains[i]), bits_of(to_float(brains[i])));
  }
}

void check_stores(std::uint32_t bits) {
  const float value = bit_cast<float>(bits);
  half_t half;
  bfloat16_t brain;
  cpu::store(&half, value);
  cpu::store(&brain, value);
  compare(half.bits, portable::half_bits(value));
  compare(brain.bits, portable::bfloat16_bits(value));
}

}  // namespace

int main() {
  for (std::uint32_t first = 0; first < 65536; first += 8) check_loads(first);
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 61)
    check_stores(static_cast<std::uint32_t>(bits));
  for (std::uint32_t half = 0; half < 65536; ++half) {  // the rounding borders: halves, midpoints and their neighbours
    const std::uint32_t bits = bits_of(portable::half_value(static_cast<std::uint16_t>(half)));
    for (std::uint32_t step : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu}) check_stores(bits + step);
  }
  if (differences != 0) std::fprintf(stderr, "cpu_check: %ld conversions differ\n", differences);
  return differences == 0 ? 0 : 1;
}
