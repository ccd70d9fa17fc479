// The facade of the arena: everything that lies above csrc/ talks to this header only.
//
// Owns nothing in the arena itself; it translates calls into operations of the tables below it.
// Promises:
//   * Operating errors are returned as a Status, never thrown; `Store::detail()` gives the
//     sentence.
//   * Every call may be made from any thread. No call needs another process to be alive.
//   * A call on a handle that was inherited through fork() answers Status::forked and touches
//     nothing; the child attaches afresh.
//   * Hold, Pin and Draft are safe to destroy at any time in any order, also after Store::close(),
//     after the Store itself, in a fork child, and while the process exits.
// Called by: csrc/bindings*.cc, csrc/tests. Bindings drop the GIL around every call that takes a
// Wait with a non-zero time-out, and around copy_in() of large buffers; all others are short.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shmrl {

// ---------------------------------------------------------------------------------------------
// Outcomes

enum class Status : int {
  ok = 0,
  // Arena by name
  not_found,        // no arena of that name for this user
  exists,           // create: a live arena of that name
  bad_name,         // arena name: 1..64 of [A-Za-z0-9._-], not starting with '.' or '-'
  bad_option,       // capacity or a table size out of its limits
  layout_mismatch,  // an arena of another layout version or another ABI
  foreign_user,     // the file belongs to another user
  corrupt,          // not an arena, truncated, or scribbled over
  superseded,       // unlink: the name now belongs to a successor of the arena this process used
  clients_full,     // all 255 client slots are taken by live processes
  no_memory,        // the file system (/dev/shm) cannot back the pages: detail has the figures
  system_error,     // a system call failed: detail has its name and errno
  // Handle
  closed,  // this handle was closed
  forked,  // this handle was inherited through fork(): attach again in the child
  stuck,   // the arena's lock is held by a live process that does not run (stopped?)
  // Objects
  full,          // no room for the object within the time-out (see full_facts())
  too_large,     // larger than the whole arena
  objects_full,  // all max_objects entries are in use
  freed,         // the object has ended
  not_sealed,    // the object was not sealed within the time-out
  bad_ref,       // not a ref that this arena ever handed out (forged)
  foreign_ref,   // a ref of another arena
  bad_draft,     // seal/discard of a draft that is sealed, discarded or not of this handle
  interrupted,   // Wait::interrupted said so
  // Sessions
  bad_id,            // session id or owner: 1..63 bytes of UTF-8 without NUL
  session_exists,    // open: a live session of that id
  session_released,  // no live session of that id
  not_owner,         // transfer/release/free: see the `refused` list
  bad_position,      // parent is not a position below the new one; keep is negative
  sessions_full,     // all max_sessions entries are in use
  owners_full,       // all max_owners entries are in use
  attachments_full,  // all attachment entries are in use
};

// A lower-case word for a Status, as spelled above.
std::string_view to_string(Status status) noexcept;

// ---------------------------------------------------------------------------------------------
// Plain values

// The name of an object: 24 bytes, equal in all processes. `generation` is never reused while the
// arena lives, so a stale ref is an error, never other bytes.
struct Ref {
  std::uint64_t arena = 0;       // random id of the arena
  std::uint64_t generation = 0;  // 48 bits, 1-based
  std::uint32_t index = 0;       // entry in the object table
  std::uint32_t check = 0;       // hash of the other three: catches garbage early
  friend bool operator==(const Ref&, const Ref&) = default;
  friend auto operator<=>(const Ref&, const Ref&) = default;
};
static_assert(sizeof(Ref) == 24);

// Whether `ref` has a correct check word (says nothing about any arena).
bool well_formed(const Ref& ref) noexcept;

// How long a call may wait. `interrupted` is called (without any lock held, from the waiting
// thread) after every wake-up and every EINTR; returning true ends the wait with
// Status::interrupted. The bindings use it to run Python's signal handlers.
struct Wait {
  std::int64_t timeout_ns = 0;  // 0: do not wait; -1: for ever
  bool (*interrupted)(void* context) = nullptr;
  void* context = nullptr;
};

