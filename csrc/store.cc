#include "store.h"

#include "client_table.h"
#include "store_call.h"

namespace shmrl {
namespace {

constexpr std::int64_t kSweepEveryNs = 5'000'000;  // how often hot calls look for deaths

thread_local std::string t_detail;

}  // namespace

// -- store_call.h --------------------------------------------------------------

Status fail(Status status, std::string text) {
  t_detail = std::move(text);
  return status;
}

Status closed_or_forked(Status status) {
  return fail(
      status,
      status == Status::forked
          ? "this handle was inherited through fork(); attach to the arena again in the child"
          : "this store is closed");
}

Status bad_name_detail(std::string_view what, std::string_view given) {
  return fail(Status::bad_id, std::string(what) + " must be 1 to " + std::to_string(kNameBytesMax) +
                                  " bytes of UTF-8 without NUL; got " +
                                  std::to_string(given.size()) + " bytes");
}

Status gone(std::string_view id) {
  return fail(Status::session_released, "there is no live session \"" + std::string(id) + "\"");
}

Status describe_ref(Status status) {
  switch (status) {
    case Status::freed:
      return fail(status, "the object has ended");
    case Status::not_sealed:
      return fail(status, "the object is still being built");
    case Status::bad_ref:
      return fail(status, "this arena never handed out such a ref");
    case Status::foreign_ref:
      return fail(status, "the ref belongs to another arena");
    case Status::closed:
    case Status::forked:
      return closed_or_forked(status);
    default:
      return status;
  }
}

void sweep_now(ProcessArena& process) {
  ClientMask dead;
  if (!find_dead(process.arena, dead)) return;
  Txn txn(process.arena);
  SweepReport report;
  sweep_dead(process.arena, txn, report);
}

void sweep_sometimes(ProcessArena& process) {
  std::int64_t const now = monotonic_ns();
  // Relaxed: two threads that both look do no harm.
  if (now < process.next_probe_ns.load(std::memory_order_relaxed)) return;
  process.next_probe_ns.store(now + kSweepEveryNs, std::memory_order_relaxed);
  sweep_now(process);
}

const std::string& Store::detail() noexcept { return t_detail; }
std::uint32_t layout_version() noexcept { return kLayoutVersion; }
std::uint64_t abi_hash() noexcept { return kAbiHash; }

// -- Hold, Pin, Draft ----------------------------------------------------------

void Hold::reset() noexcept {
  if (ProcessArena* const process = std::exchange(arena_, nullptr); process != nullptr)
    process->drop(ref_, epoch_);
}

void Pin::reset() noexcept {
  if (ProcessArena* const process = std::exchange(arena_, nullptr); process != nullptr)
    process->unpin(ref_, false);
}

void Draft::reset() noexcept {
  ProcessArena* const process = std::exchange(arena_, nullptr);
  if (process == nullptr) return;
  process->drop(ref_, epoch_);
  process->unpin(ref_, true);  // the last pin of an unsealed object ends it
}

// -- arenas by name ------------------------------------------------------------

namespace {

Status check_name(std::string_view name) {
  if (valid_arena_name(name)) return Status::ok;
  return fail(Status::bad_name,
              "an arena name is 1 to " + std::to_string(kArenaNameMax) +
                  " of A-Z a-z 0-9 . _ - and begins with a letter, a digit or _; got \"" +
                  std::string(name.substr(0, 80)) + "\"");
}

Status check_range(const char* what, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return Status::ok;
  return fail(Status::bad_option, std::string(what) + " must be " + std::to_string(low) + " to " +
                                      std::to_string(high) + ", got " + std::to_string(value));
}

Status check_options(const Options& o) {
  if (Status s = check_range("capacity", o.capacity, kCapacityMin, kCapacityMax); s != Status::ok)
    return s;
  if (Status s = check_range("max_objects", o.max_objects, kRowsMin, kObjectsMax); s != Status::ok)
    return s;
  if (Status s = check_range("max_sessions", o.max_sessions, kRowsMin, kSessionsMax);
      s != Status::ok)
    return s;
  if (Status s = check_range("max_owners", o.max_owners, kRowsMin, kOwnersMax); s != Status::ok)
    return s;
  if (o.max_attachments == 0) return Status::ok;
  return check_range("max_attachments", o.max_attachments, kRowsMin,
                     2 * (kObjectsMax + kSessionsMax));
}

}  // namespace

Status Store::create(std::string_view name, const Options& options, std::unique_ptr<Store>& out) {
  return guarded([&] {
    if (Status s = check_name(name); s != Status::ok) return s;
    if (Status s = check_options(options); s != Status::ok) return s;
    out.reset(new Store(ProcessArena::create(std::string(name), options)));
    return Status::ok;
  });
}

Status Store::attach(std::string_view name, const AttachOptions& options,
                     std::unique_ptr<Store>& out) {
  return guarded([&] {
    if (Status s = check_name(name); s != Status::ok) return s;
    out.reset(new Store(ProcessArena::attach(std::string(name), options)));
    return Status::ok;
  });
}

Status Store::unlink(std::string_view name, const std::string& directory) {
  return guarded([&] {
    if (Status s = check_name(name); s != Status::ok) return s;
    return ProcessArena::unlink(std::string(name), directory);
  });
}

Status Store::list(std::vector<ArenaInfo>& out, const std::string& directory) {
  out.clear();
  return guarded([&] {
    out = ProcessArena::list(directory);
    return Status::ok;
  });
}

Status Store::remove_debris(std::vector<ArenaInfo>& out, const std::string& directory) {
  out.clear();
  return guarded([&] {
    out = ProcessArena::remove_debris(directory);
    return Status::ok;
  });
}

Store::~Store() {
  close();
  arena_->destroy_store();
}

void Store::close() noexcept {
  if (open_.exchange(false, std::memory_order_seq_cst)) arena_->close_handle();
}

void Store::abandon() noexcept { arena_->abandon(); }

bool Store::is_open() const noexcept {
  return open_.load(std::memory_order_seq_cst) && !arena_->forked() &&
         arena_->usable.load(std::memory_order_seq_cst);
}

bool Store::in_calls() const noexcept { return arena_->active.load(std::memory_order_seq_cst) > 0; }

std::uint64_t Store::arena_id() const noexcept { return arena_->arena.id(); }
const std::string& Store::name() const noexcept { return arena_->arena.name; }
const std::string& Store::path() const noexcept { return arena_->arena.path; }
std::uint64_t Store::capacity() const noexcept { return arena_->arena.capacity(); }
std::uint32_t Store::client_slot() const noexcept { return arena_->arena.slot(); }

std::span<const std::byte> Store::payload_mapping() const noexcept {
  return {arena_->arena.payload_read_only(), arena_->arena.payload_bytes()};
}
std::byte* Store::payload_writable() const noexcept { return arena_->arena.payload(); }
std::uint64_t Store::payload_committed() const noexcept {
  return arena_->arena.mapped() ? arena_->arena.granules_ready() * kGranule : 0;
}

}  // namespace shmrl
