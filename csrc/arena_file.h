// Arenas as files: their names, how they are published whole, found, judged debris and removed.
//
// An arena NAME of user UID in directory DIR is the file DIR/shmrl-UID-NAME with its lock file
// DIR/shmrl-UID-NAME~lock beside it. Both are built under names ending in ~new and ~newlock and
// renamed when complete, the lock file first. All changes of names, and all joins, happen under one
// kernel lock on DIR itself (flock), which dies with its holder: so there is no moment between
// "this is debris" and "it is removed" in which a successor could appear, and half-built files are
// debris by definition. The lock file must never be opened and closed by a client a second time:
// that would drop its locks (POSIX). Callers go through process_arena.cc, which knows what this
// process has open.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "arena.h"
#include "store.h"

namespace shmrl {

bool valid_arena_name(std::string_view name) noexcept;
std::string arena_path(const std::string& directory, std::string_view name);
std::string lock_path(const std::string& arena_path);

inline constexpr std::int64_t kDirectoryWaitNs = 30'000'000'000;

// The lock on a directory's arena names. Throws Failure(stuck), which names the holder, after
// `wait_ns`.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory, std::int64_t wait_ns = kDirectoryWaitNs);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_;
};

// Identity of a file, to ask the registry whether this process has it open.
struct FileId {
  std::uint64_t device = 0, inode = 0;
  friend bool operator==(const FileId&, const FileId&) = default;
};
bool file_id(const std::string& path, FileId& out) noexcept;  // false: no such file

// All below: the caller holds the DirectoryLock.

// Builds the arena, joins it and publishes it. The name must be free. Throws Failure.
void create_arena_file(Arena& arena, const std::string& name, const Options& options);
// Opens and maps; the caller joins. Throws Failure (not_found, foreign_user, corrupt, ...).
void open_arena_file(Arena& arena, const std::string& name, const std::string& directory);
void remove_arena_files(const std::string& directory, std::string_view name);

// `open_here` answers which open arena of this process has that file, or nullptr: its descriptor is
// then used to look at the locks.
using OpenHere = std::function<const Arena*(FileId)>;
// What can be said about an arena without joining it.
ArenaInfo inspect_arena(const std::string& directory, const std::string& name,
                        const OpenHere& open_here);
// Names of this user's arenas; `leftovers` gets paths of half-built and lone lock files.
std::vector<std::string> arena_names(const std::string& directory,
                                     std::vector<std::string>& leftovers);

}  // namespace shmrl