inline constexpr std::uint32_t kClientsMax = 255;
inline constexpr std::size_t kNameBytesMax = 63;  // session ids and owners
inline constexpr std::size_t kArenaNameMax = 64;  // arena names
inline constexpr std::uint64_t kCapacityMin = 1ull << 20;
inline constexpr std::uint64_t kCapacityMax = 1ull << 43;
inline constexpr std::uint64_t kObjectsMax = 1ull << 26;
inline constexpr std::uint64_t kSessionsMax = 1ull << 22;
inline constexpr std::uint32_t kOwnersMax = 4096;

struct Options {
  std::uint64_t capacity = 1ull << 30;          // bytes of payload; kCapacityMin..kCapacityMax
  std::uint64_t max_objects = 1u << 20;         // 16..kObjectsMax
  std::uint64_t max_sessions = 1u << 16;        // 16..kSessionsMax
  std::uint64_t max_attachments = 0;            // 0: as many as max_objects plus max_sessions
  std::uint32_t max_owners = kOwnersMax;        // 16..kOwnersMax
  std::string directory = "/dev/shm";           // a tmpfs; tests use another
  std::int64_t lock_limit_ns = 30'000'000'000;  // for a live holder of any lock; then Status::stuck
  std::int64_t spin_ns = 20'000;  // how long a wait for a seal spins before it sleeps (0: sleep)
};

struct AttachOptions {
  std::string directory = "/dev/shm";
  std::int64_t lock_limit_ns = 30'000'000'000;
  std::int64_t spin_ns = 20'000;
};

// Attached object of a session, in attach order.
struct Entry {
  Ref ref;
  std::int32_t parent = -1;  // position, -1: none
  std::uint64_t size_bytes = 0;
};

struct Refusal {
  std::string id;      // as asked
  Status why;          // session_released, not_owner, bad_id
  std::string holder;  // who owns it now (not_owner only)
};

struct OwnerUsage {
  std::string owner;
  std::uint64_t sessions = 0;
  std::uint64_t objects = 0;  // attachments: an object in two sessions counts in each
  std::uint64_t bytes = 0;    // likewise
  std::uint32_t bound_clients = 0;
  std::string heir;  // empty: none
};

struct ClientUsage {
  std::uint32_t slot = 0;
  std::int64_t pid = 0;  // as the client itself saw it (another pid namespace has other numbers)
  bool self = false;
  std::uint64_t pins = 0;          // objects this client has pinned
  std::uint64_t held_objects = 0;  // full_facts() only: never attached, held by it
  std::uint64_t held_bytes = 0;    // full_facts() only
  std::uint64_t pinned_bytes = 0;  // full_facts() only
};

struct Counters {
  std::uint64_t puts = 0;       // objects sealed
  std::uint64_t gets = 0;       // pins taken
  std::uint64_t frees = 0;      // objects ended (by free, release, truncate, last drop)
  std::uint64_t discards = 0;   // drafts discarded
  std::uint64_t reclaimed = 0;  // objects ended by a sweep because their holders died
  std::uint64_t sessions_opened = 0;
  std::uint64_t sessions_released = 0;
  std::uint64_t sessions_transferred = 0;
  std::uint64_t sweeps = 0;      // dead clients swept
  std::uint64_t recoveries = 0;  // lock takeovers that had to repair
  std::uint64_t full_waits = 0;  // reservations that had to queue for space
};

struct Stats {
  std::uint64_t capacity = 0, used = 0, free = 0,
                largest_free = 0;  // bytes; used + free == capacity
  std::uint64_t committed = 0;     // bytes of the file that are backed by memory
  std::uint64_t objects = 0;       // sealed and building, not doomed
  std::uint64_t building = 0, doomed = 0;
  std::uint64_t sessions = 0;
  std::uint64_t pinned = 0;          // (object, process) pairs with a live view or draft
  std::uint64_t deferred_bytes = 0;  // doomed, but under live views
  std::uint64_t clients = 0;
  std::uint64_t max_objects = 0, max_sessions = 0, max_owners = 0, max_attachments = 0;
  std::vector<OwnerUsage> by_owner;
  std::vector<ClientUsage> by_client;
  Counters counters;
};

