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

// What one look at a ref finds: its record, locked while this lives, and its object.
struct ProcessArena::Look {
  Look(ProcessArena& process, std::uint32_t index) noexcept
      : record(process.lock_record(index, word)), entry(process.arena.mapped_object(index)) {}
  ~Look() { record.word.store(word, std::memory_order_release); }
  Look(const Look&) = delete;
  Look& operator=(const Look&) = delete;

  // The generation that the record counts.
  std::uint64_t known() const noexcept { return word & kRecordGeneration; }
  void count_from_now(std::uint64_t generation) noexcept {
    if (known() == generation) return;
    record.holds = record.pins = 0;
    word = generation | (word & kRecordCounted);
  }
  // Sets this client's bit, and then looks at the state: the ender does it the other way round.
  void set_bit(Shared<std::uint64_t>& mask, std::uint64_t bit) noexcept {
    mask.fetch_or(bit, std::memory_order_seq_cst);
    state = entry.state.load(std::memory_order_seq_cst);
  }

  std::uint64_t word = 0;  // of the record, when it is unlocked
  LocalRecord& record;
  ObjectEntry& entry;
  std::uint64_t state = 0;  // of the entry
};

// Calls take(look) where the ref leads to a live object. It answers ok, not_sealed, or freed: the
// object is ending or has ended, and a bit that was set for it has been taken back. That bit may
// have kept another ender from ending what is there now, so the duty is ours.
template <class Take>
Status ProcessArena::look_at(const Ref& ref, Take take) {
  if (forked()) return Status::forked;
  for (int looks = 0; looks < kLooksMax; ++looks) {
    // Cheap and nearly certain; whatever does not lead to a live object is looked at closely below.
    if (!plausible(ref)) return check_ref(ref);
    Status status = Status::freed;
    bool undecided = false, orphan = false;
    {
      Look look(*this, ref.index);  // plausible() has looked at the index
      if (!usable.load(std::memory_order_seq_cst)) return Status::closed;
      // Acquire: pairs with the seal; the payload is complete for whoever sees SEALED.
      look.state = look.entry.state.load(std::memory_order_acquire);
      if (generation_of(look.state) != ref.generation || !is_live_state(state_of(look.state)) ||
          look.known() > ref.generation) {
        Status const checked = check_ref(ref);
        return checked == Status::ok ? Status::freed : checked;
      }
      status = take(look);
      if (status == Status::freed) {
        undecided =
            generation_of(look.state) == ref.generation && state_of(look.state) == os::kEnding;
        orphan = needs_settling(look.entry);
      }
    }
    if (orphan || undecided) settle(ref.index);
    if (!undecided) return status;
  }
  throw_corrupt("an object that never finishes to end, entry", ref.index);
}

Status ProcessArena::hold(const Ref& ref, std::uint64_t& epoch_out) {
  return look_at(ref, [&](Look& look) {
    if (look.known() != ref.generation || look.record.holds == 0) {
      Shared<std::uint64_t>& mask = look.entry.holds[arena.slot() / 64];
      std::uint64_t const bit = 1ull << (arena.slot() % 64);
      look.set_bit(mask, bit);
      std::uint64_t const state = state_of(look.state);
      if (generation_of(look.state) != ref.generation ||
          (state != os::kSealed && state != os::kBuilding)) {
        mask.fetch_and(~bit, std::memory_order_seq_cst);
        return Status::freed;
      }
      look.count_from_now(ref.generation);
    }
    ++look.record.holds;
    epoch_out = epoch.load(std::memory_order_relaxed);
    return Status::ok;
  });
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
  return look_at(ref, [&](Look& look) {
    if (state_of(look.state) == os::kBuilding) return Status::not_sealed;
    ObjectEntry& e = look.entry;
    Shared<std::uint64_t>& mask = e.pins[arena.slot() / 64];
    std::uint64_t const bit = 1ull << (arena.slot() % 64);
    bool const first = look.known() != ref.generation || look.record.pins == 0;
    if (first) look.set_bit(mask, bit);
    bool const sealed =
        generation_of(look.state) == ref.generation && state_of(look.state) == os::kSealed;
    std::uint64_t const offset = e.offset.get();
    std::uint64_t const bytes = size_of(e);
    bool const sound = bytes <= arena.payload_bytes() && offset <= arena.payload_bytes() - bytes;
    if (!sealed || !sound) {
      if (first) mask.fetch_and(~bit, std::memory_order_seq_cst);
      if (sealed) throw_corrupt("the offset of an object", offset);
      return Status::freed;
    }
    look.count_from_now(ref.generation);
    ++look.record.pins;
    ClientEntry& me = arena.client(arena.slot());
    me.gets.fetch_add(1, std::memory_order_relaxed);  // figures
    if (first) me.pinned.fetch_add(1, std::memory_order_relaxed);
    data = arena.payload_read_only() + offset;
    size = bytes;
    return Status::ok;
  });
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
