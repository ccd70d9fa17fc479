// One mapped arena as one process sees it: where its tables are, who we are in it, and how far each
// table is backed by memory.
//
// Owns the mappings and the two file descriptors. Promises that no index that comes from the arena
// is followed unchecked: the accessors throw Failure(corrupt). The fixed part of the header is
// copied at attach, so that a later scribble cannot move a table. Called by the tables
// (block_allocator, object_table, session_table, client_table), by recovery and audit, always with
// the arena's lock held unless a comment says otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "failure.h"
#include "layout.h"

namespace shmrl {

class Arena {
 public:
  Arena() = default;
  ~Arena() { unmap(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps the open file `fd` (taken over) of a published or half-built arena. Throws Failure
  // (layout_mismatch, corrupt, system_error) with everything released.
  void map(int fd, const std::string& path);
  void unmap() noexcept;  // mappings and descriptors
  bool mapped() const noexcept { return base_ != nullptr; }

  Header& header() const noexcept { return *header_; }

  ObjectEntry& object(std::uint32_t i) const {
    if (i >= objects_used()) throw_corrupt("an object index", i);
    return objects_[i];
  }
  // For code that must not throw: any index below the limit is mapped.
  ObjectEntry& mapped_object(std::uint32_t i) const noexcept { return objects_[i]; }
  Attachment& attachment(std::uint32_t i) const {
    if (i >= table_used(header_->attachments, attachments_limit_))
      throw_corrupt("an attachment index", i);
    return attachments_[i];
  }
  SessionEntry& session(std::uint32_t i) const {
    if (i >= sessions_used()) throw_corrupt("a session index", i);
    return sessions_[i];
  }
  OwnerEntry& owner(std::uint32_t i) const {
    if (i >= owners_used()) throw_corrupt("an owner index", i);
    return owners_[i];
  }
  Granule& granule(std::uint64_t i) const {
    if (i >= granules_ready()) throw_corrupt("a granule index", i);
    return granules_[i];
  }
  Cell<std::uint32_t>& session_bucket(std::uint32_t hash) const noexcept {
    return session_index_[hash & (session_buckets_ - 1)];
  }
  Cell<std::uint32_t>& owner_bucket(std::uint32_t hash) const noexcept {
    return owner_index_[hash & (owner_buckets_ - 1)];
  }
  Cell<std::uint32_t>& journal_entry(std::uint64_t i) const {
    if (i >= table_ready(header_->journal_table, sessions_limit_))
      throw_corrupt("a journal index", i);
    return journal_[i];
  }
  ClientEntry& client(std::uint32_t slot) const noexcept { return clients_[slot % kSlots]; }
  WaiterEntry& waiter(std::uint32_t i) const noexcept { return waiters_[i % kWaitersMax]; }

  std::uint64_t objects_used() const noexcept {
    return table_used(header_->objects, objects_limit_);
  }
  std::uint64_t sessions_used() const noexcept {
    return table_used(header_->sessions, sessions_limit_);
  }
  std::uint64_t owners_used() const noexcept { return table_used(header_->owners, owners_limit_); }
  std::uint64_t attachments_used() const noexcept {
    return table_used(header_->attachments, attachments_limit_);
  }
  std::uint64_t granules_ready() const noexcept {
    return table_ready(header_->payload, granules_limit_);
  }
  std::uint64_t granules_limit() const noexcept { return granules_limit_; }
  std::uint64_t objects_limit() const noexcept { return objects_limit_; }
  std::uint64_t sessions_limit() const noexcept { return sessions_limit_; }
  std::uint64_t owners_limit() const noexcept { return owners_limit_; }
  std::uint64_t attachments_limit() const noexcept { return attachments_limit_; }
  std::uint32_t session_buckets() const noexcept { return session_buckets_; }
  std::uint32_t owner_buckets() const noexcept { return owner_buckets_; }
  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint64_t id() const noexcept { return id_; }
  std::uint64_t payload_bytes() const noexcept { return granules_limit_ * kGranule; }
  std::uint64_t file_bytes() const noexcept { return file_bytes_; }

  std::byte* payload() const noexcept { return payload_; }
  const std::byte* payload_read_only() const noexcept { return payload_read_only_; }

  // Takes the next never-used entry of a table: `used` grows by one, and memory is reserved first
  // where needed. Returns kNil where the table is at its limit. Throws Failure(no_memory).
  std::uint32_t take_fresh(const Txn& txn, Table& table, std::uint64_t limit,
                           std::uint64_t entry_bytes);
  // Backs entries below `count` (at most the limit) with memory.
  void ensure_ready(const Txn& txn, Table& table, std::uint64_t limit, std::uint64_t entry_bytes,
                    std::uint64_t count);
  // Backs payload granules [from, to) and their descriptors. Needs no lock: reserving memory twice,
  // or without using it, harms nobody. Throws Failure(no_memory).
  void reserve_payload(std::uint64_t from, std::uint64_t to) const;

  int fd() const noexcept { return fd_; }

  // Identity: set while joining (client_table.cc), constant afterwards. Relaxed: another thread may
  // look at the arena while it is joined, and then either answer will do.
  std::uint32_t slot() const noexcept { return slot_.load(std::memory_order_relaxed); }
  void set_slot(std::uint32_t slot) noexcept { slot_.store(slot, std::memory_order_relaxed); }
  int lock_fd = -1;  // POSIX byte locks live on this descriptor; closed only by unmap()
  std::int64_t lock_limit_ns = 30'000'000'000;
  std::string name;
  std::string path;

 private:
  static std::uint64_t table_used(const Table& table, std::uint64_t limit) noexcept {
    std::uint64_t const used = table.used.get();
    return used <= limit ? used : limit;
  }
  static std::uint64_t table_ready(const Table& table, std::uint64_t limit) noexcept {
    std::uint64_t const ready = table.ready.get();
    return ready <= limit ? ready : limit;
  }
  void validate_header(const std::string& path, std::uint64_t file_bytes) const;
  void allocate_file_range(std::uint64_t offset, std::uint64_t bytes) const;

  std::atomic<std::uint32_t> slot_{0};
  int fd_ = -1;
  std::byte* base_ = nullptr;
  Header* header_ = nullptr;
  std::byte* payload_ = nullptr;
  const std::byte* payload_read_only_ = nullptr;
  ClientEntry* clients_ = nullptr;
  WaiterEntry* waiters_ = nullptr;
  OwnerEntry* owners_ = nullptr;
  SessionEntry* sessions_ = nullptr;
  Attachment* attachments_ = nullptr;
  ObjectEntry* objects_ = nullptr;
  Granule* granules_ = nullptr;
  Cell<std::uint32_t>* session_index_ = nullptr;
  Cell<std::uint32_t>* owner_index_ = nullptr;
  Cell<std::uint32_t>* journal_ = nullptr;
  std::uint64_t file_bytes_ = 0, capacity_ = 0, id_ = 0, granules_limit_ = 0, granule_offset_ = 0,
                payload_offset_ = 0;
  std::uint64_t objects_limit_ = 0, sessions_limit_ = 0, owners_limit_ = 0, attachments_limit_ = 0;
  std::uint32_t session_buckets_ = 1, owner_buckets_ = 1;
};

// Where each part of an arena file lies; the same computation at create and at attach.
struct Geometry {
  std::uint64_t clients, waiters, owner_index, session_index, journal, owners, sessions,
      attachments, objects, granules, payload, file_bytes;
  std::uint64_t granule_count;
  std::uint32_t session_buckets, owner_buckets;
  static Geometry of(std::uint64_t capacity, std::uint64_t max_owners, std::uint64_t max_sessions,
                     std::uint64_t max_attachments, std::uint64_t max_objects) noexcept;
};

}  // namespace shmrl
