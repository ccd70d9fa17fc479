// Sessions and owners: each call is one atomic step in the session table.
#include <algorithm>
#include <unordered_set>

#include "client_table.h"
#include "object_table.h"
#include "session_table.h"
#include "store_call.h"

namespace shmrl {

namespace os = object_state;

namespace {

Status check_owner(std::string_view name) {
  if (name == "*") return fail(Status::bad_id, "\"*\" names all owners; it cannot own anything");
  return valid_utf8_name(name) ? Status::ok : bad_name_detail("an owner", name);
}

std::string owner_name(const Arena& arena, std::uint64_t session_state) {
  return std::string(arena.owner(owner_in(session_state)).name.view());
}

Status check_ids(std::span<const std::string_view> ids) {
  for (std::string_view id : ids)
    if (!valid_utf8_name(id)) return bad_name_detail("a session id", id);
  return Status::ok;
}

// Sorts `ids` into slots that `owner` (kNil: anybody) holds, and refusals; each session once.
void select_sessions(const Arena& arena, std::span<const std::string_view> ids, std::uint32_t owner,
                     bool anybody, std::vector<std::uint32_t>& slots,
                     std::vector<std::string>& selected, std::vector<Refusal>& refused) {
  std::unordered_set<std::uint32_t> seen;
  slots.reserve(ids.size());
  selected.reserve(ids.size());
  for (std::string_view id : ids) {
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
                  "all " + std::to_string(arena.sessions_limit()) +
                      " session entries are in use; release some, or create the arena with more "
                      "max_sessions");
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
    if (status != Status::ok) return fail(status, kAttachmentsFull);
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
    if (Status s = check_ids(ids); s != Status::ok) return s;
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
    if (Status s = check_ids(ids); s != Status::ok) return s;
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

Status Store::owners(std::span<const std::string_view> ids, std::vector<std::string>& out) {
  out.clear();
  return call([&](ProcessArena& process, Arena& arena) {
    if (Status s = check_ids(ids); s != Status::ok) return s;
    sweep_now(process);
    out.reserve(ids.size());
    ReadLock const lock(arena);
    for (std::string_view id : ids) {
      std::uint32_t const session = find_session(arena, id);
      out.push_back(session == kNil ? std::string()
                                    : owner_name(arena, arena.session(session).state.get()));
    }
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
    gone[arena.slot() / 64] = 1ull << (arena.slot() % 64);
    owners_lose_clients(arena, txn, gone, principal);
    return Status::ok;
  });
}

}  // namespace shmrl
