#include "crash_point.h"

#ifdef SHMRL_CRASH_POINTS

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace shmrl::crash {
namespace {
// Process-private: relaxed, one thread drives a crash test.
std::atomic<std::uint64_t> g_hits{0};
std::atomic<std::uint64_t> g_armed{0};
std::atomic<int> g_signal{SIGKILL};
std::atomic<const char*> g_file{""};
std::atomic<int> g_line{0};
}  // namespace

void hit(const char* file, int line) noexcept {
  g_file.store(file, std::memory_order_relaxed);
  g_line.store(line, std::memory_order_relaxed);
  std::uint64_t const n = g_hits.fetch_add(1, std::memory_order_relaxed) + 1;
  // A signal to oneself is delivered before kill() returns to user space.
  if (n == g_armed.load(std::memory_order_relaxed))
    ::kill(::getpid(), g_signal.load(std::memory_order_relaxed));
}

void arm(std::uint64_t n, int signal) noexcept {
  g_signal.store(signal, std::memory_order_relaxed);
  g_armed.store(n, std::memory_order_relaxed);
  g_hits.store(0, std::memory_order_relaxed);
}

std::uint64_t hits() noexcept { return g_hits.load(std::memory_order_relaxed); }
const char* last_file() noexcept { return g_file.load(std::memory_order_relaxed); }
int last_line() noexcept { return g_line.load(std::memory_order_relaxed); }

}  // namespace shmrl::crash

#endif
