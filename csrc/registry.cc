#include "registry.h"

#include <pthread.h>
#include <unistd.h>

#include <new>

#include "process_arena.h"
#include "robust_lock.h"

namespace shmrl {
namespace {

// os.fork has the GIL here, and a thread that closes an arena under the mutex may wait for a call
// that wants it back: so we wait without it, and take it back with nothing held.
void prepare_fork() {
  std::mutex& mutex = registry().mutex;
  while (!mutex.try_lock()) {
    Outside const outside;
    mutex.lock();
    mutex.unlock();
  }
}
void after_fork_parent() { registry().mutex.unlock(); }

// The child has none of the parent's byte locks. It must close the inherited lock files before it
// opens any of them again, because closing one later would drop its own new locks; and a name lock
// that it kept would outlive the parent's.
void after_fork_child() {
  Registry& r = registry();
  g_fork_generation.fetch_add(1, std::memory_order_relaxed);  // the child has one thread
  for (ProcessArena* process : r.open) {
    ::close(process->arena.lock_fd);
    process->arena.lock_fd = -1;
  }
  for (int fd : r.name_locks) ::close(fd);
  r.open.clear();
  r.name_locks.clear();
  new (&r.mutex) std::mutex;
}

}  // namespace

Registry& registry() {
  static Registry* const instance = [] {
    auto* const made = new Registry;
    ::pthread_atfork(prepare_fork, after_fork_parent, after_fork_child);
    return made;
  }();
  return *instance;
}

ProcessArena* Registry::find_open(FileId id) const noexcept {
  for (ProcessArena* process : open)
    if (process->has_file(id)) return process;
  return nullptr;
}

}  // namespace shmrl
