#include "process_arena.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "client_table.h"

namespace shmrl {
namespace {

namespace os = object_state;

// How often a reference meets an object whose end is being decided; each look waits for the
// decider.
constexpr int kLooksMax = 1000;
constexpr std::int64_t kListWaitNs = 500'000'000;  // then list() looks without the directory's lock

// What this process has open. Never destroyed: destructors of Python objects may run after ours.
struct Registry {
  std::mutex mutex;
  std::vector<ProcessArena*> open;                // joined, by file
  std::vector<ProcessArena*> all;                 // so that leak checkers see them
  std::map<std::string, std::uint64_t> last_ids;  // path -> id of the arena last used under it
};

std::atomic<std::uint64_t> g_fork_generation{1};

// The arena whose Wait::interrupted this thread is inside of, and so inside a Call on it.
thread_local const ProcessArena* t_in_callback = nullptr;

void prepare_fork();
void after_fork_parent();
void after_fork_child();

Registry& registry() {
  static Registry* const instance = [] {
    auto* const made = new Registry;
    ::pthread_atfork(prepare_fork, after_fork_parent, after_fork_child);
    return made;
  }();
  return *instance;
}

void prepare_fork() { registry().mutex.lock(); }
void after_fork_parent() { registry().mutex.unlock(); }

// The child has none of the parent's locks. It must close the inherited lock files before it opens
// any of them again, because closing one later would drop its own new locks.
void after_fork_child() {
  Registry& r = registry();
  g_fork_generation.fetch_add(1, std::memory_order_relaxed);  // the child has one thread
  for (ProcessArena* process : r.open) {
    ::close(process->arena.lock_fd);
    process->arena.lock_fd = -1;
  }
  r.open.clear();
  new (&r.mutex) std::mutex;
}

}  // namespace

bool well_formed(const Ref& ref) noexcept {
  return ref.arena != 0 && ref.generation != 0 && ref.generation <= os::kGenerationMax &&
         ref.check == ref_check(ref.arena, ref.generation, ref.index);
}

// -- calls ---------------------------------------------------------------------

Call::Call(ProcessArena& process, Need need) noexcept : process_(process) {
  if (process.forked()) {
    status_ = Status::forked;
    return;
  }
  // seq_cst, here and in close_handle() and leave(): either this call sees the flag cleared, or the
  // closer sees this call.
  process.active.fetch_add(1, std::memory_order_seq_cst);
  bool const allowed = need == Need::usable ? process.usable.load(std::memory_order_seq_cst)
                                            : process.joined.load(std::memory_order_seq_cst);
  if (!allowed) {
    leave();
    status_ = Status::closed;
  }
}

Call::~Call() {
  if (status_ == Status::ok) leave();
}

void Call::leave() noexcept {
  bool const last = process_.active.fetch_sub(1, std::memory_order_seq_cst) == 1;
  if (!last || process_.usable.load(std::memory_order_seq_cst)) return;
  process_.active.notify_all();
  if (process_.close_pending_.load(std::memory_order_seq_cst)) process_.close_if_pending();
}

void ProcessArena::close_if_pending() noexcept {
  std::scoped_lock const guard(registry().mutex);
  if (!close_pending_.exchange(false, std::memory_order_seq_cst) || handles_ > 0) return;
  finish_close();
}

bool ProcessArena::run_callback(const Wait& wait) const {
  if (wait.interrupted == nullptr) return false;
  const ProcessArena* const outer = std::exchange(t_in_callback, this);
  bool const result = wait.interrupted(wait.context);
  t_in_callback = outer;
  return result;
}

namespace {

void wait_until_idle(ProcessArena& process) noexcept {
  for (std::uint32_t n = process.active.load(std::memory_order_seq_cst); n != 0;
       n = process.active.load(std::memory_order_seq_cst))
    process.active.wait(n, std::memory_order_seq_cst);
}

}  // namespace

bool ProcessArena::forked() const noexcept {
  return fork_generation_ != g_fork_generation.load(std::memory_order_relaxed);
}

// -- opening and closing -------------------------------------------------------

void ProcessArena::map_records() {
  void* const memory =
      ::mmap(nullptr, arena.objects_limit() * sizeof(LocalRecord), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_system("mmap", "private reference counts");
  records_ = static_cast<LocalRecord*>(memory);
}

ProcessArena* ProcessArena::find_open(FileId id) noexcept {
  for (ProcessArena* process : registry().open)
    if (process->id_ == id || process->lock_id_ == id) return process;
  return nullptr;
}

// Registry mutex and directory lock are held.
template <class Setup>
ProcessArena* ProcessArena::add(Setup setup) {
  auto* const process = new ProcessArena;
  try {
    process->fork_generation_ = g_fork_generation.load(std::memory_order_relaxed);
    setup(*process);
    process->map_records();
    if (!file_id(process->arena.path, process->id_)) throw_system("stat", process->arena.path);
    if (!file_id(lock_path(process->arena.path), process->lock_id_))
      throw_system("stat", lock_path(process->arena.path));
  } catch (...) {
    delete process;  // unmaps; nobody has seen it
    throw;
  }
  Registry& r = registry();
  r.open.push_back(process);
  r.all.push_back(process);
  r.last_ids[process->arena.path] = process->arena.id();
  process->handles_ = process->stores_ = 1;
  process->joined.store(true, std::memory_order_seq_cst);
  process->usable.store(true, std::memory_order_seq_cst);
  return process;
}

namespace {

ArenaInfo inspect(const std::string& directory, const std::string& name,
                  ProcessArena* (*find)(FileId)) {
  return inspect_arena(directory, name, [find](FileId id) -> const Arena* {
    ProcessArena* const process = find(id);
    return process != nullptr ? &process->arena : nullptr;
  });
}

}  // namespace

ProcessArena* ProcessArena::create(const std::string& name, const Options& options) {
  std::scoped_lock const guard(registry().mutex);
  DirectoryLock const names(options.directory, options.lock_limit_ns);
  FileId id;
  if (file_id(arena_path(options.directory, name), id)) {
    ArenaInfo const there = inspect(options.directory, name, &ProcessArena::find_open);
    if (there.live_clients > 0 || find_open(id) != nullptr)
      throw Failure(Status::exists, "arena \"" + name + "\" is in use by " +
                                        std::to_string(there.live_clients) +
                                        " process(es); attach to it, or choose another name");
    if (there.status == Status::foreign_user) throw Failure(there.status, there.detail);
    remove_arena_files(options.directory, name);
  }
  return add([&](ProcessArena& process) {
    create_arena_file(process.arena, name, options);
    process.spin_ns = options.spin_ns;
  });
}

ProcessArena* ProcessArena::attach(const std::string& name, const AttachOptions& options) {
  std::scoped_lock const guard(registry().mutex);
  DirectoryLock const names(options.directory, options.lock_limit_ns);
  FileId id;
  if (file_id(arena_path(options.directory, name), id)) {
    if (ProcessArena* const process = find_open(id); process != nullptr) {
      ++process->handles_;
      ++process->stores_;
      process->close_pending_.store(false, std::memory_order_seq_cst);
      if (!process->usable.load(std::memory_order_seq_cst)) {
        // Reopened under live views: they are ordinary pins again.
        for (std::uint32_t i = 0; i < process->arena.objects_used(); ++i) {
          std::uint64_t word = 0;
          if (process->records_[i].word.load(std::memory_order_seq_cst) == 0) continue;
          LocalRecord& record = process->lock_record(i, word);
          if ((word & kRecordCounted) != 0)
            process->pins_left_.fetch_sub(1, std::memory_order_relaxed);
          record.word.store(word & ~kRecordCounted, std::memory_order_release);
        }
        process->usable.store(true, std::memory_order_seq_cst);
      }
      return process;
    }
  }
  if (FileId lock;
      file_id(lock_path(arena_path(options.directory, name)), lock) && find_open(lock) != nullptr)
    throw Failure(Status::corrupt,
                  "arena \"" + name +
                      "\" was replaced by another file under the lock file of an arena "
                      "that this process has open");
  return add([&](ProcessArena& process) {
    open_arena_file(process.arena, name, options.directory);
    process.arena.lock_limit_ns = options.lock_limit_ns;
    process.spin_ns = options.spin_ns;
    join_arena(process.arena);
  });
}

Status ProcessArena::unlink(const std::string& name, const std::string& directory) {
  std::scoped_lock const guard(registry().mutex);
  DirectoryLock const names(directory);
  std::string const path = arena_path(directory, name);
  FileId id;
  if (!file_id(path, id))
    throw Failure(Status::not_found,
                  "there is no arena \"" + name + "\" of this user in " + directory);
  if (auto const known = registry().last_ids.find(path); known != registry().last_ids.end()) {
    ArenaInfo const there = inspect(directory, name, &ProcessArena::find_open);
    if (there.status == Status::ok && there.arena_id != known->second)
      throw Failure(Status::superseded,
                    "the name \"" + name +
                        "\" now belongs to a newer arena than the one this process "
                        "used; whoever made that one removes it");
  }
  // The id stays known: a second unlink from this process must not take a successor's name either.
  remove_arena_files(directory, name);
  return Status::ok;
}

std::vector<ArenaInfo> ProcessArena::list(const std::string& directory) {
  std::scoped_lock const guard(registry().mutex);
  std::optional<DirectoryLock> names;
  try {
    names.emplace(directory, kListWaitNs);
  } catch (const Failure& failure) {
    // Looking changes nothing: where a stopped process holds the names, people need to look all the
    // more.
    if (failure.status() != Status::stuck) throw;
  }
  std::vector<std::string> leftovers;
  std::vector<ArenaInfo> result;
  for (const std::string& name : arena_names(directory, leftovers))
    result.push_back(inspect(directory, name, &ProcessArena::find_open));
  for (const std::string& path : leftovers) {
    ArenaInfo info;
    info.path = path;
    info.status = Status::corrupt;
    info.detail = "left by a create or an unlink that was killed";
    result.push_back(info);
  }
  return result;
}

std::vector<ArenaInfo> ProcessArena::remove_debris(const std::string& directory) {
  std::scoped_lock const guard(registry().mutex);
  DirectoryLock const names(directory);
  std::vector<std::string> leftovers;
  std::vector<ArenaInfo> removed;
  for (const std::string& name : arena_names(directory, leftovers)) {
    ArenaInfo info = inspect(directory, name, &ProcessArena::find_open);
    if (info.live_clients > 0 || info.status == Status::foreign_user) continue;
    remove_arena_files(directory, name);
    removed.push_back(std::move(info));
  }
  for (const std::string& path : leftovers) {
    ArenaInfo info;
    info.path = path;
    info.status = Status::corrupt;
    info.detail = "left by a create or an unlink that was killed";
    if (::unlink(path.c_str()) == 0) removed.push_back(std::move(info));
  }
  return removed;
}

// The last handle has closed. Registry mutex held; usable is false and no call is under way.
void ProcessArena::let_go_of_holds() noexcept {
  epoch.fetch_add(1, std::memory_order_seq_cst);
  for (std::uint32_t i = 0; i < arena.objects_used(); ++i) {
    if (records_[i].word.load(std::memory_order_seq_cst) == 0) continue;  // never used here
    std::uint64_t word = 0;
    LocalRecord& record = lock_record(i, word);
    record.holds = 0;
    if (record.pins > 0) {
      pins_left_.fetch_add(1, std::memory_order_relaxed);
      word |= kRecordCounted;
    }
    record.word.store(word, std::memory_order_release);
  }
}

void ProcessArena::close_handle() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  if (--handles_ > 0 || !joined.load(std::memory_order_seq_cst)) return;
  usable.store(false, std::memory_order_seq_cst);
  if (t_in_callback == this) {
    // A signal handler that runs inside a wait of this very thread closes the store: waiting for
    // that call to end would wait for ever. The call itself finishes the close when it returns.
    close_pending_.store(true, std::memory_order_seq_cst);
    return;
  }
  finish_close();
}

// Registry mutex held, `usable` is false.
void ProcessArena::finish_close() noexcept {
  wait_until_idle(*this);
  let_go_of_holds();
  if (pins_left_.load(std::memory_order_relaxed) == 0) {
    leave();
    return;
  }
  try {
    Txn txn(arena);
    leave_partly(arena, txn);
  } catch (const Failure&) {
    // A stopped or damaging peer: what we held goes with our slot, when the last view is gone.
  }
}

// Gives up the slot. Registry mutex held.
void ProcessArena::leave() noexcept {
  joined.store(false, std::memory_order_seq_cst);
  wait_until_idle(*this);
  try {
    Txn txn(arena);
    leave_arena(arena, txn);
  } catch (const Failure&) {
    // Then we look dead below, and the next sweep does the same work.
  }
  // Drops the byte lock; nothing of ours remains on the lock file, so that this process may join
  // again.
  ::close(arena.lock_fd);
  arena.lock_fd = -1;
  std::erase(registry().open, this);
  maybe_unmap();
}

void ProcessArena::maybe_unmap() noexcept {
  if (stores_ > 0 || pins_left_.load(std::memory_order_relaxed) > 0 ||
      joined.load(std::memory_order_seq_cst))
    return;
  if (!arena.mapped()) return;
  ::madvise(records_, arena.objects_limit() * sizeof(LocalRecord), MADV_DONTNEED);
  arena.unmap();
}

void ProcessArena::destroy_store() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  --stores_;
  maybe_unmap();
}

