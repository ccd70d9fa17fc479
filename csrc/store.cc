#include "store.h"

#include <algorithm>
#include <array>
#include <bit>
#include <unordered_set>

#include "audit.h"
#include "client_table.h"
#include "object_table.h"
#include "process_arena.h"
#include "session_table.h"

namespace shmrl {

namespace os = object_state;

namespace {

constexpr std::int64_t kSealProbeNs =
    10'000'000;  // how often a sleeper asks whether its builder lives
constexpr std::int64_t kSpaceProbeNs = 50'000'000;  // likewise a reservation that waits for space
constexpr std::int64_t kSweepEveryNs = 5'000'000;   // how often hot calls look for deaths
constexpr std::size_t kSmallBatch = 64;

thread_local std::string t_detail;

Status fail(Status status, std::string text) {
  t_detail = std::move(text);
  return status;
}

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
void sweep_now(ProcessArena& process) {
  ClientMask dead;
  if (!find_dead(process.arena, dead)) return;
  Txn txn(process.arena);
  SweepReport report;
  sweep_dead(process.arena, txn, report);
}

// The same at most every kSweepEveryNs, for calls that must stay cheap.
void sweep_sometimes(ProcessArena& process) {
  std::int64_t const now = monotonic_ns();
  // Relaxed: two threads that both look do no harm.
  if (now < process.next_probe_ns.load(std::memory_order_relaxed)) return;
  process.next_probe_ns.store(now + kSweepEveryNs, std::memory_order_relaxed);
  sweep_now(process);
}

std::vector<OwnerUsage> usage_by_owner(const Arena& arena) {
  std::vector<OwnerUsage> result;
  for (std::uint32_t i = 0; i < arena.owners_used(); ++i) {
    OwnerEntry& o = arena.owner(i);
    std::uint32_t bound = 0;
    for (const auto& word : o.bound) bound += static_cast<std::uint32_t>(std::popcount(word.get()));
    if (o.used.get() == 0 || (o.sessions.get() == 0 && bound == 0)) continue;
    OwnerUsage& usage = result.emplace_back();
    usage.owner = o.name.view();
    usage.sessions = o.sessions.get();
    usage.objects = o.objects.get();
    usage.bytes = o.bytes.get();
    usage.bound_clients = bound;
    if (o.heir.get() != kNil) usage.heir = arena.owner(o.heir.get()).name.view();
  }
  return result;
}

std::vector<ClientUsage> usage_by_client(const Arena& arena) {
  std::vector<ClientUsage> result;
  for (std::uint32_t slot = 1; slot < kSlots; ++slot) {
    if ((arena.header().live[slot / 64].get() >> (slot % 64) & 1) == 0) continue;
    ClientUsage& usage = result.emplace_back();
    usage.slot = slot;
    usage.pid = arena.client(slot).pid.get();
    usage.self = slot == arena.slot;
    usage.pins = arena.client(slot).pinned.load(std::memory_order_relaxed);
  }
  return result;
}

// used, free, largest_free: the slack beyond the capacity is not shown.
void space_figures(const Arena& arena, std::uint64_t& used, std::uint64_t& free,
                   std::uint64_t& largest) {
  used = std::min(arena.header().used_bytes.get(), arena.capacity());
  free = arena.capacity() - used;
  largest = std::min(largest_free_bytes(arena), free);
}

}  // namespace

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
  if (Status s = check_range("max_objects", o.max_objects, 16, kObjectsMax); s != Status::ok)
    return s;
  if (Status s = check_range("max_sessions", o.max_sessions, 16, kSessionsMax); s != Status::ok)
    return s;
  if (Status s = check_range("max_owners", o.max_owners, 16, kOwnersMax); s != Status::ok) return s;
  if (o.max_attachments == 0) return Status::ok;
  return check_range("max_attachments", o.max_attachments, 16, 2 * (kObjectsMax + kSessionsMax));
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

std::vector<ArenaInfo> Store::list(const std::string& directory) {
  std::vector<ArenaInfo> result;
  (void)guarded([&] {
    result = ProcessArena::list(directory);
    return Status::ok;
  });
  return result;
}

std::vector<ArenaInfo> Store::remove_debris(const std::string& directory) {
  std::vector<ArenaInfo> result;
  (void)guarded([&] {
    result = ProcessArena::remove_debris(directory);
    return Status::ok;
  });
  return result;
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

std::uint64_t Store::arena_id() const noexcept { return arena_->arena.id(); }
const std::string& Store::name() const noexcept { return arena_->arena.name; }
const std::string& Store::path() const noexcept { return arena_->arena.path; }
std::uint64_t Store::capacity() const noexcept { return arena_->arena.capacity(); }
std::uint32_t Store::client_slot() const noexcept { return arena_->arena.slot; }

std::span<const std::byte> Store::payload_mapping() const noexcept {
  return {arena_->arena.payload_read_only(), arena_->arena.payload_bytes()};
}
std::byte* Store::payload_writable() const noexcept { return arena_->arena.payload(); }
std::uint64_t Store::payload_committed() const noexcept {
  return arena_->arena.mapped() ? arena_->arena.granules_ready() * kGranule : 0;
}

// Every call on a handle: not closed, not inherited, and failures become a Status.
template <class Body>
Status Store::call(Body body) noexcept {
  Call const call(*arena_, Call::Need::usable);
  if (call.status() != Status::ok) return closed_or_forked(call.status());
  if (!open_.load(std::memory_order_seq_cst)) return closed_or_forked(Status::closed);
  return guarded([&] { return body(*arena_, arena_->arena); });
}

// -- reservations --------------------------------------------------------------

namespace {

// One reservation's place in the queue for space. Tickets are served in order: nobody overtakes.
class QueuePlace {
 public:
  explicit QueuePlace(Arena& arena) : arena_(arena) {}

  bool taken() const { return index_ != kNil; }
  bool is_first() const {
    std::uint64_t const mine = taken() ? arena_.waiter(index_).ticket.get() : UINT64_MAX;
    for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
      std::uint64_t const ticket = arena_.waiter(i).ticket.get();
      if (ticket != 0 && ticket < mine) return false;
    }
    return true;
  }
  bool take(const Txn& txn, std::uint64_t size) {
    Header& h = arena_.header();
    for (std::uint32_t i = 0; i < kWaitersMax; ++i) {
      WaiterEntry& w = arena_.waiter(i);
      if (w.ticket.get() != 0) continue;
      w.size.set(txn, size);
      w.slot.set(txn, arena_.slot);
      w.wake.store(0, std::memory_order_relaxed);
      std::uint64_t const ticket = h.next_ticket.get();
      h.next_ticket.set(txn, ticket + 1);
      w.ticket.set(txn, ticket);  // commits
      h.waiters.add(txn, 1);
      h.full_waits.add(txn, 1);
      index_ = i;
      return true;
    }
    return false;
  }
  void give_up(const Txn& txn) {
    if (!taken()) return;
    arena_.waiter(index_).ticket.set(txn, 0);
    arena_.header().waiters.add(txn, static_cast<std::uint64_t>(-1));
    index_ = kNil;
    txn.wake_head();  // whoever is first now looks again
  }
  // Before letting the lock go to sleep: a wake-up from now on is not missed.
  void arm() { arena_.waiter(index_).wake.store(0, std::memory_order_relaxed); }
  FutexResult sleep(std::int64_t timeout_ns) {
    // Acquire: pairs with the release in wake_queue_head().
    if (arena_.waiter(index_).wake.load(std::memory_order_acquire) != 0)
      return FutexResult::woken_or_changed;
    return futex_wait(arena_.waiter(index_).wake.address(), 0, timeout_ns);
  }

 private:
  Arena& arena_;
  std::uint32_t index_ = kNil;
};

enum class Attempt { done, grow, wait, failed };

class Reservation {
 public:
  Reservation(ProcessArena& process, std::uint64_t size, const Wait& wait)
      : process_(process), arena_(process.arena), size_(size), deadline_(wait), place_(arena_) {}

  Status run(Created& out) {
    // Whatever happens, the place in the queue is given up: a left place would block all behind it.
    try {
      Status const status = loop(out);
      leave_queue();
      return status;
    } catch (...) {
      leave_queue();
      throw;
    }
  }

 private:
  Status loop(Created& out) {
    for (;;) {
      Growth growth;
      switch (attempt(out, growth)) {
        case Attempt::done:
          return Status::ok;
        case Attempt::failed:
          return status_;
        case Attempt::grow:
          grow(growth);
          continue;
        case Attempt::wait:
          break;
      }
      FutexResult const result = place_.sleep(deadline_.slice(kSpaceProbeNs));
      if (deadline_.interrupted(process_))
        return fail(Status::interrupted, "interrupted by a signal");
      if (!process_.usable.load(std::memory_order_seq_cst)) return closed_or_forked(Status::closed);
      if (result == FutexResult::timed_out) sweep_now(process_);
    }
  }

  Attempt attempt(Created& out, Growth& growth) {
    Txn txn(arena_);
    for (bool swept = false;; swept = true) {
      CreateResult result = CreateResult::full;
      if (arena_.header().waiters.get() == 0 || place_.is_first())
        result = create_object(arena_, txn, size_, out, growth,
                               [&](std::uint32_t i, std::uint64_t g) { process_.claim(i, g); });
      if (result == CreateResult::ok) {
        place_.give_up(txn);
        return Attempt::done;
      }
      if (result == CreateResult::grow) return Attempt::grow;
      if (!swept) {
        SweepReport report;
        sweep_dead(arena_, txn, report);
        if (report.clients > 0) continue;
      }
      if (result == CreateResult::objects_full) {
        status_ = fail(
            Status::objects_full,
            "all " + std::to_string(arena_.objects_limit()) +
                " object entries are in use; free some, or create the arena with more max_objects");
        return Attempt::failed;
      }
      return queue(txn);
    }
  }

  Attempt queue(const Txn& txn) {
    if (deadline_.over() || (!place_.taken() && !place_.take(txn, size_))) {
      status_ = fail(Status::full, "no room for an object of " + std::to_string(size_) + " bytes");
      return Attempt::failed;
    }
    place_.arm();
    return Attempt::wait;
  }

  void grow(const Growth& growth) {
    if (growth.to <= growth.from) throw_corrupt("the end of the payload", growth.from);
    arena_.reserve_payload(growth.from, growth.to);
    Txn txn(arena_);
    commit_growth(arena_, txn, growth);
  }

  void leave_queue() {
    if (!place_.taken()) return;
    Txn txn(arena_);
    place_.give_up(txn);
  }

  ProcessArena& process_;
  Arena& arena_;
  std::uint64_t size_;
  Deadline deadline_;
  QueuePlace place_;
  Status status_ = Status::ok;
};

}  // namespace

Status Store::reserve(std::uint64_t size, const Wait& wait, Draft& out) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (size > arena.payload_bytes())
      return fail(Status::too_large, "an object of " + std::to_string(size) +
                                         " bytes cannot fit into an arena of " +
                                         std::to_string(arena.capacity()));
    sweep_sometimes(process);
    Created created;
    if (Status s = Reservation(process, size, wait).run(created); s != Status::ok) return s;
    ClientEntry& me = arena.client(arena.slot);
    me.pinned.fetch_add(1, std::memory_order_relaxed);  // figures
    me.drafts.fetch_add(1, std::memory_order_relaxed);
    out.reset();
    out.arena_ = &process;
    out.data_ = arena.payload() + created.offset;
    out.size_ = size;
    out.session_ = kNil;
    out.epoch_ = process.epoch.load(std::memory_order_relaxed);
    out.ref_ = make_ref(arena, created.index, created.generation);
    return Status::ok;
  });
}

