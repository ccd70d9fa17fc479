// What every put does: find room, write, publish. See store.h for the promises.
//
// Owns nothing. For csrc/bindings*.cc only, with the GIL held.
#pragma once

#include "bindings_store.h"

namespace shmrl::py {

// What one put was asked besides the value.
struct Target {
  StoreCore& core;
  std::string_view session;  // empty: unattached
  Wait wait;
  std::int32_t parent;
};

// BadName, BadValue for what names no place.
Target parse_target(StoreCore& core, nb::handle session, nb::handle timeout, nb::handle parent);

// `head`: bytes of the object's header; the payload follows. Waits as the target says, without the
// GIL; StoreFull.
Draft reserve(const Target& target, std::uint64_t head, std::uint64_t payload_bytes);

// Without a hold: what a session holds needs none. -> the position in the session.
std::uint32_t seal_in_session(const Target& target, Draft& draft);

// -> an ObjectRef, counted unless a session holds the object.
nb::object seal(const Target& target, Draft& draft, std::size_t payload_bytes);

// Large ones without the GIL.
void copy_payload(void* destination, const void* source, std::size_t size);

}  // namespace shmrl::py
