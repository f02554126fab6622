// SPDX-License-Identifier: Apache-2.0
// Checks of parallel.h: every index once, nested and concurrent callers, exceptions, a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <vector>

#include "muspace/parallel.h"

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "parallel_check: %s\n", what);
  ++failures;
}

bool every_index_once(std::int64_t count, std::int64_t threads) {
  std::vector<int> hits(static_cast<std::size_t>(count));
  muspace::parallel_for(count, threads, [&](std::int64_t i) { ++hits[static_cast<std::size_t>(i)]; });
  for (const int hit : hits) {
    if (hit != 1) return false;
  }
  return true;
}

void check_nested() {
  std::vector<int> sums(16);
  muspace::parallel_for(16, 4, [&](std::int64_t outer) {
    muspace::parallel_for(
        100, 4, [&](std::int64_t inner) { sums[static_cast<std::size_t>(outer)] += static_cast<int>(inner); });
  });
  for (const int sum : sums) expect(sum == 4950, "a nested call lost work");
}

void check_concurrent() {
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) good += every_index_once(200, 3);
    });
  }
  for (std::thread& caller : callers) caller.join();
  expect(good == 200, "concurrent callers disturbed each other");
}

void check_exception() {
  bool caught = false;
  try {
    muspace::parallel_for(100, 4, [](std::int64_t i) {
      if (i == 37) throw std::runtime_error("planted");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  expect(caught, "an exception got lost");
  expect(every_index_once(1000, 4), "the pool is unusable after an exception");
}

// A child that hangs is ended by its alarm.
void check_fork() {
  for (int round = 0; round < 3; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(every_index_once(1000, 4) ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the pool does not work in a forked child");
    expect(every_index_once(1000, 4), "the pool does not work in the parent after a fork");
  }
}

}  // namespace

int main() {
  for (const std::int64_t count : {0, 1, 2, 3, 1000}) {
    for (const std::int64_t threads : {0, 1, 2, 4, 9})
      expect(every_index_once(count, threads), "an index was not run once");
  }
  check_nested();
  check_concurrent();
  check_exception();
  check_fork();
  return failures == 0 ? 0 : 1;
}
