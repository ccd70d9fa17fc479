// The arena's one lock, and the two ways to hold it.
//
// The lock word names the client slot that holds it. A waiter that meets a dead holder takes the
// lock over; whoever then finds the arena marked dirty repairs it before doing anything else, and a
// repair that is itself killed is simply done again. A holder never sleeps, never calls into
// another process, and never takes a second lock.
//
// Not a pthread robust mutex: those name their holder by thread id, which means nothing in another
// pid namespace, and mark the state consistent before a repair can be known to be complete.
//
// Lock order: name lock (name_lock.h) < registry mutex (registry.h) < arena lock < record lock
// (process_refs.cc). Python's GIL comes before all of them: who has it and meets a lock that is not
// free lets go of it first (Outside), and takes it back with nothing held.
#pragma once

#include <cstdint>

#include "arena.h"

namespace shmrl {

// futex(2) on a word that several processes map. `timeout_ns` < 0: for ever.
enum class FutexResult { woken_or_changed, timed_out, interrupted };
FutexResult futex_wait(const std::uint32_t* word, std::uint32_t expected,
                       std::int64_t timeout_ns) noexcept;
void futex_wake(const std::uint32_t* word, int count) noexcept;
std::int64_t monotonic_ns() noexcept;

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// While it lives this thread may wait: what its caller holds for it (Python's GIL) is let go of.
// Made and destroyed with no lock of the core held.
class Outside {
 public:
  Outside() noexcept;
  ~Outside();
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  void* state_;
};

// Whether the process behind a slot lives: it holds the byte lock of its slot. No lock needed.
bool client_alive(const Arena& arena, std::uint32_t slot) noexcept;

// Lock held, arena sound, nothing may be changed.
class ReadLock {
 public:
  // Throws Failure: stuck when the holder lives but does not let go within lock_limit_ns, corrupt
  // when a repair finds damage.
  explicit ReadLock(Arena& arena);
  ~ReadLock();
  ReadLock(const ReadLock&) = delete;
  ReadLock& operator=(const ReadLock&) = delete;

 private:
  Arena& arena_;
};

// Lock held, arena marked dirty: the token that every Cell store demands. Leaving it by an
// exception leaves the mark, and the next holder repairs.
class Txn {
 public:
  explicit Txn(Arena& arena);
  ~Txn();
  Txn(const Txn&) = delete;
  Txn& operator=(const Txn&) = delete;

  // Bytes or a place came back: when the lock is let go, those in the queue for space that may take
  // some are woken.
  void wake_queue() const noexcept { wake_queue_ = true; }

 private:
  friend class ReadLock;
  struct Repair {};
  Txn(Arena& arena, Repair) noexcept;  // lock is held already; used to repair
  Arena& arena_;
  int exceptions_;
  bool owns_lock_ = true;
  mutable bool wake_queue_ = false;
};

}  // namespace shmrl
