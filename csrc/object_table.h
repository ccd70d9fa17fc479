// Object entries: how an object comes into being, is sealed, ends and gives its bytes back.
//
// Owns ObjectEntry and the free list of entries. Promises:
//   * An object ends exactly once; its bytes return when no pin is left, and never earlier.
//   * Generations come from one counter that only grows, so no two objects of an arena share one.
// Hold and pin bits are changed lock-free (process_refs.cc). Two rules make that safe:
//   * setter: set the bit, then look at the state; ender: change the state, then look at the bits.
//     Both sides are sequentially consistent, so at least one sees the other.
//   * who clears the last bit of an object that has no other reason to exist settles it, with the
//     lock held.
// Called with the lock held.
#pragma once

#include <cstdint>

#include "arena.h"
#include "block_allocator.h"
#include "robust_lock.h"

namespace shmrl {

inline std::uint64_t state_of(std::uint64_t word) { return word & object_state::kStateMask; }
inline std::uint64_t generation_of(std::uint64_t word) {
  return word >> object_state::kGenerationShift;
}
inline std::uint64_t object_word(std::uint64_t generation, std::uint64_t state) {
  return generation << object_state::kGenerationShift | state;
}

inline bool any_bit(const Shared<std::uint64_t> (&words)[kMaskWords]) noexcept {
  // seq_cst: partner of the fetch_or in process_refs.cc (rule above).
  std::uint64_t seen = 0;
  for (const auto& word : words) seen |= word.load(std::memory_order_seq_cst);
  return seen != 0;
}
inline bool is_live_state(std::uint64_t state) {
  return state == object_state::kBuilding || state == object_state::kSealed ||
         state == object_state::kEnding;
}
// Nothing keeps this object: somebody must settle it.
bool needs_settling(const ObjectEntry& entry) noexcept;

inline std::uint64_t size_of(const ObjectEntry& e) { return e.size.get() & kSizeMask; }
inline Block block_of(const ObjectEntry& e) { return Block{e.offset.get(), e.size.get() >> 48}; }

enum class CreateResult { ok, grow, full, objects_full };
struct Created {
  std::uint32_t index = kNil;
  std::uint64_t generation = 0;
  std::uint64_t offset = 0;
};
// A BUILDING object held and pinned by this client. `claim(index, generation)` is called before
// this client's bits are set: it must make the process's record of the entry current
// (process_arena.h). `growth`: what to reserve where the result is `grow`.
template <class Claim>
CreateResult create_object(Arena& arena, const Txn& txn, std::uint64_t size, Created& out,
                           Growth& growth, Claim claim);

// Ends a building, sealed or ending object, whoever holds it; false if it had ended already.
bool end_object(Arena& arena, const Txn& txn, std::uint32_t index);
// Ends the object if nothing keeps it (see needs_settling), or returns its bytes if it is doomed
// and the last pin is gone. True if it did something.
bool settle_object(Arena& arena, const Txn& txn, std::uint32_t index);
// BUILDING -> SEALED with these flags, and wakes waiters. False if it is no longer being built.
bool seal_object(ObjectEntry& entry, std::uint64_t generation, std::uint64_t flags) noexcept;

// -- details of the template ---------------------------------------------------

std::uint32_t peek_free_object(Arena& arena, const Txn& txn);
void commit_object(Arena& arena, const Txn& txn, std::uint32_t index, std::uint64_t generation,
                   std::uint64_t size, const Block& block);

template <class Claim>
CreateResult create_object(Arena& arena, const Txn& txn, std::uint64_t size, Created& out,
                           Growth& growth, Claim claim) {
  std::uint32_t const index = peek_free_object(arena, txn);
  if (index == kNil) return CreateResult::objects_full;
  Block block;
  switch (allocate_block(arena, txn, size, block)) {
    case AllocateResult::ok:
      break;
    case AllocateResult::grow:
      growth = plan_growth(arena, size);
      return CreateResult::grow;
    case AllocateResult::full:
      return CreateResult::full;
  }
  if (block.offset + size > arena.payload_bytes()) throw_corrupt("a block's offset", block.offset);
  std::uint64_t const generation = arena.header().next_generation.get();
  if (generation > object_state::kGenerationMax) throw_corrupt("the generation", generation);
  claim(index, generation);
  commit_object(arena, txn, index, generation, size, block);
  out = Created{index, generation, block.offset};
  return CreateResult::ok;
}

}  // namespace shmrl
