// Sessions, their lists of objects, their owners and heirs.
//
// Owns SessionEntry, Attachment, OwnerEntry, both name indexes and the journal. Promises:
//   * Every open session has exactly one owner; each change of owner or end of a session is one
//     store, or one journal record of many, so that a death leaves all of it or none of it.
//   * An object with an attachment lives; the operation that takes its last attachment ends it.
//   * A released session is never attached to again: the id resolves to nothing, a remembered slot
//     has another generation.
// Called with the lock held.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "arena.h"
#include "object_table.h"
#include "robust_lock.h"

namespace shmrl {

// Names ------------------------------------------------------------------------------------------

bool valid_utf8_name(std::string_view text) noexcept;  // 1..63 bytes of UTF-8 without NUL
std::uint32_t name_hash(std::string_view text) noexcept;

// Owners -----------------------------------------------------------------------------------------

std::uint32_t find_owner(const Arena& arena, std::string_view name);  // kNil: none
// kNil when the table is full of owners that are in use.
std::uint32_t find_or_add_owner(Arena& arena, const Txn& txn, std::string_view name);
void link_owner(Arena& arena, const Txn& txn, std::uint32_t index);  // into the index

// This client acts as the owner; the heir becomes `heir` (kNil: none).
void bind_owner(Arena& arena, const Txn& txn, std::uint32_t owner, std::uint32_t heir);

// Sessions ---------------------------------------------------------------------------------------

inline std::uint64_t session_word(std::uint32_t generation, std::uint32_t owner,
                                  std::uint64_t state) {
  return std::uint64_t{generation} << session_state::kGenerationShift |
         std::uint64_t{owner} << session_state::kOwnerShift | state;
}
inline bool is_open(std::uint64_t word) {
  return (word & session_state::kStateMask) == session_state::kOpen;
}
inline std::uint32_t owner_in(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> session_state::kOwnerShift & 0xFFFF);
}
inline std::uint32_t generation_in(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> session_state::kGenerationShift);
}

std::uint32_t find_session(const Arena& arena, std::string_view id);  // kNil: none
Status open_session(Arena& arena, const Txn& txn, std::string_view id, std::uint32_t owner);

// Appends the object. With `seal` the object is BUILDING and becomes sealed in the same step.
Status append_attachment(Arena& arena, const Txn& txn, std::uint32_t session, std::uint32_t object,
                         std::uint64_t generation, std::uint32_t parent, bool seal,
                         std::uint32_t& position);
// Lets go of positions `keep` and later; how many.
std::uint32_t truncate_session(Arena& arena, const Txn& txn, std::uint32_t session,
                               std::uint32_t keep);
// One atomic step each. The sessions are open and distinct.
void release_sessions(Arena& arena, const Txn& txn, std::span<const std::uint32_t> sessions);
void transfer_sessions(Arena& arena, const Txn& txn, std::span<const std::uint32_t> sessions,
                       std::uint32_t owner);
// The same for ending objects; large sets are several such steps.
std::uint64_t end_objects(Arena& arena, const Txn& txn, std::span<const std::uint32_t> objects);

// Calls visit(position, node) for each position; bounded, checks every index.
template <class Visit>
void for_each_attachment(const Arena& arena, const SessionEntry& session, Visit visit) {
  std::uint32_t const count = session.count.get();
  if (count > arena.attachments_used()) throw_corrupt("the length of a session", count);
  std::uint32_t node = session.head.get();
  for (std::uint32_t position = 0; position < count; ++position) {
    std::uint32_t const next = arena.attachment(node).next.get();  // visit may free the node
    visit(position, node);
    node = next;
  }
}
// Calls visit(session index) for each session of an owner, oldest first.
template <class Visit>
void for_each_session_of(const Arena& arena, std::uint32_t owner, Visit visit) {
  std::uint32_t at = arena.owner(owner).first.get();
  for (std::uint64_t steps = 0; at != kNil; ++steps) {
    if (steps > arena.sessions_used()) throw_corrupt("the session list of an owner", owner);
    std::uint32_t const next = arena.session(at).owner_next.get();
    visit(at);
    at = next;
  }
}

// For recovery
// -------------------------------------------------------------------------------------

// Applies a committed journal record to the truth, once more. Derived state is rebuilt afterwards.
void redo_journal(Arena& arena, const Txn& txn);
void link_session(Arena& arena, const Txn& txn, std::uint32_t index);  // index, owner's list, sums

// Owners lose the clients in `gone`; those that lose their last fall to their heir or are released.
struct FallReport {
  std::uint64_t inherited = 0, released = 0;
};
using ClientMask = std::uint64_t[kMaskWords];
FallReport owners_lose_clients(Arena& arena, const Txn& txn, const ClientMask& gone,
                               std::uint32_t only_owner = kNil);

}  // namespace shmrl
