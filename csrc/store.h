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
// Wait with a non-zero time-out, and around copy_in() of large buffers. The others are short,
// except where they meet a lock that is not free: the core itself lets go of the GIL there
// (Outside).
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

#include "store_values.h"

namespace shmrl {

// ---------------------------------------------------------------------------------------------
// Things a process holds. All are move-only; destruction lets go.

class Deadline;      // store_call.h
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
  // arena of that name earlier, and the name now belongs to another one that somebody uses:
  // Status::superseded.
  static Status unlink(std::string_view name, const std::string& directory = "/dev/shm");
  // Arenas of this user, debris and unreadable ones included.
  static Status list(std::vector<ArenaInfo>& out, const std::string& directory = "/dev/shm");
  // Removes those arenas of this user that have no live client, and leftovers of crashed creates.
  // `out`: what was removed. A name that a live process is creating or joining is passed over.
  static Status remove_debris(std::vector<ArenaInfo>& out,
                              const std::string& directory = "/dev/shm");
  // One sentence about the last call in this thread that did not return Status::ok.
  static const std::string& detail() noexcept;

  ~Store();  // closes
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Idempotent. Holds taken through this process's handles are dropped when its last handle
  // closes; live pins and drafts keep the client joined (not usable) until they go.
  void close() noexcept;
  bool is_open() const noexcept;  // false also in a fork child
  // Whether any thread is inside a call on this arena now: close() would wait for it.
  bool in_calls() const noexcept;

  std::uint64_t arena_id() const noexcept;
  const std::string& name() const noexcept;
  const std::string& path() const noexcept;
  std::uint64_t capacity() const noexcept;
  std::uint32_t client_slot() const noexcept;  // 1..255

  // -- objects -----------------------------------------------------------------

  // Reserves an object of `size` bytes (0 allowed). Its first `head` bytes describe the value and
  // do not count against the capacity. With a session id the seal will also attach it there; the
  // session must be live now and still at the seal.
  Status reserve(std::uint64_t size, const Wait& wait, Draft& out, std::uint64_t head = 0);
  Status reserve(std::uint64_t size, std::string_view session, const Wait& wait, Draft& out,
                 std::uint64_t head = 0);
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
  Status owners(std::span<const std::string_view> ids, std::vector<std::string>& out);  // "": gone
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
  Status wait_for_seal(const Ref& ref, const Deadline& deadline);
  ProcessArena* arena_;
  std::atomic<bool> open_{true};
};

// ---------------------------------------------------------------------------------------------
// Waiting

// What a thread does around a wait inside the core (a lock that is not free at once): the bindings
// let go of Python's GIL there, so that a peer that is stopped inside the arena's lock stops no
// other thread of this process. `leave` may answer nullptr: nothing to undo. Both are called with
// no lock of the core held. Set once, before the first store is opened.
struct WaitHooks {
  void* (*leave)() noexcept = nullptr;
  void (*enter)(void* state) noexcept = nullptr;
};
void set_wait_hooks(WaitHooks hooks) noexcept;

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
