#include "name_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "registry.h"
#include "robust_lock.h"

namespace shmrl {
namespace {

constexpr timespec kPause{0, 500'000};

std::string lock_file(const std::string& directory, const std::string& name) {
  return arena_path(directory, name) + kNameSuffix;
}

// Known to the registry from the first moment, so that no fork child keeps it.
int open_registered(const std::string& path) {
  std::scoped_lock const guard(registry().mutex);
  int const fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    if (errno == EACCES || errno == ELOOP)
      throw Failure(Status::foreign_user, path + " is not a file that this user may use");
    throw_system("open", path);
  }
  SHMRL_CRASH_POINT();
  registry().name_locks.push_back(fd);
  return fd;
}

void close_registered(int fd) noexcept {
  std::scoped_lock const guard(registry().mutex);
  std::erase(registry().name_locks, fd);
  ::close(fd);
}

// "process N" that has the flock on this file, as the kernel tells it.
std::string holder_of(const std::string& path) {
  FileId id;
  if (!file_id(path, id)) return "another process";
  std::string const wanted = ":" + std::to_string(id.inode) + " ";
  std::ifstream locks("/proc/locks");
  // "5: FLOCK  ADVISORY  WRITE 1234 fe:00:2318 0 EOF"
  for (std::string line; std::getline(locks, line);) {
    if (line.find("FLOCK") == std::string::npos || line.find(wanted) == std::string::npos) continue;
    std::size_t const at = line.find("WRITE ");
    if (at == std::string::npos || line.find("->") != std::string::npos) continue;
    return "process " + line.substr(at + 6, line.find(' ', at + 6) - at - 6);
  }
  return "another process";
}

}  // namespace

NameLock::NameLock(const std::string& directory, const std::string& name, std::int64_t wait_ns)
    : path_(lock_file(directory, name)) {
  std::int64_t const deadline = monotonic_ns() + wait_ns;
  // flock has no time-out of its own; a holder keeps it for the time of one create or join.
  while (!try_lock()) {
    if (monotonic_ns() >= deadline)
      throw Failure(Status::stuck, holder_of(path_) + " has been creating, joining or removing \"" +
                                       name + "\" in " + directory + " for " +
                                       std::to_string(wait_ns / 1'000'000) +
                                       " ms: is it stopped (SIGSTOP, debugger)?");
    ::nanosleep(&kPause, nullptr);
  }
}

bool NameLock::try_lock() {
  for (;;) {
    int const fd = open_registered(path_);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      int const error = errno;
      close_registered(fd);
      if (error == EWOULDBLOCK || error == EINTR) return false;
      errno = error;
      throw_system("flock", path_);
    }
    // A holder removes the file before it lets go: ours may have lost its name meanwhile.
    struct stat locked{};
    FileId named;
    if (::fstat(fd, &locked) == 0 && file_id(path_, named) &&
        named == FileId{locked.st_dev, locked.st_ino}) {
      fd_ = fd;
      return true;
    }
    close_registered(fd);
  }
}

NameLock::~NameLock() {
  ::unlink(path_.c_str());
  SHMRL_CRASH_POINT();
  close_registered(fd_);
}

bool name_is_locked(const std::string& directory, const std::string& name) {
  std::string const path = lock_file(directory, name);
  int const fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  bool const locked = ::flock(fd, LOCK_SH | LOCK_NB) != 0;
  ::close(fd);
  return locked;
}

}  // namespace shmrl
