// The references that this process counts: what a Hold, a Pin and a Draft do to the arena's bits.
#include <sched.h>
#include <sys/mman.h>

#include "process_arena.h"
#include "robust_lock.h"

namespace shmrl {

namespace os = object_state;

namespace {

// How often a reference meets an object whose end is being decided; each look waits for the
// decider.
constexpr int kLooksMax = 1000;

}  // namespace

bool well_formed(const Ref& ref) noexcept {
  return ref.arena != 0 && ref.generation != 0 && ref.generation <= os::kGenerationMax &&
         ref.check == ref_check(ref.arena, ref.generation, ref.index);
}

void ProcessArena::map_records() {
  void* const memory =
      ::mmap(nullptr, arena.objects_limit() * sizeof(LocalRecord), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_system("mmap", "private reference counts");
  records_ = static_cast<LocalRecord*>(memory);
}

LocalRecord& ProcessArena::lock_record(std::uint32_t index, std::uint64_t& word) noexcept {
  LocalRecord& record = records_[index];
  for (;;) {
    // An exchange is cheaper than compare-exchange, and writing the mark over the mark changes
    // nothing. Acquires what the release store that unlocks has published. seq_cst, because of the
    // closer's short cut: it skips a record whose word it finds zero, and then we must find
    // `usable` false.
    word = record.word.exchange(kRecordLocked, std::memory_order_seq_cst);
    if (word != kRecordLocked) return record;
    for (int spins = 0; record.word.load(std::memory_order_relaxed) == kRecordLocked; ++spins) {
      if (spins < 64)
        cpu_relax();
      else
        ::sched_yield();  // its holder was descheduled inside a dozen instructions
    }
  }
}

bool ProcessArena::plausible(const Ref& ref) const noexcept {
  return ref.arena == arena.id() && ref.index < arena.objects_limit() &&
         ref.check == ref_check(ref.arena, ref.generation, ref.index);
}

Status ProcessArena::check_ref(const Ref& ref) const noexcept {
  if (!well_formed(ref)) return Status::bad_ref;
  if (ref.arena != arena.id()) return Status::foreign_ref;
  if (ref.index >= arena.objects_used() || ref.generation >= arena.header().next_generation.get())
    return Status::bad_ref;
  return Status::ok;
}

void ProcessArena::claim(std::uint32_t index, std::uint64_t generation) noexcept {
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(index, word);
  record.holds = 1;
  record.pins = 1;
  record.word.store(generation, std::memory_order_release);
}

void ProcessArena::settle(std::uint32_t index) {
  Call const call(*this, Call::Need::joined);
  if (call.status() != Status::ok) return;
  Txn txn(arena);
  settle_object(arena, txn, index);
}

void ProcessArena::settle_quietly(std::uint32_t index) noexcept {
  try {
    settle(index);
  } catch (const Failure&) {
    // Destructors come here: nobody to tell. The object stays until this client leaves or is swept.
  }
}

Status ProcessArena::hold(const Ref& ref, std::uint64_t& epoch_out) {
  if (forked()) return Status::forked;
  for (int look = 0; look < kLooksMax; ++look) {
    std::uint64_t word = 0;
    // Cheap and nearly certain; whatever does not lead to a live object is looked at closely below.
    if (!plausible(ref)) return check_ref(ref);
    LocalRecord& record = lock_record(ref.index, word);
    auto unlock = [&] { record.word.store(word, std::memory_order_release); };
    if (!usable.load(std::memory_order_seq_cst)) {
      unlock();
      return Status::closed;
    }
    ObjectEntry& e = arena.mapped_object(ref.index);  // plausible() has looked at the index
    std::uint64_t state = e.state.load(std::memory_order_acquire);
    std::uint64_t const known = word & kRecordGeneration;
    if (generation_of(state) != ref.generation || !is_live_state(state_of(state)) ||
        known > ref.generation) {
      unlock();
      Status const checked = check_ref(ref);
      return checked == Status::ok ? Status::freed : checked;
    }
    if (known == ref.generation && record.holds > 0) {
      ++record.holds;
      epoch_out = epoch.load(std::memory_order_relaxed);
      unlock();
      return Status::ok;
    }
    std::uint32_t const k = arena.slot() / 64;
    std::uint64_t const bit = 1ull << (arena.slot() % 64);
    // seq_cst: set the bit, then look at the state; end_if_unheld() does it the other way round.
    e.holds[k].fetch_or(bit, std::memory_order_seq_cst);
    state = e.state.load(std::memory_order_seq_cst);
    bool const same = generation_of(state) == ref.generation;
    if (same && (state_of(state) == os::kSealed || state_of(state) == os::kBuilding)) {
      if (known != ref.generation) {
        record.pins = 0;
        word = ref.generation | (word & kRecordCounted);
      }
      record.holds = 1;
      epoch_out = epoch.load(std::memory_order_relaxed);
      unlock();
      return Status::ok;
    }
    // It is ending or has ended: take the bit back. Our transient bit may have kept another ender
    // from ending what is there now, so the duty is ours.
    e.holds[k].fetch_and(~bit, std::memory_order_seq_cst);
    bool const undecided = same && state_of(state) == os::kEnding;
    bool const orphan = needs_settling(e);
    unlock();
    if (orphan || undecided) settle(ref.index);
    if (!undecided) return Status::freed;
  }
  throw_corrupt("an object that never finishes to end, entry", ref.index);
}

void ProcessArena::drop(const Ref& ref, std::uint64_t hold_epoch) noexcept {
  if (forked() || epoch.load(std::memory_order_relaxed) != hold_epoch) return;
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(ref.index, word);
  bool orphan = false;
  // The epoch again, under the record's lock: close_handle() moves it on before it visits the
  // records.
  if (epoch.load(std::memory_order_seq_cst) == hold_epoch &&
      (word & kRecordGeneration) == ref.generation && record.holds > 0 && --record.holds == 0) {
    // Not arena.object(): a destructor must not throw, and the index was good when it was taken.
    ObjectEntry& e = arena.mapped_object(ref.index);
    e.holds[arena.slot() / 64].fetch_and(~(1ull << (arena.slot() % 64)), std::memory_order_seq_cst);
    orphan = needs_settling(e);
  }
  record.word.store(word, std::memory_order_release);
  if (orphan) settle_quietly(ref.index);
}

Status ProcessArena::try_pin(const Ref& ref, const std::byte*& data, std::uint64_t& size) {
  if (forked()) return Status::forked;
  for (int look = 0; look < kLooksMax; ++look) {
    std::uint64_t word = 0;
    // Cheap and nearly certain; whatever does not lead to a live object is looked at closely below.
    if (!plausible(ref)) return check_ref(ref);
    LocalRecord& record = lock_record(ref.index, word);
    auto unlock = [&] { record.word.store(word, std::memory_order_release); };
    if (!usable.load(std::memory_order_seq_cst)) {
      unlock();
      return Status::closed;
    }
    ObjectEntry& e = arena.mapped_object(ref.index);  // plausible() has looked at the index
    // Acquire: pairs with the seal; the payload is complete for whoever sees SEALED.
    std::uint64_t state = e.state.load(std::memory_order_acquire);
    std::uint64_t const known = word & kRecordGeneration;
    if (generation_of(state) != ref.generation || !is_live_state(state_of(state)) ||
        known > ref.generation) {
      unlock();
      Status const checked = check_ref(ref);
      return checked == Status::ok ? Status::freed : checked;
    }
    if (state_of(state) == os::kBuilding) {
      unlock();
      return Status::not_sealed;
    }
    std::uint32_t const k = arena.slot() / 64;
    std::uint64_t const bit = 1ull << (arena.slot() % 64);
    bool const first = known != ref.generation || record.pins == 0;
    if (first) {
      // seq_cst: set the bit, then look at the state; end_object() does it the other way round.
      e.pins[k].fetch_or(bit, std::memory_order_seq_cst);
      state = e.state.load(std::memory_order_seq_cst);
    }
    bool const same = generation_of(state) == ref.generation;
    bool const sealed = same && state_of(state) == os::kSealed;
    std::uint64_t const offset = e.offset.get();
    std::uint64_t const bytes = size_of(e);
    bool const sound = bytes <= arena.payload_bytes() && offset <= arena.payload_bytes() - bytes;
    if (sealed && sound) {
      if (known != ref.generation) {
        record.holds = 0;
        word = ref.generation | (word & kRecordCounted);
      }
      record.pins = first ? 1 : record.pins + 1;
      unlock();
      ClientEntry& me = arena.client(arena.slot());
      me.gets.fetch_add(1, std::memory_order_relaxed);  // figures
      if (first) me.pinned.fetch_add(1, std::memory_order_relaxed);
      data = arena.payload_read_only() + offset;
      size = bytes;
      return Status::ok;
    }
    bool orphan = false;
    if (first) {
      e.pins[k].fetch_and(~bit, std::memory_order_seq_cst);
      orphan = needs_settling(e);
    }
    bool const undecided = same && state_of(state) == os::kEnding;
    unlock();
    if (orphan || undecided) settle(ref.index);
    if (sealed && !sound) throw_corrupt("the offset of an object", offset);
    if (!undecided) return Status::freed;
  }
  throw_corrupt("an object that never finishes to end, entry", ref.index);
}

void ProcessArena::unpin(const Ref& ref, bool draft) noexcept {
  if (forked()) return;
  std::uint64_t word = 0;
  LocalRecord& record = lock_record(ref.index, word);
  bool orphan = false;
  bool last_view = false;
  if ((word & kRecordGeneration) == ref.generation && record.pins > 0) {
    // Not joined: abandoned, the bits are the sweeper's.
    bool const ours = joined.load(std::memory_order_seq_cst);
    if (ours && draft)
      arena.client(arena.slot())
          .drafts.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
    if (--record.pins == 0) {
      if ((word & kRecordCounted) != 0) {
        // Mark and count change together under the record's lock; relaxed, as the registry mutex
        // orders whoever acts on the count.
        last_view = pins_left_.fetch_sub(1, std::memory_order_relaxed) == 1;
        word &= ~kRecordCounted;
      }
      if (ours) {
        ObjectEntry& e = arena.mapped_object(ref.index);
        arena.client(arena.slot())
            .pinned.fetch_add(static_cast<std::uint64_t>(-1), std::memory_order_relaxed);
        e.pins[arena.slot() / 64].fetch_and(~(1ull << (arena.slot() % 64)),
                                            std::memory_order_seq_cst);
        orphan = needs_settling(e);
      }
    }
  }
  record.word.store(word, std::memory_order_release);
  if (orphan) settle_quietly(ref.index);
  if (!last_view) return;
  Outside const outside;  // the mutex may be held by a thread that waits for another process
  std::scoped_lock const guard(registry().mutex);
  if (pins_left_.load(std::memory_order_relaxed) > 0 || handles_ > 0) return;
  if (joined.load(std::memory_order_seq_cst))
    leave();
  else
    maybe_unmap();
}

}  // namespace shmrl
