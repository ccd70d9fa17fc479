// What this process has open, and what a fork child must do about it.
//
// Owns the list of ProcessArenas and the descriptors of name locks. Its mutex guards every opening
// and closing of an arena, and every look at another's lock file: closing a second descriptor of a
// lock file would drop this process's locks (POSIX). Waiting for others under the mutex is allowed
// only where an arena is left: the close (process_arena.cc) and the end of the last view of a
// closed one (process_refs.cc).
//
// Never destroyed: destructors of Python objects may run after ours. For csrc/ below the facade.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "arena_file.h"

namespace shmrl {

class ProcessArena;

struct Registry {
  std::mutex mutex;
  std::vector<ProcessArena*> open;                // joined or joining, by file
  std::vector<ProcessArena*> all;                 // so that leak checkers see them
  std::map<std::string, std::uint64_t> last_ids;  // path -> id of the arena last used under it
  std::vector<int> name_locks;                    // descriptors that a fork child must not keep

  // The arena that has this file, or this lock file; nullptr: none here.
  ProcessArena* find_open(FileId id) const noexcept;
};

Registry& registry();

// Grows by one in every fork child: a handle that remembers another number was inherited.
inline std::atomic<std::uint64_t> g_fork_generation{1};

}  // namespace shmrl