Status Store::reserve(std::uint64_t size, std::string_view session, const Wait& wait, Draft& out) {
  std::uint32_t slot = kNil;
  std::uint32_t generation = 0;
  Status const found = call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(session)) return bad_name_detail("a session id", session);
    sweep_sometimes(process);
    ReadLock const lock(arena);
    slot = find_session(arena, session);
    if (slot == kNil) return gone(session);
    generation = generation_in(arena.session(slot).state.get());
    return Status::ok;
  });
  if (found != Status::ok) return found;
  if (Status s = reserve(size, wait, out); s != Status::ok) return s;
  out.session_ = slot;
  out.session_generation_ = generation;
  return Status::ok;
}

Status Store::seal(Draft& draft, Hold* hold, std::int32_t parent, Pin* keep,
                   std::uint32_t* position) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (draft.arena_ != &process)
      return fail(Status::bad_draft, "not an unsealed draft of this store");
    if (draft.epoch_ != process.epoch.load(std::memory_order_relaxed))
      return fail(Status::bad_draft, "the store was closed since this draft was begun");
    std::uint32_t const index = draft.ref_.index;
    ObjectEntry& e = arena.object(index);
    bool sealed = true;
    if (draft.session_ == kNil) {
      if (parent != -1) return fail(Status::bad_position, "a parent needs a session");
      sealed = seal_object(e, draft.ref_.generation, 0);
    } else {
      if (parent < -1) return fail(Status::bad_position, "a parent is a position or -1");
      Txn const txn(arena);
      SessionEntry& s = arena.session(draft.session_);
      std::uint64_t const word = s.state.get();
      if (!shmrl::is_open(word) || generation_in(word) != draft.session_generation_)
        return fail(Status::session_released,
                    "the session was released while the object was being built");
      std::uint64_t const state = e.state.load(std::memory_order_relaxed);
      sealed = generation_of(state) == draft.ref_.generation && state_of(state) == os::kBuilding;
      std::uint32_t place = 0;
      if (sealed) {
        Status const status =
            append_attachment(arena, txn, draft.session_, index, draft.ref_.generation,
                              parent < 0 ? kNil : static_cast<std::uint32_t>(parent), true, place);
        if (status == Status::bad_position)
          return fail(status, "parent " + std::to_string(parent) + " is not below position " +
                                  std::to_string(s.count.get()));
        if (status != Status::ok) return fail(status, "all attachment entries are in use");
        if (position != nullptr) *position = place;
      }
    }
    ProcessArena* const owner = std::exchange(draft.arena_, nullptr);
    if (!sealed) {
      owner->drop(draft.ref_, draft.epoch_);
      owner->unpin(draft.ref_, true);
      return fail(Status::freed, "the object was freed while it was being built");
    }
    ClientEntry& me = arena.client(arena.slot);
    me.puts.fetch_add(1, std::memory_order_relaxed);  // figures
    if (keep != nullptr) {
      me.drafts.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
      keep->reset();
      keep->arena_ = owner;
      keep->data_ = arena.payload_read_only() + (draft.data_ - arena.payload());
      keep->size_ = draft.size_;
      keep->ref_ = draft.ref_;
    } else {
      owner->unpin(draft.ref_, true);
    }
    if (hold == nullptr) {
      owner->drop(draft.ref_, draft.epoch_);
      return Status::ok;
    }
    hold->reset();
    hold->arena_ = owner;
    hold->epoch_ = draft.epoch_;
    hold->ref_ = draft.ref_;
    return Status::ok;
  });
}

