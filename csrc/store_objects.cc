// The life of an object from its seal to its end: seal, discard, hold, pin, probe, free.
#include <array>

#include "object_table.h"
#include "session_table.h"
#include "store_call.h"

namespace shmrl {

namespace os = object_state;

namespace {

constexpr std::int64_t kSealProbeNs =
    10'000'000;  // how often a sleeper asks whether its builder lives
constexpr std::size_t kSmallBatch = 64;

}  // namespace

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
        if (status != Status::ok) return fail(status, kAttachmentsFull);
        if (position != nullptr) *position = place;
      }
    }
    ProcessArena* const owner = std::exchange(draft.arena_, nullptr);
    ClientEntry& me = arena.client(arena.slot());
    if (sealed)
      me.puts.fetch_add(1, std::memory_order_relaxed);  // figures
    else
      owner->drop(draft.ref_, draft.epoch_);
    if (keep != nullptr) {  // freed or not: whoever asked for it may still write to the bytes
      me.drafts.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
      keep->reset();
      keep->arena_ = owner;
      keep->data_ = arena.payload_read_only() + (draft.data_ - arena.payload());
      keep->size_ = draft.size_;
      keep->ref_ = draft.ref_;
    } else {
      owner->unpin(draft.ref_, true);
    }
    if (!sealed) return fail(Status::freed, "the object was freed while it was being built");
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
      status = wait_for_seal(ref, deadline);
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
Status Store::wait_for_seal(const Ref& ref, const Deadline& deadline) {
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
      if (deadline.interrupted(process))
        return fail(Status::interrupted, "interrupted by a signal");
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

}  // namespace shmrl