// What a failed reservation should tell its caller. Costs a scan of the object table.
struct FullFacts {
  std::uint64_t requested = 0, capacity = 0, free = 0, largest_free = 0;
  std::uint64_t building_bytes = 0, deferred_bytes = 0;
  std::uint32_t waiters = 0;  // other reservations in the queue
  std::vector<OwnerUsage> by_owner;
  std::vector<ClientUsage> by_client;
};

struct ArenaInfo {
  std::string name;
  std::string path;
  Status status = Status::ok;  // layout_mismatch / corrupt: the figures below are absent
  std::string detail;
  std::uint64_t arena_id = 0;
  std::uint64_t capacity = 0;
  std::uint64_t file_bytes = 0;    // backed by memory now
  std::uint32_t live_clients = 0;  // 0: debris
  std::int64_t creator_pid = 0;
  std::int64_t created_unix_ns = 0;
};

struct SweepReport {
  std::uint32_t clients = 0;  // dead clients swept
  std::uint64_t objects = 0;  // objects ended
  std::uint64_t bytes = 0;    // bytes that came back
  std::uint64_t sessions_inherited = 0, sessions_released = 0;
};

// ---------------------------------------------------------------------------------------------
// Things a process holds. All are move-only; destruction lets go.

class ProcessArena;  // the one mapping, slot and lock file of this process for one arena

// A counted reference of this process: keeps a never-attached object alive.
// Cost of hold + drop: about 15 ns.
class Hold {
 public:
  Hold() noexcept = default;
  Hold(Hold&& other) noexcept
      : arena_(std::exchange(other.arena_, nullptr)), epoch_(other.epoch_), ref_(other.ref_) {}
  Hold& operator=(Hold&& other) noexcept {
    if (this != &other) {
      reset();
      arena_ = std::exchange(other.arena_, nullptr);
      epoch_ = other.epoch_;
      ref_ = other.ref_;
    }
    return *this;
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { reset(); }

  void reset() noexcept;  // drops
  explicit operator bool() const noexcept { return arena_ != nullptr; }
  const Ref& ref() const noexcept { return ref_; }

 private:
  friend class Store;
  friend class Draft;
  ProcessArena* arena_ = nullptr;
  std::uint64_t epoch_ = 0;
  Ref ref_{};
};

// A live read-only view of a sealed object: keeps its bytes in place, not the object alive.
class Pin {
 public:
  Pin() noexcept = default;
  Pin(Pin&& other) noexcept { swap(other); }
  Pin& operator=(Pin&& other) noexcept {
    if (this != &other) {
      reset();
      swap(other);
    }
    return *this;
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() { reset(); }

  void reset() noexcept;  // unpins; the bytes must not be touched afterwards
  explicit operator bool() const noexcept { return arena_ != nullptr; }
  const std::byte* data() const noexcept {
    return data_;
  }  // in the read-only mapping; >= 64-byte
     // aligned, 4 KiB from 32 KiB up
  std::uint64_t size() const noexcept { return size_; }
  const Ref& ref() const noexcept { return ref_; }

 private:
  friend class Store;
  void swap(Pin& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(ref_, other.ref_);
  }
  ProcessArena* arena_ = nullptr;
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  Ref ref_{};
};

// An object that this process is building: writable until sealed. Destroying an unsealed draft
// discards it. Its ref may be handed out before the seal; a get() on it waits.
class Draft {
 public:
  Draft() noexcept = default;
  Draft(Draft&& other) noexcept { swap(other); }
  Draft& operator=(Draft&& other) noexcept {
    if (this != &other) {
      reset();
      swap(other);
    }
    return *this;
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  ~Draft() { reset(); }

  void reset() noexcept;  // discards if unsealed
  explicit operator bool() const noexcept { return arena_ != nullptr; }
  std::byte* data() const noexcept { return data_; }  // in the read-write mapping
  std::uint64_t size() const noexcept { return size_; }
  const Ref& ref() const noexcept { return ref_; }

 private:
  friend class Store;
  void swap(Draft& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(session_, other.session_);
    std::swap(session_generation_, other.session_generation_);
    std::swap(epoch_, other.epoch_);
    std::swap(ref_, other.ref_);
  }
  ProcessArena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint32_t session_ = UINT32_MAX;  // slot of the session that the seal attaches to
  std::uint32_t session_generation_ = 0;
  std::uint64_t epoch_ = 0;
  Ref ref_{};
};

// ---------------------------------------------------------------------------------------------

// One handle on one arena. All handles of a process on one arena share a mapping and a client slot.
class Store {
 public:
  // Arenas by name. `out` is set only when the result is Status::ok.
  static Status create(std::string_view name, const Options& options, std::unique_ptr<Store>& out);
  static Status attach(std::string_view name, const AttachOptions& options,
                       std::unique_ptr<Store>& out);
  // Removes the name (like POSIX unlink: attached clients keep working). If this process used an
  // arena of that name earlier, and the name now belongs to another one: Status::superseded.
  static Status unlink(std::string_view name, const std::string& directory = "/dev/shm");
  // Arenas of this user, debris and unreadable ones included.
  static std::vector<ArenaInfo> list(const std::string& directory = "/dev/shm");
  // Removes those arenas of this user that have no live client, and leftovers of crashed creates.
  // Returns what was removed.
  static std::vector<ArenaInfo> remove_debris(const std::string& directory = "/dev/shm");
  // One sentence about the last call in this thread that did not return Status::ok.
  static const std::string& detail() noexcept;

