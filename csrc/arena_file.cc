#include "arena_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>

#include "block_allocator.h"
#include "client_table.h"
#include "robust_lock.h"

namespace shmrl {
namespace {

constexpr const char* kLockSuffix = "~lock";
constexpr const char* kNewSuffix = "~new";
constexpr const char* kNewLockSuffix = "~newlock";

constexpr std::string_view kPrefix = "shmrl-";

std::string prefix() { return std::string(kPrefix) + std::to_string(::geteuid()) + "-"; }

// Calls visit(file name) for each file of a directory.
template <class Visit>
void for_each_file(const std::string& directory, Visit visit) {
  DIR* const dir = ::opendir(directory.c_str());
  if (dir == nullptr) throw_system("opendir", directory);
  while (const dirent* entry = ::readdir(dir)) visit(std::string_view(entry->d_name));
  ::closedir(dir);
}

std::int64_t unix_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Closes on leaving unless released.
class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

void unlink_if_there(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_system("unlink", path);
  SHMRL_CRASH_POINT();
}

void rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw_system("rename", to);
  SHMRL_CRASH_POINT();
}

int create_file(const std::string& path) {
  unlink_if_there(path);  // a crashed create left it: we hold the name's lock
  int const fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) throw_system("open", path);
  SHMRL_CRASH_POINT();
  return fd;
}

void require_space(const std::string& directory, std::uint64_t capacity) {
  struct statvfs fs{};
  if (::statvfs(directory.c_str(), &fs) != 0) throw_system("statvfs", directory);
  std::uint64_t const total = std::uint64_t{fs.f_blocks} * fs.f_frsize;
  if (total != 0 && capacity > total)
    throw Failure(
        Status::no_memory,
        directory + " has " + std::to_string(total) + " bytes in all, too few for a capacity of " +
            std::to_string(capacity) +
            "; ask for less, or enlarge it (docker run --shm-size, mount -o remount,size=)");
}

std::uint64_t random_id() {
  std::uint64_t id = 0;
  while (id == 0)
    if (::getrandom(&id, sizeof id, 0) != sizeof id) throw_system("getrandom", "arena id");
  return id;
}

// Fixed fields and empty tables, in a file that nobody else can open yet.
void write_header(int fd, const std::string& path, const Options& o, std::uint64_t max_attachments,
                  std::uint64_t lock_inode) {
  Geometry const g =
      Geometry::of(o.capacity, o.max_owners, o.max_sessions, max_attachments, o.max_objects);
  if (::ftruncate(fd, static_cast<off_t>(g.file_bytes)) != 0) throw_system("ftruncate", path);
  // Everything up to the growable tables. The journal too: a release must not need memory.
  if (int const error = ::posix_fallocate(fd, 0, static_cast<off_t>(g.owners)); error != 0) {
    errno = error;
    throw_system("fallocate", path);
  }
  Header h{};
  h.magic = kMagic;
  h.layout_version = kLayoutVersion;
  h.header_bytes = sizeof(Header);
  h.abi_hash = kAbiHash;
  h.arena_id = random_id();
  h.file_bytes = g.file_bytes;
  h.capacity = o.capacity;
  h.lock_inode = lock_inode;
  h.granules = g.granule_count;
  h.payload_offset = g.payload;
  h.creator_pid = ::getpid();
  h.created_unix_ns = unix_ns();
  h.uid = ::geteuid();
  h.session_buckets = g.session_buckets;
  h.owner_buckets = g.owner_buckets;
  h.clients_offset = g.clients;
  h.waiters_offset = g.waiters;
  h.session_index_offset = g.session_index;
  h.owner_index_offset = g.owner_index;
  h.journal_offset = g.journal;
  auto table = [](Table& t, std::uint64_t offset, std::uint64_t limit) {
    t.offset = offset;
    t.limit = limit;
  };
  table(h.owners, g.owners, o.max_owners);
  table(h.sessions, g.sessions, o.max_sessions);
  table(h.attachments, g.attachments, max_attachments);
  table(h.objects, g.objects, o.max_objects);
  table(h.journal_table, g.journal, o.max_sessions);
  h.journal_table.ready.init(o.max_sessions);
  table(h.payload, g.granules, g.granule_count);
  h.next_generation.init(1);
  h.next_opened.init(1);
  h.next_ticket.init(1);
  h.free_object.init(kNil);
  h.free_attachment.init(kNil);
  h.free_session.init(kNil);
  h.free_owner.init(kNil);
  for (auto& bin : h.bins) bin.init(kNil);
  for (auto& slab : h.slabs) slab.init(kNil);
  if (::pwrite(fd, &h, sizeof h, 0) != static_cast<ssize_t>(sizeof h)) throw_system("pwrite", path);
  SHMRL_CRASH_POINT();
  std::vector<std::uint32_t> const nils(std::max(g.session_buckets, g.owner_buckets), kNil);
  for (auto [offset, count] :
       {std::pair{g.owner_index, g.owner_buckets}, std::pair{g.session_index, g.session_buckets}}) {
    auto const bytes = count * sizeof(std::uint32_t);
    if (::pwrite(fd, nils.data(), bytes, static_cast<off_t>(offset)) != static_cast<ssize_t>(bytes))
      throw_system("pwrite", path);
  }
  SHMRL_CRASH_POINT();
}

}  // namespace

