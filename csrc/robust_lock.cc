#include "robust_lock.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "block_allocator.h"
#include "recovery.h"

namespace shmrl {
namespace {

constexpr int kSpins = 200;                        // a critical section is 0.1 to 2 µs
constexpr std::int64_t kProbeEveryNs = 2'000'000;  // how long a dead holder can go unnoticed

std::uint32_t word_of(std::uint32_t slot) noexcept { return slot + 1; }

// The holder named in `word` is dead, or no client at all.
bool holder_gone(const Arena& arena, std::uint32_t word) noexcept {
  std::uint32_t const holder = (word & ~kLockWaiters) - 1;
  if (holder >= kSlots) return true;
  // Slot 0 belongs to one joiner at a time (client_table.cc): if we are it and do not hold the
  // lock, the word is that of a joiner that died.
  if (holder == 0 && arena.slot() == 0) return true;
  return !client_alive(arena, holder);
}

WaitHooks g_wait_hooks;

// Waits with nothing held until the lock may be had: it is free, or its holder is gone.
void wait_for_lock(Arena& arena, std::int64_t deadline_ns) {
  Outside const outside;
  Shared<std::uint32_t>& lock = arena.header().lock;
  for (;;) {
    std::uint32_t word = lock.load(std::memory_order_relaxed);
    if (word == 0 || holder_gone(arena, word)) return;
    if (monotonic_ns() >= deadline_ns)
      throw Failure(Status::stuck,
                    "the lock of arena " + arena.name + " is held by client slot " +
                        std::to_string((word & ~kLockWaiters) - 1) + " (pid " +
                        std::to_string(arena.client((word & ~kLockWaiters) - 1).pid.get()) +
                        "), which lives but does not run: is it stopped (SIGSTOP, debugger)?");
    if ((word & kLockWaiters) == 0) {
      if (!lock.compare_exchange(word, word | kLockWaiters, std::memory_order_relaxed)) continue;
      word |= kLockWaiters;
    }
    futex_wait(lock.address(), word, kProbeEveryNs);
  }
}

void acquire_slow(Arena& arena) {
  Shared<std::uint32_t>& lock = arena.header().lock;
  std::uint32_t const mine = word_of(arena.slot());
  for (int i = 0; i < kSpins; ++i) {
    std::uint32_t word = lock.load(std::memory_order_relaxed);
    // Acquire: pairs with the release in release_lock().
    if (word == 0 && lock.compare_exchange(word, mine, std::memory_order_acquire)) return;
    cpu_relax();
  }
  std::int64_t const deadline = monotonic_ns() + arena.lock_limit_ns;
  for (;;) {
    wait_for_lock(arena, deadline);
    std::uint32_t word = lock.load(std::memory_order_relaxed);
    if (word != 0 && !holder_gone(arena, word)) continue;  // somebody was faster
    // Others may sleep: keep the mark, so that our release wakes one of them. Acquire: as above, or
    // after the kernel dropped a dead holder's byte lock, which followed its last store.
    if (lock.compare_exchange(word, mine | kLockWaiters, std::memory_order_acquire)) return;
  }
}

void acquire_lock(Arena& arena) {
  std::uint32_t expected = 0;
  // Acquire: pairs with the release in release_lock().
  if (!arena.header().lock.compare_exchange(expected, word_of(arena.slot()),
                                            std::memory_order_acquire)) [[unlikely]]
    acquire_slow(arena);
}

void release_lock(Arena& arena) noexcept {
  // Release: pairs with the acquire of the next holder.
  std::uint32_t const word = arena.header().lock.exchange(0, std::memory_order_release);
  if ((word & kLockWaiters) != 0) [[unlikely]]
    futex_wake(arena.header().lock.address(), 1);
}

// Wakes those in the queue for space that the rule of store_reservation.cc lets take some: the
// first, and whoever may pass all ahead of it. The lock is held; the futex calls are made here
// because they are rare and cheap compared with the waits that they end.
void wake_queue(Arena& arena) noexcept {
  std::array<std::pair<std::uint64_t, WaiterEntry*>, kWaitersMax> queue;
  std::size_t count = 0;
  for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
    WaiterEntry& w = arena.waiter(i);
    if (w.ticket.get() != 0 && w.wake.load(std::memory_order_relaxed) != wake::kGone)
      queue[count++] = {w.ticket.get(), &w};
  }
  std::sort(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(count));
  std::uint64_t room = UINT64_MAX;  // what may still pass those that came before
  for (std::size_t i = 0; i < count; ++i) {
    WaiterEntry& w = *queue[i].second;
    std::uint32_t asleep = wake::kAsleep;
    // Release: pairs with the acquire load in QueuePlace::sleep. Not a store: the waiter may leave
    // at this moment, without the lock.
    if (block_bytes(w.size.get()) <= room &&
        w.wake.compare_exchange(asleep, wake::kLook, std::memory_order_release))
      futex_wake(w.wake.address(), 1);
    room = std::min(room, w.size.get() - std::min(w.size.get(), w.passed.get()));
  }
}

}  // namespace