Status Store::discard(Draft& draft) {
  return call([&](ProcessArena& process, Arena&) {
    if (draft.arena_ != &process)
      return fail(Status::bad_draft, "not an unsealed draft of this store");
    draft.reset();
    return Status::ok;
  });
}

// -- references ----------------------------------------------------------------

Status Store::hold(const Ref& ref, Hold& out) {
  std::uint64_t epoch = 0;
  if (!open_.load(std::memory_order_relaxed)) return closed_or_forked(Status::closed);
  Status const status = guarded([&] { return arena_->hold(ref, epoch); });
  if (status != Status::ok) return describe_ref(status);
  out.reset();
  out.arena_ = arena_;
  out.epoch_ = epoch;
  out.ref_ = ref;
  return Status::ok;
}

Status Store::pin(const Ref& ref, const Wait& wait, Pin& out) {
  if (!open_.load(std::memory_order_relaxed)) return closed_or_forked(Status::closed);
  const std::byte* data = nullptr;
  std::uint64_t size = 0;
  Status status = guarded([&] { return arena_->try_pin(ref, data, size); });
  if (status == Status::not_sealed && wait.timeout_ns != 0) {
    Deadline const deadline(wait);
    do {
      status = wait_for_seal(ref, deadline, [&] { return deadline.interrupted(*arena_); });
      if (status == Status::ok) status = guarded([&] { return arena_->try_pin(ref, data, size); });
    } while (status == Status::not_sealed && !deadline.over());
  }
  if (status != Status::ok) return describe_ref(status);
  out.reset();
  out.arena_ = arena_;
  out.data_ = data;
  out.size_ = size;
  out.ref_ = ref;
  return Status::ok;
}

