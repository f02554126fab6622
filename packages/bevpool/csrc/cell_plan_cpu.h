// SPDX-License-Identifier: Apache-2.0
// Layout of a plan on the cpu, in words:
//
//   starts[cells + 1]           starts[c] .. starts[c + 1] are the entries of cell c
//   entries[points]             one word, the row, without weights; two words, {row, weight index}, with weights
//   order[points]               with weights: the point of every entry
//
// Only the first starts[cells] entries are written: points without a cell have none.
#pragma once
#include <algorithm>
#include <cstdint>

#include "muspace/cpu.h"

namespace muspace::bevpool {

struct PlanEntry {
  int32_t row, weight;
};

struct PlanView {
  const int32_t* starts;
  const int32_t* rows;       // without weights
  const PlanEntry* entries;  // with weights
  const int32_t* order;      // with weights
};

inline PlanView plan_view(const int32_t* plan, int64_t points, int64_t cells, bool weighted) {
  const int32_t* const entries = plan + cells + 1;
  if (!weighted) return PlanView{plan, entries, nullptr, nullptr};
  return PlanView{plan, nullptr, reinterpret_cast<const PlanEntry*>(entries), entries + 2 * points};
}

struct EntryRange {
  int64_t begin, end;
};

// Any words of a plan give a range inside the entries.
MSP_CPU_INLINE EntryRange entries_of(const PlanView& plan, int64_t points, int64_t cell) {
  const int64_t begin = std::clamp<int64_t>(plan.starts[cell], 0, points);
  return EntryRange{begin, std::clamp<int64_t>(plan.starts[cell + 1], begin, points)};
}

}  // namespace muspace::bevpool
