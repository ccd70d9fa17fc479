#include "process_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

#include "client_table.h"
#include "registry.h"
#include "robust_lock.h"

namespace shmrl {
namespace {

// The arena whose Wait::interrupted this thread is inside of, and so inside a Call on it.
thread_local const ProcessArena* t_in_callback = nullptr;

}  // namespace

// -- calls ---------------------------------------------------------------------

Call::Call(ProcessArena& process, Need need) noexcept : process_(process) {
  if (process.forked()) {
    status_ = Status::forked;
    return;
  }
  // seq_cst, here and in close_handle() and leave(): either this call sees the flag cleared, or the
  // closer sees this call.
  process.active.fetch_add(1, std::memory_order_seq_cst);
  bool const allowed = need == Need::usable ? process.usable.load(std::memory_order_seq_cst)
                                            : process.joined.load(std::memory_order_seq_cst);
  if (!allowed) {
    leave();
    status_ = Status::closed;
  }
}

Call::~Call() {
  if (status_ == Status::ok) leave();
}

void Call::leave() noexcept {
  bool const last = process_.active.fetch_sub(1, std::memory_order_seq_cst) == 1;
  if (!last || process_.usable.load(std::memory_order_seq_cst)) return;
  process_.active.notify_all();
  if (process_.close_pending_.load(std::memory_order_seq_cst)) process_.close_if_pending();
}

void ProcessArena::close_if_pending() noexcept {
  std::scoped_lock const guard(registry().mutex);
  if (!close_pending_.exchange(false, std::memory_order_seq_cst) || handles_ > 0) return;
  finish_close();
}

bool ProcessArena::run_callback(const Wait& wait) const {
  if (wait.interrupted == nullptr) return false;
  const ProcessArena* const outer = std::exchange(t_in_callback, this);
  bool const result = wait.interrupted(wait.context);
  t_in_callback = outer;
  return result;
}

namespace {

void wait_until_idle(ProcessArena& process) noexcept {
  for (std::uint32_t n = process.active.load(std::memory_order_seq_cst); n != 0;
       n = process.active.load(std::memory_order_seq_cst))
    process.active.wait(n, std::memory_order_seq_cst);
}

}  // namespace

// -- opening again and closing -------------------------------------------------

// Another handle. Registry mutex held.
void ProcessArena::open_again() noexcept {
  ++handles_;
  ++stores_;
  close_pending_.store(false, std::memory_order_seq_cst);
  if (usable.load(std::memory_order_seq_cst)) return;
  // Reopened under live views: they are ordinary pins again.
  for (std::uint32_t i = 0; i < arena.objects_used(); ++i) {
    std::uint64_t word = 0;
    if (records_[i].word.load(std::memory_order_seq_cst) == 0) continue;
    LocalRecord& record = lock_record(i, word);
    if ((word & kRecordCounted) != 0) pins_left_.fetch_sub(1, std::memory_order_relaxed);
    record.word.store(word & ~kRecordCounted, std::memory_order_release);
  }
  usable.store(true, std::memory_order_seq_cst);
}

// The last handle has closed. Registry mutex held; usable is false and no call is under way.
void ProcessArena::let_go_of_holds() noexcept {
  epoch.fetch_add(1, std::memory_order_seq_cst);
  for (std::uint32_t i = 0; i < arena.objects_used(); ++i) {
    if (records_[i].word.load(std::memory_order_seq_cst) == 0) continue;  // never used here
    std::uint64_t word = 0;
    LocalRecord& record = lock_record(i, word);
    record.holds = 0;
    if (record.pins > 0) {
      pins_left_.fetch_add(1, std::memory_order_relaxed);
      word |= kRecordCounted;
    }
    record.word.store(word, std::memory_order_release);
  }
}

void ProcessArena::close_handle() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  if (--handles_ > 0 || !joined.load(std::memory_order_seq_cst)) return;
  usable.store(false, std::memory_order_seq_cst);
  if (t_in_callback == this) {
    // A signal handler that runs inside a wait of this very thread closes the store: waiting for
    // that call to end would wait for ever. The call itself finishes the close when it returns.
    close_pending_.store(true, std::memory_order_seq_cst);
    return;
  }
  finish_close();
}

// Registry mutex held, `usable` is false.
void ProcessArena::finish_close() noexcept {
  wait_until_idle(*this);
  let_go_of_holds();
  if (pins_left_.load(std::memory_order_relaxed) == 0) {
    leave();
    return;
  }
  try {
    Txn txn(arena);
    leave_partly(arena, txn);
  } catch (const Failure&) {
    // A stopped or damaging peer: what we held goes with our slot, when the last view is gone.
  }
}

// Gives up the slot. Registry mutex held.
void ProcessArena::leave() noexcept {
  joined.store(false, std::memory_order_seq_cst);
  wait_until_idle(*this);
  try {
    Txn txn(arena);
    leave_arena(arena, txn);
  } catch (const Failure&) {
    // Then we look dead below, and the next sweep does the same work.
  }
  // Drops the byte lock; nothing of ours remains on the lock file, so that this process may join
  // again.
  ::close(arena.lock_fd);
  arena.lock_fd = -1;
  std::erase(registry().open, this);
  maybe_unmap();
}

void ProcessArena::maybe_unmap() noexcept {
  if (stores_ > 0 || pins_left_.load(std::memory_order_relaxed) > 0 ||
      joined.load(std::memory_order_seq_cst))
    return;
  if (!arena.mapped()) return;
  ::madvise(records_, arena.objects_limit() * sizeof(LocalRecord), MADV_DONTNEED);
  arena.unmap();
}

void ProcessArena::destroy_store() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  --stores_;
  maybe_unmap();
}

void ProcessArena::abandon() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  if (!joined.load(std::memory_order_seq_cst)) return;
  usable.store(false, std::memory_order_seq_cst);
  joined.store(false, std::memory_order_seq_cst);
  wait_until_idle(*this);
  let_go_of_holds();
  ::close(arena.lock_fd);
  arena.lock_fd = -1;
  std::erase(registry().open, this);
}

}  // namespace shmrl
