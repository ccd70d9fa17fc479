// Reserving the bytes of an object: the queue for space, growth of the arena, drafts.
#include "client_table.h"
#include "object_table.h"
#include "session_table.h"
#include "store_call.h"

namespace shmrl {
namespace {

// How often a reservation that waits for space looks for deaths.
constexpr std::int64_t kSpaceProbeNs = 50'000'000;

// One reservation's place in the queue for space. Tickets are served in order, but a reservation
// that fits may pass larger ones that wait: each until as many bytes have passed it as it asks for.
// So one that waits for half the arena does not stop the small ones, nor they it for ever.
class QueuePlace {
 public:
  explicit QueuePlace(Arena& arena) : arena_(arena) {}

  bool taken() const { return index_ != kNil; }
  bool may_take(std::uint64_t bytes) const {
    bool allowed = true;
    for_each_ahead(
        [&](const WaiterEntry& w) { allowed = allowed && w.passed.get() + bytes <= w.size.get(); });
    return allowed;
  }
  void pass(const Txn& txn, std::uint64_t bytes) {
    for_each_ahead([&](WaiterEntry& w) { w.passed.add(txn, bytes); });
  }
  bool take(const Txn& txn, std::uint64_t size) {
    Header& h = arena_.header();
    for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
      WaiterEntry& w = arena_.waiter(i);
      if (w.ticket.get() != 0) {
        if (w.wake.load(std::memory_order_relaxed) != wake::kGone) continue;
        remove(txn, w);
      }
      w.size.set(txn, size);
      w.passed.set(txn, 0);
      w.slot.set(txn, arena_.slot());
      w.wake.store(wake::kAsleep, std::memory_order_relaxed);
      std::uint64_t const ticket = h.next_ticket.get();
      h.next_ticket.set(txn, ticket + 1);
      w.ticket.set(txn, ticket);  // commits
      h.waiters.add(txn, 1);
      h.full_waits.add(txn, 1);
      index_ = i;
      return true;
    }
    return false;
  }
  void give_up(const Txn& txn) {
    if (!taken()) return;
    remove(txn, arena_.waiter(index_));
    index_ = kNil;
    txn.wake_queue();  // those that were behind look again
  }
  // Without the lock, when it cannot be had: the next that needs an entry clears this one away.
  void abandon() noexcept {
    if (!taken()) return;
    // Relaxed: nothing else is published; who reads it too early looks again at its next probe.
    arena_.waiter(index_).wake.store(wake::kGone, std::memory_order_relaxed);
    index_ = kNil;
  }
  // Before letting the lock go to sleep: a wake-up from now on is not missed.
  void arm() { arena_.waiter(index_).wake.store(wake::kAsleep, std::memory_order_relaxed); }
  FutexResult sleep(std::int64_t timeout_ns) {
    // Acquire: pairs with the release in wake_queue().
    if (arena_.waiter(index_).wake.load(std::memory_order_acquire) != wake::kAsleep)
      return FutexResult::woken_or_changed;
    return futex_wait(arena_.waiter(index_).wake.address(), wake::kAsleep, timeout_ns);
  }

 private:
  void remove(const Txn& txn, WaiterEntry& w) {
    w.ticket.set(txn, 0);
    arena_.header().waiters.add(txn, static_cast<std::uint64_t>(-1));
  }
  template <class Visit>
  void for_each_ahead(Visit visit) const {
    if (arena_.header().waiters.get() == 0) return;
    std::uint64_t const mine = taken() ? arena_.waiter(index_).ticket.get() : UINT64_MAX;
    for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
      WaiterEntry& w = arena_.waiter(i);
      if (w.ticket.get() != 0 && w.ticket.get() < mine &&
          w.wake.load(std::memory_order_relaxed) != wake::kGone)
        visit(w);
    }
  }

  Arena& arena_;
  std::uint32_t index_ = kNil;
};

enum class Attempt { done, grow, wait, failed };

class Reservation {
 public:
  Reservation(ProcessArena& process, std::uint64_t size, const Wait& wait)
      : process_(process), arena_(process.arena), size_(size), deadline_(wait), place_(arena_) {}

  Status run(Created& out) {
    // Whatever happens, the place in the queue is given up: a left place would block all behind it.
    try {
      Status const status = loop(out);
      leave_queue();
      return status;
    } catch (...) {
      place_.abandon();  // it may be the lock that is not to be had: no second wait for it
      throw;
    }
  }

