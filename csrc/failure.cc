#include "failure.h"

#include <cerrno>
#include <cstring>

namespace shmrl {

void throw_corrupt(const char* what, std::uint64_t value) {
  throw Failure(Status::corrupt, std::string("the arena is damaged: ") + what + " is " +
                                     std::to_string(value) +
                                     "; detach every process, remove it and create it anew");
}

void throw_system(const char* call, const std::string& subject) {
  int const error = errno;
  std::string text = std::string(call) + "(" + subject + ") failed: " + std::strerror(error);
  throw Failure(error == ENOSPC || error == ENOMEM ? Status::no_memory : Status::system_error,
                std::move(text));
}

std::string_view to_string(Status status) noexcept {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::not_found:
      return "not_found";
    case Status::exists:
      return "exists";
    case Status::bad_name:
      return "bad_name";
    case Status::bad_option:
      return "bad_option";
    case Status::layout_mismatch:
      return "layout_mismatch";
    case Status::foreign_user:
      return "foreign_user";
    case Status::corrupt:
      return "corrupt";
    case Status::superseded:
      return "superseded";
    case Status::clients_full:
      return "clients_full";
    case Status::no_memory:
      return "no_memory";
    case Status::system_error:
      return "system_error";
    case Status::closed:
      return "closed";
    case Status::forked:
      return "forked";
    case Status::stuck:
      return "stuck";
    case Status::full:
      return "full";
    case Status::too_large:
      return "too_large";
    case Status::objects_full:
      return "objects_full";
    case Status::freed:
      return "freed";
    case Status::not_sealed:
      return "not_sealed";
    case Status::bad_ref:
      return "bad_ref";
    case Status::foreign_ref:
      return "foreign_ref";
    case Status::bad_draft:
      return "bad_draft";
    case Status::interrupted:
      return "interrupted";
    case Status::bad_id:
      return "bad_id";
    case Status::session_exists:
      return "session_exists";
    case Status::session_released:
      return "session_released";
    case Status::not_owner:
      return "not_owner";
    case Status::bad_position:
      return "bad_position";
    case Status::sessions_full:
      return "sessions_full";
    case Status::owners_full:
      return "owners_full";
    case Status::attachments_full:
      return "attachments_full";
  }
  return "unknown";
}

}  // namespace shmrl