void ProcessArena::abandon() noexcept {
  if (forked()) return;
  std::scoped_lock const guard(registry().mutex);
  if (!joined.load(std::memory_order_seq_cst)) return;
  usable.store(false, std::memory_order_seq_cst);
  joined.store(false, std::memory_order_seq_cst);
  wait_until_idle(*this);
  let_go_of_holds();
  ::close(arena.lock_fd);
  arena.lock_fd = -1;
  std::erase(registry().open, this);
}

// -- references ----------------------------------------------------------------

LocalRecord& ProcessArena::lock_record(std::uint32_t index, std::uint64_t& word) noexcept {
  LocalRecord& record = records_[index];
  for (;;) {
    // An exchange is cheaper than compare-exchange, and writing the mark over the mark changes
    // nothing. Acquires what the release store that unlocks has published. seq_cst, because of the
    // closer's short cut: it skips a record whose word it finds zero, and then we must find
    // `usable` false.
    word = record.word.exchange(kRecordLocked, std::memory_order_seq_cst);
    if (word != kRecordLocked) return record;
    for (int spins = 0; record.word.load(std::memory_order_relaxed) == kRecordLocked; ++spins) {
      if (spins < 64)
        cpu_relax();
      else
        ::sched_yield();  // its holder was descheduled inside a dozen instructions
    }
  }
}

