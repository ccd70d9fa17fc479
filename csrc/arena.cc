#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "robust_lock.h"

namespace shmrl {
namespace {

constexpr std::uint64_t kTableChunkBytes = 256 * 1024;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

Geometry Geometry::of(std::uint64_t capacity, std::uint64_t max_owners, std::uint64_t max_sessions,
                      std::uint64_t max_attachments, std::uint64_t max_objects) noexcept {
  Geometry g{};
  g.session_buckets = static_cast<std::uint32_t>(std::bit_ceil(max_sessions));
  g.owner_buckets = static_cast<std::uint32_t>(std::bit_ceil(max_owners));
  g.granule_count = (round_up(capacity, kSlabBytes) + kSlackBytes) / kGranule;
  std::uint64_t at = sizeof(Header);
  auto place = [&at](std::uint64_t bytes) {
    std::uint64_t const where = at;
    at = round_up(at + bytes, kGranule);
    return where;
  };
  g.clients = place(kSlots * sizeof(ClientEntry));
  g.waiters = place(kWaitersMax * sizeof(WaiterEntry));
  g.owner_index = place(g.owner_buckets * sizeof(std::uint32_t));
  g.session_index = place(g.session_buckets * sizeof(std::uint32_t));
  g.journal = place(max_sessions * sizeof(std::uint32_t));
  g.owners = place(max_owners * sizeof(OwnerEntry));
  g.sessions = place(max_sessions * sizeof(SessionEntry));
  g.attachments = place(max_attachments * sizeof(Attachment));
  g.objects = place(max_objects * sizeof(ObjectEntry));
  g.granules = place(g.granule_count * sizeof(Granule));
  at = round_up(at, 2ull << 20);  // so that huge pages can back the payload where they are enabled
  g.payload = place(g.granule_count * kGranule);
  g.file_bytes = at;
  return g;
}

void Arena::validate_header(const std::string& file, std::uint64_t file_bytes) const {
  const Header& h = *header_;
  auto corrupt = [&file](const std::string& what) {
    throw Failure(Status::corrupt, file + " is not a sound arena: " + what);
  };
  if (h.magic != kMagic) corrupt("its first eight bytes are not those of an arena");
  if (h.layout_version != kLayoutVersion || h.abi_hash != kAbiHash)
    throw Failure(Status::layout_mismatch,
                  file + " has layout version " + std::to_string(h.layout_version) + " (ABI " +
                      std::to_string(h.abi_hash) + "), this build has " +
                      std::to_string(kLayoutVersion) + " (ABI " + std::to_string(kAbiHash) + ")");
  if (h.capacity < kCapacityMin || h.capacity > kCapacityMax)
    corrupt("its capacity is out of range");
  if (h.objects.limit < kRowsMin || h.objects.limit > kObjectsMax)
    corrupt("its object limit is out of range");
  if (h.sessions.limit < kRowsMin || h.sessions.limit > kSessionsMax)
    corrupt("its session limit is out of range");
  if (h.owners.limit < kRowsMin || h.owners.limit > kOwnersMax)
    corrupt("its owner limit is out of range");
  if (h.attachments.limit < kRowsMin || h.attachments.limit > 2 * (kObjectsMax + kSessionsMax))
    corrupt("its attachment limit is out of range");
  Geometry const g = Geometry::of(h.capacity, h.owners.limit, h.sessions.limit, h.attachments.limit,
                                  h.objects.limit);
  if (h.file_bytes != g.file_bytes || file_bytes != g.file_bytes)
    corrupt("it has " + std::to_string(file_bytes) + " bytes, its header asks for " +
            std::to_string(g.file_bytes) + " (truncated?)");
  if (h.header_bytes != sizeof(Header) || h.clients_offset != g.clients ||
      h.waiters_offset != g.waiters || h.owner_index_offset != g.owner_index ||
      h.session_index_offset != g.session_index || h.journal_offset != g.journal ||
      h.owners.offset != g.owners || h.sessions.offset != g.sessions ||
      h.attachments.offset != g.attachments || h.objects.offset != g.objects ||
      h.journal_table.offset != g.journal || h.payload.offset != g.granules ||
      h.payload_offset != g.payload || h.granules != g.granule_count ||
      h.payload.limit != g.granule_count || h.journal_table.limit != h.sessions.limit ||
      h.session_buckets != g.session_buckets || h.owner_buckets != g.owner_buckets)
    corrupt("its table offsets do not follow from its sizes");
  for (const Table* t :
       {&h.owners, &h.sessions, &h.attachments, &h.objects, &h.journal_table, &h.payload})
    if (t->used.get() > t->ready.get() || t->ready.get() > t->limit)
      corrupt("a table is over-full");
  if (h.arena_id == 0) corrupt("it has no id");
}

void Arena::map(int fd, const std::string& file) {
  fd_ = fd;
  path = file;
  try {
    struct stat info{};
    if (::fstat(fd, &info) != 0) throw_system("fstat", file);
    if (static_cast<std::uint64_t>(info.st_size) < sizeof(Header))
      throw Failure(Status::corrupt, file + " is not a sound arena: it has only " +
                                         std::to_string(info.st_size) + " bytes");
    file_bytes_ = static_cast<std::uint64_t>(info.st_size);
    void* const base =
        ::mmap(nullptr, file_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) throw_system("mmap", file);
    base_ = static_cast<std::byte*>(base);
    header_ = reinterpret_cast<Header*>(base_);
    validate_header(file, file_bytes_);
    const Header& h = *header_;
    granules_limit_ = h.granules;
    granule_offset_ = h.payload.offset;
    payload_offset_ = h.payload_offset;
    capacity_ = h.capacity;
    id_ = h.arena_id;
    objects_limit_ = h.objects.limit;
    sessions_limit_ = h.sessions.limit;
    owners_limit_ = h.owners.limit;
    attachments_limit_ = h.attachments.limit;
    session_buckets_ = h.session_buckets;
    owner_buckets_ = h.owner_buckets;
    payload_ = base_ + payload_offset_;
    clients_ = reinterpret_cast<ClientEntry*>(base_ + h.clients_offset);
    waiters_ = reinterpret_cast<WaiterEntry*>(base_ + h.waiters_offset);
    owner_index_ = reinterpret_cast<Cell<std::uint32_t>*>(base_ + h.owner_index_offset);
    session_index_ = reinterpret_cast<Cell<std::uint32_t>*>(base_ + h.session_index_offset);
    journal_ = reinterpret_cast<Cell<std::uint32_t>*>(base_ + h.journal_offset);
    owners_ = reinterpret_cast<OwnerEntry*>(base_ + h.owners.offset);
    sessions_ = reinterpret_cast<SessionEntry*>(base_ + h.sessions.offset);
    attachments_ = reinterpret_cast<Attachment*>(base_ + h.attachments.offset);
    objects_ = reinterpret_cast<ObjectEntry*>(base_ + h.objects.offset);
    granules_ = reinterpret_cast<Granule*>(base_ + h.payload.offset);
    void* const view = ::mmap(nullptr, payload_bytes(), PROT_READ, MAP_SHARED | MAP_NORESERVE, fd,
                              static_cast<off_t>(payload_offset_));
    if (view == MAP_FAILED) throw_system("mmap", file);
    payload_read_only_ = static_cast<const std::byte*>(view);
    // Fails harmlessly where the kernel has no huge pages for shared memory.
    (void)::madvise(payload_, payload_bytes(), MADV_HUGEPAGE);
  } catch (...) {
    unmap();
    throw;
  }
}

void Arena::unmap() noexcept {
  if (payload_read_only_ != nullptr)
    ::munmap(const_cast<std::byte*>(payload_read_only_), payload_bytes());
  if (base_ != nullptr) ::munmap(base_, file_bytes_);
  payload_read_only_ = nullptr;
  base_ = nullptr;
  header_ = nullptr;
  payload_ = nullptr;
  if (fd_ >= 0) ::close(fd_);
  if (lock_fd >= 0) ::close(lock_fd);  // drops this process's byte locks on it
  fd_ = lock_fd = -1;
}

void Arena::allocate_file_range(std::uint64_t offset, std::uint64_t bytes) const {
  std::uint64_t const from = offset / kGranule * kGranule;
  std::uint64_t const to = round_up(offset + bytes, kGranule);
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, static_cast<off_t>(from), static_cast<off_t>(to - from));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    int const error = errno;
    struct statvfs fs{};
    std::string figures;
    if (::fstatvfs(fd_, &fs) == 0)
      figures = ": " + std::to_string(fs.f_bavail * fs.f_frsize) + " of its " +
                std::to_string(fs.f_blocks * fs.f_frsize) + " bytes are free, " +
                std::to_string(to - from) + " more are needed (capacity " +
                std::to_string(capacity_) + ")";
    if (error == ENOSPC || error == ENOMEM || error == EDQUOT)
      throw Failure(Status::no_memory, "the file system under " + path + " is full" + figures);
    errno = error;
    throw_system("fallocate", path);
  }
  SHMRL_CRASH_POINT();
}