// ok: it is not being built any more. Spins first: a hand-over to a spinning reader takes well
// under the 20 µs that waking a sleeper costs.
template <class Deadline, class Interrupted>
Status Store::wait_for_seal(const Ref& ref, const Deadline& deadline, Interrupted interrupted) {
  return call([&](ProcessArena& process, Arena& arena) {
    Shared<std::uint64_t>& state = arena.object(ref.index).state;
    auto building = [&](std::uint64_t word) {
      return generation_of(word) == ref.generation && state_of(word) == os::kBuilding;
    };
    std::int64_t const spin_until = monotonic_ns() + process.spin_ns;
    while (process.spin_ns > 0 && !deadline.over() && monotonic_ns() < spin_until) {
      for (int i = 0; i < 16; ++i) {
        if (!building(state.load(std::memory_order_relaxed))) return Status::ok;
        cpu_relax();
      }
    }
    for (;;) {
      std::uint64_t word = state.load(std::memory_order_relaxed);
      if (!building(word)) return Status::ok;
      if (deadline.over()) return Status::not_sealed;
      if ((word & os::kWaiters) == 0) {
        // Relaxed: the sealer's exchange of the same word sees the flag or this compare fails.
        if (!state.compare_exchange(word, word | os::kWaiters, std::memory_order_relaxed)) continue;
        word |= os::kWaiters;
      }
      static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex word is the low half");
      FutexResult const result =
          futex_wait(reinterpret_cast<const std::uint32_t*>(state.address()),
                     static_cast<std::uint32_t>(word), deadline.slice(kSealProbeNs));
      if (interrupted()) return fail(Status::interrupted, "interrupted by a signal");
      if (!process.usable.load(std::memory_order_seq_cst)) return Status::closed;
      if (result == FutexResult::timed_out) sweep_now(process);  // has its builder died?
    }
  });
}