  ~Store();  // closes
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Idempotent. Holds taken through this process's handles are dropped when its last handle
  // closes; live pins and drafts keep the client joined (not usable) until they go.
  void close() noexcept;
  bool is_open() const noexcept;  // false also in a fork child

  std::uint64_t arena_id() const noexcept;
  const std::string& name() const noexcept;
  const std::string& path() const noexcept;
  std::uint64_t capacity() const noexcept;
  std::uint32_t client_slot() const noexcept;  // 1..255

  // -- objects -----------------------------------------------------------------

  // Reserves an object of `size` bytes (0 allowed). With a session id the seal will also attach it
  // there; the session must be live now and still at the seal.
  Status reserve(std::uint64_t size, const Wait& wait, Draft& out);
  Status reserve(std::uint64_t size, std::string_view session, const Wait& wait, Draft& out);
  // Publishes the draft's bytes (and attaches, in the same atomic step). On ok `hold` owns a
  // counted reference (pass nullptr where none is wanted: an unattached object then ends at once
  // unless somebody else holds it) and the draft is empty. On failure the draft is unchanged
  // (session_released, bad_position, attachments_full), except Status::freed: somebody freed it
  // meanwhile, and the draft is empty. `keep` takes over the draft's pin, without a moment in which
  // the bytes are not pinned: for builders whose own views of the memory live on. `position`: where
  // in the session it stands.
  Status seal(Draft& draft, Hold* hold, std::int32_t parent = -1, Pin* keep = nullptr,
              std::uint32_t* position = nullptr);
  Status discard(Draft& draft);

  Status hold(const Ref& ref, Hold& out);                  // freed when it has ended
  Status pin(const Ref& ref, const Wait& wait, Pin& out);  // waits for the seal
  // ok: sealed; not_sealed: being built; freed; bad_ref; foreign_ref. `size` is set when ok.
  Status probe(const Ref& ref, std::uint64_t* size = nullptr);
  // Ends objects. Repeated, unknown, ended refs are skipped, and so is what a session holds;
  // strict: not_owner if a session holds any of them, and nothing is freed. `ended`: how many.
  Status free(std::span<const Ref> refs, bool strict, std::uint64_t& ended);