bool ProcessArena::plausible(const Ref& ref) const noexcept {
  return ref.arena == arena.id() && ref.index < arena.objects_limit() &&
         ref.check == ref_check(ref.arena, ref.generation, ref.index);
}

Status ProcessArena::check_ref(const Ref& ref) const noexcept {
  if (!well_formed(ref)) return Status::bad_ref;
  if (ref.arena != arena.id()) return Status::foreign_ref;
  if (ref.index >= arena.objects_used() || ref.generation >= arena.header().next_generation.get())
    return Status::bad_ref;
  return Status::ok;
}

void ProcessArena::claim(std::uint32_t index, std::uint64_t generation) noexcept {
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(index, word);
  record.holds = 1;
  record.pins = 1;
  record.word.store(generation, std::memory_order_release);
}

void ProcessArena::settle(std::uint32_t index) noexcept {
  Call const call(*this, Call::Need::joined);
  if (call.status() != Status::ok) return;
  try {
    Txn txn(arena);
    settle_object(arena, txn, index);
  } catch (const Failure&) {
    // Destructors come here: nobody to tell. The next sweep of this client settles the object.
  }
}

Status ProcessArena::hold(const Ref& ref, std::uint64_t& epoch_out) {
  if (forked()) return Status::forked;
  for (int look = 0; look < kLooksMax; ++look) {
    std::uint64_t word = 0;
    // Cheap and nearly certain; whatever does not lead to a live object is looked at closely below.
    if (!plausible(ref)) return check_ref(ref);
    LocalRecord& record = lock_record(ref.index, word);
    auto unlock = [&] { record.word.store(word, std::memory_order_release); };
    if (!usable.load(std::memory_order_seq_cst)) {
      unlock();
      return Status::closed;
    }
    ObjectEntry& e = arena.mapped_object(ref.index);  // plausible() has looked at the index
    std::uint64_t state = e.state.load(std::memory_order_acquire);
    std::uint64_t const known = word & kRecordGeneration;
    if (generation_of(state) != ref.generation || !is_live_state(state_of(state)) ||
        known > ref.generation) {
      unlock();
      Status const checked = check_ref(ref);
      return checked == Status::ok ? Status::freed : checked;
    }
    if (known == ref.generation && record.holds > 0) {
      ++record.holds;
      epoch_out = epoch.load(std::memory_order_relaxed);
      unlock();
      return Status::ok;
    }
    std::uint32_t const k = arena.slot / 64;
    std::uint64_t const bit = 1ull << (arena.slot % 64);
    // seq_cst: set the bit, then look at the state; end_if_unheld() does it the other way round.
    e.holds[k].fetch_or(bit, std::memory_order_seq_cst);
    state = e.state.load(std::memory_order_seq_cst);
    bool const same = generation_of(state) == ref.generation;
    if (same && (state_of(state) == os::kSealed || state_of(state) == os::kBuilding)) {
      if (known != ref.generation) {
        record.pins = 0;
        word = ref.generation | (word & kRecordCounted);
      }
      record.holds = 1;
      epoch_out = epoch.load(std::memory_order_relaxed);
      unlock();
      return Status::ok;
    }
    // It is ending or has ended: take the bit back. Our transient bit may have kept another ender
    // from ending what is there now, so the duty is ours.
    e.holds[k].fetch_and(~bit, std::memory_order_seq_cst);
    bool const undecided = same && state_of(state) == os::kEnding;
    bool const orphan = needs_settling(e);
    unlock();
    if (orphan || undecided) settle(ref.index);
    if (!undecided) return Status::freed;
  }
  throw_corrupt("an object that never finishes to end, entry", ref.index);
}

