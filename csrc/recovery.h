// Repair after a death inside the arena's lock.
//
// Owns the order: first the committed journal record is applied again, then everything derived is
// computed from the truth, then whatever nothing keeps any more is ended. Promises: the state
// before or after the operation that was under way, nothing else; may be killed at any store and
// run again; touches only what it can bounds-check, and throws Failure(corrupt) where the truth
// contradicts itself. docs/crash_recovery.md goes through it kill point by kill point.
#pragma once

#include "arena.h"
#include "robust_lock.h"

namespace shmrl {

// Called by the lock (robust_lock.cc) when it finds the arena marked dirty.
void recover(Arena& arena, const Txn& txn);

}  // namespace shmrl
