// Outcomes and plain values of the arena's interface (store.h): what a call may answer, how objects
// are named, what an arena is made with, and what can be said about one.
//
// Owns nothing; everything here is a value. May be used by anybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
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
inline constexpr std::uint64_t kRowsMin = 16;  // of any table
inline constexpr std::uint64_t kObjectsMax = 1ull << 26;
inline constexpr std::uint64_t kSessionsMax = 1ull << 22;
inline constexpr std::uint32_t kOwnersMax = 4096;

struct Options {
  std::uint64_t capacity = 1ull << 30;          // bytes of payload; kCapacityMin..kCapacityMax
  std::uint64_t max_objects = 1u << 20;         // kRowsMin..kObjectsMax
  std::uint64_t max_sessions = 1u << 16;        // kRowsMin..kSessionsMax
  std::uint64_t max_attachments = 0;            // 0: as many as max_objects plus max_sessions
  std::uint32_t max_owners = kOwnersMax;        // kRowsMin..kOwnersMax
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
  Status why;          // session_released, not_owner
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

}  // namespace shmrl