void set_wait_hooks(WaitHooks hooks) noexcept { g_wait_hooks = hooks; }

Outside::Outside() noexcept
    : state_(g_wait_hooks.leave != nullptr ? g_wait_hooks.leave() : nullptr) {}

Outside::~Outside() {
  if (state_ != nullptr) g_wait_hooks.enter(state_);
}

FutexResult futex_wait(const std::uint32_t* word, std::uint32_t expected,
                       std::int64_t timeout_ns) noexcept {
  timespec timeout{};
  timespec* given = nullptr;
  if (timeout_ns >= 0) {
    timeout.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000);
    timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000);
    given = &timeout;
  }
  // Not FUTEX_PRIVATE: the word is shared between processes.
  long const result = ::syscall(SYS_futex, word, FUTEX_WAIT, expected, given, nullptr, 0);
  if (result == 0 || errno == EAGAIN) return FutexResult::woken_or_changed;
  return errno == EINTR ? FutexResult::interrupted : FutexResult::timed_out;
}

void futex_wake(const std::uint32_t* word, int count) noexcept {
  ::syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

bool client_alive(const Arena& arena, std::uint32_t slot) noexcept {
  if (slot == arena.slot()) return true;  // F_GETLK does not report one's own locks
  struct flock probe{};
  probe.l_type = F_WRLCK;
  probe.l_whence = SEEK_SET;
  probe.l_start = static_cast<off_t>(slot);
  probe.l_len = 1;
  if (::fcntl(arena.lock_fd, F_GETLK, &probe) != 0) return true;  // never repair on a doubt
  return probe.l_type != F_UNLCK;
}

ReadLock::ReadLock(Arena& arena) : arena_(arena) {
  acquire_lock(arena);
  try {
    if (arena.header().dirty.load(std::memory_order_relaxed) != 0) {
      Txn repair(arena, Txn::Repair{});
      recover(arena, repair);
    }
  } catch (...) {
    release_lock(arena);
    throw;
  }
}

ReadLock::~ReadLock() { release_lock(arena_); }

Txn::Txn(Arena& arena) : arena_(arena), exceptions_(std::uncaught_exceptions()) {
  acquire_lock(arena);
  // Relaxed: only lock holders touch it, and the lock orders them.
  if (arena.header().dirty.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    try {
      recover(arena, *this);
    } catch (...) {
      release_lock(arena);
      throw;
    }
  }
  arena.header().dirty.store(1, std::memory_order_relaxed);
  keep_program_order();
}

Txn::Txn(Arena& arena, Repair) noexcept
    : arena_(arena), exceptions_(std::uncaught_exceptions()), owns_lock_(false) {}

Txn::~Txn() {
  keep_program_order();
  if (std::uncaught_exceptions() == exceptions_)
    arena_.header().dirty.store(0, std::memory_order_relaxed);
  if (wake_queue_ && arena_.header().waiters.get() != 0) shmrl::wake_queue(arena_);
  if (owns_lock_) release_lock(arena_);
}

}  // namespace shmrl
