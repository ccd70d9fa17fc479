#include "session_table.h"

#include <algorithm>
#include <cstring>

namespace shmrl {

namespace os = object_state;
namespace ss = session_state;

// -- names ---------------------------------------------------------------------

bool valid_utf8_name(std::string_view text) noexcept {
  if (text.empty() || text.size() > kNameBytesMax) return false;
  for (std::size_t i = 0; i < text.size();) {
    auto const lead = static_cast<unsigned char>(text[i]);
    std::size_t length = 0;
    std::uint32_t point = 0;
    if (lead < 0x80) {
      if (lead == 0) return false;
      ++i;
      continue;
    }
    if (lead >= 0xC2 && lead <= 0xDF) {
      length = 2;
      point = lead & 0x1Fu;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      length = 3;
      point = lead & 0x0Fu;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      length = 4;
      point = lead & 0x07u;
    } else {
      return false;
    }
    if (i + length > text.size()) return false;
    for (std::size_t k = 1; k < length; ++k) {
      auto const byte = static_cast<unsigned char>(text[i + k]);
      if ((byte & 0xC0u) != 0x80u) return false;
      point = point << 6 | (byte & 0x3Fu);
    }
    bool const overlong = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
    if (overlong || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return false;
    i += length;
  }
  return true;
}

std::uint32_t name_hash(std::string_view text) noexcept {
  std::uint64_t h = 0x9E3779B97F4A7C15ull ^ text.size();
  for (std::size_t i = 0; i < text.size(); i += 8) {
    std::uint64_t chunk = 0;
    std::memcpy(&chunk, text.data() + i, std::min<std::size_t>(8, text.size() - i));
    h = (h ^ chunk) * 0xD6E8FEB86659FD93ull;
    h ^= h >> 32;
  }
  return static_cast<std::uint32_t>(h ^ (h >> 29));
}

// -- owners --------------------------------------------------------------------

namespace {

bool any_bound(const OwnerEntry& owner) {
  std::uint64_t seen = 0;
  for (const auto& word : owner.bound) seen |= word.get();
  return seen != 0;
}

void unlink_owner(Arena& arena, const Txn& txn, std::uint32_t index) {
  Cell<std::uint32_t>* link = &arena.owner_bucket(name_hash(arena.owner(index).name.view()));
  for (std::uint64_t steps = 0; link->get() != index; ++steps) {
    if (link->get() == kNil || steps > arena.owners_used())
      throw_corrupt("the index of owners at entry", index);
    link = &arena.owner(link->get()).hash_next;
  }
  link->set(txn, arena.owner(index).hash_next.get());
}

// Frees owner entries that name nobody's sessions, clients or heir.
void collect_owners(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  auto const used = static_cast<std::uint32_t>(arena.owners_used());
  std::vector<bool> is_heir(used, false);
  for (std::uint32_t i = 0; i < used; ++i) {
    OwnerEntry& o = arena.owner(i);
    bool const matters = o.used.get() != 0 && (o.sessions.get() != 0 || any_bound(o));
    if (matters && o.heir.get() < used) is_heir[o.heir.get()] = true;
  }
  for (std::uint32_t i = 0; i < used; ++i) {
    OwnerEntry& o = arena.owner(i);
    if (o.used.get() == 0 || o.sessions.get() != 0 || any_bound(o) || is_heir[i]) continue;
    unlink_owner(arena, txn, i);
    o.heir.set(txn, kNil);
    o.used.set(txn, 0);
    o.hash_next.set(txn, h.free_owner.get());
    h.free_owner.set(txn, i);
  }
  // An unused owner may still name one that was freed: its heir means nothing until it is bound
  // anew.
  for (std::uint32_t i = 0; i < used; ++i) {
    OwnerEntry& o = arena.owner(i);
    std::uint32_t const heir = o.heir.get();
    if (o.used.get() != 0 && heir < used && arena.owner(heir).used.get() == 0)
      o.heir.set(txn, kNil);
  }
}

}  // namespace

std::uint32_t find_owner(const Arena& arena, std::string_view name) {
  std::uint32_t at = arena.owner_bucket(name_hash(name)).get();
  for (std::uint64_t steps = 0; at != kNil; ++steps) {
    if (steps > arena.owners_used()) throw_corrupt("a chain of owners at entry", at);
    OwnerEntry& o = arena.owner(at);
    if (o.name.view() == name) return at;
    at = o.hash_next.get();
  }
  return kNil;
}

void link_owner(Arena& arena, const Txn& txn, std::uint32_t index) {
  OwnerEntry& o = arena.owner(index);
  Cell<std::uint32_t>& bucket = arena.owner_bucket(name_hash(o.name.view()));
  o.hash_next.set(txn, bucket.get());
  bucket.set(txn, index);
}

std::uint32_t find_or_add_owner(Arena& arena, const Txn& txn, std::string_view name) {
  std::uint32_t const known = find_owner(arena, name);
  if (known != kNil) return known;
  Header& h = arena.header();
  if (h.free_owner.get() == kNil && arena.owners_used() >= arena.owners_limit())
    collect_owners(arena, txn);
  std::uint32_t index = h.free_owner.get();
  if (index != kNil) {
    h.free_owner.set(txn, arena.owner(index).hash_next.get());
  } else {
    index = arena.take_fresh(txn, h.owners, arena.owners_limit(), sizeof(OwnerEntry));
    if (index == kNil) return kNil;
  }
  OwnerEntry& o = arena.owner(index);
  o.name.set(txn, name);
  o.heir.set(txn, kNil);
  for (auto& word : o.bound) word.set(txn, 0);
  o.objects.set(txn, 0);
  o.bytes.set(txn, 0);
  o.sessions.set(txn, 0);
  o.first.set(txn, kNil);
  o.last.set(txn, kNil);
  o.used.set(txn, 1);  // commits
  link_owner(arena, txn, index);
  return index;
}

void bind_owner(Arena& arena, const Txn& txn, std::uint32_t owner, std::uint32_t heir) {
  OwnerEntry& o = arena.owner(owner);
  Cell<std::uint64_t>& word = o.bound[arena.slot() / 64];
  std::uint64_t const bound = word.get() | 1ull << (arena.slot() % 64);
  // Which store comes first decides what a death between them leaves. Where others act as this
  // owner the sweep takes our bit back and their heir stands; where nobody does, a heir without a
  // client is not looked at, while our bit alone would make the sweep let go of the owner's
  // sessions.
  if (any_bound(o)) {
    word.set(txn, bound);
    o.heir.set(txn, heir);
  } else {
    o.heir.set(txn, heir);
    word.set(txn, bound);
  }
}

// -- lists and sums (derived) --------------------------------------------------

namespace {

void owner_list_push(Arena& arena, const Txn& txn, std::uint32_t owner, std::uint32_t session) {
  OwnerEntry& o = arena.owner(owner);
  SessionEntry& s = arena.session(session);
  std::uint32_t const last = o.last.get();
  s.owner_previous.set(txn, last);
  s.owner_next.set(txn, kNil);
  if (last != kNil)
    arena.session(last).owner_next.set(txn, session);
  else
    o.first.set(txn, session);
  o.last.set(txn, session);
  o.sessions.add(txn, 1);
  o.objects.add(txn, s.count.get());
  o.bytes.add(txn, s.bytes.get());
}

void owner_list_remove(Arena& arena, const Txn& txn, std::uint32_t owner, std::uint32_t session) {
  OwnerEntry& o = arena.owner(owner);
  SessionEntry& s = arena.session(session);
  std::uint32_t const previous = s.owner_previous.get();
  std::uint32_t const next = s.owner_next.get();
  if (previous != kNil)
    arena.session(previous).owner_next.set(txn, next);
  else
    o.first.set(txn, next);
  if (next != kNil)
    arena.session(next).owner_previous.set(txn, previous);
  else
    o.last.set(txn, previous);
  o.sessions.add(txn, static_cast<std::uint32_t>(-1));
  o.objects.add(txn, 0 - std::uint64_t{s.count.get()});
  o.bytes.add(txn, 0 - s.bytes.get());
}

void index_remove(Arena& arena, const Txn& txn, std::uint32_t session) {
  SessionEntry& s = arena.session(session);
  Cell<std::uint32_t>* link = &arena.session_bucket(s.hash.get());
  for (std::uint64_t steps = 0; link->get() != session; ++steps) {
    if (link->get() == kNil || steps > arena.sessions_used())
      throw_corrupt("the index of sessions at entry", session);
    link = &arena.session(link->get()).hash_next;
  }
  link->set(txn, s.hash_next.get());
}

std::uint32_t take_attachment(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  std::uint32_t const head = h.free_attachment.get();
  if (head == kNil)
    return arena.take_fresh(txn, h.attachments, arena.attachments_limit(), sizeof(Attachment));
  h.free_attachment.set(txn, arena.attachment(head).next.get());
  return head;
}

// The node's session has let go of it.
void drop_attachment(Arena& arena, const Txn& txn, std::uint32_t node) {
  Header& h = arena.header();
  Attachment& a = arena.attachment(node);
  std::uint32_t const index = a.object.get();
  ObjectEntry& e = arena.object(index);
  std::uint64_t const word = e.state.load(std::memory_order_relaxed);
  std::uint32_t const attached = e.attached.get();
  if (generation_of(word) != a.generation.get() || attached == 0)
    throw_corrupt("an attachment to an ended object, entry", index);
  e.attached.set(txn, attached - 1);
  if (attached == 1) end_object(arena, txn, index);
  a.next.set(txn, h.free_attachment.get());
  h.free_attachment.set(txn, node);
}

// Truth first, then what follows from it.
void apply_release(Arena& arena, const Txn& txn, std::uint32_t index) {
  Header& h = arena.header();
  SessionEntry& s = arena.session(index);
  std::uint64_t const word = s.state.get();
  s.state.set(txn, session_word(generation_in(word) + 1, 0, ss::kFree));
  owner_list_remove(arena, txn, owner_in(word), index);
  index_remove(arena, txn, index);
  for_each_attachment(
      arena, s, [&](std::uint32_t, std::uint32_t node) { drop_attachment(arena, txn, node); });
  s.hash_next.set(txn, h.free_session.get());
  h.free_session.set(txn, index);
  h.sessions_open.add(txn, static_cast<std::uint64_t>(-1));
  h.sessions_released.add(txn, 1);
}

void apply_transfer(Arena& arena, const Txn& txn, std::uint32_t index, std::uint32_t owner) {
  SessionEntry& s = arena.session(index);
  std::uint64_t const word = s.state.get();
  s.state.set(txn, session_word(generation_in(word), owner, ss::kOpen));
  owner_list_remove(arena, txn, owner_in(word), index);
  owner_list_push(arena, txn, owner, index);
  arena.header().sessions_transferred.add(txn, 1);
}

std::uint64_t journal_word(JournalOp op, std::uint32_t owner, std::uint64_t count) {
  return static_cast<std::uint64_t>(op) | std::uint64_t{owner} << 8 | count << 32;
}

// Publishes the plan: from here on it happens, whoever dies.
void commit_journal(Arena& arena, const Txn& txn, JournalOp op, std::uint32_t owner,
                    std::span<const std::uint32_t> entries) {
  for (std::size_t i = 0; i < entries.size(); ++i) arena.journal_entry(i).set(txn, entries[i]);
  std::uint64_t const word = journal_word(op, owner, entries.size());
#ifdef SHMRL_CANARY_NO_JOURNAL
  (void)word;  // the deliberately broken build that the crash matrix must catch
#else
  arena.header().journal.set(txn, word);
#endif
}

void clear_journal(Arena& arena, const Txn& txn) { arena.header().journal.set(txn, 0); }

}  // namespace

void link_session(Arena& arena, const Txn& txn, std::uint32_t index) {
  SessionEntry& s = arena.session(index);
  std::uint32_t const hash = name_hash(s.id.view());
  s.hash.set(txn, hash);
  Cell<std::uint32_t>& bucket = arena.session_bucket(hash);
  s.hash_next.set(txn, bucket.get());
  bucket.set(txn, index);
  owner_list_push(arena, txn, owner_in(s.state.get()), index);
  arena.header().sessions_open.add(txn, 1);
}

// -- operations ----------------------------------------------------------------

std::uint32_t find_session(const Arena& arena, std::string_view id) {
  std::uint32_t const hash = name_hash(id);
  std::uint32_t at = arena.session_bucket(hash).get();
  for (std::uint64_t steps = 0; at != kNil; ++steps) {
    if (steps > arena.sessions_used()) throw_corrupt("a chain of sessions at entry", at);
    SessionEntry& s = arena.session(at);
    if (s.hash.get() == hash && s.id.view() == id) return at;
    at = s.hash_next.get();
  }
  return kNil;
}

Status open_session(Arena& arena, const Txn& txn, std::string_view id, std::uint32_t owner) {
  Header& h = arena.header();
  std::uint32_t index = h.free_session.get();
  if (index != kNil) {
    h.free_session.set(txn, arena.session(index).hash_next.get());
  } else {
    index = arena.take_fresh(txn, h.sessions, arena.sessions_limit(), sizeof(SessionEntry));
    if (index == kNil) return Status::sessions_full;
  }
  SessionEntry& s = arena.session(index);
  s.id.set(txn, id);
  s.head.set(txn, kNil);
  s.tail.set(txn, kNil);
  s.count.set(txn, 0);
  s.bytes.set(txn, 0);
  std::uint64_t const opened = h.next_opened.get();
  h.next_opened.set(txn, opened + 1);
  s.opened.set(txn, opened);
  s.state.set(txn, session_word(generation_in(s.state.get()), owner, ss::kOpen));  // commits
  link_session(arena, txn, index);
  h.sessions_opened.add(txn, 1);
  return Status::ok;
}

Status append_attachment(Arena& arena, const Txn& txn, std::uint32_t session, std::uint32_t object,
                         std::uint64_t generation, std::uint32_t parent, bool seal,
                         std::uint32_t& position) {
  SessionEntry& s = arena.session(session);
  ObjectEntry& e = arena.object(object);
  std::uint32_t const count = s.count.get();
  if (parent != kNil && parent >= count) return Status::bad_position;
  std::uint32_t const node = take_attachment(arena, txn);
  if (node == kNil) return Status::attachments_full;
  Attachment& a = arena.attachment(node);
  a.generation.set(txn, generation);
  a.object.set(txn, object);
  a.parent.set(txn, parent);
  a.next.set(txn, kNil);
  a.previous.set(txn, count == 0 ? kNil : s.tail.get());
  if (count == 0)
    s.head.set(txn, node);
  else
    arena.attachment(s.tail.get()).next.set(txn, node);
  s.count.set(txn, count + 1);  // commits: an object in a list is sealed and attached (recovery.cc)
  if (seal)
    seal_object(e, generation, os::kEverAttached);
  else
    e.state.fetch_or(os::kEverAttached, std::memory_order_seq_cst);
  s.tail.set(txn, node);
  std::uint64_t const size = size_of(e);
  s.bytes.add(txn, size);
  e.attached.add(txn, 1);
  OwnerEntry& o = arena.owner(owner_in(s.state.get()));
  o.objects.add(txn, 1);
  o.bytes.add(txn, size);
  position = count;
  return Status::ok;
}

std::uint32_t truncate_session(Arena& arena, const Txn& txn, std::uint32_t session,
                               std::uint32_t keep) {
  SessionEntry& s = arena.session(session);
  std::uint32_t const count = s.count.get();
  if (keep >= count) return 0;
  if (count > arena.attachments_used()) throw_corrupt("the length of a session", count);
  std::vector<std::uint32_t> nodes;
  nodes.reserve(count - keep);
  std::uint32_t tail = kNil;
  std::uint64_t bytes = 0;
  for_each_attachment(arena, s, [&](std::uint32_t position, std::uint32_t node) {
    if (position < keep) {
      tail = node;
      return;
    }
    nodes.push_back(node);
    bytes += size_of(arena.object(arena.attachment(node).object.get()));
  });
  s.count.set(txn, keep);  // commits
  s.tail.set(txn, tail);
  s.bytes.add(txn, 0 - bytes);
  OwnerEntry& o = arena.owner(owner_in(s.state.get()));
  o.objects.add(txn, 0 - std::uint64_t{nodes.size()});
  o.bytes.add(txn, 0 - bytes);
  for (std::uint32_t node : nodes) drop_attachment(arena, txn, node);
  return count - keep;
}

void release_sessions(Arena& arena, const Txn& txn, std::span<const std::uint32_t> sessions) {
  // One session: the store of its state is the commit.
  if (sessions.size() > 1) commit_journal(arena, txn, JournalOp::release, 0, sessions);
  for (std::uint32_t index : sessions) apply_release(arena, txn, index);
  if (sessions.size() > 1) clear_journal(arena, txn);
}

void transfer_sessions(Arena& arena, const Txn& txn, std::span<const std::uint32_t> sessions,
                       std::uint32_t owner) {
  if (sessions.size() > 1) commit_journal(arena, txn, JournalOp::transfer, owner, sessions);
  for (std::uint32_t index : sessions) apply_transfer(arena, txn, index, owner);
  if (sessions.size() > 1) clear_journal(arena, txn);
}

std::uint64_t end_objects(Arena& arena, const Txn& txn, std::span<const std::uint32_t> objects) {
  std::uint64_t ended = 0;
  while (!objects.empty()) {
    auto const part = objects.first(std::min<std::size_t>(objects.size(), arena.sessions_limit()));
    objects = objects.subspan(part.size());
    if (part.size() > 1) commit_journal(arena, txn, JournalOp::doom, 0, part);
    for (std::uint32_t index : part) ended += end_object(arena, txn, index) ? 1 : 0;
    if (part.size() > 1) clear_journal(arena, txn);
  }
  return ended;
}

// -- recovery ------------------------------------------------------------------

void redo_journal(Arena& arena, const Txn& txn) {
  std::uint64_t const word = arena.header().journal.get();
  if (word == 0) return;
  auto const op = static_cast<JournalOp>(word & 0xFF);
  auto const owner = static_cast<std::uint32_t>(word >> 8 & 0xFFFF);
  std::uint64_t const count = word >> 32;
  if (op == JournalOp::none || op > JournalOp::doom || count > arena.sessions_limit())
    throw_corrupt("the journal word", word);
  if (op == JournalOp::transfer && arena.owner(owner).used.get() == 0)
    throw_corrupt("the owner in the journal", owner);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint32_t const entry = arena.journal_entry(i).get();
    if (op == JournalOp::doom) {
      ObjectEntry& e = arena.object(entry);
      std::uint64_t state = e.state.load(std::memory_order_relaxed);
      while (is_live_state(state_of(state)))
        if (e.state.compare_exchange(state, object_word(generation_of(state), os::kDoomed),
                                     std::memory_order_seq_cst))
          break;
      continue;
    }
    SessionEntry& s = arena.session(entry);
    std::uint64_t const state = s.state.get();
    if (!is_open(state)) continue;  // done before the death
    s.state.set(txn, op == JournalOp::release
                         ? session_word(generation_in(state) + 1, 0, ss::kFree)
                         : session_word(generation_in(state), owner, ss::kOpen));
  }
  clear_journal(arena, txn);
}

FallReport owners_lose_clients(Arena& arena, const Txn& txn, const ClientMask& gone,
                               std::uint32_t only_owner) {
  FallReport report;
  auto clear_bits = [&](OwnerEntry& o) {
    for (std::uint32_t i = 0; i < kMaskWords; ++i)
      if ((o.bound[i].get() & gone[i]) != 0) o.bound[i].set(txn, o.bound[i].get() & ~gone[i]);
  };
  std::vector<std::uint32_t> pending;  // owners that lose their last client
  for (std::uint32_t i = 0; i < arena.owners_used(); ++i) {
    OwnerEntry& o = arena.owner(i);
    if (o.used.get() == 0 || (only_owner != kNil && i != only_owner)) continue;
    std::uint64_t lost = 0, left = 0;
    for (std::uint32_t k = 0; k < kMaskWords; ++k) {
      lost |= o.bound[k].get() & gone[k];
      left |= o.bound[k].get() & ~gone[k];
    }
    if (lost == 0) continue;
    if (left != 0)
      clear_bits(o);
    else
      pending.push_back(i);
  }
  std::vector<std::uint32_t> done;
  while (!pending.empty()) {
    // An owner that is the heir of another pending one goes after it, so that what it inherits
    // falls on; in a cycle of heirs that all died it goes round once and ends with the last.
    auto next = std::find_if(pending.begin(), pending.end(), [&](std::uint32_t candidate) {
      return std::none_of(pending.begin(), pending.end(), [&](std::uint32_t other) {
        return other != candidate && arena.owner(other).heir.get() == candidate;
      });
    });
    if (next == pending.end()) next = pending.begin();
    std::uint32_t const owner = *next;
    pending.erase(next);
    OwnerEntry& o = arena.owner(owner);
    std::vector<std::uint32_t> sessions;
    for_each_session_of(arena, owner, [&](std::uint32_t s) { sessions.push_back(s); });
    std::uint32_t const heir = o.heir.get();
    bool const heir_gone = std::find(done.begin(), done.end(), heir) != done.end();
    done.push_back(owner);
    if (heir != kNil && !heir_gone && arena.owner(heir).used.get() != 0) {
      transfer_sessions(arena, txn, sessions, heir);
      report.inherited += sessions.size();
    } else {
      release_sessions(arena, txn, sessions);
      report.released += sessions.size();
    }
    clear_bits(o);
  }
  return report;
}

}  // namespace shmrl
