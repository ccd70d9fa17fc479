// Crash points: every store to the arena (and every system call that changes what other processes
// see) is followed by one. In the normal build they are nothing.
//
// With -DSHMRL_CRASH_POINTS a test arms one: the process gets a signal right after the n-th store.
// The crash matrix (csrc/tests/crash_matrix.cc) visits every n of every operation with SIGKILL.
#pragma once

#ifdef SHMRL_CRASH_POINTS

#include <signal.h>

#include <cstdint>

namespace shmrl::crash {

// Counts a store made at file:line; dies or stops there if it is the armed one.
void hit(const char* file, int line) noexcept;
// Sends itself SIGKILL or SIGSTOP at the `n`-th hit from now on (1-based); 0 disarms. Resets the
// count.
void arm(std::uint64_t n, int signal = SIGKILL) noexcept;
// Hits since the last arm().
std::uint64_t hits() noexcept;
// Where the last hit was (for reports).
const char* last_file() noexcept;
int last_line() noexcept;

}  // namespace shmrl::crash

#define SHMRL_WHERE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SHMRL_STORED ::shmrl::crash::hit(file, line)
#define SHMRL_CRASH_POINT() ::shmrl::crash::hit(__FILE__, __LINE__)

#else

#define SHMRL_WHERE
#define SHMRL_STORED ((void)0)
#define SHMRL_CRASH_POINT() ((void)0)

#endif