  // -- sessions (ids and owners: 1..63 bytes of UTF-8) -------------------------

  Status open(std::string_view id, std::string_view owner);
  Status attach_object(std::string_view id, const Ref& ref, std::int32_t parent,
                       std::uint32_t& position);
  Status objects(std::string_view id, std::vector<Entry>& out);  // a consistent snapshot
  // Keeps positions 0..keep-1; `let_go`: how many were detached.
  Status truncate(std::string_view id, std::int64_t keep, std::uint64_t& let_go);
  // One atomic step. Moves each of `ids` that `source` owns to `destination`; `moved` in the order
  // asked, each once. strict: all or nothing (not_owner or session_released, nothing moved).
  // `refused` says which did not move, and why.
  Status transfer(std::span<const std::string_view> ids, std::string_view source,
                  std::string_view destination, bool strict, std::vector<std::string>& moved,
                  std::vector<Refusal>& refused);
  // One atomic step. owner "*": whoever owns them. Not strict: ids that are unknown or owned by
  // somebody else are left out of `released` (and listed in `refused`); strict: not_owner when one
  // is owned by somebody else, and nothing is released (unknown ids are no error, L03).
  Status release(std::span<const std::string_view> ids, std::string_view owner, bool strict,
                 std::vector<std::string>& released, std::vector<Refusal>& refused);
  Status release_owned(std::string_view owner, std::vector<std::string>& released);
  Status owner(std::string_view id, std::string& out);  // session_released if gone
  Status contains(std::string_view id, bool& out);
  Status list(std::string_view owner, std::vector<std::string>& out);  // "": of all owners;
                                                                       // oldest first per owner
  Status session_count(std::uint64_t& out);
  // This process acts as `owner`. When the last process that does so dies or closes, the sessions
  // fall to `heir`, or are released when `heir` is empty. Calling again replaces the heir.
  Status bind(std::string_view owner, std::string_view heir);
  Status unbind(std::string_view owner);  // as a clean exit of this process would, for this owner

  // -- state of the arena ------------------------------------------------------

  Status stats(Stats& out);
  Status full_facts(std::uint64_t requested, FullFacts& out);
  Status check(std::vector<std::string>& problems);  // empty when sound
  Status sweep(SweepReport& out);                    // repairs after deaths, now

  // -- memory ------------------------------------------------------------------

  // For cudaHostRegister: both mappings of the payload, and how much of it is backed so far.
  std::span<const std::byte> payload_mapping() const noexcept;  // read-only: where views lie
  std::byte* payload_writable() const noexcept;                 // the same bytes, where drafts lie
  std::uint64_t payload_committed() const noexcept;

  // Tests only: lets go of the kernel lock without any clean-up, so that to every other process
  // this client is dead. Every later call on this process's handles answers Status::closed.
  void abandon() noexcept;

 private:
  explicit Store(ProcessArena* arena) noexcept : arena_(arena) {}
  template <class Body>
  Status call(Body body) noexcept;
  template <class Deadline, class Interrupted>
  Status wait_for_seal(const Ref& ref, const Deadline& deadline, Interrupted interrupted);
  ProcessArena* arena_;
  std::atomic<bool> open_{true};
};

// ---------------------------------------------------------------------------------------------
// Copying into the arena

// memcpy for small; for large ones non-temporal stores, and `threads` of a persistent pool
// (0: min(4, cores)). Blocks until done. `source` and `destination` must not overlap.
void copy_in(void* destination, const void* source, std::size_t size,
             unsigned threads = 0) noexcept;

// Build facts: layout version and ABI hash of this build.
std::uint32_t layout_version() noexcept;
std::uint64_t abi_hash() noexcept;

}  // namespace shmrl
