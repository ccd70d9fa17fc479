// Arenas by name, as this process sees them: create, attach, unlink, list, and the removal of
// debris.
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "client_table.h"
#include "name_lock.h"
#include "process_arena.h"
#include "registry.h"

namespace shmrl {
namespace {

constexpr std::int64_t kDebrisWaitNs = 50'000'000;  // then somebody is at work on that name
constexpr const char* kLeftover = "left by a create or an unlink that was killed";

// Registry mutex held.
ArenaInfo inspect(const std::string& directory, const std::string& name) {
  return inspect_arena(directory, name, [](FileId id) -> const Arena* {
    ProcessArena* const process = registry().find_open(id);
    return process != nullptr ? &process->arena : nullptr;
  });
}

// Makes way for a new arena: an old one without live clients goes. Registry mutex held.
void remove_dead(const std::string& directory, const std::string& name) {
  FileId id;
  if (!file_id(arena_path(directory, name), id)) return;
  ArenaInfo const there = inspect(directory, name);
  if (there.live_clients > 0 || registry().find_open(id) != nullptr)
    throw Failure(Status::exists, "arena \"" + name + "\" is in use by " +
                                      std::to_string(there.live_clients) +
                                      " process(es); attach to it, or choose another name");
  if (there.status == Status::foreign_user) throw Failure(there.status, there.detail);
  remove_arena_files(directory, name);
}

bool locked_by_anybody(const std::string& directory, const std::string& name) {
  std::scoped_lock const guard(registry().mutex);
  return name_is_locked(directory, name);
}

ArenaInfo leftover(const std::string& path) {
  ArenaInfo info;
  info.path = path;
  info.status = Status::corrupt;
  info.detail = kLeftover;
  return info;
}

}  // namespace

// Registry mutex held. Sets nothing that others see until publish().
template <class Setup>
ProcessArena* ProcessArena::prepare(Setup setup) {
  std::unique_ptr<ProcessArena> process(new ProcessArena);  // unmaps where setup fails
  process->fork_generation_ = g_fork_generation.load(std::memory_order_relaxed);
  setup(*process);
  process->map_records();
  if (!file_id(process->arena.path, process->id_)) throw_system("stat", process->arena.path);
  if (!file_id(lock_path(process->arena.path), process->lock_id_))
    throw_system("stat", lock_path(process->arena.path));
  registry().open.push_back(process.get());
  return process.release();
}

// Registry mutex held: the slot is ours.
void ProcessArena::publish() {
  Registry& r = registry();
  r.all.push_back(this);
  r.last_ids[arena.path] = arena.id();
  handles_ = stores_ = 1;
  joined.store(true, std::memory_order_seq_cst);
  usable.store(true, std::memory_order_seq_cst);
}

ProcessArena* ProcessArena::create(const std::string& name, const Options& options) {
  NameLock const lock(options.directory, name, options.lock_limit_ns);
  std::scoped_lock const guard(registry().mutex);
  remove_dead(options.directory, name);
  ProcessArena* const process = prepare([&](ProcessArena& made) {
    create_arena_file(made.arena, name, options);
    made.spin_ns = options.spin_ns;
  });
  process->publish();
  return process;
}

ProcessArena* ProcessArena::attach(const std::string& name, const AttachOptions& options) {
  NameLock const lock(options.directory, name, options.lock_limit_ns);
  std::string const path = arena_path(options.directory, name);
  ProcessArena* process = nullptr;
  {
    std::scoped_lock const guard(registry().mutex);
    FileId id;
    if (file_id(path, id)) process = registry().find_open(id);
    if (process != nullptr) {
      process->open_again();
      return process;
    }
    if (file_id(lock_path(path), id) && registry().find_open(id) != nullptr)
      throw Failure(Status::corrupt,
                    "arena \"" + name +
                        "\" was replaced by another file under the lock file of an arena "
                        "that this process has open");
    process = prepare([&](ProcessArena& made) {
      open_arena_file(made.arena, name, options.directory);
      made.arena.lock_limit_ns = options.lock_limit_ns;
      made.spin_ns = options.spin_ns;
    });
  }
  try {
    join_arena(process->arena);  // may wait for the arena's lock: without the registry's mutex
  } catch (...) {
    std::scoped_lock const guard(registry().mutex);
    std::erase(registry().open, process);
    delete process;  // nobody has seen it
    throw;
  }
  std::scoped_lock const guard(registry().mutex);
  process->publish();
  return process;
}

Status ProcessArena::unlink(const std::string& name, const std::string& directory) {
  std::string const path = arena_path(directory, name);
  FileId id;
  if (!file_id(path, id)) throw no_arena(directory, name);
  NameLock const lock(directory, name);
  std::scoped_lock const guard(registry().mutex);
  if (!file_id(path, id)) throw no_arena(directory, name);
  if (auto const known = registry().last_ids.find(path); known != registry().last_ids.end()) {
    ArenaInfo const there = inspect(directory, name);
    bool const another = there.status == Status::layout_mismatch ||
                         (there.status == Status::ok && there.arena_id != known->second);
    if (there.live_clients > 0 && another)
      throw Failure(Status::superseded,
                    "the name \"" + name +
                        "\" now belongs to a newer arena than the one this process "
                        "used; whoever made that one removes it");
  }
  // The id stays known: a second unlink from this process must not take a successor's name either.
  remove_arena_files(directory, name);
  return Status::ok;
}

// Takes no lock on names: looking changes nothing, and where a process is stopped in the middle of
// a create, people need to look all the more.
std::vector<ArenaInfo> ProcessArena::list(const std::string& directory) {
  std::scoped_lock const guard(registry().mutex);
  NamesFound const found = find_names(directory);
  std::vector<ArenaInfo> result;
  for (const std::string& name : found.arenas) {
    ArenaInfo info = inspect(directory, name);
    FileId id;
    if (file_id(info.path, id)) result.push_back(std::move(info));  // else unlinked meanwhile
  }
  for (const std::string& name : found.partial) {
    if (name_is_locked(directory, name)) continue;  // somebody is at work on it
    for (const std::string& path : leftovers_of(directory, name)) result.push_back(leftover(path));
    std::string const lock = arena_path(directory, name) + kNameSuffix;
    if (FileId id; file_id(lock, id)) result.push_back(leftover(lock));
  }
  return result;
}

std::vector<ArenaInfo> ProcessArena::remove_debris(const std::string& directory) {
  NamesFound const found = find_names(directory);
  std::vector<std::string> names = found.arenas;
  names.insert(names.end(), found.partial.begin(), found.partial.end());
  std::vector<ArenaInfo> removed;
  for (const std::string& name : names) {
    try {
      remove_debris_of(directory, name, removed);
    } catch (const Failure& failure) {
      // Somebody is at work on that name, and alive: no debris.
      if (failure.status() != Status::stuck) throw;
    }
  }
  return removed;
}

void ProcessArena::remove_debris_of(const std::string& directory, const std::string& name,
                                    std::vector<ArenaInfo>& removed) {
  std::string const path = arena_path(directory, name);
  FileId id;
  // Only for the report: the destructor of our own lock removes it.
  bool const stale_lock = file_id(path + kNameSuffix, id) && !locked_by_anybody(directory, name);
  NameLock const lock(directory, name, kDebrisWaitNs);
  std::scoped_lock const guard(registry().mutex);
  if (file_id(path, id)) {
    ArenaInfo info = inspect(directory, name);
    if (info.live_clients == 0 && info.status != Status::foreign_user) {
      remove_arena_files(directory, name);
      removed.push_back(std::move(info));
    }
  }
  for (const std::string& file : leftovers_of(directory, name))
    if (::unlink(file.c_str()) == 0) removed.push_back(leftover(file));
  if (stale_lock) removed.push_back(leftover(path + kNameSuffix));
}

}  // namespace shmrl
