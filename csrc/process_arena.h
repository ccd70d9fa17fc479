// One arena as this process has it: one mapping, one client slot, one lock file, shared by all
// Store handles, and the private count of references behind each bit in the object table.
//
// Promises:
//   * One slot and one open lock file per process and arena. Closing a second descriptor of the
//     lock file would drop this process's locks (POSIX), and make it look dead.
//   * A ProcessArena is never destroyed, so that a Hold, Pin or Draft may outlive everything; its
//     mappings go when no Store object and no pin needs them.
//   * In a fork child everything here answers "forked" and touches nothing.
//
// Private multiplicity. Record i counts this process's holds and pins of entry i for one
// generation; 0 -> 1 sets the bit in the arena, 1 -> 0 clears it, both under the record's spin
// lock, so that a stale reference never clears a bit that another thread owns. The lock order is in
// robust_lock.h.
//
// Called by the facade (store*.cc) only. Implemented in process_names.cc (by name),
// process_arena.cc (calls, closing) and process_refs.cc (references).
#pragma once

#include <atomic>
#include <cstdint>

#include "arena.h"
#include "arena_file.h"
#include "object_table.h"
#include "registry.h"
#include "store.h"

namespace shmrl {

struct LocalRecord {
  std::atomic<std::uint64_t> word;  // kRecordLocked while locked, else generation | kRecordCounted
  std::uint32_t holds;
  std::uint32_t pins;
};
static_assert(sizeof(LocalRecord) == 16);
inline constexpr std::uint64_t kRecordLocked = 1ull << 63;
// Its pins are among pins_left: the last handle closed while they were live.
inline constexpr std::uint64_t kRecordCounted = 1ull << 62;
inline constexpr std::uint64_t kRecordGeneration = object_state::kGenerationMax;

class ProcessArena {
 public:
  static ProcessArena* create(const std::string& name, const Options& options);
  static ProcessArena* attach(const std::string& name, const AttachOptions& options);
  static Status unlink(const std::string& name, const std::string& directory);
  static std::vector<ArenaInfo> list(const std::string& directory);
  static std::vector<ArenaInfo> remove_debris(const std::string& directory);

  bool forked() const noexcept {
    return fork_generation_ != g_fork_generation.load(std::memory_order_relaxed);
  }
  bool has_file(FileId id) const noexcept { return id_ == id || lock_id_ == id; }
  // Wait::interrupted, which may close the store that this thread is waiting in.
  bool run_callback(const Wait& wait) const;
  void close_handle() noexcept;   // Store::close
  void destroy_store() noexcept;  // ~Store, after close_handle
  void abandon() noexcept;        // Store::abandon

  // Object references; see Store. `epoch` tells the holds of one opening from those of the next.
  Status hold(const Ref& ref, std::uint64_t& epoch);
  void drop(const Ref& ref, std::uint64_t epoch) noexcept;
  // not_sealed while it is being built (whatever the caller then does).
  Status try_pin(const Ref& ref, const std::byte*& data, std::uint64_t& size);
  void unpin(const Ref& ref, bool draft) noexcept;
  Status check_ref(const Ref& ref) const noexcept;
  bool plausible(const Ref& ref) const noexcept;

  // Makes the record of an entry that is about to be created count one hold and one pin.
  void claim(std::uint32_t index, std::uint64_t generation) noexcept;

  Arena arena;
  std::atomic<bool> usable{false};       // some handle is open
  std::atomic<bool> joined{false};       // the slot is ours
  std::atomic<std::uint32_t> active{0};  // calls under way
  std::atomic<std::uint64_t> epoch{1};
  std::int64_t spin_ns = 0;
  std::atomic<std::int64_t> next_probe_ns{0};

 private:
  friend class Call;
  ProcessArena() = default;
  void map_records();
  LocalRecord& lock_record(std::uint32_t index, std::uint64_t& word) noexcept;
  struct Look;
  template <class Take>
  Status look_at(const Ref& ref, Take take);
  void settle(std::uint32_t index);  // throws Failure(stuck)
  void settle_quietly(std::uint32_t index) noexcept;
  void let_go_of_holds() noexcept;
  void finish_close() noexcept;
  void close_if_pending() noexcept;
  void leave() noexcept;
  void maybe_unmap() noexcept;
  void open_again() noexcept;
  void publish();
  template <class Setup>
  static ProcessArena* prepare(Setup setup);
  static void remove_debris_of(const std::string& directory, const std::string& name,
                               std::vector<ArenaInfo>& removed);

  LocalRecord* records_ = nullptr;
  FileId id_, lock_id_;
  std::uint64_t fork_generation_ = 0;
  std::uint32_t handles_ = 0;                // open; registry mutex
  std::uint32_t stores_ = 0;                 // alive, open or not; registry mutex
  std::atomic<bool> close_pending_{false};   // closed from inside a call: its end finishes the work
  std::atomic<std::uint64_t> pins_left_{0};  // records with kRecordCounted
};

// A call under way on an arena that this process has joined: while one exists the slot is not given
// up.
class Call {
 public:
  enum class Need { usable, joined };
  Call(ProcessArena& process, Need need) noexcept;
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  Status status() const noexcept { return status_; }

 private:
  void leave() noexcept;
  ProcessArena& process_;
  Status status_ = Status::ok;
};

// Catches garbage, not malice: one multiplication, because every use of a ref makes it.
inline std::uint32_t ref_check(std::uint64_t arena, std::uint64_t generation,
                               std::uint32_t index) noexcept {
  std::uint64_t const mixed =
      (arena ^ generation ^ std::uint64_t{index} << 29) * 0xD6E8FEB86659FD93ull;
  return static_cast<std::uint32_t>(mixed >> 32) | 1u;  // never zero
}
inline Ref make_ref(const Arena& arena, std::uint32_t index, std::uint64_t generation) noexcept {
  return Ref{arena.id(), generation, index, ref_check(arena.id(), generation, index)};
}

}  // namespace shmrl
