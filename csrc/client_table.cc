#include "client_table.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <bit>

#include "object_table.h"

namespace shmrl {
namespace {

std::int64_t unix_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

bool set_byte_lock(const Arena& arena, std::uint32_t slot, short type) noexcept {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot);
  lock.l_len = 1;
  int result = 0;
  do {
    result = ::fcntl(arena.lock_fd, F_SETLK, &lock);
  } while (result != 0 && errno == EINTR);
  SHMRL_CRASH_POINT();
  return result == 0;
}

void enter_slot(Arena& arena, const Txn& txn, std::uint32_t slot) {
  ClientEntry& client = arena.client(slot);
  client.pid.set(txn, ::getpid());
  client.joined_unix_ns.set(txn, unix_ns());
  // Relaxed: figures.
  client.puts.store(0, std::memory_order_relaxed);
  client.gets.store(0, std::memory_order_relaxed);
  client.pinned.store(0, std::memory_order_relaxed);
  client.drafts.store(0, std::memory_order_relaxed);
  Cell<std::uint64_t>& word = arena.header().live[slot / 64];
  word.set(txn, word.get() | 1ull << (slot % 64));  // commits
}

std::uint32_t take_free_slot(Arena& arena, const Txn& txn) {
  for (std::uint32_t slot = 1; slot < kSlots; ++slot) {
    if ((arena.header().live[slot / 64].get() >> (slot % 64) & 1) != 0) continue;
    // Fails while a leaver has cleared its slot but not yet dropped its byte: take another.
    if (!set_byte_lock(arena, slot, F_WRLCK)) continue;
    enter_slot(arena, txn, slot);
    return slot;
  }
  return 0;
}

void clear_columns(Arena& arena, const Txn& txn, const ClientMask& gone, bool pins_too,
                   SweepReport& report) {
  auto const used = static_cast<std::uint32_t>(arena.objects_used());
  for (std::uint32_t i = 0; i < used; ++i) {
    ObjectEntry& e = arena.object(i);
    if (state_of(e.state.load(std::memory_order_relaxed)) == object_state::kFree) {
      // A stale setter may have died between setting its bit and taking it back.
      for (std::uint32_t k = 0; k < kMaskWords; ++k) {
        if ((e.holds[k].load(std::memory_order_relaxed) & gone[k]) != 0)
          e.holds[k].fetch_and(~gone[k], std::memory_order_seq_cst);
        if (pins_too && (e.pins[k].load(std::memory_order_relaxed) & gone[k]) != 0)
          e.pins[k].fetch_and(~gone[k], std::memory_order_seq_cst);
      }
      continue;
    }
    for (std::uint32_t k = 0; k < kMaskWords; ++k) {
      // seq_cst: then settle looks at the state, as every clearer of a bit does (object_table.h).
      if ((e.holds[k].load(std::memory_order_relaxed) & gone[k]) != 0)
        e.holds[k].fetch_and(~gone[k], std::memory_order_seq_cst);
      if (pins_too && (e.pins[k].load(std::memory_order_relaxed) & gone[k]) != 0)
        e.pins[k].fetch_and(~gone[k], std::memory_order_seq_cst);
    }
    std::uint64_t const bytes = block_bytes(size_of(e));
    if (!settle_object(arena, txn, i)) continue;
    ++report.objects;
    if (state_of(e.state.load(std::memory_order_relaxed)) == object_state::kFree)
      report.bytes += bytes;
  }
}

void clear_waiters(Arena& arena, const Txn& txn, const ClientMask& gone) {
  Header& h = arena.header();
  for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
    WaiterEntry& w = arena.waiter(i);
    std::uint32_t const slot = w.slot.get() % kSlots;
    if (w.ticket.get() == 0 || (gone[slot / 64] >> (slot % 64) & 1) == 0) continue;
    w.ticket.set(txn, 0);
    h.waiters.add(txn, static_cast<std::uint64_t>(-1));
    txn.wake_queue();  // those that were behind look again
  }
}

