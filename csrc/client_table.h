// Clients: joining, leaving, finding the dead and clearing what they held.
//
// A client is a process that holds the kernel's byte lock at its slot of the lock file; the kernel
// drops it at death, whatever the cause, so there are no heartbeats and no pids to be recycled.
// Promises:
//   * A slot is handed out again only when nothing in the arena remembers its last holder.
//   * A joining process is never taken for dead: it holds its byte before its slot is marked live.
//   * A sweep may be killed anywhere and is done again by the next one.
#pragma once

#include <cstdint>

#include "arena.h"
#include "robust_lock.h"
#include "session_table.h"
#include "store.h"

namespace shmrl {

// Joins as the next free client. The caller holds the arena's NameLock, so that there
// is one joiner at a time: it acts as slot 0 until it has its own. Sweeps the dead first when no
// slot is free. Throws Failure(clients_full).
void join_arena(Arena& arena);
// For the creator of an arena that is not published yet: takes slot 1.
void join_unpublished(Arena& arena);

// Bits of the live clients that turn out to be dead; no lock needed. True if there is any.
bool find_dead(const Arena& arena, ClientMask& dead) noexcept;
// Under the lock: looks again (a slot may have changed hands) and clears what the dead held.
void sweep_dead(Arena& arena, const Txn& txn, SweepReport& report);
// Under the lock: clears what this client holds and its slot. The byte lock is the caller's to
// drop.
void leave_arena(Arena& arena, const Txn& txn);
// Under the lock, when the last handle closes under live views: holds and bound owners only.
void leave_partly(Arena& arena, const Txn& txn);

}  // namespace shmrl
