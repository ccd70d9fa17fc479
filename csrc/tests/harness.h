// What the C++ tests share: checks that print where they failed, children that die on purpose, and
// arenas whose names nobody else uses. No framework: a test is a function, a failure ends the
// program.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "store.h"

namespace shmrl::test {

[[noreturn]] inline void fail_at(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  ::_exit(1);
}

#define EXPECT(condition)                                                                  \
  do {                                                                                     \
    if (!(condition)) ::shmrl::test::fail_at(__FILE__, __LINE__, "expected: " #condition); \
  } while (0)

#define EXPECT_STATUS(expected, call)                                              \
  do {                                                                             \
    ::shmrl::Status const status_ = (call);                                        \
    if (status_ != (expected))                                                     \
      ::shmrl::test::fail_at(__FILE__, __LINE__,                                   \
                             std::string(#call " answered ") +                     \
                                 std::string(::shmrl::to_string(status_)) + ": " + \
                                 ::shmrl::Store::detail());                        \
  } while (0)

#define OK(call) EXPECT_STATUS(::shmrl::Status::ok, call)

#define EXPECT_SOUND(store)                                                        \
  do {                                                                             \
    std::vector<std::string> problems_;                                            \
    OK((store).check(problems_));                                                  \
    if (!problems_.empty())                                                        \
      ::shmrl::test::fail_at(__FILE__, __LINE__,                                   \
                             "check(): " + problems_.front() + " (and " +          \
                                 std::to_string(problems_.size() - 1) + " more)"); \
  } while (0)

inline std::string unique_name(const char* what) {
  static int count = 0;
  return std::string(what) + "-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

// A child process that runs `body` and exits with 0. Returns its pid.
inline pid_t start(const std::function<void()>& body) {
  std::fflush(nullptr);
  pid_t const pid = ::fork();
  EXPECT(pid >= 0);
  if (pid == 0) {
    body();
    std::fflush(nullptr);
    ::_exit(0);
  }
  return pid;
}

inline int wait_for(pid_t pid) {
  int status = 0;
  EXPECT(::waitpid(pid, &status, 0) == pid);
  return status;
}

inline bool was_killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
inline bool exited_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

[[noreturn]] inline void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

// A one-way channel between a test and its child.
class Pipe {
 public:
  Pipe() { EXPECT(::pipe(ends_) == 0); }
  ~Pipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  template <class T>
  void send(const T& value) {
    EXPECT(::write(ends_[1], &value, sizeof value) == static_cast<ssize_t>(sizeof value));
  }
  template <class T>
  T receive() {
    T value{};
    EXPECT(::read(ends_[0], &value, sizeof value) == static_cast<ssize_t>(sizeof value));
    return value;
  }
  void send_text(const std::string& text) {
    send(text.size());
    for (std::size_t at = 0; at < text.size();) {
      ssize_t const n = ::write(ends_[1], text.data() + at, text.size() - at);
      EXPECT(n > 0);
      at += static_cast<std::size_t>(n);
    }
  }
  std::string receive_text() {
    std::string text(receive<std::size_t>(), '\0');
    for (std::size_t at = 0; at < text.size();) {
      ssize_t const n = ::read(ends_[0], text.data() + at, text.size() - at);
      EXPECT(n > 0);
      at += static_cast<std::size_t>(n);
    }
    return text;
  }

 private:
  int ends_[2];
};

inline std::unique_ptr<Store> create(const std::string& name, Options options = {}) {
  std::unique_ptr<Store> store;
  OK(Store::create(name, options, store));
  return store;
}
inline std::unique_ptr<Store> attach(const std::string& name, AttachOptions options = {}) {
  std::unique_ptr<Store> store;
  OK(Store::attach(name, options, store));
  return store;
}

// A sealed object filled with `fill`.
inline Hold put(Store& store, std::uint64_t size, int fill, std::string_view session = {},
                std::int32_t parent = -1) {
  Draft draft;
  OK(session.empty() ? store.reserve(size, Wait{}, draft)
                     : store.reserve(size, session, Wait{}, draft));
  std::memset(draft.data(), fill, size);
  Hold hold;
  OK(store.seal(draft, &hold, parent));
  return hold;
}

// Whether every byte is `fill`.
inline bool holds_only(const Pin& pin, int fill) {
  for (std::uint64_t i = 0; i < pin.size(); ++i)
    if (pin.data()[i] != static_cast<std::byte>(fill)) return false;
  return true;
}

using Ids = std::vector<std::string_view>;

}  // namespace shmrl::test