bool valid_arena_name(std::string_view name) noexcept {
  if (name.empty() || name.size() > kArenaNameMax || name[0] == '.' || name[0] == '-') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

std::string arena_path(const std::string& directory, std::string_view name) {
  return directory + "/" + prefix() + std::string(name);
}

bool file_id(const std::string& path, FileId& out) noexcept {
  struct stat info{};
  if (::lstat(path.c_str(), &info) != 0) return false;
  out = {info.st_dev, info.st_ino};
  return true;
}

std::string lock_path(const std::string& arena_path) { return arena_path + kLockSuffix; }

void create_arena_file(Arena& arena, const std::string& name, const Options& options) {
  require_space(options.directory, options.capacity);
  std::string const path = arena_path(options.directory, name);
  Descriptor lock(create_file(path + kNewLockSuffix));
  struct stat lock_info{};
  if (::fstat(lock.get(), &lock_info) != 0) throw_system("fstat", path + kNewLockSuffix);
  try {
    Descriptor file(create_file(path + kNewSuffix));
    std::uint64_t const max_attachments = options.max_attachments != 0
                                              ? options.max_attachments
                                              : options.max_objects + options.max_sessions;
    write_header(file.get(), path, options, max_attachments, lock_info.st_ino);
    arena.map(file.release(), path);
    arena.name = name;
    arena.lock_limit_ns = options.lock_limit_ns;
    arena.lock_fd = lock.release();
    join_unpublished(arena);
    Growth const first = plan_growth(arena, 0);
    arena.reserve_payload(first.from, first.to);
    {
      Txn txn(arena);
      commit_growth(arena, txn, first);
    }
    rename_file(path + kNewLockSuffix, path + kLockSuffix);
    rename_file(path + kNewSuffix, path);
  } catch (...) {
    arena.unmap();
    ::unlink((path + kNewSuffix).c_str());
    ::unlink((path + kNewLockSuffix).c_str());
    throw;
  }
}

Failure no_arena(const std::string& directory, const std::string& name) {
  std::string user;
  for_each_file(directory, [&](std::string_view file) {
    if (!file.starts_with(kPrefix) || !file.ends_with("-" + name)) return;
    std::size_t const length = file.size() - kPrefix.size() - name.size() - 1;
    if (length >= file.size()) return;  // the prefix and the name overlap
    std::string_view const uid = file.substr(kPrefix.size(), length);
    if (uid.find_first_not_of("0123456789") == std::string_view::npos) user = uid;
  });
  std::string const none = "there is no arena \"" + name + "\" of this user in " + directory;
  if (user.empty()) return {Status::not_found, none};
  return {Status::foreign_user, none + "; that of user " + user + " may not be used"};
}

void open_arena_file(Arena& arena, const std::string& name, const std::string& directory) {
  std::string const path = arena_path(directory, name);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0) {
    if (errno == ENOENT) throw no_arena(directory, name);
    if (errno == EACCES || errno == ELOOP)
      throw Failure(Status::foreign_user, path + " is not a file that this user may use");
    throw_system("open", path);
  }
  struct stat info{};
  if (::fstat(file.get(), &info) != 0) throw_system("fstat", path);
  if (info.st_uid != ::geteuid())
    throw Failure(Status::foreign_user, path + " belongs to user " + std::to_string(info.st_uid) +
                                            ", this process runs as " +
                                            std::to_string(::geteuid()));
  if (!S_ISREG(info.st_mode)) throw Failure(Status::corrupt, path + " is not a regular file");
  arena.map(file.release(), path);
  arena.name = name;
  try {
    std::string const lock_path = path + kLockSuffix;
    Descriptor lock(::open(lock_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (lock.get() < 0) {
      if (errno == ENOENT) throw Failure(Status::corrupt, path + " has lost its lock file");
      throw_system("open", lock_path);
    }
    struct stat lock_info{};
    if (::fstat(lock.get(), &lock_info) != 0) throw_system("fstat", lock_path);
    if (lock_info.st_ino != arena.header().lock_inode)
      throw Failure(Status::corrupt, lock_path + " is not the lock file of that arena");
    arena.lock_fd = lock.release();
  } catch (...) {
    arena.unmap();
    throw;
  }
}

void remove_arena_files(const std::string& directory, std::string_view name) {
  std::string const path = arena_path(directory, name);
  unlink_if_there(path);
  unlink_if_there(lock_path(path));
}

namespace {

std::uint32_t count_lock_holders(const std::string& path, const OpenHere& open_here) {
  FileId id;
  if (!file_id(path, id)) return 0;
  if (open_here(id) != nullptr) return 1;  // ours; opening and closing it would drop our locks
  Arena probe;
  probe.lock_fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  std::uint32_t holders = 0;
  for (std::uint32_t slot = 1; probe.lock_fd >= 0 && slot < kSlots; ++slot)
    if (client_alive(probe, slot)) ++holders;
  return holders;
}

}  // namespace

ArenaInfo inspect_arena(const std::string& directory, const std::string& name,
                        const OpenHere& open_here) {
  ArenaInfo info;
  info.name = name;
  info.path = arena_path(directory, name);
  FileId id;
  try {
    if (!file_id(info.path, id)) throw Failure(Status::not_found, "no such arena");
    struct stat file{};
    if (::lstat(info.path.c_str(), &file) == 0)
      info.file_bytes = static_cast<std::uint64_t>(file.st_blocks) * 512;
    auto describe = [&info](const Arena& arena) {
      const Header& h = arena.header();
      info.arena_id = arena.id();
      info.capacity = arena.capacity();
      info.creator_pid = h.creator_pid;
      info.created_unix_ns = h.created_unix_ns;
      for (std::uint32_t slot = 1; slot < kSlots; ++slot)
        if (client_alive(arena, slot)) ++info.live_clients;
    };
    if (const Arena* open = open_here(id); open != nullptr) {
      describe(*open);
    } else {
      Arena arena;
      open_arena_file(arena, name, directory);
      arena.set_slot(0);  // not a client: every byte lock is somebody else's
      describe(arena);
    }
  } catch (const Failure& failure) {
    info.status = failure.status();
    info.detail = failure.text();
    // Damaged, or of another version: its clients may be alive all the same.
    info.live_clients = count_lock_holders(lock_path(info.path), open_here);
  }
  return info;
}

NamesFound find_names(const std::string& directory) {
  std::set<std::string> arenas, others;
  std::string const begin = prefix();
  for_each_file(directory, [&](std::string_view file) {
    if (!file.starts_with(begin)) return;
    std::string const name(file.substr(begin.size(), file.find('~') - begin.size()));
    if (!valid_arena_name(name)) return;
    (file.find('~') == std::string_view::npos ? arenas : others).insert(name);
  });
  NamesFound found;
  found.arenas.assign(arenas.begin(), arenas.end());
  std::set_difference(others.begin(), others.end(), arenas.begin(), arenas.end(),
                      std::back_inserter(found.partial));
  return found;
}

std::vector<std::string> leftovers_of(const std::string& directory, const std::string& name) {
  std::string const path = arena_path(directory, name);
  FileId there;
  std::vector<std::string> found;
  for (const char* suffix : {kNewSuffix, kNewLockSuffix})
    if (file_id(path + suffix, there)) found.push_back(path + suffix);
  if (!file_id(path, there) && file_id(path + kLockSuffix, there))
    found.push_back(path + kLockSuffix);
  return found;
}

}  // namespace shmrl