void Arena::ensure_ready(const Txn& txn, Table& table, std::uint64_t limit,
                         std::uint64_t entry_bytes, std::uint64_t count) {
  std::uint64_t const ready = table.ready.get();
  if (count <= ready) return;
  if (ready > limit || count > limit) throw_corrupt("a table size", ready);
  // Offsets are recomputed from the private geometry by comparing with what was validated at
  // attach; header fields that are not cells never change.
  std::uint64_t const begin = table.offset + ready * entry_bytes;
  std::uint64_t const end_wanted = table.offset + count * entry_bytes;
  std::uint64_t const end_limit = table.offset + limit * entry_bytes;
  if (end_limit > file_bytes_) throw_corrupt("a table offset", table.offset);
  std::uint64_t const end = std::min(
      end_limit, std::max(end_wanted, begin + kTableChunkBytes) / kGranule * kGranule + kGranule);
  allocate_file_range(begin, end - begin);
  table.ready.set(txn, std::min(limit, (end - table.offset) / entry_bytes));
}

std::uint32_t Arena::take_fresh(const Txn& txn, Table& table, std::uint64_t limit,
                                std::uint64_t entry_bytes) {
  std::uint64_t const used = table.used.get();
  if (used >= limit) return kNil;
  ensure_ready(txn, table, limit, entry_bytes, used + 1);
  table.used.set(txn, used + 1);
  return static_cast<std::uint32_t>(used);
}

void Arena::reserve_payload(std::uint64_t from, std::uint64_t to) const {
  allocate_file_range(granule_offset_ + from * sizeof(Granule), (to - from) * sizeof(Granule));
  allocate_file_range(payload_offset_ + from * kGranule, (to - from) * kGranule);
}

}  // namespace shmrl
