// The lock on one arena name: held by whoever creates, joins or removes an arena of that name.
//
// It is a kernel lock (flock) on the file NAME~name beside the arena, which exists only while
// somebody holds or wants it, and dies with its holder. So between "this is debris" and "it is
// removed" no successor can appear, half-built files without a holder are debris by definition,
// and a process that is stopped while it creates "a" delays nobody but those who want "a".
//
// Lock order: name lock < registry mutex < arena lock < record lock.
#pragma once

#include <cstdint>
#include <string>

namespace shmrl {

inline constexpr std::int64_t kNameWaitNs = 30'000'000'000;

class NameLock {
 public:
  // Throws Failure(stuck), which names the holder, after `wait_ns`.
  NameLock(const std::string& directory, const std::string& name,
           std::int64_t wait_ns = kNameWaitNs);
  ~NameLock();
  NameLock(const NameLock&) = delete;
  NameLock& operator=(const NameLock&) = delete;

 private:
  bool try_lock();

  std::string path_;
  int fd_ = -1;
};

// Whether somebody holds the lock on that name now. The registry mutex is held, so that no fork
// child inherits the descriptor that looks.
bool name_is_locked(const std::string& directory, const std::string& name);

}  // namespace shmrl