void ProcessArena::drop(const Ref& ref, std::uint64_t hold_epoch) noexcept {
  if (forked() || epoch.load(std::memory_order_relaxed) != hold_epoch) return;
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(ref.index, word);
  bool orphan = false;
  // The epoch again, under the record's lock: close_handle() moves it on before it visits the
  // records.
  if (epoch.load(std::memory_order_seq_cst) == hold_epoch &&
      (word & kRecordGeneration) == ref.generation && record.holds > 0 && --record.holds == 0) {
    // Not arena.object(): a destructor must not throw, and the index was good when it was taken.
    ObjectEntry& e = arena.mapped_object(ref.index);
    e.holds[arena.slot / 64].fetch_and(~(1ull << (arena.slot % 64)), std::memory_order_seq_cst);
    orphan = needs_settling(e);
  }
  record.word.store(word, std::memory_order_release);
  if (orphan) settle(ref.index);
}

Status ProcessArena::try_pin(const Ref& ref, const std::byte*& data, std::uint64_t& size) {
  if (forked()) return Status::forked;
  for (int look = 0; look < kLooksMax; ++look) {
    std::uint64_t word = 0;
    // Cheap and nearly certain; whatever does not lead to a live object is looked at closely below.
    if (!plausible(ref)) return check_ref(ref);
    LocalRecord& record = lock_record(ref.index, word);
    auto unlock = [&] { record.word.store(word, std::memory_order_release); };
    if (!usable.load(std::memory_order_seq_cst)) {
      unlock();
      return Status::closed;
    }
    ObjectEntry& e = arena.mapped_object(ref.index);  // plausible() has looked at the index
    // Acquire: pairs with the seal; the payload is complete for whoever sees SEALED.
    std::uint64_t state = e.state.load(std::memory_order_acquire);
    std::uint64_t const known = word & kRecordGeneration;
    if (generation_of(state) != ref.generation || !is_live_state(state_of(state)) ||
        known > ref.generation) {
      unlock();
      Status const checked = check_ref(ref);
      return checked == Status::ok ? Status::freed : checked;
    }
    if (state_of(state) == os::kBuilding) {
      unlock();
      return Status::not_sealed;
    }
    std::uint32_t const k = arena.slot / 64;
    std::uint64_t const bit = 1ull << (arena.slot % 64);
    bool const first = known != ref.generation || record.pins == 0;
    if (first) {
      // seq_cst: set the bit, then look at the state; end_object() does it the other way round.
      e.pins[k].fetch_or(bit, std::memory_order_seq_cst);
      state = e.state.load(std::memory_order_seq_cst);
    }
    bool const same = generation_of(state) == ref.generation;
    bool const sealed = same && state_of(state) == os::kSealed;
    std::uint64_t const offset = e.offset.get();
    std::uint64_t const bytes = size_of(e);
    bool const sound = bytes <= arena.payload_bytes() && offset <= arena.payload_bytes() - bytes;
    if (sealed && sound) {
      if (known != ref.generation) {
        record.holds = 0;
        word = ref.generation | (word & kRecordCounted);
      }
      record.pins = first ? 1 : record.pins + 1;
      unlock();
      ClientEntry& me = arena.client(arena.slot);
      me.gets.fetch_add(1, std::memory_order_relaxed);  // figures
      if (first) me.pinned.fetch_add(1, std::memory_order_relaxed);
      data = arena.payload_read_only() + offset;
      size = bytes;
      return Status::ok;
    }
    bool orphan = false;
    if (first) {
      e.pins[k].fetch_and(~bit, std::memory_order_seq_cst);
      orphan = needs_settling(e);
    }
    bool const undecided = same && state_of(state) == os::kEnding;
    unlock();
    if (orphan || undecided) settle(ref.index);
    if (sealed && !sound) throw_corrupt("the offset of an object", offset);
    if (!undecided) return Status::freed;
  }
  throw_corrupt("an object that never finishes to end, entry", ref.index);
}