Status Store::probe(const Ref& ref, std::uint64_t* size) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (Status s = process.check_ref(ref); s != Status::ok) return describe_ref(s);
    ObjectEntry& e = arena.object(ref.index);
    std::uint64_t const bytes = size_of(e);
    // Acquire: the size read before belongs to this generation if the word still does.
    std::uint64_t const word = e.state.load(std::memory_order_acquire);
    if (generation_of(word) != ref.generation || !is_live_state(state_of(word)))
      return describe_ref(Status::freed);
    if (size != nullptr) *size = bytes;
    return state_of(word) == os::kBuilding ? describe_ref(Status::not_sealed) : Status::ok;
  });
}

Status Store::free(std::span<const Ref> refs, bool strict, std::uint64_t& ended) {
  ended = 0;
  return call([&](ProcessArena& process, Arena& arena) {
    std::array<std::uint32_t, kSmallBatch> few;
    std::vector<std::uint32_t> many;
    if (refs.size() > few.size()) many.reserve(refs.size());
    std::size_t count = 0;
    Txn const txn(arena);
    for (const Ref& ref : refs) {
      if (process.check_ref(ref) != Status::ok) continue;
      ObjectEntry& e = arena.object(ref.index);
      std::uint64_t const word = e.state.load(std::memory_order_relaxed);
      if (generation_of(word) != ref.generation || !is_live_state(state_of(word))) continue;
      if (e.attached.get() != 0) {
        if (!strict) continue;
        return fail(Status::not_owner, "a session holds one of the objects; nothing was freed");
      }
      if (refs.size() > few.size())
        many.push_back(ref.index);
      else
        few[count++] = ref.index;
    }
    ended =
        end_objects(arena, txn,
                    refs.size() > few.size() ? std::span<const std::uint32_t>(many)
                                             : std::span<const std::uint32_t>(few.data(), count));
    return Status::ok;
  });
}

// -- sessions ------------------------------------------------------------------

namespace {

Status check_owner(std::string_view name) {
  if (name == "*") return fail(Status::bad_id, "\"*\" names all owners; it cannot own anything");
  return valid_utf8_name(name) ? Status::ok : bad_name_detail("an owner", name);
}

std::string owner_name(const Arena& arena, std::uint64_t session_state) {
  return std::string(arena.owner(owner_in(session_state)).name.view());
}

// Sorts `ids` into slots that `owner` (kNil: anybody) holds, and refusals; each session once.
void select_sessions(const Arena& arena, std::span<const std::string_view> ids, std::uint32_t owner,
                     bool anybody, std::vector<std::uint32_t>& slots,
                     std::vector<std::string>& selected, std::vector<Refusal>& refused) {
  std::unordered_set<std::uint32_t> seen;
  slots.reserve(ids.size());
  selected.reserve(ids.size());
  for (std::string_view id : ids) {
    if (!valid_utf8_name(id)) {
      refused.push_back({std::string(id), Status::bad_id, {}});
      continue;
    }
    std::uint32_t const slot = find_session(arena, id);
    if (slot == kNil) {
      refused.push_back({std::string(id), Status::session_released, {}});
      continue;
    }
    std::uint64_t const word = arena.session(slot).state.get();
    if (!anybody && owner_in(word) != owner) {
      refused.push_back({std::string(id), Status::not_owner, owner_name(arena, word)});
      continue;
    }
    if (!seen.insert(slot).second) continue;
    slots.push_back(slot);
    selected.emplace_back(id);
  }
}

std::string describe(const Refusal& refusal) {
  return "\"" + refusal.id + "\" " +
         (refusal.why == Status::not_owner ? "is owned by \"" + refusal.holder + "\""
          : refusal.why == Status::bad_id  ? "is not a session id"
                                           : "is not a live session");
}

}  // namespace

