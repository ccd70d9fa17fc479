// Arenas as files: their names, how they are published whole, found, judged debris and removed.
//
// An arena NAME of user UID in directory DIR is the file DIR/shmrl-UID-NAME with its lock file
// DIR/shmrl-UID-NAME~lock beside it. Both are built under names ending in ~new and ~newlock and
// renamed when complete, the lock file first; ~name is the lock on the name (name_lock.h). The lock
// file must never be opened and closed by a client a second time: that would drop its locks
// (POSIX). Callers go through process_names.cc, which knows what this process has open.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "arena.h"
#include "store.h"

namespace shmrl {

bool valid_arena_name(std::string_view name) noexcept;
std::string arena_path(const std::string& directory, std::string_view name);
std::string lock_path(const std::string& arena_path);

inline constexpr const char* kNameSuffix = "~name";

// Identity of a file, to ask the registry whether this process has it open.
struct FileId {
  std::uint64_t device = 0, inode = 0;
  friend bool operator==(const FileId&, const FileId&) = default;
};
bool file_id(const std::string& path, FileId& out) noexcept;  // false: no such file

// The caller holds the NameLock.

// Builds the arena, joins it and publishes it. The name must be free. Throws Failure.
void create_arena_file(Arena& arena, const std::string& name, const Options& options);
// Why there is nothing to open or remove: not_found, or foreign_user where another user has an
// arena of that name.
Failure no_arena(const std::string& directory, const std::string& name);
// Opens and maps; the caller joins. Throws Failure (not_found, foreign_user, corrupt, ...).
void open_arena_file(Arena& arena, const std::string& name, const std::string& directory);
void remove_arena_files(const std::string& directory, std::string_view name);
// Files that a create or an unlink of that name left when it was killed, its NameLock's apart.
std::vector<std::string> leftovers_of(const std::string& directory, const std::string& name);

// No lock is needed to look.

// `open_here` answers which open arena of this process has that file, or nullptr: its descriptor is
// then used to look at the locks.
using OpenHere = std::function<const Arena*(FileId)>;
// What can be said about an arena without joining it.
ArenaInfo inspect_arena(const std::string& directory, const std::string& name,
                        const OpenHere& open_here);
// Files of this user's arenas in a directory, by name.
struct NamesFound {
  std::vector<std::string> arenas;   // sorted
  std::vector<std::string> partial;  // sorted: half-built, or lock files alone: left by a death, or
                                     // somebody is at work on them
};
NamesFound find_names(const std::string& directory);

}  // namespace shmrl
