// How the layers below the facade report what a caller cannot be expected to test for at every
// step: a scribbled arena, a failed system call, a lock that cannot be had. The facade turns a
// Failure into its Status and text; it never leaves csrc/.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "store.h"

namespace shmrl {

class Failure : public std::exception {
 public:
  Failure(Status status, std::string text) : status_(status), text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }
  Status status() const noexcept { return status_; }
  const std::string& text() const noexcept { return text_; }

 private:
  Status status_;
  std::string text_;
};

[[noreturn]] void throw_corrupt(const char* what, std::uint64_t value);
// errno is taken at the call.
[[noreturn]] void throw_system(const char* call, const std::string& subject);

}  // namespace shmrl