Status Store::open(std::string_view id, std::string_view owner) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    if (Status s = check_owner(owner); s != Status::ok) return s;
    sweep_sometimes(process);
    for (bool swept = false;; swept = true) {
      Txn const txn(arena);
      bool const there = find_session(arena, id) != kNil;
      std::uint32_t principal = kNil;
      Status status = Status::session_exists;
      if (!there) {
        principal = find_or_add_owner(arena, txn, owner);
        status = principal == kNil ? Status::owners_full : open_session(arena, txn, id, principal);
      }
      if (status == Status::ok) return status;
      if (!swept) {
        // Perhaps its owner is dead, or the dead fill the table.
        SweepReport report;
        sweep_dead(arena, txn, report);
        if (report.clients > 0) continue;
      }
      if (status == Status::session_exists)
        return fail(status, "session \"" + std::string(id) + "\" is open already");
      if (status == Status::owners_full)
        return fail(status,
                    "all " + std::to_string(arena.owners_limit()) + " owner entries are in use");
      return fail(status,
                  "all " + std::to_string(arena.sessions_limit()) + " session entries are in use");
    }
  });
}

Status Store::attach_object(std::string_view id, const Ref& ref, std::int32_t parent,
                            std::uint32_t& position) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    if (parent < -1) return fail(Status::bad_position, "a parent is a position or -1");
    sweep_sometimes(process);
    Txn const txn(arena);
    if (Status s = process.check_ref(ref); s != Status::ok) return describe_ref(s);
    std::uint32_t const session = find_session(arena, id);
    if (session == kNil) return gone(id);
    std::uint64_t const word = arena.object(ref.index).state.load(std::memory_order_acquire);
    if (generation_of(word) != ref.generation || !is_live_state(state_of(word)))
      return describe_ref(Status::freed);
    if (state_of(word) != os::kSealed) return describe_ref(Status::not_sealed);
    Status const status =
        append_attachment(arena, txn, session, ref.index, ref.generation,
                          parent < 0 ? kNil : static_cast<std::uint32_t>(parent), false, position);
    if (status == Status::bad_position)
      return fail(status, "parent " + std::to_string(parent) + " is not below position " +
                              std::to_string(arena.session(session).count.get()));
    if (status != Status::ok) return fail(status, "all attachment entries are in use");
    return status;
  });
}

Status Store::objects(std::string_view id, std::vector<Entry>& out) {
  out.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    sweep_sometimes(process);
    ReadLock const lock(arena);
    std::uint32_t const session = find_session(arena, id);
    if (session == kNil) return gone(id);
    SessionEntry& s = arena.session(session);
    out.reserve(std::min<std::uint64_t>(s.count.get(), arena.attachments_used()));
    for_each_attachment(arena, s, [&](std::uint32_t, std::uint32_t node) {
      Attachment& a = arena.attachment(node);
      Entry& entry = out.emplace_back();
      entry.ref = make_ref(arena, a.object.get(), a.generation.get());
      entry.parent = a.parent.get() == kNil ? -1 : static_cast<std::int32_t>(a.parent.get());
      entry.size_bytes = size_of(arena.object(a.object.get()));
    });
    return Status::ok;
  });
}

Status Store::truncate(std::string_view id, std::int64_t keep, std::uint64_t& let_go) {
  let_go = 0;
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    if (keep < 0) return fail(Status::bad_position, "keep is a count of positions, 0 or more");
    sweep_sometimes(process);
    Txn const txn(arena);
    std::uint32_t const session = find_session(arena, id);
    if (session == kNil) return gone(id);
    let_go = truncate_session(arena, txn, session,
                              static_cast<std::uint32_t>(std::min<std::int64_t>(keep, kNil - 1)));
    return Status::ok;
  });
}

Status Store::transfer(std::span<const std::string_view> ids, std::string_view source,
                       std::string_view destination, bool strict, std::vector<std::string>& moved,
                       std::vector<Refusal>& refused) {
  moved.clear();
  refused.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    if (Status s = check_owner(source); s != Status::ok) return s;
    if (Status s = check_owner(destination); s != Status::ok) return s;
    sweep_now(process);
    std::vector<std::uint32_t> slots;
    Txn const txn(arena);
    std::uint32_t const from = find_owner(arena, source);
    select_sessions(arena, ids, from, false, slots, moved, refused);
    if (strict && !refused.empty()) {
      moved.clear();
      return fail(
          refused.front().why == Status::not_owner ? Status::not_owner : Status::session_released,
          "nothing was transferred: session " + describe(refused.front()));
    }
    if (slots.empty()) return Status::ok;
    std::uint32_t const to = find_or_add_owner(arena, txn, destination);
    if (to == kNil) {
      moved.clear();
      return fail(Status::owners_full,
                  "all " + std::to_string(arena.owners_limit()) + " owner entries are in use");
    }
    if (to != from) transfer_sessions(arena, txn, slots, to);
    return Status::ok;
  });
}