 private:
  Status loop(Created& out) {
    for (;;) {
      Growth growth;
      switch (attempt(out, growth)) {
        case Attempt::done:
          return Status::ok;
        case Attempt::failed:
          return status_;
        case Attempt::grow:
          grow(growth);
          continue;
        case Attempt::wait:
          break;
      }
      FutexResult const result = place_.sleep(deadline_.slice(kSpaceProbeNs));
      if (deadline_.interrupted(process_))
        return fail(Status::interrupted, "interrupted by a signal");
      if (!process_.usable.load(std::memory_order_seq_cst)) return closed_or_forked(Status::closed);
      if (result == FutexResult::timed_out) sweep_now(process_);
    }
  }

  Attempt attempt(Created& out, Growth& growth) {
    Txn txn(arena_);
    for (bool swept = false;; swept = true) {
      CreateResult result = CreateResult::full;
      if (place_.may_take(block_bytes(size_)))
        result = create_object(arena_, txn, size_, out, growth,
                               [&](std::uint32_t i, std::uint64_t g) { process_.claim(i, g); });
      if (result == CreateResult::ok) {
        place_.pass(txn, block_bytes(size_));
        place_.give_up(txn);
        return Attempt::done;
      }
      if (result == CreateResult::grow) return Attempt::grow;
      if (!swept) {
        SweepReport report;
        sweep_dead(arena_, txn, report);
        if (report.clients > 0) continue;
      }
      return queue(txn, result);
    }
  }

  Attempt queue(const Txn& txn, CreateResult why) {
    if (deadline_.over()) {
      status_ =
          why == CreateResult::objects_full
              ? fail(Status::objects_full, "all " + std::to_string(arena_.objects_limit()) +
                                               " object entries are in use; free some, or create "
                                               "the arena with more max_objects")
              : fail(Status::full, "no room for an object of " + std::to_string(size_) + " bytes");
      return Attempt::failed;
    }
    if (!place_.taken() && !place_.take(txn, size_)) {
      status_ = fail(Status::full,
                     std::to_string(kWaitersMax) + " reservations wait for room: no more may");
      return Attempt::failed;
    }
    place_.arm();
    return Attempt::wait;
  }

  void grow(const Growth& growth) {
    if (growth.to <= growth.from) throw_corrupt("the end of the payload", growth.from);
    arena_.reserve_payload(growth.from, growth.to);
    Txn txn(arena_);
    commit_growth(arena_, txn, growth);
  }

  void leave_queue() {
    if (!place_.taken()) return;
    Txn txn(arena_);
    place_.give_up(txn);
  }

  ProcessArena& process_;
  Arena& arena_;
  std::uint64_t size_;
  Deadline deadline_;
  QueuePlace place_;
  Status status_ = Status::ok;
};

}  // namespace

Status Store::reserve(std::uint64_t size, const Wait& wait, Draft& out, std::uint64_t head) {
  return call([&](ProcessArena& process, Arena& arena) {
    // The slack beyond the capacity is for heads.
    if (size > arena.payload_bytes() || size - std::min(head, size) > arena.capacity())
      return fail(Status::too_large, "an object of " + std::to_string(size) +
                                         " bytes cannot fit into an arena of " +
                                         std::to_string(arena.capacity()));
    sweep_sometimes(process);
    Created created;
    if (Status s = Reservation(process, size, wait).run(created); s != Status::ok) return s;
    ClientEntry& me = arena.client(arena.slot());
    me.pinned.fetch_add(1, std::memory_order_relaxed);  // figures
    me.drafts.fetch_add(1, std::memory_order_relaxed);
    out.reset();
    out.arena_ = &process;
    out.data_ = arena.payload() + created.offset;
    out.size_ = size;
    out.session_ = kNil;
    out.epoch_ = process.epoch.load(std::memory_order_relaxed);
    out.ref_ = make_ref(arena, created.index, created.generation);
    return Status::ok;
  });
}

Status Store::reserve(std::uint64_t size, std::string_view session, const Wait& wait, Draft& out,
                      std::uint64_t head) {
  std::uint32_t slot = kNil;
  std::uint32_t generation = 0;
  Status const found = call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(session)) return bad_name_detail("a session id", session);
    sweep_sometimes(process);
    ReadLock const lock(arena);
    slot = find_session(arena, session);
    if (slot == kNil) return gone(session);
    generation = generation_in(arena.session(slot).state.get());
    return Status::ok;
  });
  if (found != Status::ok) return found;
  if (Status s = reserve(size, wait, out, head); s != Status::ok) return s;
  out.session_ = slot;
  out.session_generation_ = generation;
  return Status::ok;
}

}  // namespace shmrl
