#include "object_table.h"

#include <climits>

namespace shmrl {

namespace os = object_state;

namespace {

void wake_seal_waiters(ObjectEntry& entry) noexcept {
  futex_wake(reinterpret_cast<const std::uint32_t*>(entry.state.address()), INT_MAX);
}

// The entry of an ended object without pins becomes free, and its bytes return.
void reclaim(Arena& arena, const Txn& txn, std::uint32_t index) {
  Header& h = arena.header();
  ObjectEntry& e = arena.object(index);
  std::uint64_t const size = size_of(e);
  Block const block = block_of(e);
  // References of other processes to the ended object: their drops will find a newer generation.
  for (auto& word : e.holds)
    if (word.load(std::memory_order_relaxed) != 0) word.store(0, std::memory_order_relaxed);
  // Commits. Release: the entry's fields are not touched by its next user before this.
  e.state.store(object_word(generation_of(e.state.load(std::memory_order_relaxed)), os::kFree),
                std::memory_order_release);
  free_block(arena, txn, size, block);
  e.next_free.set(txn, h.free_object.get());
  h.free_object.set(txn, index);
  h.objects_live.add(txn, static_cast<std::uint64_t>(-1));
  h.used_bytes.add(txn, 0 - block_bytes(size));
}

// The object has just become DOOMED: its bytes return now or with the last pin.
void after_doom(Arena& arena, const Txn& txn, std::uint32_t index) {
  Header& h = arena.header();
  ObjectEntry& e = arena.object(index);
  if (!any_bit(e.pins)) {
    reclaim(arena, txn, index);
    return;
  }
  h.objects_doomed.add(txn, 1);
  h.doomed_bytes.add(txn, block_bytes(size_of(e)));
}

void reclaim_doomed(Arena& arena, const Txn& txn, std::uint32_t index) {
  Header& h = arena.header();
  h.objects_doomed.add(txn, static_cast<std::uint64_t>(-1));
  h.doomed_bytes.add(txn, 0 - block_bytes(size_of(arena.object(index))));
  reclaim(arena, txn, index);
}

// Ends a sealed, never attached object unless somebody holds it.
bool end_if_unheld(Arena& arena, const Txn& txn, std::uint32_t index) {
  ObjectEntry& e = arena.object(index);
  std::uint64_t word = e.state.load(std::memory_order_seq_cst);
  if (any_bit(e.holds)) return false;
  std::uint64_t const generation = generation_of(word);
  if (state_of(word) == os::kSealed) {
    // seq_cst: partner of a holder's fetch_or-then-load (process_refs.cc). Whoever sees ENDING
    // there takes its bit back and comes again under the lock.
    if (!e.state.compare_exchange(word, object_word(generation, os::kEnding),
                                  std::memory_order_seq_cst))
      return false;
  }
  if (any_bit(e.holds)) {
    e.state.store(object_word(generation, os::kSealed), std::memory_order_seq_cst);
    return false;
  }
  e.state.store(object_word(generation, os::kDoomed), std::memory_order_seq_cst);
  arena.header().frees.add(txn, 1);
  after_doom(arena, txn, index);
  return true;
}

}  // namespace

bool needs_settling(const ObjectEntry& e) noexcept {
  // seq_cst: this thread has just cleared a bit; an ender has changed the state before it looked.
  std::uint64_t const word = e.state.load(std::memory_order_seq_cst);
  switch (state_of(word)) {
    case os::kBuilding:
    case os::kDoomed:
      return !any_bit(e.pins);
    case os::kSealed:
    case os::kEnding:
      return (word & os::kEverAttached) == 0 && !any_bit(e.holds);
    default:
      return false;
  }
}

std::uint32_t peek_free_object(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  std::uint32_t const head = h.free_object.get();
  if (head != kNil) {
    if (state_of(arena.object(head).state.load(std::memory_order_relaxed)) != os::kFree)
      throw_corrupt("the free list of objects at entry", head);
    return head;
  }
  std::uint32_t const fresh =
      arena.take_fresh(txn, h.objects, arena.objects_limit(), sizeof(ObjectEntry));
  if (fresh == kNil) return kNil;
  arena.object(fresh).next_free.set(txn, kNil);
  h.free_object.set(txn, fresh);
  return fresh;
}

void commit_object(Arena& arena, const Txn& txn, std::uint32_t index, std::uint64_t generation,
                   std::uint64_t size, const Block& block) {
  Header& h = arena.header();
  ObjectEntry& e = arena.object(index);
  h.free_object.set(txn, e.next_free.get());
  h.next_generation.set(txn, generation + 1);
  std::uint32_t const mine = arena.slot() / 64;
  std::uint64_t const bit = 1ull << (arena.slot() % 64);
  for (std::uint32_t i = 0; i < kMaskWords; ++i) {
    std::uint64_t const want = i == mine ? bit : 0;
    // Relaxed: published by the state below. A stale setter's transient bit may be lost here; it
    // looks at the state, finds another generation and clears its bit again.
    if (e.holds[i].load(std::memory_order_relaxed) != want)
      e.holds[i].store(want, std::memory_order_relaxed);
    if (e.pins[i].load(std::memory_order_relaxed) != want)
      e.pins[i].store(want, std::memory_order_relaxed);
  }
  e.offset.set(txn, block.offset);
  e.size.set(txn, size | block.slot << 48);
  e.attached.set(txn, 0);
  // Commits. Release: pairs with the acquire of a reader that finds this generation.
  e.state.store(object_word(generation, os::kBuilding), std::memory_order_release);
  h.objects_live.add(txn, 1);
  h.used_bytes.add(txn, block_bytes(size));
}

bool end_object(Arena& arena, const Txn& txn, std::uint32_t index) {
  Header& h = arena.header();
  ObjectEntry& e = arena.object(index);
  std::uint64_t word = e.state.load(std::memory_order_relaxed);
  do {
    if (!is_live_state(state_of(word))) return false;
    // seq_cst: partner of a reader's set-pin-then-look (process_refs.cc).
  } while (!e.state.compare_exchange(word, object_word(generation_of(word), os::kDoomed),
                                     std::memory_order_seq_cst));
  if ((word & os::kWaiters) != 0) wake_seal_waiters(e);
  (state_of(word) == os::kBuilding ? h.discards : h.frees).add(txn, 1);
  after_doom(arena, txn, index);
  return true;
}

bool settle_object(Arena& arena, const Txn& txn, std::uint32_t index) {
  ObjectEntry& e = arena.object(index);
  std::uint64_t word = e.state.load(std::memory_order_relaxed);
  // Nobody is in the middle of an end while we have the lock.
  if (state_of(word) == os::kEnding) {
    word = object_word(generation_of(word), os::kSealed) | (word & os::kEverAttached);
    e.state.store(word, std::memory_order_seq_cst);
  }
  if (!needs_settling(e)) return false;
  word = e.state.load(std::memory_order_relaxed);
  if (state_of(word) == os::kDoomed) {
    reclaim_doomed(arena, txn, index);
    return true;
  }
  if (state_of(word) == os::kBuilding) {
    // Its builder is gone. By compare-exchange, because a builder seals before it lets go of its
    // pin: the word may have become SEALED since it was read, and the pin gone since then.
    if (!e.state.compare_exchange(word, object_word(generation_of(word), os::kDoomed),
                                  std::memory_order_seq_cst))
      return settle_object(arena, txn, index);
    if ((word & os::kWaiters) != 0) wake_seal_waiters(e);
    arena.header().discards.add(txn, 1);
    after_doom(arena, txn, index);
    return true;
  }
  return e.attached.get() == 0 && end_if_unheld(arena, txn, index);
}

bool seal_object(ObjectEntry& e, std::uint64_t generation, std::uint64_t flags) noexcept {
  std::uint64_t word = e.state.load(std::memory_order_relaxed);
  do {
    if (generation_of(word) != generation || state_of(word) != os::kBuilding) return false;
    // Release: the payload is written before; pairs with the acquire of a reader's pin. seq_cst,
    // because the next step clears the pin bit and a settler must not see that first.
  } while (!e.state.compare_exchange(word, object_word(generation, os::kSealed) | flags,
                                     std::memory_order_seq_cst));
  if ((word & os::kWaiters) != 0) wake_seal_waiters(e);
  return true;
}

}  // namespace shmrl