Status Store::release(std::span<const std::string_view> ids, std::string_view owner, bool strict,
                      std::vector<std::string>& released, std::vector<Refusal>& refused) {
  released.clear();
  refused.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    bool const anybody = owner == "*";
    if (!anybody && !valid_utf8_name(owner)) return bad_name_detail("an owner", owner);
    sweep_now(process);
    std::vector<std::uint32_t> slots;
    Txn const txn(arena);
    std::uint32_t const principal = anybody ? kNil : find_owner(arena, owner);
    select_sessions(arena, ids, principal, anybody, slots, released, refused);
    auto const foreign = std::find_if(refused.begin(), refused.end(),
                                      [](const Refusal& r) { return r.why == Status::not_owner; });
    if (strict && foreign != refused.end()) {
      released.clear();
      return fail(Status::not_owner, "nothing was released: session " + describe(*foreign));
    }
    release_sessions(arena, txn, slots);
    return Status::ok;
  });
}

Status Store::release_owned(std::string_view owner, std::vector<std::string>& released) {
  released.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    if (Status s = check_owner(owner); s != Status::ok) return s;
    sweep_now(process);
    Txn const txn(arena);
    std::uint32_t const principal = find_owner(arena, owner);
    if (principal == kNil) return Status::ok;
    std::vector<std::uint32_t> slots;
    for_each_session_of(arena, principal, [&](std::uint32_t s) {
      slots.push_back(s);
      released.emplace_back(arena.session(s).id.view());
    });
    release_sessions(arena, txn, slots);
    return Status::ok;
  });
}

Status Store::owner(std::string_view id, std::string& out) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    sweep_now(process);
    ReadLock const lock(arena);
    std::uint32_t const session = find_session(arena, id);
    if (session == kNil) return gone(id);
    out = owner_name(arena, arena.session(session).state.get());
    return Status::ok;
  });
}

Status Store::contains(std::string_view id, bool& out) {
  out = false;
  return call([&](ProcessArena& process, Arena& arena) {
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
    sweep_now(process);
    ReadLock const lock(arena);
    out = find_session(arena, id) != kNil;
    return Status::ok;
  });
}

Status Store::list(std::string_view owner, std::vector<std::string>& out) {
  out.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    if (!owner.empty())
      if (Status s = check_owner(owner); s != Status::ok) return s;
    sweep_now(process);
    ReadLock const lock(arena);
    auto append = [&](std::uint32_t principal) {
      for_each_session_of(arena, principal,
                          [&](std::uint32_t s) { out.emplace_back(arena.session(s).id.view()); });
    };
    if (!owner.empty()) {
      if (std::uint32_t const principal = find_owner(arena, owner); principal != kNil)
        append(principal);
      return Status::ok;
    }
    for (std::uint32_t i = 0; i < arena.owners_used(); ++i)
      if (arena.owner(i).used.get() != 0) append(i);
    return Status::ok;
  });
}

Status Store::session_count(std::uint64_t& out) {
  return call([&](ProcessArena& process, Arena& arena) {
    sweep_now(process);
    ReadLock const lock(arena);
    out = arena.header().sessions_open.get();
    return Status::ok;
  });
}

Status Store::bind(std::string_view owner, std::string_view heir) {
  return call([&](ProcessArena& process, Arena& arena) {
    if (Status s = check_owner(owner); s != Status::ok) return s;
    if (!heir.empty())
      if (Status s = check_owner(heir); s != Status::ok) return s;
    if (owner == heir) return fail(Status::bad_id, "an owner cannot be its own heir");
    sweep_now(process);
    Txn const txn(arena);
    std::uint32_t const inherits = heir.empty() ? kNil : find_or_add_owner(arena, txn, heir);
    std::uint32_t const principal = find_or_add_owner(arena, txn, owner);
    // Adding the second may have collected the first, where the table is full but for one entry.
    if (principal == kNil || (!heir.empty() && find_owner(arena, heir) != inherits))
      return fail(Status::owners_full,
                  "all " + std::to_string(arena.owners_limit()) + " owner entries are in use");
    bind_owner(arena, txn, principal, inherits);
    return Status::ok;
  });
}

Status Store::unbind(std::string_view owner) {
  return call([&](ProcessArena&, Arena& arena) {
    if (Status s = check_owner(owner); s != Status::ok) return s;
    Txn const txn(arena);
    std::uint32_t const principal = find_owner(arena, owner);
    if (principal == kNil) return Status::ok;
    ClientMask gone = {};
    gone[arena.slot / 64] = 1ull << (arena.slot % 64);
    owners_lose_clients(arena, txn, gone, principal);
    return Status::ok;
  });
}

// -- state of the arena --------------------------------------------------------

