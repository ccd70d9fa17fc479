// The audit behind Store::check(): recomputes everything derived from the truth and compares.
//
// Promises: reads only, under the lock; bounded in time whatever the bytes say; never crashes.
// Cost: about 30 ms for 100,000 objects.
#pragma once

#include <string>
#include <vector>

#include "arena.h"

namespace shmrl {

// Lock held (ReadLock). Appends problems. `transient`: objects that nothing keeps but that have not
// ended; legitimate for the microseconds in which their last holder is on its way to the lock, so
// the caller looks again before it reports them: (index, generation).
struct Unsettled {
  std::uint32_t index;
  std::uint64_t generation;
  friend bool operator==(const Unsettled&, const Unsettled&) = default;
};
void audit_arena(const Arena& arena, std::vector<std::string>& problems,
                 std::vector<Unsettled>& transient);

}  // namespace shmrl
