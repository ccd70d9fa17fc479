// What every operation of the facade begins with: the handle is good, failures become a Status, and
// the dead are swept where the answer depends on it.
//
// Owns nothing. For store*.cc only.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "process_arena.h"
#include "store.h"

namespace shmrl {

inline constexpr const char* kAttachmentsFull =
    "all attachment entries are in use; release sessions, or create the arena with more "
    "max_attachments";

// Remembers the sentence for Store::detail() of this thread.
Status fail(Status status, std::string text);
Status closed_or_forked(Status status);
Status bad_name_detail(std::string_view what, std::string_view given);
Status gone(std::string_view session);
Status describe_ref(Status status);

// Runs `body` (which returns a Status) and turns what is thrown into one.
template <class Body>
Status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const Failure& failure) {
    return fail(failure.status(), failure.text());
  } catch (const std::exception& error) {  // bad_alloc
    return fail(Status::system_error, error.what());
  }
}

class Deadline {
 public:
  explicit Deadline(const Wait& wait)
      : wait_(wait), at_(wait.timeout_ns > 0 ? monotonic_ns() + wait.timeout_ns : 0) {}
  bool none() const { return wait_.timeout_ns == 0; }
  bool over() const { return none() || (wait_.timeout_ns > 0 && monotonic_ns() >= at_); }
  // At most `slice_ns`, at most what is left.
  std::int64_t slice(std::int64_t slice_ns) const {
    if (wait_.timeout_ns < 0) return slice_ns;
    return std::clamp<std::int64_t>(at_ - monotonic_ns(), 0, slice_ns);
  }
  bool interrupted(const ProcessArena& process) const { return process.run_callback(wait_); }

 private:
  const Wait& wait_;
  std::int64_t at_;
};

// Repairs after deaths before an operation whose answer depends on it. No lock unless there is one.
void sweep_now(ProcessArena& process);
// The same at most every few milliseconds, for calls that must stay cheap.
void sweep_sometimes(ProcessArena& process);

// Every call on a handle: not closed, not inherited, and failures become a Status.
template <class Body>
Status Store::call(Body body) noexcept {
  Call const call(*arena_, Call::Need::usable);
  if (call.status() != Status::ok) return closed_or_forked(call.status());
  if (!open_.load(std::memory_order_seq_cst)) return closed_or_forked(Status::closed);
  return guarded([&] { return body(*arena_, arena_->arena); });
}

}  // namespace shmrl