Status Store::stats(Stats& out) {
  out = Stats{};
  return call([&](ProcessArena& process, Arena& arena) {
    sweep_now(process);
    Txn const txn(arena);
    Header& h = arena.header();
    if (h.empty_slabs.get() != 0) trim_slabs(arena, txn);  // so that largest_free tells the truth
    out.capacity = arena.capacity();
    space_figures(arena, out.used, out.free, out.largest_free);
    out.committed = arena.granules_ready() * kGranule;
    out.doomed = h.objects_doomed.get();
    out.objects = h.objects_live.get() - out.doomed;
    out.sessions = h.sessions_open.get();
    out.deferred_bytes = h.doomed_bytes.get();
    out.max_objects = arena.objects_limit();
    out.max_sessions = arena.sessions_limit();
    out.max_owners = arena.owners_limit();
    out.max_attachments = arena.attachments_limit();
    out.by_owner = usage_by_owner(arena);
    out.by_client = usage_by_client(arena);
    out.clients = out.by_client.size();
    Counters& c = out.counters;
    c.puts = h.puts_past.get();
    c.gets = h.gets_past.get();
    for (const ClientUsage& usage : out.by_client) {
      const ClientEntry& client = arena.client(usage.slot);
      c.puts += client.puts.load(std::memory_order_relaxed);
      c.gets += client.gets.load(std::memory_order_relaxed);
      out.building += client.drafts.load(std::memory_order_relaxed);
      out.pinned += usage.pins;
    }
    c.frees = h.frees.get();
    c.discards = h.discards.get();
    c.reclaimed = h.reclaimed.get();
    c.sessions_opened = h.sessions_opened.get();
    c.sessions_released = h.sessions_released.get();
    c.sessions_transferred = h.sessions_transferred.get();
    c.sweeps = h.sweeps.get();
    c.recoveries = h.recoveries.get();
    c.full_waits = h.full_waits.get();
    return Status::ok;
  });
}

Status Store::full_facts(std::uint64_t requested, FullFacts& out) {
  out = FullFacts{};
  return call([&](ProcessArena&, Arena& arena) {
    Txn const txn(arena);
    if (arena.header().empty_slabs.get() != 0) trim_slabs(arena, txn);
    std::uint64_t used = 0;
    out.requested = requested;
    out.capacity = arena.capacity();
    space_figures(arena, used, out.free, out.largest_free);
    out.deferred_bytes = arena.header().doomed_bytes.get();
    out.waiters = static_cast<std::uint32_t>(arena.header().waiters.get());
    out.by_owner = usage_by_owner(arena);
    out.by_client = usage_by_client(arena);
    for (std::uint32_t i = 0; i < arena.objects_used(); ++i) {
      ObjectEntry& e = arena.object(i);
      std::uint64_t const word = e.state.load(std::memory_order_relaxed);
      if (state_of(word) == os::kFree) continue;
      std::uint64_t const bytes = block_bytes(size_of(e));
      if (state_of(word) == os::kBuilding) out.building_bytes += bytes;
      bool const by_hold = state_of(word) == os::kSealed && (word & os::kEverAttached) == 0;
      for (ClientUsage& usage : out.by_client) {
        std::uint64_t const bit = 1ull << (usage.slot % 64);
        if (by_hold && (e.holds[usage.slot / 64].load(std::memory_order_relaxed) & bit) != 0) {
          ++usage.held_objects;
          usage.held_bytes += bytes;
        }
        if ((e.pins[usage.slot / 64].load(std::memory_order_relaxed) & bit) != 0)
          usage.pinned_bytes += bytes;
      }
    }
    return Status::ok;
  });
}

Status Store::check(std::vector<std::string>& problems) {
  problems.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    sweep_now(process);
    std::vector<Unsettled> suspects;
    {
      ReadLock const lock(arena);
      audit_arena(arena, problems, suspects);
    }
    // Those whose last holder was on its way to the lock are settled by now, or soon.
    constexpr int kLooks = 20;
    for (int look = 0; look < kLooks && !suspects.empty(); ++look) {
      std::uint32_t const nobody = 0;
      futex_wait(&nobody, 0, 1'000'000);
      ReadLock const lock(arena);
      std::erase_if(suspects, [&](const Unsettled& u) {
        ObjectEntry& e = arena.object(u.index);
        return generation_of(e.state.load(std::memory_order_relaxed)) != u.generation ||
               !needs_settling(e);
      });
    }
    for (const Unsettled& u : suspects)
      problems.push_back("nothing keeps object " + std::to_string(u.index) +
                         ", yet it has not ended");
    return Status::ok;
  });
}

Status Store::sweep(SweepReport& out) {
  out = SweepReport{};
  return call([&](ProcessArena&, Arena& arena) {
    Txn const txn(arena);
    sweep_dead(arena, txn, out);
    return Status::ok;
  });
}

}  // namespace shmrl
