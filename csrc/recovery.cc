#include "recovery.h"

#include <algorithm>
#include <vector>

#include "block_allocator.h"
#include "object_table.h"
#include "session_table.h"

namespace shmrl {
namespace {

namespace os = object_state;

void rebuild_owners(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  h.free_owner.set(txn, kNil);
  for (std::uint32_t i = 0; i < arena.owner_buckets(); ++i)
    if (arena.owner_bucket(i).get() != kNil) arena.owner_bucket(i).set(txn, kNil);
  for (auto i = static_cast<std::uint32_t>(arena.owners_used()); i-- > 0;) {
    OwnerEntry& o = arena.owner(i);
    o.objects.set(txn, 0);
    o.bytes.set(txn, 0);
    o.sessions.set(txn, 0);
    o.first.set(txn, kNil);
    o.last.set(txn, kNil);
    if (o.used.get() != 0) {
      link_owner(arena, txn, i);
    } else {
      o.hash_next.set(txn, h.free_owner.get());
      h.free_owner.set(txn, i);
    }
  }
}

// One session's list: marks its nodes, counts its objects, and finishes a seal that it committed.
void rebuild_session(Arena& arena, const Txn& txn, std::uint32_t index,
                     std::vector<bool>& node_used) {
  SessionEntry& s = arena.session(index);
  std::uint32_t const owner = owner_in(s.state.get());
  if (arena.owner(owner).used.get() == 0) throw_corrupt("the owner of a session", owner);
  std::uint32_t tail = kNil;
  std::uint64_t bytes = 0;
  for_each_attachment(arena, s, [&](std::uint32_t, std::uint32_t node) {
    Attachment& a = arena.attachment(node);
    if (node_used[node]) throw_corrupt("an attachment in two lists, entry", node);
    node_used[node] = true;
    ObjectEntry& e = arena.object(a.object.get());
    std::uint64_t const word = e.state.load(std::memory_order_relaxed);
    if (generation_of(word) != a.generation.get() || !is_live_state(state_of(word)))
      throw_corrupt("an attachment to an ended object, entry", a.object.get());
    // The list is the truth: what stands in it is sealed and attached (append_attachment).
    if (state_of(word) == os::kBuilding) seal_object(e, generation_of(word), os::kEverAttached);
    e.state.fetch_or(os::kEverAttached, std::memory_order_seq_cst);
    e.attached.set(txn, e.attached.get() + 1);
    a.previous.set(txn, tail);
    tail = node;
    bytes += size_of(e);
  });
  s.tail.set(txn, tail);
  s.bytes.set(txn, bytes);
  link_session(arena, txn, index);
}

void rebuild_sessions(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  h.free_session.set(txn, kNil);
  h.sessions_open.set(txn, 0);
  for (std::uint32_t i = 0; i < arena.session_buckets(); ++i)
    if (arena.session_bucket(i).get() != kNil) arena.session_bucket(i).set(txn, kNil);
  std::vector<std::uint32_t> open;
  for (auto i = static_cast<std::uint32_t>(arena.sessions_used()); i-- > 0;) {
    SessionEntry& s = arena.session(i);
    if (is_open(s.state.get())) {
      open.push_back(i);
    } else {
      s.hash_next.set(txn, h.free_session.get());
      h.free_session.set(txn, i);
    }
  }
  std::sort(open.begin(), open.end(), [&](std::uint32_t a, std::uint32_t b) {
    return arena.session(a).opened.get() < arena.session(b).opened.get();
  });
  std::vector<bool> node_used(arena.attachments_used(), false);
  for (std::uint32_t i : open) rebuild_session(arena, txn, i, node_used);
  h.free_attachment.set(txn, kNil);
  for (auto i = static_cast<std::uint32_t>(arena.attachments_used()); i-- > 0;) {
    if (node_used[i]) continue;
    arena.attachment(i).next.set(txn, h.free_attachment.get());
    h.free_attachment.set(txn, i);
  }
}

// Entries, allocator and figures. Returns the objects that nothing keeps.
std::vector<std::uint32_t> rebuild_objects(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  std::vector<UsedBlock> blocks;
  std::vector<std::uint32_t> unwanted;
  std::uint64_t live = 0, doomed = 0, doomed_bytes = 0, used_bytes = 0, generation_max = 0;
  h.free_object.set(txn, kNil);
  for (auto i = static_cast<std::uint32_t>(arena.objects_used()); i-- > 0;) {
    ObjectEntry& e = arena.object(i);
    std::uint64_t word = e.state.load(std::memory_order_seq_cst);
    generation_max = std::max(generation_max, generation_of(word));
    if (state_of(word) == os::kFree) {
      e.next_free.set(txn, h.free_object.get());
      h.free_object.set(txn, i);
      continue;
    }
    if (state_of(word) > os::kDoomed) throw_corrupt("the state of an object", word);
    if (state_of(word) == os::kEnding) {
      // The ender died undecided; decide again below.
      word = object_word(generation_of(word), os::kSealed) | (word & os::kEverAttached);
      e.state.store(word, std::memory_order_seq_cst);
    }
    std::uint64_t const size = size_of(e);
    if (size > arena.payload_bytes()) throw_corrupt("the size of an object", size);
    blocks.push_back({size, block_of(e)});
    ++live;
    used_bytes += block_bytes(size);
    if (state_of(word) == os::kDoomed) {
      ++doomed;
      doomed_bytes += block_bytes(size);
    }
    bool const let_go =
        (word & os::kEverAttached) != 0 && state_of(word) == os::kSealed && e.attached.get() == 0;
    if (let_go || needs_settling(e)) unwanted.push_back(i);
  }
  h.objects_live.set(txn, live);
  h.objects_doomed.set(txn, doomed);
  h.doomed_bytes.set(txn, doomed_bytes);
  h.used_bytes.set(txn, used_bytes);
  if (h.next_generation.get() <= generation_max) h.next_generation.set(txn, generation_max + 1);
  rebuild_blocks(arena, txn, blocks);
  return unwanted;
}

void rebuild(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  std::uint64_t waiters = 0;
  for (std::uint32_t i = 0; i < kWaitersMax; ++i)
    waiters += arena.waiter(i).ticket.get() != 0 ? 1 : 0;
  h.waiters.set(txn, waiters);
  rebuild_owners(arena, txn);
  for (std::uint32_t i = 0; i < arena.objects_used(); ++i)
    if (arena.object(i).attached.get() != 0) arena.object(i).attached.set(txn, 0);
  rebuild_sessions(arena, txn);
  for (std::uint32_t i : rebuild_objects(arena, txn)) {
    ObjectEntry& e = arena.object(i);
    std::uint64_t const word = e.state.load(std::memory_order_seq_cst);
    if ((word & os::kEverAttached) != 0 && is_live_state(state_of(word)))
      end_object(arena, txn, i);
    else
      settle_object(arena, txn, i);
  }
}

}  // namespace

void recover(Arena& arena, const Txn& txn) {
  arena.header().recoveries.add(txn, 1);
  redo_journal(arena, txn);
  rebuild(arena, txn);
  txn.wake_queue();
}

}  // namespace shmrl
