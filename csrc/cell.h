// The two kinds of memory words in an arena, and the token that a store needs.
//
// Cell<T>: changed only inside a transaction (Txn), that is with the arena's lock held and the
//   arena marked dirty. A store without a Txn does not compile.
// Shared<T>: changed lock-free by several processes; each use names its memory order.
//
// Both end every store with a crash point, and keep stores in program order: a killed process has
// done a prefix of its stores, and recovery relies on which prefixes can exist.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "crash_point.h"

namespace shmrl {

class Txn;

// The compiler may not move stores across this; the machine keeps a single thread's stores in order
// as seen after its death (the kernel's context switch is a full barrier).
inline void keep_program_order() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

template <class T>
class Cell {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));

 public:
  // Relaxed: the lock's acquire/release orders cells between clients; unlocked readers (probes of
  // the client mask, limits) tolerate any single past value.
  T get() const noexcept { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }

  void set(const Txn&, T value SHMRL_WHERE) noexcept {
    keep_program_order();
    __atomic_store_n(&value_, value, __ATOMIC_RELAXED);
    keep_program_order();
    SHMRL_STORED;
  }
  void add(const Txn& txn, T delta SHMRL_WHERE) noexcept {
#ifdef SHMRL_CRASH_POINTS
    set(txn, static_cast<T>(get() + delta), file, line);
#else
    set(txn, static_cast<T>(get() + delta));
#endif
  }
  // Only while the arena is not yet published (arena_file.cc).
  void init(T value SHMRL_WHERE) noexcept {
    __atomic_store_n(&value_, value, __ATOMIC_RELAXED);
    SHMRL_STORED;
  }

 private:
  T value_;
};

template <class T>
class Shared {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));

 public:
  T load(std::memory_order order) const noexcept {
    return __atomic_load_n(&value_, static_cast<int>(order));
  }
  void store(T value, std::memory_order order SHMRL_WHERE) noexcept {
    keep_program_order();
    __atomic_store_n(&value_, value, static_cast<int>(order));
    SHMRL_STORED;
  }
  T fetch_or(T bits, std::memory_order order SHMRL_WHERE) noexcept {
    T const old = __atomic_fetch_or(&value_, bits, static_cast<int>(order));
    SHMRL_STORED;
    return old;
  }
  T fetch_and(T bits, std::memory_order order SHMRL_WHERE) noexcept {
    T const old = __atomic_fetch_and(&value_, bits, static_cast<int>(order));
    SHMRL_STORED;
    return old;
  }
  T fetch_add(T delta, std::memory_order order SHMRL_WHERE) noexcept {
    T const old = __atomic_fetch_add(&value_, delta, static_cast<int>(order));
    SHMRL_STORED;
    return old;
  }
  T exchange(T value, std::memory_order order SHMRL_WHERE) noexcept {
    T const old = __atomic_exchange_n(&value_, value, static_cast<int>(order));
    SHMRL_STORED;
    return old;
  }
  // On failure `expected` becomes what was there (loaded relaxed).
  bool compare_exchange(T& expected, T desired, std::memory_order order SHMRL_WHERE) noexcept {
    bool const done = __atomic_compare_exchange_n(&value_, &expected, desired, false,
                                                  static_cast<int>(order), __ATOMIC_RELAXED);
    if (done) SHMRL_STORED;
    return done;
  }
  T* address() noexcept { return &value_; }

 private:
  T value_;
};

// A name of up to 63 bytes, its length in front. Written only while nothing points at it.
struct Name {
  std::uint8_t length;
  char text[63];

  // `text` may be scribbled over: the length is bounded here, once, for everybody.
  std::string_view view() const noexcept {
    return {text, length <= sizeof text ? length : sizeof text};
  }
  void set(const Txn&, std::string_view value SHMRL_WHERE) noexcept {
    length = static_cast<std::uint8_t>(value.size());
    std::memcpy(text, value.data(), value.size());
    keep_program_order();
    SHMRL_STORED;
  }
};
static_assert(sizeof(Name) == 64);

}  // namespace shmrl