void ProcessArena::unpin(const Ref& ref, bool draft) noexcept {
  if (forked()) return;
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(ref.index, word);
  bool orphan = false;
  bool last_view = false;
  if ((word & kRecordGeneration) == ref.generation && record.pins > 0) {
    // Not joined: abandoned, the bits are the sweeper's.
    bool const ours = joined.load(std::memory_order_seq_cst);
    if (ours && draft)
      arena.client(arena.slot)
          .drafts.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
    if (--record.pins == 0) {
      if ((word & kRecordCounted) != 0) {
        // Mark and count change together under the record's lock; relaxed, as the registry mutex
        // orders whoever acts on the count.
        last_view = pins_left_.fetch_sub(1, std::memory_order_relaxed) == 1;
        word &= ~kRecordCounted;
      }
      if (ours) {
        ObjectEntry& e = arena.mapped_object(ref.index);
        arena.client(arena.slot)
            .pinned.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
        e.pins[arena.slot / 64].fetch_and(~(1ull << (arena.slot % 64)), std::memory_order_seq_cst);
        orphan = needs_settling(e);
      }
    }
  }
  record.word.store(word, std::memory_order_release);
  if (orphan) settle(ref.index);
  if (!last_view) return;
  std::scoped_lock const guard(registry().mutex);
  if (pins_left_.load(std::memory_order_relaxed) > 0 || handles_ > 0) return;
  if (joined.load(std::memory_order_seq_cst))
    leave();
  else
    maybe_unmap();
}

}  // namespace shmrl
