// What the arena holds and who holds it; its audit and its repair.
#include <algorithm>
#include <bit>

#include "audit.h"
#include "client_table.h"
#include "object_table.h"
#include "store_call.h"

namespace shmrl {

namespace os = object_state;

namespace {

std::vector<OwnerUsage> usage_by_owner(const Arena& arena) {
  std::vector<OwnerUsage> result;
  for (std::uint32_t i = 0; i < arena.owners_used(); ++i) {
    OwnerEntry& o = arena.owner(i);
    std::uint32_t bound = 0;
    for (const auto& word : o.bound) bound += static_cast<std::uint32_t>(std::popcount(word.get()));
    if (o.used.get() == 0 || (o.sessions.get() == 0 && bound == 0)) continue;
    OwnerUsage& usage = result.emplace_back();
    usage.owner = o.name.view();
    usage.sessions = o.sessions.get();
    usage.objects = o.objects.get();
    usage.bytes = o.bytes.get();
    usage.bound_clients = bound;
    if (o.heir.get() != kNil) usage.heir = arena.owner(o.heir.get()).name.view();
  }
  return result;
}

std::vector<ClientUsage> usage_by_client(const Arena& arena) {
  std::vector<ClientUsage> result;
  for (std::uint32_t slot = 1; slot < kSlots; ++slot) {
    if ((arena.header().live[slot / 64].get() >> (slot % 64) & 1) == 0) continue;
    ClientUsage& usage = result.emplace_back();
    usage.slot = slot;
    usage.pid = arena.client(slot).pid.get();
    usage.self = slot == arena.slot();
    usage.pins = arena.client(slot).pinned.load(std::memory_order_relaxed);
  }
  return result;
}

// used, free, largest_free: the slack beyond the capacity is not shown.
void space_figures(const Arena& arena, std::uint64_t& used, std::uint64_t& free,
                   std::uint64_t& largest) {
  used = std::min(arena.header().used_bytes.get(), arena.capacity());
  free = arena.capacity() - used;
  largest = std::min(largest_free_bytes(arena), free);
}

}  // namespace

Status Store::stats(Stats& out) {
  out = Stats{};
  return call([&](ProcessArena& process, Arena& arena) {
    sweep_now(process);
    Txn const txn(arena);
    Header& h = arena.header();
    if (h.empty_slabs.get() != 0) trim_slabs(arena, txn);  // so that largest_free tells the truth
    out.capacity = arena.capacity();
    space_figures(arena, out.used, out.free, out.largest_free);
    out.committed = arena.granules_ready() * kGranule;
    out.doomed = h.objects_doomed.get();
    out.objects = h.objects_live.get() - out.doomed;
    out.sessions = h.sessions_open.get();
    out.deferred_bytes = h.doomed_bytes.get();
    out.max_objects = arena.objects_limit();
    out.max_sessions = arena.sessions_limit();
    out.max_owners = arena.owners_limit();
    out.max_attachments = arena.attachments_limit();
    out.by_owner = usage_by_owner(arena);
    out.by_client = usage_by_client(arena);
    out.clients = out.by_client.size();
    Counters& c = out.counters;
    c.puts = h.puts_past.get();
    c.gets = h.gets_past.get();
    for (const ClientUsage& usage : out.by_client) {
      const ClientEntry& client = arena.client(usage.slot);
      c.puts += client.puts.load(std::memory_order_relaxed);
      c.gets += client.gets.load(std::memory_order_relaxed);
      out.building += client.drafts.load(std::memory_order_relaxed);
      out.pinned += usage.pins;
    }
    c.frees = h.frees.get();
    c.discards = h.discards.get();
    c.reclaimed = h.reclaimed.get();
    c.sessions_opened = h.sessions_opened.get();
    c.sessions_released = h.sessions_released.get();
    c.sessions_transferred = h.sessions_transferred.get();
    c.sweeps = h.sweeps.get();
    c.recoveries = h.recoveries.get();
    c.full_waits = h.full_waits.get();
    return Status::ok;
  });
}

Status Store::full_facts(std::uint64_t requested, FullFacts& out) {
  out = FullFacts{};
  return call([&](ProcessArena&, Arena& arena) {
    Txn const txn(arena);
    if (arena.header().empty_slabs.get() != 0) trim_slabs(arena, txn);
    std::uint64_t used = 0;
    out.requested = requested;
    out.capacity = arena.capacity();
    space_figures(arena, used, out.free, out.largest_free);
    out.deferred_bytes = arena.header().doomed_bytes.get();
    out.waiters = static_cast<std::uint32_t>(arena.header().waiters.get());
    out.by_owner = usage_by_owner(arena);
    out.by_client = usage_by_client(arena);
    for (std::uint32_t i = 0; i < arena.objects_used(); ++i) {
      ObjectEntry& e = arena.object(i);
      std::uint64_t const word = e.state.load(std::memory_order_relaxed);
      if (state_of(word) == os::kFree) continue;
      std::uint64_t const bytes = block_bytes(size_of(e));
      if (state_of(word) == os::kBuilding) out.building_bytes += bytes;
      bool const by_hold = state_of(word) == os::kSealed && (word & os::kEverAttached) == 0;
      for (ClientUsage& usage : out.by_client) {
        std::uint64_t const bit = 1ull << (usage.slot % 64);
        if (by_hold && (e.holds[usage.slot / 64].load(std::memory_order_relaxed) & bit) != 0) {
          ++usage.held_objects;
          usage.held_bytes += bytes;
        }
        if ((e.pins[usage.slot / 64].load(std::memory_order_relaxed) & bit) != 0)
          usage.pinned_bytes += bytes;
      }
    }
    return Status::ok;
  });
}

Status Store::check(std::vector<std::string>& problems) {
  problems.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    sweep_now(process);
    std::vector<Unsettled> suspects;
    {
      ReadLock const lock(arena);
      audit_arena(arena, problems, suspects);
    }
    // Those whose last holder was on its way to the lock are settled by now, or soon.
    constexpr int kLooks = 20;
    for (int look = 0; look < kLooks && !suspects.empty(); ++look) {
      std::uint32_t const nobody = 0;
      futex_wait(&nobody, 0, 1'000'000);
      ReadLock const lock(arena);
      std::erase_if(suspects, [&](const Unsettled& u) {
        ObjectEntry& e = arena.object(u.index);
        return generation_of(e.state.load(std::memory_order_relaxed)) != u.generation ||
               !needs_settling(e);
      });
    }
    for (const Unsettled& u : suspects)
      problems.push_back("nothing keeps object " + std::to_string(u.index) +
                         ", yet it has not ended");
    return Status::ok;
  });
}

Status Store::sweep(SweepReport& out) {
  out = SweepReport{};
  return call([&](ProcessArena&, Arena& arena) {
    Txn const txn(arena);
    sweep_dead(arena, txn, out);
    return Status::ok;
  });
}

}  // namespace shmrl