void clear_clients(Arena& arena, const Txn& txn, const ClientMask& gone, SweepReport& report) {
  Header& h = arena.header();
  FallReport const fall = owners_lose_clients(arena, txn, gone);
  report.sessions_inherited += fall.inherited;
  report.sessions_released += fall.released;
  clear_columns(arena, txn, gone, true, report);
  clear_waiters(arena, txn, gone);
  for (std::uint32_t slot = 1; slot < kSlots; ++slot) {
    if ((gone[slot / 64] >> (slot % 64) & 1) == 0) continue;
    ClientEntry& client = arena.client(slot);
    h.puts_past.add(txn, client.puts.load(std::memory_order_relaxed));
    h.gets_past.add(txn, client.gets.load(std::memory_order_relaxed));
    client.puts.store(0, std::memory_order_relaxed);
    client.gets.store(0, std::memory_order_relaxed);
    client.pinned.store(0, std::memory_order_relaxed);
    client.drafts.store(0, std::memory_order_relaxed);
  }
  // Last: until here a death of the sweeper leaves them dead and unswept, and all is done again.
  for (std::uint32_t k = 0; k < kMaskWords; ++k)
    if (gone[k] != 0) h.live[k].set(txn, h.live[k].get() & ~gone[k]);
}

}  // namespace

void join_arena(Arena& arena) {
  arena.set_slot(0);
  if (!set_byte_lock(arena, 0, F_WRLCK))
    throw Failure(Status::stuck, "another process is joining arena " + arena.name +
                                     " without the lock on its name");
  try {
    Txn txn(arena);
    std::uint32_t slot = take_free_slot(arena, txn);
    if (slot == 0) {
      SweepReport report;
      sweep_dead(arena, txn, report);
      slot = take_free_slot(arena, txn);
    }
    if (slot == 0)
      throw Failure(Status::clients_full,
                    "all " + std::to_string(kClientsMax) + " client slots of arena " + arena.name +
                        " are taken by live processes; close one of them first");
    arena.set_slot(slot);
  } catch (...) {
    set_byte_lock(arena, 0, F_UNLCK);
    throw;
  }
  set_byte_lock(arena, 0, F_UNLCK);
}

void join_unpublished(Arena& arena) {
  arena.set_slot(1);
  if (!set_byte_lock(arena, 1, F_WRLCK)) throw_system("fcntl", arena.path);
  Txn txn(arena);
  enter_slot(arena, txn, 1);
}

bool find_dead(const Arena& arena, ClientMask& dead) noexcept {
  bool any = false;
  for (std::uint32_t k = 0; k < kMaskWords; ++k) {
    dead[k] = 0;
    for (std::uint64_t left = arena.header().live[k].get(); left != 0; left &= left - 1) {
      auto const slot = k * 64 + static_cast<std::uint32_t>(std::countr_zero(left));
      if (slot == 0 || client_alive(arena, slot)) continue;
      dead[k] |= 1ull << (slot % 64);
      any = true;
    }
  }
  return any;
}

void sweep_dead(Arena& arena, const Txn& txn, SweepReport& report) {
  ClientMask dead;
  if (!find_dead(arena, dead)) return;
  std::uint32_t clients = 0;
  for (std::uint64_t word : dead) clients += static_cast<std::uint32_t>(std::popcount(word));
  std::uint64_t const before = report.objects;
  clear_clients(arena, txn, dead, report);
  report.clients += clients;
  arena.header().sweeps.add(txn, clients);
  arena.header().reclaimed.add(txn, report.objects - before);
}

void leave_arena(Arena& arena, const Txn& txn) {
  ClientMask gone = {};
  gone[arena.slot() / 64] = 1ull << (arena.slot() % 64);
  SweepReport report;
  clear_clients(arena, txn, gone, report);
}

void leave_partly(Arena& arena, const Txn& txn) {
  ClientMask gone = {};
  gone[arena.slot() / 64] = 1ull << (arena.slot() % 64);
  SweepReport report;
  owners_lose_clients(arena, txn, gone);
  clear_columns(arena, txn, gone, false, report);
  clear_waiters(arena, txn, gone);
}

}  // namespace shmrl
